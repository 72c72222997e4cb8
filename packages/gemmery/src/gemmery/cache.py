"""Bytes under a key on disk: written whole or not at all; a damaged entry is a miss; entries are listed and removed.

Entries hold machine code, so an entry is read only if nobody but this user could have written it. The folder is opened
once; it and the entry are checked and used through their descriptors, so that nobody can exchange them between the
check and the use.

The name of an entry is its key, "cpu-91c5eb0d22af-...": what it is for, a digest of gemmery's sources that made it, and
a digest of everything it depends on. Reading an entry sets its time of change, once a day. When all entries exceed
512 MiB, the next write removes those not read for the longest time, down to 384 MiB. Entries of other versions stay
until `gemmery doctor --prune`, because another installation may use them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from gemmery.tuples import NamedTuple

try:  # hashlib's implementation, without the 3 ms that hashlib takes to load OpenSSL
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

LIMIT = 512 << 20  # bytes of all entries
_KEPT = 0.75  # of LIMIT, after entries were removed
_CHECKED = 32 << 20  # bytes that a process writes before it adds up the sizes again
_DAY = 86400.0  # s after which a read sets an entry's time
_UNFINISHED = 3600.0  # s after which a temporary file belongs to no process
# Patterns, which `re` compiles when the cache is listed: a first product takes 0.3 ms less.
_NAME = r"(?:(?P<kind>cpu|cuda|ptx|times)-(?:(?P<version>[0-9a-z.]+)-)?)?[0-9a-f]{64}"
_TEMPORARY = r"\.new-[0-9]+-[0-9a-f]{16}"

FULL = "make room in the file system"
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_DIGEST = 32
_BINARY = getattr(os, "O_BINARY", 0)  # Windows
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe would wait for its writer


def unusable(folder: str) -> str:
    """Return why nothing can be stored in a folder, as what to do about it; "" if entries can be written and read.

    >>> unusable("/dev/null")
    'make it a folder that only you can write (chmod 700), or set GEMMERY_CACHE_DIR to another'
    """
    probe = f".new-{os.getpid()}-{os.urandom(8).hex()}"
    failure = _failure(folder, probe, b"probe")
    if failure is not None and failure.errno in _NO_ROOM:
        return FULL
    if failure is None and read(folder, probe) == b"probe":
        with contextlib.suppress(OSError), _opened(folder) as at:
            os.unlink(_path(folder, at, probe), dir_fd=at)
        return ""
    if os.path.islink(folder):  # its owner could point it elsewhere between a check and a use
        return f"links are not followed: set GEMMERY_CACHE_DIR={os.path.realpath(folder)}"
    return "make it a folder that only you can write (chmod 700), or set GEMMERY_CACHE_DIR to another"


class CacheEntry(NamedTuple):
    """An entry of the cache."""

    name: str
    kind: str  # "cpu", "cuda", "ptx", "times" (predicted), "" for what a killed process left
    version: str  # of the sources that made it; "" for entries of releases that stored no version
    size: int  # bytes
    used: float  # time of the last read, in seconds since 1970, to a day


def key(kind: str, version: str, *parts: bytes) -> str:
    """Return the name of an entry.

    >>> key("cpu", "91c5eb0d22af", b"packed_f32")[:20]
    'cpu-91c5eb0d22af-f06'
    """
    return f"{kind}-{version}-{digest(*parts).hex()}"


def digest(*parts: bytes) -> bytes:
    """Return a 32-byte digest of the parts (BLAKE2b, RFC 7693), each after its length: no others give the same bytes.

    >>> digest(b"ab", b"c") == digest(b"a", b"bc")
    False
    """
    hasher = blake2b(digest_size=_DIGEST)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def private(folder: str) -> bool:
    """Return True if the folder belongs to this user and nobody else can write into it."""
    try:
        with _opened(folder):
            return True
    except OSError:
        return False


def read(folder: str | None, key: str) -> bytes | None:
    """Return the bytes stored under `key`, or None if there are none, they are damaged, or others could write them.

    A folder of None holds nothing.
    """
    if folder is None:
        return None
    try:
        with _opened(folder) as at, os.fdopen(_descriptor(folder, at, key, os.O_RDONLY | _NO_WAIT), "rb") as file:
            if not _own(file.fileno(), stat.S_ISREG):
                return None
            data = file.read()
            _touch(file.fileno())
    except OSError:
        return None
    payload = data[_DIGEST:]
    return payload if data[:_DIGEST] == digest(key.encode(), payload) else None


def write(folder: str | None, key: str, payload: bytes) -> bool:
    """Store `payload` under `key` by a temporary file and a rename; return False if the folder cannot be used.

    A process killed half-way leaves a temporary file, which is never read. Without a cache everything works, only
    slower, so an unwritable folder is not an error; `gemmery doctor` reports it.
    """
    return folder is not None and _failure(folder, key, payload) is None


def _failure(folder: str, key: str, payload: bytes) -> OSError | None:
    """Store `payload` under `key`; return the error if the folder cannot be used."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with _opened(folder) as at:
            _write(folder, at, key, digest(key.encode(), payload) + payload)  # with the key: files may be exchanged
            _bound(folder, at, len(payload))
    except OSError as error:
        return error
    return None


def listing(folder: str | None) -> tuple[CacheEntry, ...]:
    """Return the entries of a folder; () for a folder that is not there or that others can write into."""
    if folder is None:
        return ()
    try:
        with _opened(folder) as at:
            return tuple(_entries(folder, at))
    except OSError:
        return ()


def prune(folder: str, current: Mapping[str, Collection[str]], limit: int = LIMIT) -> tuple[CacheEntry, ...]:
    """Remove entries that no process of this version reads, and return them. Other processes may use the folder.

    `current` has the versions to keep for each kind of entry; entries of other kinds stay. What killed processes left
    is removed too. If the rest exceeds `limit`, the entries not read for the longest time are removed.
    Raises OSError for a folder that cannot be read, or that others can write into.
    """
    removed: list[CacheEntry] = []
    with _opened(folder) as at:
        remaining: list[CacheEntry] = []
        for entry in _entries(folder, at):
            old = not entry.kind or entry.version not in current.get(entry.kind, (entry.version,))
            (removed if old else remaining).append(entry)
        removed += _oldest(remaining, limit, limit)
        return tuple(entry for entry in removed if _remove(folder, at, entry))


def _entries(folder: str, at: int | None) -> Iterator[CacheEntry]:
    """Yield the entries of a folder, and temporary files that no process writes any more."""
    with os.scandir(folder if at is None else at) as files:
        for file in files:
            name = re.fullmatch(_NAME, file.name)
            if not name and not re.fullmatch(_TEMPORARY, file.name):
                continue
            try:
                about = file.stat(follow_symlinks=False)
            except OSError:  # removed by another process
                continue
            if not stat.S_ISREG(about.st_mode):
                continue
            if name:
                yield CacheEntry(file.name, name["kind"] or "cpu", name["version"] or "", about.st_size, about.st_mtime)
            elif about.st_mtime < time.time() - _UNFINISHED:
                yield CacheEntry(file.name, "", "", about.st_size, about.st_mtime)


def _oldest(entries: list[CacheEntry], limit: int, budget: float) -> list[CacheEntry]:
    """Return the entries to remove, those not read for the longest time, so that `kept` bytes stay."""
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return []
    oldest: list[CacheEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.used):
        if total <= budget:
            break
        total -= entry.size
        oldest.append(entry)
    return oldest


_unchecked = _CHECKED  # bytes written since this process added up the sizes; its first write does


def _bound(folder: str, at: int | None, size: int) -> None:
    """Remove the entries not read for the longest time if all exceed LIMIT."""
    global _unchecked
    _unchecked += size
    if _unchecked > _CHECKED:
        _unchecked = 0
        for entry in _oldest(list(_entries(folder, at)), LIMIT, LIMIT * _KEPT):
            _remove(folder, at, entry)


def _remove(folder: str, at: int | None, entry: CacheEntry) -> bool:
    try:
        os.unlink(_path(folder, at, entry.name), dir_fd=at)
    except OSError:  # removed by another process, or read by one (Windows)
        return False
    return True


def _touch(descriptor: int) -> None:
    """Note that an entry was read. The system's own time of access is switched off on many."""
    if os.utime in os.supports_fd and os.fstat(descriptor).st_mtime < time.time() - _DAY:
        with contextlib.suppress(OSError):  # a read-only file system
            os.utime(descriptor)


def _write(folder: str, at: int | None, key: str, data: bytes) -> None:
    temporary = f".new-{os.getpid()}-{os.urandom(8).hex()}"
    handle = _descriptor(folder, at, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(_path(folder, at, temporary), _path(folder, at, key), src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(_path(folder, at, temporary), dir_fd=at)
        raise


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int | None]:
    """Open the folder and give its descriptor; None where files cannot be opened relative to one (Windows).

    Raises OSError unless the folder belongs to this user and nobody else can write into it.
    """
    if os.open not in os.supports_dir_fd:
        yield None
        return
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    try:
        if not _own(at, stat.S_ISDIR):
            raise PermissionError(f"{folder}: others can write into it")
        yield at
    finally:
        os.close(at)


def _path(folder: str, at: int | None, name: str) -> str:
    """Return the path of a file for functions that take `at` as the descriptor of its folder."""
    return os.path.join(folder, name) if at is None else name


def _descriptor(folder: str, at: int | None, name: str, flags: int) -> int:
    return os.open(_path(folder, at, name), flags | _NO_LINK | _BINARY, 0o600, dir_fd=at)


def _own(descriptor: int, kind: Callable[[int], bool]) -> bool:
    """Return True for a file or folder of this kind that belongs to this user and that nobody else can write."""
    status = os.fstat(descriptor)
    if not hasattr(os, "geteuid"):  # Windows: the user's own folders are protected by their access lists
        return kind(status.st_mode)
    others = stat.S_IWGRP | stat.S_IWOTH
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & others
