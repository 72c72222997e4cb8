"""Bytes under a key on disk: written whole or not at all, and a damaged entry is a miss."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def _private(folder: Path) -> bool:
    """True when only this user can write into `folder`."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(folder: Path, key: str) -> bytes | None:
    """The bytes stored under `key`; None when there are none, they are damaged, or others could have written them."""
    path = folder / key
    try:
        if not _private(folder):
            return None
        data = path.read_bytes()
    except OSError:
        return None
    digest, payload = data[:_DIGEST], data[_DIGEST:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def write(folder: Path, key: str, payload: bytes) -> bool:
    """Store `payload` under `key` by a temporary file and a rename; False when the folder cannot be used.

    A process killed half-way leaves a temporary file that no key names. Running without a cache is slower,
    never wrong, so an unwritable folder is not an error; `gemmery doctor` reports it.
    """
    import tempfile  # 10 ms that a process with a warm cache need not pay

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(folder):
            return False
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, folder / key)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    return True
