"""What captions say in the same words."""

from __future__ import annotations

from gemmery.emulator.trace import WarpAccess


def place(access: WarpAccess) -> str:
    """The instruction and where it stands: "st.shared.f32 of simt_smem.cu:18, warp 0"."""
    inside = f", there {access.inner}" if access.inner != access.line else ""
    return f"{access.opcode} of {access.line}{inside}, warp {access.warp}"


def plural(number: int, what: str) -> str:
    """`1 wavefront`, `2 wavefronts`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")
