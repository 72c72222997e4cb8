"""What the blocks that one multiprocessor runs side by side ask of it, and how long their warps wait."""

from gemmery.emulator.pace.demand import KINDS
from gemmery.emulator.pace.multiprocessor import UNITS, Pace, Paced, shares

__all__ = ["KINDS", "UNITS", "Pace", "Paced", "shares"]
