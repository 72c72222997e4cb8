"""Textures against the formulas of CUDA's programming guide in plain Python, element by element; surfaces; refusals."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import gemmery as gm

CODE = """
extern "C" {
__global__ void line(cudaTextureObject_t t, const float* x, float* z) {
  z[threadIdx.x] = tex1D<float>(t, x[threadIdx.x]);
}
__global__ void plane(cudaTextureObject_t t, const float* x, const float* y, float* z) {
  z[threadIdx.x] = tex2D<float>(t, x[threadIdx.x], y[threadIdx.x]);
}
__global__ void fetched(cudaTextureObject_t t, int* z) { z[threadIdx.x] = tex1Dfetch<int>(t, int(threadIdx.x) - 2); }
__global__ void pixel(cudaTextureObject_t t, uchar4* z) {
  z[threadIdx.x] = tex2D<uchar4>(t, threadIdx.x % 8, threadIdx.x / 8);
}
__global__ void brighter(cudaTextureObject_t t, float4* z) {
  z[threadIdx.x] = tex2DLod<float4>(t, threadIdx.x % 8 + 0.5f, threadIdx.x / 8 + 0.5f, 0.f);
}
__global__ void copied(cudaSurfaceObject_t from, cudaSurfaceObject_t to) {
  uchar4 value;
  surf2Dread(&value, from, threadIdx.x % 8 * 4, threadIdx.x / 8);
  surf2Dwrite(value, to, threadIdx.x % 8 * 4, threadIdx.x / 8);
}
__global__ void shifted(cudaSurfaceObject_t s, float* z) {
  z[threadIdx.x] = surf1Dread<float>(s, 4 * (int(threadIdx.x) - 4), cudaBoundaryModeClamp);
  z[threadIdx.x] += 100 * surf1Dread<float>(s, 4 * (int(threadIdx.x) - 4), cudaBoundaryModeZero);
}
__global__ void beyond(cudaSurfaceObject_t s, int step) { surf1Dwrite(1.f, s, step * int(threadIdx.x)); }
__global__ void wide(cudaSurfaceObject_t s, int step) { surf1Dwrite(float2{1, 1}, s, step * int(threadIdx.x)); }
}"""
DRAW = np.random.default_rng(3)
LINE, PLANE = DRAW.standard_normal(24).astype(np.float32), DRAW.standard_normal((6, 9)).astype(np.float32)
PIXELS = DRAW.integers(0, 256, (4, 8, 4)).astype(np.uint8)


def element(values, places, address):
    """The element at whole coordinates, x first."""
    at = []
    for place, side in zip(places, values.shape[::-1], strict=True):
        if address == "border" and not 0 <= place < side:
            return 0.0
        at.append(place % side if address == "wrap" else min(max(place, 0), side - 1))
    return float(values[tuple(at[::-1])])


def expected(values, coordinates, filtered, address, normalized):
    """What a texture instruction reads, by the guide."""
    places = []
    for x, side in zip(coordinates, values.shape[::-1], strict=True):
        whole, part = math.floor(x), float(x) - math.floor(x)
        mirrored = part if whole % 2 == 0 else 1 - part
        inside = {"wrap": part, "mirror": mirrored}.get(address, float(x))
        places.append(inside * side if normalized else inside)
    if filtered == "nearest":
        return element(values, [math.floor(x) for x in places], address)
    total = 0.0
    for corner in np.ndindex(*(2,) * len(places)):
        weight, at = 1.0, []
        for x, step in zip(places, corner, strict=True):
            part = round((x - 0.5 - math.floor(x - 0.5)) * 256) / 256
            weight *= part if step else 1 - part
            at.append(math.floor(x - 0.5) + step)
        total += weight * element(values, at, address)
    return total


@pytest.mark.parametrize(
    ("address", "normalized"),
    [("clamp", False), ("border", False), ("clamp", True), ("border", True), ("wrap", True), ("mirror", True)],
)
@pytest.mark.parametrize("filtered", ["nearest", "linear"])
def test_a_texture_reads_what_the_guide_says(filtered, address, normalized):
    """One and two dimensions, inside and outside."""
    for kernel, values in (("line", LINE), ("plane", PLANE)):
        sides = values.shape[::-1]
        coordinates = [
            DRAW.uniform(-1.4, 2.4, 64).astype(np.float32) * np.float32(1 if normalized else side) for side in sides
        ]
        z = np.full(64, np.nan, np.float32)
        texture = gm.texture(values, filter=filtered, address=address, normalized=normalized)
        assert gm.emulate(CODE, kernel, 1, 64, [texture, *coordinates, z]).findings == ()
        for place, x in enumerate(zip(*coordinates, strict=True)):
            assert abs(z[place] - expected(values, x, filtered, address, normalized)) <= 1e-5


def test_integers_are_read_as_they_are_or_as_numbers_up_to_one():
    """Whole coordinates, and four channels."""
    z = np.zeros(32, np.int32)
    gm.emulate(CODE, "fetched", 1, 32, [gm.texture(np.arange(5, 21, dtype=np.int32)), z])
    assert z.tolist() == [0, 0, *range(5, 21), *[0] * 14]
    gm.emulate(CODE, "fetched", 1, 32, [gm.texture(np.arange(-5, 11, dtype=np.int8)), z])
    assert z.tolist() == [0, 0, *range(-5, 11), *[0] * 14]
    pixels, bright = np.zeros((4, 8, 4), np.uint8), np.zeros((4, 8, 4), np.float32)
    gm.emulate(CODE, "pixel", 1, 32, [gm.texture(PIXELS, channels=4), pixels])
    gm.emulate(CODE, "brighter", 1, 32, [gm.texture(PIXELS, channels=4, filter="linear", unit=True), bright])
    assert np.array_equal(pixels, PIXELS)
    assert np.abs(bright - PIXELS / 255).max() <= 1e-6


def test_surfaces_are_read_and_written_by_bytes():
    """A write goes to the array; a read outside gives the last element or zero."""
    to = np.zeros_like(PIXELS)
    args = [gm.texture(PIXELS, channels=4), gm.texture(to, channels=4)]
    assert gm.emulate(CODE, "copied", 1, 32, args).findings == ()
    assert np.array_equal(to, PIXELS)
    x, z = np.arange(1, 25, dtype=np.float32), np.zeros(32, np.float32)
    assert gm.emulate(CODE, "shifted", 1, 32, [gm.texture(x), z]).findings == ()
    assert z.tolist() == [1.0] * 4 + [101.0 * k for k in range(1, 25)] + [24.0] * 4


@pytest.mark.parametrize(
    ("kernel", "step", "surface", "words"),
    [
        ("beyond", 4, True, "thread 24 of block 0 is outside a surface of 24 x 1 elements"),
        ("beyond", 2, True, "no multiple of 4"),
        ("wide", 8, True, "accesses 8 bytes of a surface whose elements have 4"),
        ("beyond", 4, False, "is no texture or surface: pass gemmery.texture(array)"),
    ],
)
def test_a_wrong_access_to_a_surface_is_found(kernel, step, surface, words):
    """Each with the threads that do so."""
    x = np.zeros(24, np.float32)
    (finding,) = gm.emulate(CODE, kernel, 1, 32, [gm.texture(x) if surface else x, step]).findings
    assert finding.kind == "misuse"
    assert words in finding.message


@pytest.mark.parametrize(
    ("array", "options", "words"),
    [
        ([1.0], {}, "texture of list: pass a NumPy array of"),
        (np.zeros(4), {}, "texture of float64"),
        (PLANE.T, {}, "pass numpy.ascontiguousarray"),
        (np.zeros((2, 2, 2), np.float32), {}, "one or two dimensions"),
        (PLANE, {"channels": 4}, "2 or 4 with a last axis of that length"),
        (PLANE, {"filter": "cubic"}, "filter='cubic'"),
        (PLANE, {"address": "wrap"}, "it needs normalized=True"),
        (PLANE, {"unit": True}, "only integers of 8 and 16 bits"),
        (PLANE, {"unit": PLANE}, "pass True or False"),
        (PLANE, {"normalized": "no"}, "normalized='no'"),
        (PIXELS, {"channels": 4, "filter": "linear"}, "or integers with unit=True"),
    ],
)
def test_a_texture_that_cuda_would_refuse_is_refused(array, options, words):
    """In words that name the way out."""
    with pytest.raises(gm.GemmeryError, match=re.escape(words)):
        gm.texture(array, **options)
