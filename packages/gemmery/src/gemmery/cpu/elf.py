"""Turn an ELF object into a flat image: code and constants, relocations applied, symbols by offset.

All references inside a module are relative to the program counter, so the image runs at any address, and loading it is
a copy; on ARM, where references to constants are relative to pages of 4 KiB, at any address of a page. References:
System V ABI, AMD64 supplement, section 4.4 (relocation types); ELF for the Arm 64-bit architecture, section 5.7.
"""

from __future__ import annotations

import struct

from gemmery.config import ON_ARM
from gemmery.errors import CompileError

_ALLOCATED, _NOBITS, _RELA, _SYMTAB = 0x2, 8, 4, 2
_R_X86_64_PC32, _R_X86_64_PLT32 = 2, 4
_PAGE = 275  # R_AARCH64_ADR_PREL_PG_HI21; LLVM resolves calls inside a module itself
_IN_PAGE = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # ADD_ABS_LO12_NC, LDST8, 16, 32, 64 and 128: the scale
_AARCH64, _PC32 = 183, 261  # the machine in the header; R_AARCH64_PREL32


def flatten(data: bytes) -> tuple[bytes, dict[str, int]]:
    """Return the image of an ELF object for x86-64 or 64-bit ARM and the offset of each global function in it.

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
    kind, on_arm = info & 0xFFFFFFFF, struct.unpack_from("<H", data, 18)[0] == _AARCH64
    known = (_PC32, _PAGE, *_IN_PAGE) if on_arm else (_R_X86_64_PC32, _R_X86_64_PLT32)
    if kind not in known or where not in placed:
        symbol = _string(data, strings + name)
        raise CompileError(f"relocation type {kind} against {symbol!r}: a kernel may only refer to itself")
    place, to = base + offset, placed[where] + value + addend
    if kind == _PC32 or not on_arm:
        struct.pack_into("<i", image, place, to - place)
        return
    word = struct.unpack_from("<I", image, place)[0]
    if kind == _PAGE:
        pages = (to >> 12) - (place >> 12)
        word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    else:
        word |= (to & 0xFFF) >> _IN_PAGE[kind] << 10
    struct.pack_into("<I", image, place, word)


def fill(image: bytes, hole: int, number: int) -> bytes:
    """Replace a 64-bit constant in an image: its bytes, or on ARM the four instructions that put it in a register.

    These are movz and three movk, which may build the constant plus an offset, since that takes no more instructions.
    """
    if not ON_ARM:
        return image.replace(hole.to_bytes(8, "little"), number.to_bytes(8, "little"))
    words = memoryview(bytearray(image[: len(image) // 4 * 4])).cast("I")
    latest = dict[int, int]()  # where each part of each register was set, by the bits that say which
    for place, word in enumerate(words.tolist()):
        register, at = word & 31, word >> 21 & 3
        if word & 0xFF800000 in (_MOVZ, _MOVK):
            latest[at << 5 | register] = place
        if word & ~31 != _MOVK | 3 << 21 | hole >> 48 << 5:
            continue
        places = [latest.get(part << 5 | register, 0) for part in range(4)]
        offset = sum((words[each] >> 5 & 0xFFFF) << 16 * part for part, each in enumerate(places)) - hole
        if 0 <= offset < 1 << 32:
            for part, each in enumerate(places):
                words[each] = words[each] & ~(0xFFFF << 5) | (number + offset >> 16 * part & 0xFFFF) << 5
    return words.tobytes() + image[len(words) * 4 :]


_MOVZ, _MOVK = 0xD2800000, 0xF2800000
