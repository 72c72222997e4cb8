"""join_linear: layers with one input compute one product, and give what they gave by themselves."""

from __future__ import annotations

import copy

import pytest

from gemmery.errors import ArgumentError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402 # of the package that may be missing

from gemmery.torch import QuantizedLinear, join_linear, replace_linear  # noqa: E402

NAMES = ("q", "k", "v")


class Block(nn.Module):
    """Three layers with one input, and one that reads what they give."""

    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, rows, bias) for rows in (64, 16, 48))
        self.out = nn.Linear(128, 64)

    def forward(self, x):
        return self.out(torch.cat((self.q(x), self.k(x), self.v(x)), -1))


def blocks(bias=True):
    torch.manual_seed(3)
    return nn.Sequential(Block(bias), Block(bias))


X = torch.linspace(-1, 1, 5 * 64).reshape(1, 5, 64)


def apart(x, y):
    return float((x - y).detach().abs().max())


def products(model, x):
    """What a model gives, and how many products its first block computed."""
    calls = []
    hooks = [layer.register_forward_hook(lambda *_: calls.append(1)) for layer in model[0].modules()
             if isinstance(layer, (nn.Linear, QuantizedLinear))]  # fmt: skip
    y = model(x)
    for hook in hooks:
        hook.remove()
    return y, len(calls)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_one_product_gives_what_three_give(bits, bias):
    model = blocks(bias)
    together = copy.deepcopy(model)
    assert join_linear(together, NAMES) == 2
    replace_linear(model, bits, group=32)
    report = replace_linear(together, bits, group=32)
    assert [layer.out_features for layer in report.replaced] == [128, 64] * 2
    expected, separate = products(model, X)
    y, joined = products(together, X)
    assert (separate, joined) == (4, 2)
    assert apart(y, expected) <= 2e-6
    if bits:
        packed = torch.cat([model[0].q.packed, model[0].k.packed, model[0].v.packed])
        assert torch.equal(together[0].q.linear.packed, packed)


def test_gradients_are_those_of_the_layers():
    model = blocks()
    together = copy.deepcopy(model)
    join_linear(together, NAMES)
    for each in (model, together):
        each(X).square().sum().backward()
    expected = torch.cat([getattr(model[1], name).weight.grad for name in NAMES])
    assert apart(together[1].q.linear.weight.grad, expected) <= 1e-5 * float(expected.abs().max())


def test_another_input_is_computed_anew():
    model = blocks()
    block, separate = model[0], copy.deepcopy(model[0])
    join_linear(model, NAMES)
    x, other = X.clone(), X.neg()

    def check(name, x):
        assert apart(getattr(block, name)(x), getattr(separate, name)(x)) <= 1e-6

    check("q", x)
    check("k", other)
    check("v", x)
    check("q", x)
    x.mul_(2)
    check("k", x)
    block.q.linear.load_state_dict({name: 2 * value for name, value in block.q.linear.state_dict().items()})
    separate.load_state_dict({name: 2 * value for name, value in separate.state_dict().items()})
    check("k", x)  # the same layer again
    with torch.no_grad():
        check("v", x)
    assert block.q(x).requires_grad


def test_without_and_with_gradients_are_two_products():
    block = blocks()[0]
    join_linear(block, NAMES)
    with torch.no_grad():
        block.q(X)
    assert block.k(X).requires_grad


def test_copies_and_checkpoints_have_one_weight():
    model = blocks()
    join_linear(model, NAMES)
    model[0].q(X)  # leaves a product with a gradient, which cannot be copied
    other = copy.deepcopy(model)
    assert [name for name in model.state_dict() if name.startswith("0.")] == [
        "0.q.linear.weight", "0.q.linear.bias", "0.out.weight", "0.out.bias",
    ]  # fmt: skip
    expected = model(X)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(X).any()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), expected)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_compiled_model_has_one_product(bits):
    model = blocks().requires_grad_(False)
    join_linear(model, NAMES)
    replace_linear(model, bits, group=32)
    graphs = []
    compiled = torch.compile(
        model, fullgraph=True, dynamic=False, backend=lambda graph, _: graphs.append(graph) or graph
    )
    assert torch.equal(compiled(X), model(X))
    (graph,) = graphs
    assert sum("linear" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") == 4
    assert torch.equal(compiled(X), model(X))


def shared():
    model = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)})
    return nn.ModuleList([model, nn.ModuleList([model["k"]])])


def pair(k):
    return nn.ModuleDict({"q": nn.Linear(8, 8), "k": k})


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        (lambda: pair(nn.Linear(8, 4)), ("q", "w"), "a module of the model has"),
        (lambda: pair(nn.Linear(8, 4)), ("q",), "a module of the model has"),
        (lambda: pair(nn.Linear(8, 4)), "qk", "a module of the model has"),
        (lambda: pair(nn.Linear(9, 8)), ("q", "k"), "the same columns"),
        (lambda: pair(nn.Linear(8, 8, bias=False)), ("q", "k"), "the same columns"),
        (lambda: pair(nn.Linear(8, 8, dtype=torch.float64)), ("q", "k"), "the same columns"),
        (lambda: pair(nn.Linear(8, 8).requires_grad_(False)), ("q", "k"), "the same columns"),
        (lambda: pair(nn.ReLU()), ("q", "k"), "plain nn.Linear"),
        (shared, ("q", "k"), "each in one place of"),
    ],
)
def test_layers_that_cannot_be_joined(model, names, message):
    model = model()
    layers = list(model.modules())
    with pytest.raises(ArgumentError, match=message):
        join_linear(model, names)
    assert list(model.modules()) == layers


def test_a_model_that_is_no_module():
    with pytest.raises(ArgumentError, match="pass the model"):
        join_linear(3, NAMES)
