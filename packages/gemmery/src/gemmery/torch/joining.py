"""`join_linear`: layers with one input become one product, and parts of it stand in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemmery.errors import ArgumentError, brief
from gemmery.torch.gradients import is_compiling


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
