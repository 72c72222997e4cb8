"""replace_linear over trees of modules: what it replaces, what it leaves and why, and that models work as before."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from gemmery.config import FLOAT32_PRECISIONS
from gemmery.errors import ArgumentError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402 # of the package that may be missing
from torch.nn.utils import parametrizations  # noqa: E402

from gemmery.torch import Linear, QuantizedLinear, replace_linear  # noqa: E402


class Block(nn.Module):
    """Two layers with an activation between them, and the input added."""

    def __init__(self, shared):
        super().__init__()
        self.up, self.down, self.shared = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), shared

    def forward(self, x):
        return x + self.shared(self.down(torch.nn.functional.silu(self.up(x))))


class Model(nn.Module):
    """An embedding whose weight is the head's too, and blocks that share a layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        shared = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(3))
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(5)
    return Model()


TOKENS = torch.arange(14).reshape(2, 7)


def test_a_model_with_other_layers_gives_the_same_numbers_and_the_same_checkpoint(model):
    expected, state = model(TOKENS), {name: x.clone() for name, x in model.state_dict().items()}
    report = replace_linear(model)
    assert [layer.names for layer in report.replaced][:3] == [
        ("blocks.0.up",),
        ("blocks.0.down",),
        ("blocks.0.shared", "blocks.1.shared", "blocks.2.shared"),
    ]
    assert len(report.replaced) == 8
    assert report.skipped == ()
    assert torch.allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert model.head.weight is model.embedding.weight
    assert {name: x.tolist() for name, x in model.state_dict().items()} == {n: x.tolist() for n, x in state.items()}
    model.load_state_dict({name: torch.zeros_like(x) for name, x in state.items()})
    assert not model(TOKENS).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_model_loads_a_plain_checkpoint_and_its_own(model, bits):
    expected, plain = model(TOKENS), copy.deepcopy(model.state_dict())
    report = replace_linear(model, bits, group=16)
    assert {type(layer) for block in model.blocks for layer in block.children()} == {QuantizedLinear}
    assert model.blocks[0].shared is model.blocks[2].shared
    assert [(layer.names, layer.kind) for layer in report.skipped] == [(("head",), "Linear")]
    assert "embedding.weight too" in report.skipped[0].reason
    quantized, packed = model(TOKENS), copy.deepcopy(model.state_dict())
    size = float(expected.detach().abs().max())
    assert 0 < float((quantized - expected).detach().abs().max()) <= size * {8: 0.02, 4: 0.3}[bits]
    for state in (packed, plain):
        other = Model()
        replace_linear(other, bits, group=16)
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        assert torch.equal(other(TOKENS), quantized)


def test_layers_that_share_a_weight_share_the_quantized_one():
    model = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8)])
    model[1].weight = model[0].weight
    replace_linear(model, 8, group=16)
    assert model[0].packed is model[1].packed
    assert model[0].bias is not model[1].bias


def test_replacing_again_quantizes_and_says_what_is_so_already(model):
    replace_linear(model)
    model.blocks[0].up.activation = "relu"
    again = replace_linear(model)
    assert again.replaced == ()
    assert {layer.reason for layer in again.skipped} == {"it is a gemmery.torch.Linear already"}
    assert len(replace_linear(model, 4, group=16).replaced) == 7
    assert (model.blocks[0].up.activation, model.blocks[0].down.activation) == ("relu", None)
    assert len(replace_linear(model, 4, group=16).replaced) == 0


def test_a_single_layer_is_replaced_where_it_stands():
    layer = nn.Linear(32, 8)
    assert "the model itself" in str(replace_linear(layer, precision="tf32"))
    assert type(layer) is Linear
    assert repr(layer) == "Linear(in_features=32, out_features=8, bias=True, precision='tf32')"
    assert layer(torch.ones(2, 32)).shape == (2, 8)  # where it means nothing, precision is ignored
    assert layer.training
    for precision in FLOAT32_PRECISIONS:
        replace_linear(nn.Linear(32, 8), precision=precision)
        assert Linear(32, 8, precision=precision).precision == precision


def hooked():
    layer = nn.Linear(32, 8)
    layer.register_forward_hook(lambda *_: None)
    return layer


def own_forward():
    layer = nn.Linear(32, 8)
    layer.forward = lambda x: x
    return layer


class Other(nn.Linear):
    """A layer that computes something else."""


class OwnTensor(torch.Tensor):
    """A tensor that may compute something else."""


def own_weight():
    layer = nn.Linear(32, 8)
    layer.weight = nn.Parameter(torch.ones(8, 32).as_subclass(OwnTensor))
    return layer


LEFT_ALONE = {
    "subclass": (lambda: Other(32, 8), "Other is a subclass"),
    "lazy": (lambda: nn.LazyLinear(8), "its weight is created by the first call"),
    "attention": (lambda: nn.MultiheadAttention(32, 4), "it is part of an nn.MultiheadAttention"),
    "hooked": (hooked, "it has hooks (forward_hooks)"),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(32, 8)), "weight is parametrized"),
    "forward": (own_forward, "its forward was replaced"),
    "meta": (lambda: nn.Linear(32, 8, device="meta"), "without memory: load it first"),
    "weight": (own_weight, "its weight is of OwnTensor"),
    "complex": (lambda: nn.Linear(32, 8, dtype=torch.complex64), "its weight is complex64"),
}


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_a_layer_that_is_left_alone_has_a_reason(case, bits):
    build, reason = LEFT_ALONE[case]
    model = nn.Sequential(build(), nn.Linear(32, 8))
    kind = type(model[0])
    report = replace_linear(model, bits, group=16)
    assert type(model[0]) is kind
    assert len(report.replaced) == 1
    assert reason in report.skipped[0].reason
    assert reason in str(report)


def test_a_report_without_replaced_layers_has_no_sizes():
    assert str(replace_linear(Other(32, 8), 8, group=16)).splitlines()[0].endswith(" by gemmery.torch.QuantizedLinear")


@pytest.mark.parametrize("bits", [None, 8])
def test_a_lazy_layer_is_replaced_after_a_call(bits):
    model = nn.Sequential(nn.LazyLinear(8))
    model(torch.ones(2, 32))
    assert len(replace_linear(model, bits, group=16).replaced) == 1
    assert model(torch.ones(2, 32)).shape == (2, 8)


def test_a_group_that_does_not_divide_the_columns_is_a_reason(model):
    report = replace_linear(model, 8, group=64)
    assert [layer.names[0] for layer in report.replaced] == ["blocks.0.down", "blocks.1.down", "blocks.2.down"]
    assert "group=64 does not divide its 32 columns" in {layer.reason for layer in report.skipped}


def test_the_report_is_short_and_cannot_be_changed(model):
    report = replace_linear(model, 8, group=16)
    lines = str(report).splitlines()
    assert lines[0].startswith("Replaced 7 of 8 linear layers by gemmery.torch.QuantizedLinear: 8 bits in groups of 16")
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "blocks.*.up x 3 replaced: 64 x 32, float32",
        "blocks.*.down x 3 replaced: 32 x 64, float32",
        "blocks.*.shared replaced: 32 x 32, float32",
        "head not replaced: its weight is embedding.weight too, and quantized it would be a second copy",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.bits = 4
    assert report._repr_html_().count("<tr>") == 5
    assert " -&gt; " in report._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Linear(4, 4), 3), "8 or 4 bits"),
        ((nn.Linear(4, 4), 4, 3), "two columns share a byte"),
        ((nn.Linear(4, 4), None, 128, "bf16"), "precision='bf16'"),
        (([nn.Linear(4, 4)],), "is not a torch.nn.Module"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        replace_linear(*arguments)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_transformer_layer_of_pytorch_runs(bits):
    """Its fast path reads the weights of its layers itself."""
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = layer(x)
        report = replace_linear(layer, bits, group=16)
        assert torch.allclose(layer(x), expected, atol=0.05)
    layer.train()
    assert layer(x).shape == x.shape
    assert [skipped.kind for skipped in report.skipped] == ["NonDynamicallyQuantizableLinear"]
