"""Where kernels are cached, and what a damaged or shared cache folder costs."""

import os
import sys

import platformdirs
import pytest

from gemmery import cache, config


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platformdirs itself is asked")
@pytest.mark.parametrize("base", ["/somewhere/else", "", "relative", "  "])
def test_the_cache_folder_is_where_platformdirs_has_it(monkeypatch, base):
    monkeypatch.delenv("GEMMERY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert config.cache_dir() == platformdirs.user_cache_dir("gemmery", appauthor=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_dir() == platformdirs.user_cache_dir("gemmery", appauthor=False)


def test_the_cache_folder_can_be_chosen(monkeypatch):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", "~/kernels")
    assert config.cache_dir() == os.path.expanduser("~/kernels")


def test_what_is_written_is_read(tmp_path):
    folder = str(tmp_path / "new" / "folder")
    assert cache.read(folder, "key") is None
    assert cache.write(folder, "key", b"payload")
    assert cache.read(folder, "key") == b"payload"
    assert os.listdir(folder) == ["key"]


@pytest.mark.parametrize("at", [0, 20, 32, 38])
def test_a_changed_byte_is_a_miss(tmp_path, at):
    cache.write(str(tmp_path), "key", b"payload")
    data = bytearray((tmp_path / "key").read_bytes())
    data[at] ^= 1
    (tmp_path / "key").write_bytes(data)
    assert cache.read(str(tmp_path), "key") is None
    (tmp_path / "key").write_bytes(b"")
    assert cache.read(str(tmp_path), "key") is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes are POSIX's")
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path):
    cache.write(str(tmp_path), "key", b"payload")
    tmp_path.chmod(0o777)
    assert cache.read(str(tmp_path), "key") is None
    assert not cache.write(str(tmp_path), "other", b"payload")


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not cache.write(str(tmp_path / "file" / "folder"), "key", b"payload")
