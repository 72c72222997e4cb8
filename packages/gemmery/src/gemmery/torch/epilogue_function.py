"""`gemmery.torch.fused`: a product with an epilogue that is a Python function, and the gradient of it, for autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from gemmery import api, dtypes
from gemmery.api import finished
from gemmery.api.epilogue_terms import read_operand, sides_of, with_kinds
from gemmery.api.opaque import opaque
from gemmery.api.options import viewed
from gemmery.arrays import view
from gemmery.epilogues.gradient import COTANGENT, SUM, gradient
from gemmery.epilogues.graph import EpilogueGraph, GraphBuilder, GraphOutput
from gemmery.epilogues.trace import Epilogue, GraphEpilogue, epilogue
from gemmery.errors import ArgumentError, DTypeError, brief
from gemmery.torch.gradients import evaluated, have_tangents, rows

_Function: Any = torch.autograd.Function


class FusedProduct:
    """An epilogue's function as an operator on tensors: `fused(x, weight, ...)`."""

    def __init__(self, function: Callable[..., Any], recompute: bool = False) -> None:
        self.epilogue, self.recompute = epilogue(function), recompute
        self.__name__, self.__doc__ = self.epilogue.__name__, self.epilogue.__doc__
        self._forward: dict[int, Epilogue] = {}

    @opaque
    def __call__(self, x: Any, weight: Any, /, **operands: Any) -> Any:
        """Return the epilogue's results for x @ weight, or for x @ weight[0] and x @ weight[1]; all have gradients.

        `x` is (..., k), a weight (k, n). Operands are those of the epilogue, tensors or numbers. Second derivatives,
        tangents and torch.func take the function's graph by PyTorch's functions, after the product.

        Raises the errors of `gemmery.matmul`, and ArgumentError for a weight that is no matrix.
        """
        weights = weight if isinstance(weight, tuple) else (weight,)
        for z in (x, *weights):
            if isinstance(z, torch.Tensor) and (z.is_nested or z.layout is not torch.strided):
                viewed("x" if z is x else "weight", z)  # raises
            if not isinstance(z, torch.Tensor) or (z is x and not z.ndim) or (z is not x and z.ndim != 2):
                raise ArgumentError(f"{brief(z)}: fused multiplies tensors, an x of (..., k) by weights of (k, n)")
        function, values = finished.bound(self.epilogue(**operands), None)
        names = function.parameters[len(weights) :]
        missing = [name for name in names if name not in values]
        if missing:
            raise ArgumentError(f"{self.__name__} has no value for its operand {missing[0]!r}: pass {missing[0]}=...")
        if x.ndim > 2 and any(node.op == "row_index" for node in function.graph(len(weights)).nodes):
            raise ArgumentError(
                f"{self.__name__} reads gm.row_index, and x has {x.ndim} dimensions, multiplied as rows of one "
                "matrix: pass numbers of rows as an operand, (m, 1)"
            )
        flat = rows(x)
        inputs = [self._flat(name, values[name], x) for name in names]
        in_parts = torch._C._are_functorch_transforms_active() or have_tangents((flat, *weights, *inputs))
        result: Any = self.in_parts if in_parts else partial(_FusedFunction.apply, self)
        result = result(len(weights), flat, *weights, *inputs)
        results = result if isinstance(result, tuple) else (result,)
        shaped = tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)
        return shaped if len(shaped) > 1 else shaped[0]

    def in_parts(self, count: int, x: Any, *tensors: Any) -> Any:
        """Return the results by the operator `gemmery::matmul` and PyTorch's functions."""
        sums = [torch.ops.gemmery.matmul(x, weight) for weight in tensors[:count]]
        if not sums[0].is_floating_point():
            raise DTypeError(f"derivatives and torch.func need a product of floats, not {sums[0].dtype}: convert x")
        operands = dict(zip(self.epilogue.parameters[count:], tensors[count:], strict=True))
        for name, value in operands.items():
            if isinstance(value, torch.Tensor):
                sides_of(name, tuple(value.shape), (), *sums[0].shape)
            elif not isinstance(read_operand(name, value, False), float):
                raise ArgumentError(f"operand {name!r} is {brief(value)}: derivatives need a tensor or a number")
        graph = self.epilogue.graph(count)
        results = evaluated(with_kinds(graph, graph.operands, ""), sums, operands)
        return tuple(results) if len(results) > 1 else results[0]

    def _flat(self, name: str, value: Any, x: Any) -> Any:
        """Return an operand that broadcasts to (..., m, n) as (rows, n). Raises ShapeError for one that does not."""
        if not isinstance(value, torch.Tensor) or x.ndim <= 2:
            return value
        if value.numel() == value.shape[-1:].numel():  # one row for all
            return value.reshape(-1)
        *batch, m = x.shape[:-1]
        sides_of(name, tuple(value.shape), tuple(batch), m, value.shape[-1])
        return rows(value.expand(*x.shape[:-1], value.shape[-1]))


def fused(function: Callable[..., Any] | None = None, *, recompute: bool = False) -> Any:
    """Return an operator of tensors, with gradients, from a function of the sums of a product and of operands.

    >>> import torch, gemmery.torch
    >>> @gemmery.torch.fused
    ... def layer(c, bias):
    ...     return torch.nn.functional.silu(c + bias)
    >>> x, weight = torch.ones(1, 2), torch.ones(2, 1, requires_grad=True)
    >>> y = layer(x, weight, bias=torch.tensor([-2.0]))
    >>> y.backward()
    >>> weight.grad
    tensor([[0.5000],
            [0.5000]])

    The function is an epilogue (`gemmery.epilogue`), whose gradient is traced too: in the backward pass one kernel
    makes from the sums and the operands the gradients of both, and two products follow. The forward pass keeps the sums
    if these gradients read them. With `recompute` it does not, and the backward pass multiplies again, with the
    gradient as the epilogue: less memory for more work. torch.compile calls it as it is.

    Raises ArgumentError for a function that cannot be traced, with its line, when it is first called.
    """
    if function is None:
        return lambda own: FusedProduct(own, recompute)
    return FusedProduct(function, recompute)


class _FusedFunction(_Function):
    """The product with its epilogue, and its gradient."""

    @staticmethod
    def forward(ctx: Any, fused: FusedProduct, count: int, x: Any, *tensors: Any) -> Any:
        weights, values = tensors[:count], tensors[count:]
        function = fused.epilogue
        names = function.parameters[count:]
        graph = function.graph(count)
        operands = dict(zip(names, values, strict=True))
        arrays = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in operands.items()}
        _, _, of_x, *others = ctx.needs_input_grad
        needed_names = {name for name, needed in zip(names, others[count:], strict=True) if needed}
        needed_names |= {f"{SUM}{i}" for i in range(count) if of_x or others[i]}
        derived, outputs = _derived(graph, frozenset(needed_names)) if needed_names else (graph, ())
        reads = bool(needed_names) and any(node.op == "sum" for node in derived.nodes)
        keeps = reads and not fused.recompute
        own = view(x.detach())  # on a device sums are kept in the type of the result, as PyTorch keeps them
        kept_as = dtypes.get(own.dtype).accumulator if own.device == "cpu" else own.dtype
        with_sums = _keeping_sums(function, count, kept_as) if keeps else function
        plain = [w.detach() for w in weights]
        multiply: Any = api.matmul
        result = multiply(x.detach(), tuple(plain) if count > 1 else plain[0], epilogue=with_sums(**arrays))
        results = result if isinstance(result, tuple) else (result,)
        sums = results[len(graph.outputs) :]
        ctx.count, ctx.names, ctx.fused = count, names, fused
        ctx.numbers = [None if isinstance(value, torch.Tensor) else value for value in values]
        ctx.derived, ctx.outputs, ctx.keeps = derived, outputs, keeps
        ctx.save_for_backward(x, *weights, *(v for v in values if isinstance(v, torch.Tensor)), *sums)
        ctx.reads = reads
        results = results[: len(graph.outputs)]
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, *saved = ctx.saved_tensors
        weights, saved = saved[: ctx.count], saved[ctx.count :]
        tensors = iter(saved)
        values = [next(tensors) if number is None else number for number in ctx.numbers]
        sums = list(tensors)
        if torch.is_grad_enabled():
            return _recorded(ctx, (x, *weights, *values), gradients)
        operands = dict(zip(ctx.names, values, strict=True))
        operands |= {f"{COTANGENT}{i}": g.contiguous() for i, g in enumerate(gradients)}
        function, place = _function_of(f"the gradient of {ctx.fused.__name__}", ctx.derived, ctx.count)
        multiply: Any = api.matmul
        result: Any
        if ctx.reads and not ctx.keeps:
            bound = function(**{name: operands[name] for name in function.parameters[ctx.count :]})
            result = multiply(x, tuple(weights) if ctx.count > 1 else weights[0], epilogue=bound)
        else:
            # Without sums in its graph, the gradient only needs an array of their shape.
            sums = sums or [gradients[0].new_empty(1, 1).expand(x.shape[0], weights[0].shape[1])] * ctx.count
            result = finished.apply(function, sums, operands, view(x).dtype)
        result = result if isinstance(result, tuple) else (result,)
        by_name = {name: result[place[output]] for name, output in zip(ctx.outputs, ctx.derived.outputs, strict=True)}
        grad_x: Any = None
        grad_weights: list[Any] = []
        for i, weight in enumerate(weights):
            of_sum: Any = by_name.get(f"{SUM}{i}")
            if of_sum is not None and ctx.needs_input_grad[2]:
                part = multiply(of_sum, weight.mT)
                grad_x = part if grad_x is None else grad_x + part
            needed = of_sum is not None and ctx.needs_input_grad[3 + i]
            grad_weights.append(_gradient_of(weight, x, of_sum) if needed else None)
        grads = [
            by_name[name].sum_to_size(value.shape).to(value.dtype) if name in by_name else None
            for name, value in zip(ctx.names, values, strict=True)
        ]
        return None, None, grad_x, *grad_weights, *grads


def _recorded(ctx: Any, inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of a product with an epilogue as functions of which PyTorch records gradients."""
    # By names of their own: one input may come from another, whose gradient would then pass through it, too.
    inputs = [x.view_as(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    result = ctx.fused.in_parts(ctx.count, *inputs)
    results = result if isinstance(result, tuple) else (result,)
    used = [(y, g) for y, g in zip(results, gradients, strict=True) if y.requires_grad]
    needed = [x for x, is_needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if is_needed]
    ys, gs = [y for y, _ in used], [g for _, g in used]
    each = iter(torch.autograd.grad(ys, needed, gs, create_graph=True, allow_unused=True))
    return None, None, *(next(each) if is_needed else None for is_needed in ctx.needs_input_grad[2:])


def _gradient_of(weight: Any, x: Any, of_sum: Any) -> Any:
    """Return x' times the gradient of the sums, in the order of the weight: PyTorch copies one of another order."""
    multiply: Any = api.matmul
    if weight.stride(0) == 1 < weight.stride(1):
        return multiply(of_sum.mT, x).mT
    return multiply(x.mT, of_sum)


@lru_cache(maxsize=256)
def _derived(graph: EpilogueGraph, names: frozenset[str]) -> tuple[EpilogueGraph, tuple[str, ...]]:
    """Return the gradient of a graph for the sums and operands of these names, and what its outputs are."""
    return gradient(with_kinds(graph, graph.operands, ""), names)


@lru_cache(maxsize=256)
def _function_of(name: str, derived: EpilogueGraph, count: int) -> tuple[GraphEpilogue, dict[GraphOutput, int]]:
    """Return a gradient as a function, and the place of each output in its results: those of c + b are one."""
    place = {output: i for i, output in enumerate(dict.fromkeys(derived.outputs))}
    return GraphEpilogue(name, derived._replace(outputs=tuple(place)), count), place


@lru_cache(maxsize=256)
def _keeping_sums(function: Epilogue, count: int, dtype: str) -> Epilogue:
    """Return an epilogue that also returns the sums, in their own type."""
    graph = function.graph(count)
    builder = GraphBuilder(graph.nodes)
    sums = [GraphOutput(builder.add("sum", value=str(i)), "matrix", dtype) for i in range(count)]
    return GraphEpilogue(function.__name__, builder.graph((*graph.outputs, *sums), graph.operands), count)
