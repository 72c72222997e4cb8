"""Bytes under a key on disk: written whole or not at all, and a damaged entry is a miss.

Entries hold machine code, so an entry is read only if nobody but this user could have written it. The folder is opened
once; it and the entry are checked and used through their descriptors, so that nobody can exchange them between the
check and the use.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator

try:  # hashlib's implementation, without the 3 ms that hashlib takes to load OpenSSL
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

_DIGEST = 32
_BINARY = getattr(os, "O_BINARY", 0)  # Windows
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe would wait for its writer


def digest(*parts: bytes) -> bytes:
    """Return a 32-byte digest of the parts (BLAKE2b, RFC 7693)."""
    made = blake2b(digest_size=_DIGEST)
    for part in parts:
        made.update(part)
    return made.digest()


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
    except OSError:
        return None
    payload = data[_DIGEST:]
    return payload if data[:_DIGEST] == digest(payload) else None


def write(folder: str | None, key: str, payload: bytes) -> bool:
    """Store `payload` under `key` by a temporary file and a rename; return False if the folder cannot be used.

    A process killed half-way leaves a temporary file, which is never read. Without a cache everything works, only
    slower, so an unwritable folder is not an error; `gemmery doctor` reports it.
    """
    if folder is None:
        return False
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with _opened(folder) as at:
            _write(folder, at, key, digest(payload) + payload)
    except OSError:
        return False
    return True


def _write(folder: str, at: int | None, key: str, data: bytes) -> None:
    temporary = f".new-{os.getpid()}-{os.urandom(8).hex()}"
    handle = _descriptor(folder, at, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(_named(folder, at, temporary), _named(folder, at, key), src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(_named(folder, at, temporary), dir_fd=at)
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


def _named(folder: str, at: int | None, name: str) -> str:
    """Return the path of a file for functions that take `at` as the descriptor of its folder."""
    return os.path.join(folder, name) if at is None else name


def _descriptor(folder: str, at: int | None, name: str, flags: int) -> int:
    return os.open(_named(folder, at, name), flags | _NO_LINK | _BINARY, 0o600, dir_fd=at)


def _own(descriptor: int, kind: Callable[[int], bool]) -> bool:
    """Return True for a file or folder of this kind that belongs to this user and that nobody else can write."""
    found = os.fstat(descriptor)
    if not hasattr(os, "geteuid"):  # Windows: the user's own folders are protected by their access lists
        return kind(found.st_mode)
    others = stat.S_IWGRP | stat.S_IWOTH
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others
