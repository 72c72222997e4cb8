"""Where kernels are cached, and what a damaged or shared cache folder costs."""

import os
import pwd
import sys
import types

import platformdirs
import pytest

from gemmery import cache, config
from gemmery.cuda import include, nvrtc
from gemmery.errors import ArgumentError

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platformdirs itself is asked")
@pytest.mark.parametrize("home", [None, "", "relative"])
@pytest.mark.parametrize("chosen", ["", "~/kernels", "~nobody-of-that-name/kernels"])
def test_without_a_home_folder_there_is_no_cache(monkeypatch, tmp_path, home, chosen):
    """A folder called "~", or a relative one, would be made in the working directory, and trusted in anybody's."""
    monkeypatch.chdir(tmp_path)
    config._absolute.cache_clear()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("GEMMERY_CACHE_DIR", chosen)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    if chosen == "~/kernels" and home:
        assert config.cache_dir() == str(tmp_path / "relative" / "kernels")  # as asked
        return
    if home == "" and not chosen.startswith("~nobody"):
        assert config.cache_dir() in ("/.cache/gemmery", "/kernels")
        return
    assert config.cache_dir() is None
    assert not cache.write(config.cache_dir(), "key", b"payload")
    assert cache.read(config.cache_dir(), "key") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["²", "１", "0", "00", "-1", "1.5", "many", "1 2", "9" * 5000])
def test_a_number_of_threads_in_the_environment_is_a_plain_number(monkeypatch, text):
    monkeypatch.setenv("GEMMERY_NUM_THREADS", text)
    with pytest.raises(ArgumentError, match="GEMMERY_NUM_THREADS="):
        config.num_threads()


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


@posix
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path):
    cache.write(str(tmp_path), "key", b"payload")
    tmp_path.chmod(0o777)
    assert cache.read(str(tmp_path), "key") is None
    assert not cache.write(str(tmp_path), "other", b"payload")


@posix
def test_a_folder_or_file_of_another_user_is_not_trusted(tmp_path, monkeypatch):
    cache.write(str(tmp_path), "key", b"payload")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert cache.read(str(tmp_path), "key") is None
    assert not cache.write(str(tmp_path), "other", b"payload")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["key"]
    if os.geteuid() == 0:
        os.chown(tmp_path / "key", 12345, -1)
        assert cache.read(str(tmp_path), "key") is None


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_trusted(tmp_path, mode):
    cache.write(str(tmp_path), "key", b"payload")
    (tmp_path / "key").chmod(mode)
    assert cache.read(str(tmp_path), "key") is None
    assert cache.write(str(tmp_path), "key", b"payload")
    assert cache.read(str(tmp_path), "key") == b"payload"


@posix
def test_links_are_not_followed_and_pipes_are_not_waited_for(tmp_path):
    own, link = tmp_path / "own", tmp_path / "link"
    cache.write(str(own), "key", b"payload")
    link.symlink_to(own)
    (own / "linked").symlink_to(own / "key")
    os.mkfifo(own / "pipe", 0o600)
    (own / "folder").mkdir()
    assert cache.read(str(link), "key") is None
    assert not cache.write(str(link), "other", b"payload")
    assert [cache.read(str(own), name) for name in ("linked", "pipe", "folder")] == [None] * 3


@posix
@pytest.mark.parametrize("after", ["stat", "fstat", "open"])
def test_a_folder_that_is_exchanged_after_it_was_checked_is_not_read(tmp_path, monkeypatch, after):
    """Where others can write into the parent folder, they can exchange the folder between any two system calls."""
    own, foreign, aside = tmp_path / "own", tmp_path / "foreign", tmp_path / "aside"
    cache.write(str(own), "key", b"payload")
    cache.write(str(foreign), "key", b"planted")
    genuine, exchanged = getattr(os, after), []

    def exchanging(*arguments, **options):
        result = genuine(*arguments, **options)
        if not exchanged:
            exchanged.append(True)
            own.rename(aside)
            foreign.rename(own)
            own.chmod(0o777)
        return result

    monkeypatch.setattr(os, after, exchanging)
    assert cache.read(str(own), "key") in (b"payload", None)
    monkeypatch.undo()
    assert exchanged or after == "stat"


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not cache.write(str(tmp_path / "file" / "folder"), "key", b"payload")


@posix
def test_headers_are_written_only_where_nobody_else_can_change_them(monkeypatch, tmp_path):
    class Bindings:
        NVRTC_INSTALL_HEADERS_SKIP_IF_EXISTS = 0
        nvrtcResult = types.SimpleNamespace(NVRTC_SUCCESS=0)
        nvrtcInstallBundledHeaders = staticmethod(lambda folder, flags: (0,))

    monkeypatch.setattr(nvrtc, "bindings", Bindings)
    monkeypatch.setattr(nvrtc, "version", lambda: "99.9")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "headers-99.9"
    assert include._bundled()[0] == str(folder)
    folder.chmod(0o777)
    assert include._bundled() == ()
    monkeypatch.setenv("GEMMERY_CACHE_DIR", "/dev/null")
    assert include._bundled() == ()
    monkeypatch.setenv("GEMMERY_CACHE_DIR", "~nobody-of-that-name")
    assert include._bundled() == ()
