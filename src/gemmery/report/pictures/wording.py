"""Phrases that captions share."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.emulator.ptx import Line, calling
from gemmery.emulator.trace import Divergence, WarpAccess


def seen(one: WarpAccess | Divergence) -> Line:
    """The line that does it: the innermost one that is more than a wrapper of one instruction."""
    return calling(one.frames or (one.line,))[-1]


def called(one: WarpAccess | Divergence) -> str:
    """That line, and those it is called from: "registers.cuh:22 (called from simt_padded.cu:19)"."""
    *outer, here = map(str, calling(one.frames or (one.line,)))
    return f"{here} (called from {', '.join(reversed(outer))})" if outer else here


def place(access: WarpAccess) -> str:
    """The instruction and its line: "st.shared.f32 at simt_smem.cu:18, warp 0"."""
    return f"{access.opcode} at {called(access)}, warp {access.warp}"


def quoted(source: Mapping[str, str], *ones: WarpAccess | Divergence | None) -> str:
    """The text of their lines, where it is known: " The source: “x = 0;”."."""
    texts = [source.get(str(seen(one)), "") for one in ones if one is not None]
    known = [f"“{text}”" for text in dict.fromkeys(texts) if text]
    return f" The source: {', '.join(known)}." if known else ""
