"""Weights that PyTorch's layers hold, arranged for the kernel of Hopper: by format, once, and anew after a change."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmery as gm  # noqa: E402
import gemmery.torch  # noqa: E402
from gemmery.cuda.weights import Format, arrange, arrange_levels  # noqa: E402
from gemmery.torch import arranged  # noqa: E402

N, K = 70, 256


@pytest.mark.parametrize(
    ("format_", "group", "dtype", "form"),
    [
        ("int4", 128, torch.bfloat16, ("int4", 128)),
        ("int4", 128, torch.float16, ("int4_close", 128)),
        ("int4", 64, torch.float16, ("int4_zeros", 64)),
        ("int8", K, torch.bfloat16, ("int8", 0)),
        ("int8", 32, torch.float16, ("int8", 32)),
        ("float8_e4m3", K, torch.bfloat16, ("e4m3", 0)),
        ("mxfp4", 32, torch.bfloat16, ("e2m1", 32)),
        ("nvfp4", 16, torch.float16, ("e2m1", 16)),
    ],
)
def test_a_matrix_is_arranged_from_its_logical_form(format_, group, dtype, form):
    bits = 8 if "8" in format_ else 4
    codes = torch.arange(N * K, dtype=torch.int64).mul(7).remainder(2**bits).to(torch.uint8).view(N, K)
    packed = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    values = torch.tensor([0.5, 1, 2, 4])[torch.arange(N * (K // group)) % 4].view(N, -1)
    zeros = torch.full_like(values, 3).to(dtype) if form[0] == "int4_zeros" else None
    scales, scale, rows = values.to(dtype), None, None
    if format_ == "mxfp4":
        scales = (values.log2() + 127).to(torch.uint8)
    elif format_ == "nvfp4":
        scales, scale = values.to(torch.float8_e4m3fn).view(torch.uint8), torch.tensor(0.25)
        rows = torch.full((N,), 0.25)
    elif not form[1]:
        rows = values.flatten()
    matrix = SimpleNamespace(format=format_, packed=packed, scales=scales, zeros=zeros, scale=scale)
    entry = arranged._arranged(matrix, dtype)
    expected = Format(N, K, *form, arranged.TYPES[dtype])
    bits_of = values.to(dtype).view(torch.int16) if form[1] else None
    whole = arrange(expected, codes, bits_of, None if zeros is None else zeros.to(torch.uint8), rows)
    assert entry is not None
    assert entry[0] == expected
    assert torch.equal(entry[1], whole)


@pytest.mark.parametrize(
    "change",
    [
        {"scales": torch.full((N, 2), 1.1)},  # would be rounded
        {"scales": torch.full((N, 2), 256.0, dtype=torch.bfloat16)},  # does not fit
        {"zeros": torch.full((N, 2), 7.5, dtype=torch.bfloat16)},  # no whole number
        {"packed": torch.zeros(2, N, K // 2, dtype=torch.uint8)},
        {"scales": torch.ones((N, 32), dtype=torch.bfloat16)},  # groups of 8
    ],
)
def test_a_matrix_that_the_kernel_cannot_hold_is_left_alone(change):
    parts = {"packed": torch.zeros(N, K // 2, dtype=torch.uint8), "scales": torch.ones(N, 2, dtype=torch.bfloat16)}
    parts |= {"zeros": None, "scale": None}
    assert arranged._arranged(SimpleNamespace(format="int4", **parts), torch.bfloat16) is not None
    assert arranged._arranged(SimpleNamespace(format="int4", **(parts | change)), torch.bfloat16) is None


def test_a_layers_copy_lives_with_the_packed_tensor_and_follows_its_changes(monkeypatch):
    """The copy is made on the stream of the call, by a thread whose memory no graph takes into its pool."""
    streams = []
    monkeypatch.setattr(arranged, "find", lambda _: SimpleNamespace(capability=90, bandwidth=4800))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "s")
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: nullcontext(streams.append((stream, threading.get_ident())))
    )
    used = []
    monkeypatch.setattr(arranged, "_product", lambda x, copy, *others: used.append(copy))
    packed, scales = gemmery.torch.quantize(torch.randn(N, K).bfloat16(), 4, 128)
    x = torch.ones(1, K, dtype=torch.bfloat16)
    known = len(arranged._copies)
    for _ in range(2):
        assert arranged.layer(x, packed, scales, None, None) is None
    assert used[0] is used[1]
    ((stream, thread),) = streams
    assert stream == "s"
    assert thread != threading.get_ident()
    packed.zero_()
    arranged.layer(x, packed, scales, None, None)
    assert not torch.equal(used[2], used[1])
    arranged.layer(x, packed, scales.clone(), None, None)
    assert used[3] is not used[2]
    assert len(arranged._copies) == known + 1
    del packed
    assert len(arranged._copies) == known
    assert arranged.layer(x.float(), *gemmery.torch.quantize(torch.ones(4, K), 4, 128), None, None) is None


def test_experts_are_arranged_one_after_the_other():
    experts = gm.quantize(torch.randn(3, K, N), "int4", 128, dtype="bfloat16")
    form, whole = arranged._arranged_experts(experts, torch.bfloat16)
    assert whole.shape == (3, form.bytes)
    for i in range(3):
        assert torch.equal(whole[i], arranged._arranged(experts[i], torch.bfloat16)[1])
    assert arranged._arranged_experts(gm.quantize(torch.full((2, K, N), 1.1), "int4", 128), torch.float16) is None


def test_experts_have_one_format_where_only_some_have_close_factors():
    experts = gm.quantize(torch.randn(2, K, N), "int4", 128, dtype="float16")
    assert arranged._arranged_experts(experts, torch.float16)[0].kind == "int4_close"
    experts.scales[1, 3, 0] = 2.0**6
    form, whole = arranged._arranged_experts(experts, torch.float16)
    assert form.kind == "int4"
    assert torch.equal(whole[0], arranged._arranged(experts[0], torch.float16, close=False)[1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_levels_for_codes_are_arranged_alike_by_numpy(dtype):
    matrix = gm.quantize(torch.randn(K, N), "int4", 128)
    form, whole = arranged._arranged_levels(matrix, dtype)
    codes = torch.stack((matrix.packed & 15, matrix.packed >> 4), -1).flatten(1)
    assert np.array_equal(whole.numpy(), arrange_levels(form, codes.numpy(), matrix.scales.numpy()))
    assert arranged._arranged_levels(gm.quantize(torch.randn(K, N), "int4", 64), dtype) is None
