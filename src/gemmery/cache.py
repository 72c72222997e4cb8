"""Bytes under a key on disk: written whole or not at all, and a damaged entry is a miss."""

from __future__ import annotations

import contextlib
import os
import stat

try:  # hashlib's own, without the 3 ms that hashlib takes to load OpenSSL
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

_DIGEST = 32


def digest(*parts: bytes) -> bytes:
    """32 bytes that tell different contents apart (BLAKE2b, RFC 7693)."""
    made = blake2b(digest_size=_DIGEST)
    for part in parts:
        made.update(part)
    return made.digest()


def _private(folder: str) -> bool:
    """True when only this user can write into `folder`."""
    found = os.stat(folder)
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(folder: str, key: str) -> bytes | None:
    """The bytes stored under `key`; None when there are none, they are damaged, or others could have written them."""
    try:
        if not _private(folder):
            return None
        with open(os.path.join(folder, key), "rb") as file:
            data = file.read()
    except OSError:
        return None
    payload = data[_DIGEST:]
    return payload if data[:_DIGEST] == digest(payload) else None


def write(folder: str, key: str, payload: bytes) -> bool:
    """Store `payload` under `key` by a temporary file and a rename; False when the folder cannot be used.

    A process killed half-way leaves a temporary file that no key names. Running without a cache is slower,
    never wrong, so an unwritable folder is not an error; `gemmery doctor` reports it.
    """
    import tempfile  # 10 ms that a process with a warm cache need not pay

    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not _private(folder):
            return False
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(digest(payload) + payload)
        os.replace(temporary, os.path.join(folder, key))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    return True
