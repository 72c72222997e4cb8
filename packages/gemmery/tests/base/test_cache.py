"""What the cache folder lists, what it removes, and that others may read and write meanwhile."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gemmery import cache
from gemmery.cpu import jit
from gemmery.cpu.ir import Module
from gemmery.cpu.target import host
from gemmery.cuda import nvrtc

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")
BEFORE = 1_600_000_000.0  # long ago, in seconds since 1970


@pytest.fixture(autouse=True)
def writes_check_the_total(monkeypatch):
    monkeypatch.setattr(cache, "_CHECKED", 0)


def stored(folder: Path, number: int, kind="cpu", version="new", size=100, used=BEFORE) -> str:
    """An entry of `size` bytes on disk that was last read at `used`."""
    name = cache.key(kind, version, b"%d" % number)
    assert cache.write(str(folder), name, bytes(size - 32))
    os.utime(folder / name, (used, used))
    return name


def test_a_listing_names_kinds_versions_sizes_and_times(tmp_path):
    names = [stored(tmp_path, 1), stored(tmp_path, 2, "cuda", "91c5eb", 500), stored(tmp_path, 3, "ptx", "13.5")]
    flat = ["0a" * 32, f"cuda-{'1b' * 32}", f"ptx-{'2c' * 32}"]  # as earlier releases named their entries
    for name in flat:
        assert cache.write(str(tmp_path), name, bytes(68))
        os.utime(tmp_path / name, (BEFORE, BEFORE))
    kinds = [("cpu", "new", 100), ("cuda", "91c5eb", 500), ("ptx", "13.5", 100)]
    kinds += [("cpu", "", 100), ("cuda", "", 100), ("ptx", "", 100)]
    expected = [cache.CacheEntry(name, *kind, BEFORE) for name, kind in zip(names + flat, kinds, strict=True)]
    assert sorted(cache.listing(str(tmp_path))) == sorted(expected)


@pytest.mark.parametrize(
    "name", ["notes.txt", "headers-13.5", "key", "cpu-new-12", f"x{'0a' * 32}", ".new-1-2", "cpu-"]
)
def test_files_of_others_are_neither_listed_nor_removed(tmp_path, name):
    (tmp_path / name).write_text("mine")
    os.utime(tmp_path / name, (BEFORE, BEFORE))
    assert cache.listing(str(tmp_path)) == ()
    assert cache.prune(str(tmp_path), {"cpu": (), "cuda": (), "ptx": ()}, 0) == ()
    assert (tmp_path / name).read_text() == "mine"


@posix
def test_folders_and_links_with_the_name_of_an_entry_stay(tmp_path):
    (tmp_path / cache.key("cpu", "old", b"1")).mkdir()
    (tmp_path / cache.key("cpu", "old", b"2")).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / cache.key("cpu", "old", b"3"), 0o600)
    assert cache.listing(str(tmp_path)) == ()
    assert cache.prune(str(tmp_path), {"cpu": ()}) == ()
    assert len(os.listdir(tmp_path)) == 3


@posix
def test_a_folder_that_others_can_write_is_neither_listed_nor_pruned(tmp_path):
    stored(tmp_path, 1)
    tmp_path.chmod(0o777)
    assert cache.listing(str(tmp_path)) == ()
    with pytest.raises(PermissionError):
        cache.prune(str(tmp_path), {"cpu": ()})
    assert cache.listing(str(tmp_path / "missing")) == cache.listing(None) == ()
    with pytest.raises(FileNotFoundError):
        cache.prune(str(tmp_path / "missing"), {})
    assert len(os.listdir(tmp_path)) == 1


def test_pruning_removes_other_versions_alone(tmp_path):
    kept = {stored(tmp_path, 1), stored(tmp_path, 2, "cuda", "second"), stored(tmp_path, 3, "ptx", "12.9")}
    old = {stored(tmp_path, 4, version="old"), stored(tmp_path, 5, "cuda", "zeroth"), "0a" * 32}
    assert cache.write(str(tmp_path), "0a" * 32, b"of an earlier release")
    removed = cache.prune(str(tmp_path), {"cpu": ("new",), "cuda": ("first", "second")})
    assert {entry.name for entry in removed} == old
    assert set(os.listdir(tmp_path)) == kept
    assert cache.prune(str(tmp_path), {"cpu": ("new",), "cuda": ("first", "second")}) == ()


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    left, live = (tmp_path / f".new-{process}-0123456789abcdef" for process in (1, 2))
    for path in (left, live):
        path.write_bytes(bytes(10))
    os.utime(left, (BEFORE, BEFORE))
    assert [entry.name for entry in cache.prune(str(tmp_path), {})] == [left.name]
    assert os.listdir(tmp_path) == [live.name]


def test_beyond_the_limit_the_least_recently_read_are_removed(tmp_path):
    names = [stored(tmp_path, number, used=BEFORE + number) for number in range(6)]
    removed = cache.prune(str(tmp_path), {}, 350)
    assert [entry.name for entry in removed] == names[:3]
    assert set(os.listdir(tmp_path)) == set(names[3:])


def test_a_write_keeps_the_total_within_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 1000)
    names = [stored(tmp_path, number, used=BEFORE + number) for number in range(11)]
    assert set(os.listdir(tmp_path)) == set(names[4:])  # 700 bytes: below three quarters of the limit
    assert cache.read(str(tmp_path), names[10]) == bytes(68)


def test_the_total_is_added_up_at_the_first_write_and_then_rarely(tmp_path, monkeypatch):
    looked, genuine = [], cache._entries
    monkeypatch.setattr(cache, "_entries", lambda *place: looked.append(place) or genuine(*place))
    monkeypatch.setattr(cache, "_CHECKED", 150)
    monkeypatch.setattr(cache, "_unchecked", 150)
    counts = []
    for number in range(6):
        stored(tmp_path, number)
        counts.append(len(looked))
    assert counts == [1, 1, 1, 2, 2, 2]  # 68 bytes each


@posix
def test_reading_an_entry_sets_its_time_once_a_day(tmp_path):
    name = stored(tmp_path, 1)
    assert cache.read(str(tmp_path), name) == bytes(68)
    read = os.stat(tmp_path / name).st_mtime_ns
    assert read > (BEFORE + 1e6) * 1e9
    assert cache.read(str(tmp_path), name) == bytes(68)
    assert os.stat(tmp_path / name).st_mtime_ns == read


def test_others_read_and_write_while_entries_are_removed(tmp_path):
    """A reader gets the whole entry or none; a writer succeeds."""
    folder = str(tmp_path)
    payloads = {cache.key("cpu", "old", b"%d" % number): bytes([number]) * 5000 for number in range(10)}

    def use(key):
        wrong = 0
        for _ in range(30):
            wrong += not cache.write(folder, key, payloads[key])
            wrong += cache.read(folder, key) not in (None, payloads[key])
        return wrong

    with ThreadPoolExecutor(12) as pool:
        pruning = [pool.submit(lambda: [cache.prune(folder, {"cpu": ()}) for _ in range(30)]) for _ in range(2)]
        assert not any(pool.map(use, payloads))
        assert all(future.result() is not None for future in pruning)


@pytest.mark.skipif(not jit.keeps(host()), reason="no kernels of this machine are stored")
def test_an_entry_of_a_cpu_kernel_is_of_the_current_version(tmp_path, monkeypatch):
    def generate():
        module = Module(host())
        with module.function("nothing"):
            pass
        return module

    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    jit.load(host(), "test_cache_nothing", generate)
    entries = cache.listing(str(tmp_path))
    assert {entry.kind for entry in entries} == {"cpu"}
    assert jit.version() in {entry.version for entry in entries} <= set(jit.versions())


def test_an_entry_of_a_cuda_kernel_is_of_a_current_version(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    nvrtc.code("simt_naive.cu", "simt_naive<float, float, 0>", "sm_80")
    (entry,) = (entry for entry in cache.listing(str(tmp_path)) if entry.kind == "cuda")
    assert entry.version in nvrtc.versions()
