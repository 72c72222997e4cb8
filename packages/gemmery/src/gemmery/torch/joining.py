"""`join_linear`: linear layers side by side become one product, in the places of which their parts stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemmery.errors import ArgumentError, ShapeError, brief
from gemmery.torch.gradients import is_compiling


class JoinedLinear(nn.Module):
    """Layers that have one input, as one nn.Linear; it keeps their outputs until each `JoinedPart` has taken its own."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        first, weights = layers[0], torch.cat([layer.weight.detach() for layer in layers])
        self.sizes = tuple(layer.out_features for layer in layers)
        bias = None if first.bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.linear = nn.Linear(first.in_features, sum(self.sizes), bias is not None, "meta", weights.dtype)
        self.linear.weight = nn.Parameter(weights, first.weight.requires_grad)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias, first.bias.requires_grad)
        self._kept: tuple[Tensor, Any, tuple[Tensor, ...], tuple[int, ...]] | None = None  # the last: who took theirs

    def forward(self, input: Tensor, index: int) -> Tensor:  # noqa: A002 # nn.Linear's name for it
        """Return the output of the layer `index`, of the product that another layer began for this very input."""
        kept, self._kept = self._kept, None
        state = torch.is_grad_enabled(), 0 if is_compiling() or input.is_inference() else input._version
        if kept is None or kept[0] is not input or kept[1] != state or index in kept[3]:
            kept = input, state, self.linear(input).split(self.sizes, -1), ()
        taken = (*kept[3], index)
        if len(taken) < len(self.sizes):
            self._kept = *kept[:3], taken
        return kept[2][index]


class JoinedPart(nn.Module):
    """What stands in the place of one of the layers of a `JoinedLinear`."""

    def __init__(self, joined: JoinedLinear, index: int) -> None:
        super().__init__()
        self.index = index
        if index == 0:
            self.joined = joined
        else:
            vars(self)["joined"] = joined  # no child of this one: state dicts have it once, as tools that save them ask

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # nn.Linear's name for it
        """Return the layer's output for an input of shape (..., in_features)."""
        return self.joined(input, self.index)


def join_linear(model: nn.Module, *names: Sequence[str]) -> int:
    """Make nn.Linear layers of one module and one input one product, in place; return how many products there are.

    >>> mlp = nn.ModuleDict({"gate": nn.Linear(256, 512), "up": nn.Linear(256, 512), "down": nn.Linear(512, 256)})
    >>> join_linear(mlp, ("gate", "up"))
    1
    >>> x = torch.ones(1, 256)
    >>> mlp["gate"](x).shape, mlp["up"](x).shape  # the second is a view of what the first computed
    (torch.Size([1, 512]), torch.Size([1, 512]))

    In each module of the model that has all layers of a tuple, such as ("q_proj", "k_proj", "v_proj"), their weights
    are joined along the rows; call `replace_linear` after it, which then replaces the joined layers. With few rows a
    product costs what its launch costs, so one of three is faster than three.

    The first layer that a forward calls computes the outputs of all, and the others return theirs when they get the
    same tensor object, unchanged; for another, the product is computed anew. A compiled forward must not change the
    input in place between them. Parameters and state dict are those of the joined layers: load a checkpoint and move
    the model first, and make optimizers afterwards.

    Raises ArgumentError for names that no module has, and for layers that are no plain nn.Linear alike in columns,
    type, device, bias and gradients, or stand in several places; ShapeError for fewer than two names.
    """
    found = []
    uses = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    for group in names:
        if isinstance(group, str) or len(group) < 2:
            raise ShapeError(f"names={brief(group)}: pass tuples of the names of two layers or more to join")
        parents = [module for module in model.modules() if all(hasattr(module, name) for name in group)]
        if not parents:
            raise ArgumentError(f"names={brief(group)}: no module of the model has all of these; pass names of layers")
        found += [(parent, tuple(group), [getattr(parent, name) for name in group]) for parent in parents]
    for _, group, layers in found:
        if len({_kind(layer) for layer in layers}) > 1 or any(
            type(layer) is not nn.Linear or uses.count(id(layer)) > 1 for layer in layers
        ):
            raise ArgumentError(
                f"{', '.join(group)} are not alike: join plain nn.Linear of one input, each in one place"
            )
    for parent, group, layers in found:
        joined = JoinedLinear(layers)
        for index, name in enumerate(group):
            setattr(parent, name, JoinedPart(joined, index))
    return len(found)


def _kind(layer: Any) -> tuple[Any, ...]:
    """What layers that are joined have in common."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    of_bias = None if bias is None else bias.requires_grad
    return getattr(layer, "in_features", None), weight.dtype, weight.device, weight.requires_grad, of_bias
