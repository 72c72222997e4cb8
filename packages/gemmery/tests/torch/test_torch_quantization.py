"""Weights of 8 and 4 bits: the levels and factors of groups, against their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from gemmery.torch.quantization import dequantize, quantize  # noqa: E402 # it needs PyTorch

TOP = {8: 127, 4: 7}


def levels(packed, bits):
    """The levels of a packed weight, one byte after the other."""
    if bits == 8:
        return packed.tolist()
    return [[half - 8 for byte in row for half in (byte % 16, byte // 16)] for row in packed.tolist()]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_an_element_is_within_half_a_factor_of_the_weight(bits, dtype):
    weight = torch.randn(6, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    weight[2] *= 100
    packed, scales = quantize(weight, bits, 8)
    assert packed.nbytes * 8 == weight.numel() * bits
    assert scales.dtype is dtype
    factors = scales.double().repeat_interleave(8, 1)
    exact = torch.tensor(levels(packed, bits), dtype=torch.float64) * factors
    assert bool(((exact - weight.double()).abs() <= factors * (0.5 + 2.0**-20)).all())
    assert int(torch.tensor(levels(packed, bits)).abs().max()) == TOP[bits]
    assert torch.equal(dequantize(packed, scales, bits, dtype), exact.to(dtype))  # rounded once


@pytest.mark.parametrize("bits", [8, 4])
def test_levels_times_a_power_of_two_come_back_as_they_were(bits):
    weight = torch.arange(-TOP[bits], TOP[bits] + 1).repeat(2)[None] * torch.tensor([[0.25], [8.0], [0.0]])
    packed, scales = quantize(weight, bits, weight.shape[1])
    assert scales.tolist() == [[0.25], [8.0], [0.0]]
    assert torch.equal(dequantize(packed, scales, bits, torch.float32), weight)


def test_factors_may_have_another_type_than_the_weight():
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    packed, scales = quantize(weight, 8, 32, torch.bfloat16)
    again = dequantize(packed, scales, 8, torch.float32)
    assert scales.dtype is torch.bfloat16
    assert bool(((again - weight).abs() <= scales.float().repeat_interleave(32, 1) * 0.51).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_group_with_an_infinity_or_a_nan_spoils_itself_alone(bits):
    weight = torch.ones(3, 8)
    weight[0, 1], weight[1, 6] = torch.inf, torch.nan
    again = dequantize(*quantize(weight, bits, 4), bits, torch.float32)
    assert not again[0, :4].isfinite().any()
    assert not again[1, 4:].isfinite().any()
    assert torch.equal(again[0, 4:], weight[0, 4:])
    assert torch.equal(again[1, :4], weight[1, :4])
    assert torch.equal(again[2], weight[2])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [3e-3, 1e-4, 1e-6])
def test_factors_that_are_subnormal_reach_the_weight(bits, size):
    weight = (torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) * size).half()
    packed, scales = quantize(weight, bits, 16)
    error = (dequantize(packed, scales, bits, torch.float64) - weight.double()).abs()
    assert bool((error <= scales.double().repeat_interleave(16, 1) * 0.5).all())


def test_weights_that_only_float64_holds_are_quantized():
    weight = torch.tensor([[2.0**900, -(2.0**899)]], dtype=torch.float64) * 7
    assert torch.equal(dequantize(*quantize(weight * 127, 8, 2), 8, torch.float64)[0, :1], weight[0, :1] * 127)


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        ([[1.0]], ArgumentError, "no tensor"),
        (torch.ones(4), ShapeError, r"shape \(4,\)"),
        (torch.ones(2, 2, 4), ShapeError, r"shape \(2, 2, 4\)"),
        (torch.ones(2, 4).int(), DTypeError, r"weight is torch\.int32"),
        (torch.ones(2, 4).cfloat(), DTypeError, r"weight is torch\.complex64"),
        (torch.ones(2, 4).to_sparse(), LayoutError, "to_dense"),
    ],
)
def test_what_is_no_weight_is_refused(weight, error, words):
    with pytest.raises(error, match=words):
        quantize(weight, 8, 4)


def test_factors_are_floating_point():
    with pytest.raises(DTypeError, match=r"dtype=torch\.int32"):
        quantize(torch.ones(2, 4), 8, 4, torch.int32)
    with pytest.raises(DTypeError, match="dtype=array"):
        quantize(torch.ones(2, 4), 8, 4, np.ones(2))


@pytest.mark.parametrize(
    ("bits", "group", "error", "words"),
    [
        (2, 4, ArgumentError, "8 or 4 bits"),
        (True, 4, ArgumentError, "8 or 4 bits"),
        (8.0, 4, ArgumentError, "8 or 4 bits"),
        (8, True, ArgumentError, "at least 1"),
        (8, 0, ArgumentError, "at least 1"),
        (8, 4.0, ArgumentError, "at least 1"),
        (4, 3, ArgumentError, "two columns share a byte"),
        (8, 5, ShapeError, "does not divide the 8 columns"),
    ],
)
def test_a_format_that_no_weight_has_is_refused(bits, group, error, words):
    with pytest.raises(error, match=words):
        quantize(torch.ones(2, 8), bits, group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_finite_weights_stay_finite(bits, dtype):
    """Half a factor is the bound of an error, with one rounding each of the factor and of the product."""
    limits, top = torch.finfo(dtype), 2 ** (bits - 1) - 1
    weight = torch.tensor([[limits.max, -limits.max, 0, limits.max / 2]], dtype=dtype)
    packed, scales = quantize(weight, bits, 4)
    back = dequantize(packed, scales, bits, dtype)
    assert bool(back.isfinite().all())
    bound = (0.5 / top + 4 * limits.eps) * limits.max
    assert bool(((back.double() / 2 - weight.double() / 2).abs() <= bound / 2).all())


def test_a_weight_beyond_the_type_of_the_factors_does_not_become_a_finite_one():
    packed, scales = quantize(torch.tensor([[1e6, 1.0]]), 8, 2, torch.float16)
    assert not bool(dequantize(packed, scales, 8, torch.float16)[0, 0].isfinite())
