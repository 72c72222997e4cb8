"""The garbage collector is off while a kernel is read and lowered, and as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from gemmery.errors import EmulationError
from gemmery_emulator import lower
from gemmery_emulator.ptx.module import parse

HEAD = ".version 8.0\n.target sm_90\n.visible .entry f() { .reg .b32 %r<2>;"


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_it_was_also_after_an_error(on, monkeypatch):
    during = []
    starts = lower._starts
    monkeypatch.setattr(lower, "_starts", lambda kernel: (during.append(gc.isenabled()), starts(kernel))[1])
    try:
        (gc.enable if on else gc.disable)()
        lower.lowered(parse(f"{HEAD} mov.b32 %r1, 42; ret; }}").kernels["f"])
        assert gc.isenabled() == on
        with pytest.raises(EmulationError):
            lower.lowered(parse(f"{HEAD} nosuch.b32 %r1, 42; ret; }}").kernels["f"])
        assert gc.isenabled() == on
    finally:
        gc.enable()
    assert during == [False, False]
