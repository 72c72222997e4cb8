"""Linear and QuantizedLinear next to nn.Linear: values against float64, gradients, state dicts, copies, compilation."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import ArgumentError, DeviceError, DTypeError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402 # of the package that may be missing
from torch.nn import functional  # noqa: E402

from gemmery.torch import Linear, QuantizedLinear, modules, plain_state_dict, replace_linear  # noqa: E402
from gemmery.torch.quantization import dequantize  # noqa: E402

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
K, N = 64, 24


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layers(bits, dtype=torch.float32, bias=True):
    """An nn.Linear, and gemmery's layer in its place."""
    torch.manual_seed(3)
    plain = nn.Linear(K, N, bias=bias, dtype=dtype)
    layer = (
        Linear(K, N, bias, dtype=dtype)
        if bits is None
        else QuantizedLinear(K, N, bias, None, dtype, bits=bits, group=16)
    )
    assert str(layer.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    return plain, layer


def check(result, x, layer):
    """`result` is within the bound of x Wᵀ + bias, W the weight that the layer says it has."""
    weight, sums = layer.weight.detach().double(), min(ROUNDOFF[x.dtype], 2.0**-24)
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    exact, size = x.double() @ weight.T + bias, x.double().abs() @ weight.abs().T + abs(bias)
    assert result.dtype is x.dtype
    assert bool(((result.double() - exact).abs() <= (K + 4) * sums * size + 2 * ROUNDOFF[x.dtype] * exact.abs()).all())


@pytest.mark.many(5)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_a_layer_is_within_the_bound(bits, bias, dtype):
    _, layer = layers(bits, dtype, bias)
    for shape in ((5, K), (K,), (2, 3, K), (0, K)):
        x = random(*shape, dtype=dtype)
        result = layer(x).detach()
        assert result.shape == (*shape[:-1], N)
        check(result, x, layer)


@pytest.mark.parametrize("bits", [8, 4])
def test_factors_of_another_type_are_used_in_that_of_the_input(bits):
    _, layer = layers(bits, torch.bfloat16, bias=False)
    x = random(5, K)
    result = layer(x)
    wide = layer.float()
    check(result, x, wide)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_layer_differs_from_the_plain_one_by_half_the_factors(bits):
    plain, layer = layers(bits)
    x = random(5, K)
    halves = x.abs() @ (layer.scales / 2).repeat_interleave(16, 1).T
    assert bool(((layer(x) - plain(x)).abs() <= halves * 1.001).all())


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_an_activation_is_applied_to_the_output(bits, activation):
    options = {"activation": activation} if bits is None else {"activation": activation, "bits": bits, "group": 16}
    layer = (Linear if bits is None else QuantizedLinear)(K, N, **options)
    layer.load_state_dict(nn.Linear(K, N).state_dict())
    x = random(5, K)
    expected = getattr(functional, activation)(functional.linear(x, layer.weight, layer.bias))
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert f"activation='{activation}'" in repr(layer)


def test_a_layer_trains_as_nn_linear_does():
    plain, layer = layers(None)
    x = random(5, K)
    steps = []
    for model in (plain, layer):
        for _ in range(3):
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        steps.append(model.weight.detach())
    assert not torch.equal(steps[0], layers(None)[0].weight)
    assert torch.allclose(*steps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_input_and_the_bias_of_a_quantized_layer_have_gradients(bits):
    _, layer = layers(bits)
    x = random(5, K).requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(5, K), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.bias.grad, torch.full((N,), 5.0))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    layer.requires_grad_(True)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_copies_and_files_give_the_same_bits(bits):
    _, layer = layers(bits)
    x, file = random(5, K), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x))
        assert repr(other) == repr(layer)
        assert {key: value.dtype for key, value in other.state_dict().items()} == {
            key: value.dtype for key, value in layer.state_dict().items()
        }


@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_state_dict_is_saved_and_loaded(bits):
    _, layer = layers(bits)
    _, other = layers(bits, torch.bfloat16)
    state = layer.state_dict()
    assert set(state) == {"bias", "packed", "scales"}
    fresh = QuantizedLinear(K, N, bits=bits, group=16)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.packed, layer.packed)
    assert torch.equal(fresh.scales, layer.scales)
    other.load_state_dict(state)  # into another type: the factors are rounded to it
    assert other.scales.dtype is torch.bfloat16
    empty = QuantizedLinear(K, N, bits=bits, group=16, device="meta")
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty(torch.ones(K)), layer(torch.ones(K)))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_state_dict_for_plain_layers_again(bits):
    shared = layers(bits)[1]
    model = nn.ModuleDict({"first": shared, "tied": shared, "plain": nn.Linear(K, N), "norm": nn.BatchNorm1d(N)})
    other = nn.ModuleDict({key: nn.Linear(K, N) for key in ("first", "tied", "plain")} | {"norm": nn.BatchNorm1d(N)})
    before = list(model.state_dict())
    assert str(other.load_state_dict(plain_state_dict(model))) == "<All keys matched successfully>"
    assert list(model.state_dict()) == before
    for key in ("first", "tied"):
        assert torch.equal(other[key].weight, shared.weight)
        assert torch.equal(other[key].bias, shared.bias)
    assert torch.equal(other["plain"].weight, model["plain"].weight)
    assert list(plain_state_dict(shared)) == ["bias", "weight"]
    with pytest.raises(ArgumentError, match=r"model=.* is not a torch\.nn\.Module"):
        plain_state_dict({"weight": 1})


@pytest.mark.parametrize("bits", [8, 4])
def test_a_plain_checkpoint_is_quantized_from_its_own_type(bits):
    plain, layer = layers(bits)
    coarse = QuantizedLinear(K, N, dtype=torch.bfloat16, bits=bits, group=16)
    state = plain.state_dict()
    coarse.load_state_dict(state)
    assert set(state) == {"weight", "bias"}  # the caller's dict is as it was
    difference = (coarse.weight.float() - plain.weight).abs()
    assert bool(
        (difference <= coarse.scales.float().repeat_interleave(16, 1) * 0.51 + 2.0**-8 * plain.weight.abs()).all()
    )
    empty = QuantizedLinear(K, N, bits=bits, group=16, device="meta")
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty.packed, layer.packed)


def test_a_checkpoint_of_another_size_or_format_is_refused():
    with pytest.raises(RuntimeError, match=r"weight: size mismatch: .*\(24, 32\)"):
        layers(8)[1].load_state_dict({"weight": torch.ones(24, 32), "bias": torch.ones(24)})
    with pytest.raises(RuntimeError, match="size mismatch for packed"):
        layers(8)[1].load_state_dict(layers(4)[1].state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        layers(8)[1].load_state_dict({"bias": torch.ones(24)})


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(N, K).int(), r"0\.weight: weight is torch\.int32"),
        (torch.ones(N, K).to_sparse(), r"0\.weight: .*to_dense"),
        (torch.ones(N, K, device="meta"), r"0\.weight: .*without memory"),
        (None, r"0\.weight: weight is None, and no tensor"),
    ],
)
def test_a_checkpoint_without_a_weight_to_quantize_is_refused_by_name(weight, words):
    model = nn.Sequential(layers(8)[1])
    before = model(random(5, K))
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict({"0.weight": weight, "0.bias": model[0].bias})
    assert torch.equal(model(random(5, K)), before)


def test_the_weight_of_a_quantized_layer_cannot_be_tied():
    with pytest.raises(ArgumentError, match="load_state_dict"):
        layers(8)[1].weight = nn.Embedding(N, K).weight


@pytest.mark.parametrize("bits", [8, 4])
def test_to_converts_factors_and_bias_and_leaves_the_levels(bits):
    _, layer = layers(bits)
    packed = layer.packed.clone()
    layer.to(torch.float16)
    assert {key: value.dtype for key, value in layer.state_dict().items()} == {
        "bias": torch.float16,
        "packed": torch.int8 if bits == 8 else torch.uint8,
        "scales": torch.float16,
    }
    assert torch.equal(layer.packed, packed)
    check(layer(random(5, K, dtype=torch.float16)).detach(), random(5, K, dtype=torch.float16), layer)


def test_a_format_that_a_layer_cannot_have_is_refused():
    with pytest.raises(ArgumentError, match="8 or 4 bits"):
        QuantizedLinear(K, N, bits=5)
    with pytest.raises(ShapeError, match="does not divide the 64 columns"):
        QuantizedLinear(K, N, bits=8)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activation": "tanh"}, ArgumentError, "relu, gelu, silu"),
        ({"activation": nn.ReLU()}, ArgumentError, "relu, gelu, silu"),
        ({"precision": "bf16"}, ArgumentError, "precision='bf16'"),
        ({"precision": np.ones(2)}, ArgumentError, "precision=array"),
    ],
)
def test_options_that_no_layer_has_are_refused_at_once(options, error, words):
    for build in (Linear, lambda *sizes, **options: QuantizedLinear(*sizes, bits=8, group=16, **options)):
        with pytest.raises(error, match=words):
            build(K, N, **options)


@pytest.mark.parametrize(
    ("sizes", "dtype", "error", "words"),
    [
        ((-1, N), None, ArgumentError, "in_features=-1"),
        ((K, 2.5), None, ArgumentError, r"out_features=2\.5"),
        ((K, N), torch.complex64, DTypeError, r"dtype=torch\.complex64"),
        ((K, N), torch.float8_e5m2, DTypeError, r"dtype=torch\.float8_e5m2"),
    ],
)
def test_sizes_and_types_that_no_quantized_layer_has_are_refused(sizes, dtype, error, words):
    with pytest.raises(error, match=words):
        QuantizedLinear(*sizes, dtype=dtype, bits=8, group=1)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_autocast_gives_what_it_gives_nn_linear(bits):
    plain, layer = layers(bits)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        result, expected = layer(random(5, K)), plain(random(5, K))
    assert result.dtype is expected.dtype is torch.bfloat16
    assert torch.allclose(result, expected, atol=0.3, rtol=0.05)


def test_a_model_is_compiled_without_a_graph_break():
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(K, K), nn.SiLU(), nn.Linear(K, N, bias=False))
    x = random(5, K)
    for bits in (None, 8, 4):
        model = copy.deepcopy(plain)
        replace_linear(model, bits, group=16)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
    plain.requires_grad_(True)
    replace_linear(plain)
    torch.compile(plain, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in plain.parameters())


@pytest.mark.parametrize("bits", [None, 8])
def test_torch_fx_records_a_layer_as_one_step(bits):
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU())
    replace_linear(model, bits, group=16)
    traced = torch.fx.symbolic_trace(model)
    names = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"]
    assert names == ["_precision", "linear" if bits is None else "quantized_linear"]
    x = random(5, K)
    assert torch.equal(traced(x), model(x))


def copy_of(layer):
    """The packed copy of a layer's weight, if its last product read it."""
    return layer._copy and layer._copy[0]


def unrounded(layer):
    """The layer with the weight that products by panels read: no product of a level and a factor is rounded."""
    if isinstance(layer, Linear) or layer.scales.dtype is torch.float64:
        return layer
    weight = dequantize(layer.packed, layer.scales.double(), layer.bits, torch.float64)
    return SimpleNamespace(weight=weight, bias=layer.bias)


@pytest.mark.many(5)
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_packed_layer_is_within_the_bound(dtype, bias, bits, monkeypatch):
    layer = layers(bits, dtype, bias)[1].pack()
    if bits is None or dtype is not torch.float64:  # nothing else computes it
        monkeypatch.setattr(modules, "linear", None)
        monkeypatch.setattr(modules, "quantized_linear", None)
    with torch.no_grad():
        for shape in ((5, K), (K,), (2, 3, K), (64, K)):
            x = random(*shape, dtype=dtype)
            assert layer(x).shape == (*shape[:-1], N)
            check(layer(x), x, unrounded(layer))
        check(layer(x[::2]), x[::2], unrounded(layer))
        plain = layer(x)
        layer.activation = "relu"
        assert torch.equal(layer(x), plain.clamp(min=0))
        monkeypatch.undo()
        assert layer(x[:0]).shape == (0, N)
        with pytest.raises(ShapeError):
            layer(x[:, 1:])


def test_a_changed_weight_is_packed_again():
    layer, x = layers(None)[1].pack(), random(3, K)
    first = copy_of(layer)
    with torch.inference_mode():
        before = layer(x)
        assert copy_of(layer) is first
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert torch.equal(layer(x), 2 * before)
        assert copy_of(layer) is not first
        layer.load_state_dict(layers(None)[0].state_dict())
        assert torch.equal(layer(x), before)
        layer.weight = nn.Parameter(layer.weight * 2)
        layer.bias.mul_(2)
        assert torch.equal(layer(x), 2 * before)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert copy_of(twin) is None
            assert torch.equal(twin(x), 2 * before)
            assert copy_of(twin) is not None
        check(layer.to(torch.bfloat16)(x.bfloat16()), x.bfloat16(), layer)
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_where_the_packed_copy_is_not_read():
    layer, x = layers(None)[1].pack(), random(3, K)
    layer._copy = "a copy that nothing can multiply by", layer._copy[1]
    result = layer(x)
    assert result.requires_grad
    result.sum().backward()
    assert layer.weight.grad.shape == (N, K)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
        assert torch.func.vmap(layer)(x).shape == (3, N)
        with pytest.raises(DTypeError):
            layer(x.double())
        assert layer.to("meta")(x.to("meta")).shape == (3, N)
    with pytest.raises(DeviceError, match="has no memory"):
        layer.pack()


@pytest.mark.parametrize("bits", [8, 4])
def test_changed_levels_are_packed_again(bits):
    layer, x = layers(bits)[1].pack(), random(3, K)
    with torch.no_grad():
        check(layer(x), x, unrounded(layer))
        layer.scales.mul_(2)
        check(layer(x), x, unrounded(layer))
        layer.load_state_dict({"weight": random(N, K, seed=7), "bias": layer.bias.detach()})
        check(layer(x), x, unrounded(layer))
        half = layer.to(torch.bfloat16)
        check(half(x.bfloat16()), x.bfloat16(), unrounded(half))
        twin = copy.deepcopy(half)
        assert copy_of(twin) is None
        assert torch.equal(twin(x.bfloat16()), half(x.bfloat16()))
        assert copy_of(twin) is not None
        one = layers(None)[1].pack()
        replace_linear(nn.Sequential(one), bits=bits, group=16)
        assert one._copy is None
        check(one(x), x, one)
    assert set(layer.state_dict()) == {"packed", "scales", "bias"}
    assert layer(x.bfloat16().requires_grad_()).requires_grad


def test_groups_longer_than_a_block_and_odd_ones():
    layer = QuantizedLinear(2048, 40, bits=8, group=2048).pack()
    layer.load_state_dict({"weight": random(40, 2048), "bias": torch.zeros(40)})
    x = random(3, 2048)
    with torch.no_grad():
        exact = x.double() @ layer.weight.double().T
        size = x.double().abs() @ layer.weight.double().abs().T
        assert bool(((layer(x) - exact).abs() <= 2**-24 * 1024 * size).all())
    layer = QuantizedLinear(18, 4, bits=8, group=3).pack()
    layer.load_state_dict({"weight": random(4, 18), "bias": torch.zeros(4)})
    x = random(2, 18)
    assert torch.allclose(layer(x), x @ layer.weight.T, rtol=0, atol=1e-5)
    for sizes in ((0, 4), (4, 0)):
        empty = QuantizedLinear(*sizes, bits=8, group=2).pack()
        assert empty(random(3, sizes[0])).shape == (3, sizes[1])
    with pytest.raises(DeviceError, match="on meta"):
        layer.to("meta").pack()


@pytest.mark.parametrize("bits", [None, 8])
def test_a_packed_layer_stays_one_step_of_a_compiled_graph(bits):
    _, layer = layers(bits)
    x = random(5, K)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer.pack(), backend="aot_eager", fullgraph=True)(x), expected)
        assert torch.equal(torch.export.export(layer, (x,)).module()(x), expected)


@pytest.mark.parametrize(
    ("format_", "group", "zero_points"),
    [
        ("int4", 32, True),
        ("float8_e4m3", None, False),
        ("mxfp4", None, False),
        ("nvfp4", None, False),
        ("int8", 64, False),
    ],
)
def test_a_layer_of_every_format(format_, group, zero_points, tmp_path):
    matrix = gm.quantize(torch.randn(128, 24), format_, group, zero_points=zero_points)
    layer = QuantizedLinear.of(matrix, torch.randn(24), activation="relu")
    x, weight = torch.randn(3, 128), matrix.dequantize("float64").T
    exact = torch.nn.functional.linear(x.double(), weight, layer.bias.double()).relu()
    tolerance = 140 * 2.0**-24 * torch.nn.functional.linear(x.double().abs(), weight.abs(), layer.bias.double().abs())
    recorded = layer(x.clone().requires_grad_())
    for result in (layer(x), recorded):
        assert bool(((result.double() - exact).abs() <= tolerance).all())
    recorded.sum().backward()
    assert torch.equal(layer.weight.double(), weight.float().double())
    torch.save(layer, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    other = QuantizedLinear.of(
        gm.quantize(torch.zeros(128, 24), format_, group, zero_points=zero_points), torch.zeros(24)
    )
    other.load_state_dict(layer.state_dict())
    other.activation = "relu"
    for each in (again, other, copy.deepcopy(layer)):
        assert torch.equal(each(x), layer(x))
    half = copy.deepcopy(layer).half()
    assert (half.scale is None) == (format_ != "nvfp4")
    assert half(x.half()).dtype is torch.float16
    with pytest.raises(RuntimeError, match=r"QuantizedLinear\.of"):
        layer.load_state_dict({"weight": torch.zeros(24, 128), "bias": torch.zeros(24)})
    assert plain_state_dict(nn.Sequential(layer)).keys() == {"0.weight", "0.bias"}
    with pytest.raises(ArgumentError, match="no QuantizedMatrix"):
        QuantizedLinear.of(weight)
