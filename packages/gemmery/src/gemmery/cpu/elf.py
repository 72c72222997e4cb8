"""Turn an ELF object into a flat image: code and constants, relocations applied, symbols by offset.

All references inside a module are relative to the program counter, so the image runs at any address, and loading it is
a copy. Reference: System V ABI, AMD64 supplement, section 4.4 (relocation types).
"""

from __future__ import annotations

import struct

from gemmery.errors import CompileError

_ALLOCATED, _NOBITS, _RELA, _SYMTAB = 0x2, 8, 4, 2
_R_X86_64_PC32, _R_X86_64_PLT32 = 2, 4


def flatten(data: bytes) -> tuple[bytes, dict[str, int]]:
    """Return the image of an x86-64 ELF object and the offset of each global function in it.

    Raises CompileError for a reference that leaves the module or is not relative, since a kernel must not depend on
    the process that loads it.
    """
    sections = _sections(data)
    names = sections[struct.unpack_from("<H", data, 62)[0]]
    placed: dict[int, int] = {}
    image = bytearray()
    for number, section in enumerate(sections):
        name = _string(data, names[4] + section[0])
        if section[2] & _ALLOCATED and name != ".eh_frame" and section[5]:
            image.extend(bytes(-len(image) % max(section[8], 1)))
            placed[number] = len(image)
            image.extend(bytes(section[5]) if section[1] == _NOBITS else data[section[4] : section[4] + section[5]])
    symbols = next(s for s in sections if s[1] == _SYMTAB)
    strings = sections[symbols[6]]
    table = [struct.unpack_from("<IBBHQQ", data, symbols[4] + 24 * i) for i in range(symbols[5] // 24)]
    for section in sections:
        if section[1] == _RELA and section[7] in placed:
            for at in range(section[4], section[4] + section[5], 24):
                _relocate(data, image, placed, placed[section[7]], table, strings[4], at)
    entries = {
        _string(data, strings[4] + name): placed[where] + value
        for name, info, _, where, value, _ in table
        if info >> 4 == 1 and where in placed
    }
    return bytes(image), entries


def _sections(data: bytes) -> list[tuple[int, ...]]:
    """Return the section headers: name, type, flags, address, offset, size, link, info, alignment, entry size."""
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", data, offset + size * i) for i in range(count)]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _relocate(
    data: bytes,
    image: bytearray,
    placed: dict[int, int],
    base: int,
    symbols: list[tuple[int, ...]],
    strings: int,
    at: int,
) -> None:
    """Apply one relocation record: S + A - P, all within the image."""
    offset, info, addend = struct.unpack_from("<QQq", data, at)
    name, _, _, where, value, _ = symbols[info >> 32]
    if info & 0xFFFFFFFF not in (_R_X86_64_PC32, _R_X86_64_PLT32) or where not in placed:
        symbol = _string(data, strings + name)
        raise CompileError(f"relocation type {info & 0xFFFFFFFF} against {symbol!r}: a kernel may only refer to itself")
    place = base + offset
    struct.pack_into("<i", image, place, placed[where] + value + addend - place)
