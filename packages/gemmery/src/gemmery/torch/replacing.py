"""The linear layers of a model: `replace_linear` makes them gemmery's, with a report; `join_linear` joins some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from gemmery import display
from gemmery.errors import ArgumentError, brief
from gemmery.torch.modules import Linear, become_linear, become_quantized, check_precision
from gemmery.torch.quantization import DTYPES, check_format, quantize

if TYPE_CHECKING:
    from gemmery.keywords import Precision


from typing import Any

from torch import Tensor

from gemmery.torch.gradients import is_compiling

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class ReplacedLayer:
    """A layer that was replaced; `names` has each place in the model where it stands."""

    names: tuple[str, ...]
    out_features: int
    in_features: int
    dtype: torch.dtype
    bytes_before: int  # of its weight and bias
    bytes_after: int


@dataclass(frozen=True)
class SkippedLayer:
    """A linear layer that stays as it is, and why."""

    names: tuple[str, ...]
    kind: str  # the name of its class
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What `replace_linear` did to a model; print it to read it."""

    bits: int | None
    group: int | None  # None without bits
    replaced: tuple[ReplacedLayer, ...]
    skipped: tuple[SkippedLayer, ...]

    def __str__(self) -> str:
        return "\n".join([self._summary(), *(f"  {'  '.join(row)}".rstrip() for row in _aligned(self._rows()))])

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._summary())}</p>{display.table(self._rows(), ('layer', 'times', 'what became of it'))}"

    def _summary(self) -> str:
        count, every = len(self.replaced), len(self.replaced) + len(self.skipped)
        if self.bits is None:
            return f"Replaced {count} of {every} linear layers by gemmery.torch.Linear"
        if not count:
            return f"Replaced 0 of {every} linear layers by gemmery.torch.QuantizedLinear"
        before, after = sum(x.bytes_before for x in self.replaced), sum(x.bytes_after for x in self.replaced)
        how = f"{self.bits} bits in groups of {self.group}, {_size(before)} -> {_size(after)}"
        return f"Replaced {count} of {every} linear layers by gemmery.torch.QuantizedLinear: {how}"

    def _rows(self) -> list[tuple[str, str, str]]:
        """The layers whose names differ in numbers alone, in one row."""
        counts: dict[tuple[str, str], int] = {}
        for layer in self.replaced:
            what = f"replaced: {layer.out_features} x {layer.in_features}, {_name(layer.dtype)}"
            key = (_pattern(layer.names), what)
            counts[key] = counts.get(key, 0) + 1
        for other in self.skipped:
            key = (_pattern(other.names), f"not replaced: {other.reason}")
            counts[key] = counts.get(key, 0) + 1
        return [(pattern, f"x {count}" if count > 1 else "", what) for (pattern, what), count in counts.items()]


def replace_linear(
    model: nn.Module, bits: int | None = None, group: int = 128, precision: Precision | None = None
) -> Replacement:
    """Make the nn.Linear layers of a model gemmery's, in place, and return a report of what was replaced.

    >>> model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    >>> print(replace_linear(model, bits=8))
    Replaced 2 of 2 linear layers by gemmery.torch.QuantizedLinear: 8 bits in groups of 128, 136.7 kB -> 35.7 kB
      0  replaced: 128 x 256, float32
      2  replaced: 10 x 128, float32

    `bits=None` leaves the parameters as they are, in a `Linear`. `bits=8` and `bits=4` quantize each weight, `group`
    columns with one factor, in a `QuantizedLinear`, which is for inference. `precision` says how a GPU may multiply
    float32: "tf32", "f32_tensor", "f32_strict" or "f32_plus", as in `gemmery.matmul`.

    A layer stays the same object, so a layer or a weight that stands in several places still does, and optimizers keep
    their parameters. Not replaced, with the reason in the report, are: subclasses of nn.Linear; layers with hooks,
    parametrizations or a `forward` of their own; weights of other types than float64, float32, float16 and bfloat16,
    on other devices than CPU and CUDA (meta too), or of a class of their own; and for `bits` weights that another
    module uses too, and those whose number of columns `group` does not divide. To leave out a layer, pass the modules
    beside it one by one.

    Raises ArgumentError for a model that is not a module, and for `bits`, `group` or `precision` that no layer can
    have.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={brief(model)} is not a torch.nn.Module: pass the model whose layers to replace")
    if bits is not None:
        check_format(bits, group)
    check_precision(precision)
    others = _other_uses(model)
    formats: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of weights that several layers share
    replaced, skipped = [], []
    for names, layer in _linear_layers(model):
        reason = _reason_of_module(layer, bits) or _reason_of_weight(layer, bits, group, others)
        if reason:
            skipped.append(SkippedLayer(names, type(layer).__name__, reason))
            continue
        before, weight = _bytes(layer), layer.weight
        if bits is None:
            become_linear(layer, precision)
        else:
            if id(weight) not in formats:
                formats[id(weight)] = quantize(weight, bits, group)
            become_quantized(layer, *formats[id(weight)], bits, group, precision)
        rows, columns = weight.shape
        replaced.append(ReplacedLayer(names, rows, columns, weight.dtype, before, _bytes(layer)))
    return Replacement(bits, group if bits else None, tuple(replaced), tuple(skipped))


def _linear_layers(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Linear]]:
    """Each linear layer, gemmery's included, with the places where it stands."""
    names: dict[int, list[str]] = {}
    layers: dict[int, nn.Linear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
            layers[id(module)] = module
    for key, layer in layers.items():
        yield tuple(names[key]), layer


def _other_uses(model: nn.Module) -> dict[int, str]:
    """The parameters that modules other than linear layers have: id -> name."""
    return {
        id(parameter): f"{name}.{own}".lstrip(".")
        for name, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        if type(module) not in (nn.Linear, Linear)
    }


def _reason_of_module(layer: nn.Linear, bits: int | None) -> str:
    """Why a layer is not replaced; "" if it is."""
    if type(layer) is Linear and bits is None:
        return "it is a gemmery.torch.Linear already"
    if parametrize.is_parametrized(layer):
        names = ", ".join(name for name, _ in layer.get_submodule("parametrizations").named_children())
        return f"{names} is parametrized; torch.nn.utils.parametrize.remove_parametrizations makes it plain"
    if isinstance(layer, nn.LazyLinear):
        return "its weight is created by the first call: call the model once, then replace"
    if type(layer) is NonDynamicallyQuantizableLinear:
        return "it is part of an nn.MultiheadAttention, which multiplies by its weight without calling it"
    if type(layer) not in (nn.Linear, Linear):
        return f"{type(layer).__name__} is a subclass of nn.Linear, which may compute something else"
    if "forward" in vars(layer):
        return "its forward was replaced on this layer alone"
    hooks = [name for name in HOOKS if getattr(layer, name, None)]
    if hooks:
        return f"it has hooks ({', '.join(name.strip('_') for name in hooks)}); remove them first"
    return ""


def _reason_of_weight(layer: nn.Linear, bits: int | None, group: int, others: dict[int, str]) -> str:
    weight = layer.weight
    if weight.device.type == "meta":
        return "its weight is on the device meta, without memory: load it first"
    if weight.device.type not in ("cpu", "cuda"):
        return f"its weight is on the device {weight.device.type}; gemmery multiplies on CPU and CUDA"
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is of {type(weight).__name__}, which defines its own arithmetic"
    if weight.dtype not in DTYPES:
        return f"its weight is {_name(weight.dtype)}, and {', '.join(map(_name, DTYPES))} are replaced"
    if bits is None:
        return ""
    if id(weight) in others:
        return f"its weight is {others[id(weight)]} too, and quantized it would be a second copy"
    if weight.shape[1] % group:
        return f"group={group} does not divide its {weight.shape[1]} columns"
    return ""


def _bytes(layer: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


def _size(count: int) -> str:
    """Return a number of bytes as text: "136.8 kB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pattern(names: Sequence[str]) -> str:
    """Return names with a star for each number between other parts: layers.*.up_proj; "" is the model itself."""
    texts = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return " = ".join(dict.fromkeys(text or "the model itself" for text in texts))


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[list[str]]:
    """Return the rows with columns of one width each, without empty columns."""
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    return [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in zip(*columns, strict=True)]


# ---- layers with one input ----


class Last:
    """The last product of joined layers, until each took its output: input, state, outputs, and who took theirs."""

    product: tuple[Tensor, tuple[bool, int], tuple[Tensor, ...], tuple[int, ...]] | None = None

    def __reduce__(self) -> tuple[type[Last], tuple[()]]:
        return Last, ()  # copies and pickles have no product


class JoinedPart(nn.Module):
    """One of several layers with one input: the first that is called computes the outputs of all."""

    linear: nn.Linear

    def __init__(self, linear: nn.Linear, sizes: tuple[int, ...], index: int, last: Last) -> None:
        super().__init__()
        self.sizes, self.index, self._last = sizes, index, last
        if index == 0:
            self.linear = linear
        else:
            vars(self)["linear"] = linear  # a child of the first part alone, so a state dict has it once

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # nn.Linear's name for it
        """Return this layer's output, of the product that another one computed of this very input if there is one."""
        product, self._last.product = self._last.product, None
        state = torch.is_grad_enabled(), 0 if is_compiling() or input.is_inference() else input._version
        if product is None or product[0] is not input or product[1] != state or self.index in product[3]:
            product = input, state, self.linear(input).split(self.sizes, -1), ()
        readers = (*product[3], self.index)
        if len(readers) < len(self.sizes):
            self._last.product = (*product[:3], readers)
        return product[2][self.index]


def join_linear(model: nn.Module, *groups: Sequence[str]) -> int:
    """Make nn.Linear layers with one input one product, in place, and return how many products that makes.

    >>> mlp = nn.ModuleDict({"gate": nn.Linear(256, 512), "up": nn.Linear(256, 512), "down": nn.Linear(512, 256)})
    >>> join_linear(mlp, ("gate", "up"))
    1
    >>> x = torch.ones(1, 256)
    >>> mlp["gate"](x).shape, mlp["up"](x).shape  # one product of 1024 columns, and views of it
    (torch.Size([1, 512]), torch.Size([1, 512]))

    A group has the names of layers, such as ("q_proj", "k_proj", "v_proj"); it is joined in each module that has all of
    them. Call `replace_linear` afterwards: it makes the joined layers gemmery's.

    The first layer that a forward calls computes the outputs of all, and the others return theirs if they get the same
    tensor object; for any other they compute anew. Between them neither weights may change nor, compiled, the input.
    Joined layers have one weight and bias, under the name of the first: load a plain checkpoint before, and make an
    optimizer after.

    Raises ArgumentError for a model that is not a module, for a group that no module has, and for layers that are not
    plain nn.Linear with the same columns, type, device, bias and gradients, each in one place of the model.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={brief(model)} is not a torch.nn.Module: pass the model whose layers to join")
    joins: list[tuple[nn.Module, Sequence[str], list[Any]]] = []
    uses = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    for names in groups:
        parents = [parent for parent in model.modules() if all(hasattr(parent, name) for name in names)]
        of_group = [(parent, names, [getattr(parent, name) for name in names]) for parent in parents]
        if isinstance(names, str) or len(names) < 2 or not of_group:
            raise ArgumentError(f"group {brief(names)}: pass a tuple of names of layers that a module of the model has")
        for _, _, layers in of_group:
            if any(type(layer) is not nn.Linear or uses.count(id(layer)) > 1 for layer in layers):
                raise ArgumentError(f"group {brief(names)}: join plain nn.Linear, each in one place of the model")
            if len(set(map(_kind, layers))) > 1:
                raise ArgumentError(f"group {brief(names)}: join layers of the same columns, type, device and bias")
        joins += of_group
    for parent, names, layers in joins:
        sizes, last, linear = tuple(layer.out_features for layer in layers), Last(), _joined(layers)
        for index, name in enumerate(names):
            setattr(parent, name, JoinedPart(linear, sizes, index, last))
    return len(joins)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What joined layers have in common."""
    return tuple((name, x.shape[1:], x.dtype, x.device, x.requires_grad) for name, x in layer.named_parameters())


def _joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the rows of all."""
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    linear = nn.Linear(first.in_features, rows, first.bias is not None, "meta", first.weight.dtype)
    linear.train(first.training)
    for name, parameter in first.named_parameters():
        parts = [layer.get_parameter(name).detach() for layer in layers]
        setattr(linear, name, nn.Parameter(torch.cat(parts), parameter.requires_grad))
    return linear
