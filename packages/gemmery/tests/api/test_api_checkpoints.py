"""Tensors of quantized checkpoints, against layers whose words are packed here one code after the other."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import ArgumentError, LayoutError, ShapeError

N, K, GROUP = 16, 64, 32
RNG = np.random.default_rng(7)
CODES = RNG.integers(0, 16, (N, K))
ZEROS = RNG.integers(0, 16, (N, K // GROUP))
SCALES = np.exp2(RNG.uniform(-4, 2, (N, K // GROUP))).astype(np.float16)


def weight(codes=CODES, zeros=ZEROS):
    """The layer by the definition, one element after the other."""
    return np.array(
        [
            [(int(codes[j, p]) - float(zeros[j, p // GROUP])) * float(SCALES[j, p // GROUP]) for j in range(N)]
            for p in range(K)
        ]
    )


def word(codes, bits=4):
    """Codes in a word of 32 bits, the first in the lowest bits."""
    number = sum(int(code) << bits * i for i, code in enumerate(codes))
    return number - (1 << 32 if number >> 31 else 0)


def words(rows, bits=4):
    """Rows of codes in rows of words."""
    each = 32 // bits
    return np.array([[word(row[i : i + each], bits) for i in range(0, len(row), each)] for row in rows], np.int32)


def awq(codes=CODES, zeros=ZEROS):
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(rows):
        return [[row[i // 8 * 8 + order[i % 8]] for i in range(len(row))] for row in rows]

    return {"qweight": words(mixed(codes.T)), "qzeros": words(mixed(zeros.T)), "scales": SCALES.T.copy()}


def gptq(codes=CODES, zeros=ZEROS, bits=4, less=1):
    stored = (zeros.T - less) % 2**bits
    return {
        "qweight": words(codes, bits).T.copy(), "qzeros": words(stored, bits), "scales": SCALES.T.copy(),
        "g_idx": np.repeat(np.arange(K // GROUP), GROUP).astype(np.int32),
    }  # fmt: skip


def compressed(codes=CODES, zeros=ZEROS):
    return {
        "weight_packed": words(codes), "weight_scale": SCALES, "weight_shape": np.array([N, K]),
        "weight_zero_point": words(zeros.T).T.copy(),
    }  # fmt: skip


def hqq(codes=CODES, zeros=ZEROS):
    groups = codes.reshape(-1, GROUP)
    half = len(groups) // 2
    packed = (groups[:half] << 4 | groups[half:]).astype(np.uint8)
    return {"W_q": packed, "scale": SCALES.reshape(-1, 1), "zero": zeros.reshape(-1, 1).astype(np.float16)}


HQQ = {"shape": (N, K), "nbits": 4}
CASES = {
    "awq": (awq, {"bits": 4, "version": "gemm"}),
    "gptq": (gptq, {"bits": 4}),
    "compressed-tensors": (compressed, {}),
    "hqq": (hqq, HQQ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_layer_has_the_weight_of_the_checkpoint(kind, library):
    make, config = CASES[kind]
    tensors = make()
    if library == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        tensors = {name: torch.from_numpy(z) for name, z in tensors.items()}
    matrix = gm.from_checkpoint(kind, tensors, config)
    assert (matrix.format, matrix.group, matrix.shape) == ("int4", GROUP, (K, N))
    exact = weight()
    assert np.array_equal(np.asarray(matrix.dequantize("float64")), exact)
    x = RNG.standard_normal((3, K)).astype(np.float32)
    result = gm.matmul(x, gm.from_checkpoint(kind, make(), config))
    assert np.all(np.abs(result - x @ exact) <= (K + 4) * 2.0**-24 * (np.abs(x) @ np.abs(exact)))


def test_the_first_word_of_each_kind_by_hand():
    """A row of codes 0 to 7 in its places: numbers that were written down and not computed."""
    codes, zeros = np.tile(np.arange(8), (N, K // 8)), np.full_like(ZEROS, 8)
    assert gptq(codes, zeros)["qweight"][0, 0] == 0x76543210
    assert gptq(codes, zeros)["qzeros"][0, 0] == 0x77777777
    assert compressed(codes, zeros)["weight_packed"][0, 0] == 0x76543210
    assert awq(np.tile(np.arange(16)[:, None], (1, K)), zeros)["qweight"][0, 0] == 0x75316420
    for kind, (make, config) in CASES.items():
        matrix = gm.from_checkpoint(kind, make(codes, zeros), config)
        assert matrix.zeros is None  # all 8, so symmetric
        assert np.array_equal(matrix.packed[0, :4], [0x10, 0x32, 0x54, 0x76])


@pytest.mark.parametrize("less", [1, 0])
def test_gptq_of_8_bits_and_both_versions(less):
    codes, zeros = RNG.integers(0, 256, (N, K)), RNG.integers(1, 256, ZEROS.shape)
    config = {"bits": 8, "checkpoint_format": "gptq" if less else "gptq_v2"}
    matrix = gm.from_checkpoint("gptq", gptq(codes, zeros, 8, less), config)
    assert matrix.format == "int8"
    assert np.array_equal(matrix.dequantize("float64"), weight(codes, zeros))


def test_zero_points_of_hqq_have_fractions():
    zeros = ZEROS + np.float16(0.375)
    matrix = gm.from_checkpoint("hqq", hqq(zeros=zeros), HQQ)
    exact = weight(zeros=zeros)
    assert np.array_equal(matrix.dequantize("float64"), exact)
    x = RNG.standard_normal((3, K)).astype(np.float32)
    rounding = 2.0**-23 * (np.abs(x) @ np.abs(exact))
    assert np.all(np.abs(gm.matmul(x, matrix) - x @ exact) <= (K + 4) * rounding)


def test_experts_of_mxfp4():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    blocks = RNG.integers(0, 256, (3, N, K // 32, 16)).astype(np.uint8)
    scales = RNG.integers(120, 134, (3, N, K // 32)).astype(np.uint8)
    matrix = gm.from_checkpoint("mxfp4", {"blocks": blocks, "scales": scales})
    assert matrix.shape == (3, K, N)
    for expert, j, p in [(0, 0, 0), (0, 0, 1), (1, 7, 33), (2, N - 1, K - 1), (2, 3, 30)]:
        byte = int(blocks[expert, j, p // 32, p % 32 // 2])
        code = byte >> 4 if p % 2 else byte & 15
        value = (-1) ** (code >> 3) * values[code & 7] * 2.0 ** (int(scales[expert, j, p // 32]) - 127)
        assert matrix.dequantize()[expert, p, j] == value


@pytest.mark.parametrize(
    ("kind", "change", "config", "error", "words_"),
    [
        ("marlin", {}, {}, ArgumentError, "known: awq, gptq"),
        ("awq", {}, {"bits": 8}, ArgumentError, "4 bits"),
        ("awq", {}, {"version": "gemv"}, ArgumentError, "gemm is read"),
        ("awq", {"qzeros": None}, {}, ArgumentError, "without qzeros"),
        ("gptq", {"g_idx": np.arange(K, dtype=np.int32) % 2}, {}, ArgumentError, "desc_act"),
        ("gptq", {}, {"bits": 3}, ArgumentError, "bits=3"),
        ("gptq", {"scales": SCALES.T[:, :8], "g_idx": None}, {}, ShapeError, "codes of shape"),
        ("hqq", {}, {"shape": (N, K), "axis": 0}, ArgumentError, "axis=1"),
        ("hqq", {}, {}, ArgumentError, "shape"),
        ("hqq", {}, {"shape": (N, K + 8)}, ShapeError, "not the 16 x 72"),
        ("compressed-tensors", {"weight_scale": SCALES[:7]}, {}, ShapeError, "factors"),
        ("gptq", {"scales": SCALES[0]}, {}, ShapeError, r"no layer of gptq .*scales \("),
        (
            "mxfp4",
            {"blocks": np.zeros((8, 1, 16), np.uint8), "scales": "text"},
            {},
            ArgumentError,
            "arrays of one library",
        ),
    ],
)
def test_what_is_no_layer_is_refused_in_words(kind, change, config, error, words_):
    tensors = CASES.get(kind, CASES["awq"])[0]()
    tensors = {name: z for name, z in {**tensors, **change}.items() if z is not None}
    with pytest.raises(error, match=words_):
        gm.from_checkpoint(kind, tensors, config)


# ---- files ----


MATRICES = [("int8", None), ("int4", 32), ("float8_e4m3", None), ("mxfp4", None), ("nvfp4", None)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_files_come_back_bit_for_bit(library, tmp_path):
    pytest.importorskip("safetensors")
    w = RNG.standard_normal((64, 6)).astype(np.float32)
    if library == "torch":
        w = pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(w).bfloat16()
    matrices = {f"layer.{format_}": gm.quantize(w, format_, group) for format_, group in MATRICES}
    matrices["zeros"] = gm.quantize(w, "int4", 64, zero_points=True)
    gm.save_quantized(tmp_path / "a.safetensors", matrices)
    again = gm.load_quantized(tmp_path / "a.safetensors", library)
    assert list(again) == list(matrices)
    for name, matrix in matrices.items():
        assert repr(again[name]) == repr(matrix)
        for one, other in zip(matrix.parts, again[name].parts, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.dtype == other.dtype and bool((one == other).all()))


def test_a_file_of_another_version_is_refused_by_name(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "new.safetensors"
    numpy.save_file({"a.packed": np.zeros(1)}, path, metadata={"gemmery": json.dumps({"version": 99, "formats": {}})})
    with pytest.raises(LayoutError, match=r"new\.safetensors has .* version 99, and this gemmery reads version 1"):
        gm.load_quantized(path)
    numpy.save_file({"a": np.zeros(1)}, path)
    with pytest.raises(LayoutError, match="no quantized matrices"):
        gm.load_quantized(path)


def test_a_damaged_file_is_refused_by_name(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "layer.safetensors"
    gm.save_quantized(path, {"a": gm.quantize(np.ones((8, 4)), "int8")})
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(LayoutError, match=r"layer\.safetensors is damaged"):
        gm.load_quantized(path)
    for header in ("{", "[]", '{"version": 1}', '{"version": 1, "formats": {"a": ["int8"]}}'):
        numpy.save_file({"a.packed": np.zeros((4, 8), np.int8)}, path, metadata={"gemmery": header})
        with pytest.raises(LayoutError, match="damaged"):
            gm.load_quantized(path)
    with pytest.raises(ArgumentError, match="pass a dict of what"):
        gm.save_quantized(path, {"a": np.ones(3)})
    matrix = gm.quantize(np.eye(4), "int8")
    for place, others, words in [
        (path, {"a.scales": np.ones(3)}, r"others has a a\.scales, .* rename one"),
        (path.parent / "nowhere" / "file", {}, "choose another place"),
        (None, {}, "path=None: "),
        ("a\0b", {}, "path='a"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            gm.save_quantized(place, {"a": matrix}, others)
    with pytest.raises(LayoutError, match="3 is damaged, or no file of"):
        gm.load_quantized(3)
    with pytest.raises(ArgumentError, match="known: awq"):
        gm.from_checkpoint([], {})


@pytest.mark.parametrize("value", [True, 3, "text", (1, 2), {1: SCALES}, SCALES])
def test_what_is_no_dict_of_names_is_refused_in_words(value, tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(ArgumentError, match=r"^tensors=.* pass a dict with names as keys"):
        gm.from_checkpoint("awq", value)
    with pytest.raises(ArgumentError, match=r"^config=.* pass a dict with names as keys"):
        gm.from_checkpoint("awq", CASES["awq"][0](), value)
    with pytest.raises(ArgumentError, match=r"^others=.* pass a dict with names as keys"):
        gm.save_quantized(tmp_path / "file", {}, value)


def test_a_folder_in_the_place_of_a_file_is_refused_by_name(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(LayoutError, match=r"is damaged, or no file of gm\.save_quantized"):
        gm.load_quantized(tmp_path)


def convert(*arguments, **options):
    pytest.importorskip("safetensors")
    path = Path(__file__).parents[4] / "examples" / "12_convert_a_checkpoint.py"
    return runpy.run_path(str(path))["convert"](*arguments, **options)


def folder(path, parts, config):
    """A checkpoint of several files, whose layer is spread over them, with its index."""
    numpy = pytest.importorskip("safetensors.numpy")
    path.mkdir()
    for i, tensors in enumerate(parts):
        numpy.save_file(tensors, path / f"model-{i}.safetensors")
    where = {name: f"model-{i}.safetensors" for i, tensors in enumerate(parts) for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")


def test_a_folder_is_converted_file_by_file(tmp_path):
    layer = {f"model.up.{name}": z for name, z in gptq().items()}
    last = {"model.up.scales": layer.pop("model.up.scales"), "norm.weight": np.ones(4, np.float32)}
    folder(tmp_path / "in", [layer, last], {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert convert(tmp_path / "in", tmp_path / "out") == {"model.up": "int4"}
    matrix = gm.load_quantized(tmp_path / "out" / "model-0.safetensors")["model.up"]
    assert np.array_equal(matrix.dequantize("float64"), weight())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "model.up.packed": "model-0.safetensors", "model.up.scales": "model-0.safetensors",
        "model.up.zeros": "model-0.safetensors", "norm.weight": "model-1.safetensors",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(FileExistsError):
        convert(tmp_path / "in", tmp_path / "out")


def test_a_plain_folder_is_quantized(tmp_path):
    w = RNG.standard_normal((8, 64)).astype(np.float32)
    folder(tmp_path / "in", [{"up_proj.weight": w, "embed.weight": w}], {})
    assert convert(tmp_path / "in", tmp_path / "out", format_="int4", group=32) == {"up_proj": "int4"}
    again = gm.load_quantized(tmp_path / "out" / "model-0.safetensors")["up_proj"]
    assert np.array_equal(again.packed, gm.quantize(w.T, "int4", 32).packed)
    with pytest.raises(ArgumentError, match="quant_method"):
        convert(tmp_path / "in", tmp_path / "other")
    with pytest.raises(ArgumentError, match="no safetensors"):
        convert(tmp_path / "nothing", tmp_path / "other")


def test_an_error_names_the_layer(tmp_path):
    layer = {f"model.up.{name}": z for name, z in gptq().items()}
    layer["model.up.g_idx"] = layer["model.up.g_idx"][::-1].copy()
    folder(tmp_path / "in", [layer], {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ArgumentError, match=r"model\.up: g_idx"):
        convert(tmp_path / "in", tmp_path / "out")
