"""Layers: nn.Linear by gemmery's products, with a weight of floating-point numbers or of 8 or 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gemmery import api, config
from gemmery.api.options import check_activation
from gemmery.api.packing import pack
from gemmery.api.quantized import QuantizedMatrix
from gemmery.errors import ArgumentError, DeviceError, GemmeryError, ShapeError, brief, is_one
from gemmery.torch.functions import linear, quantized_linear
from gemmery.torch.gradients import PLAIN, is_compiling, watched
from gemmery.torch.quantization import by_panels, check_factors, dequantize, panels, quantize, reads_panels

if TYPE_CHECKING:
    from gemmery.keywords import Activation, Precision

for _name in ("linear", "quantized_linear", "_precision"):
    torch.fx.wrap(_name)  # torch.fx.symbolic_trace records a call of it, as it does of nn.Linear


class Linear(nn.Linear):
    """A layer y = activation(x Wᵀ + bias) in the place of nn.Linear, computed by gemmery.

    >>> layer = Linear(3, 2, activation="relu")
    >>> layer(torch.ones(5, 3)).shape
    torch.Size([5, 2])

    `in_features`, `out_features`, `bias`, `device` and `dtype`, the parameters, their initial values and the state dict
    are those of nn.Linear. `activation` is None, "relu", "gelu" (by erf) or "silu"; `precision` says how a GPU may
    multiply float32, as in `gemmery.matmul`, and means nothing elsewhere. Autograd computes both gradients by gemmery
    too, and torch.compile keeps the layer in its graph. `pack` makes inference with few rows faster on the CPU.

    Raises ArgumentError for another `activation` or `precision`, and the errors of `gemmery.matmul` when it is called.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        precision: Precision | None = None,
    ) -> None:
        _check_options(activation, precision)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation: Activation | None = activation
        self.precision: Precision | None = precision

    _copy: tuple[Any, tuple[int, ...]] | None = None  # with the state of the weight that it was made of

    def pack(self) -> Linear:
        """Keep a copy of the weight packed by `gemmery.pack`, for inference on the CPU, and return the layer.

        >>> layer = Linear(3, 2).pack()
        >>> with torch.inference_mode():
        ...     layer(torch.ones(5, 3)).shape
        torch.Size([5, 2])

        Products that record no gradients and that nothing in PyTorch watches then read the copy: few rows at the speed
        of memory. It takes the memory of the weight once more, is in no state dict, and is made anew in the call after
        a change of the weight.

        Raises DeviceError for a weight that is not on the CPU.
        """
        self._copy = pack(self.weight.detach().T), _state(self.weight)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return _state_of(self)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # nn.Linear's name for it
        """Return the layer's output for an input of shape (..., in_features)."""
        if self._copy is not None and _by_copy(input, self.weight, self.bias):
            if self._copy[1] != _state(self.weight):
                self.pack()
            result: Tensor = api.matmul(input, self._copy[0], bias=self.bias, activation=self.activation)
            return result
        return linear(input, self.weight, self.bias, self.activation, precision=_precision(self, input))

    def extra_repr(self) -> str:
        """Return the sizes and options, which print(layer) shows."""
        return super().extra_repr() + _options(self)


class QuantizedLinear(nn.Module):
    """A layer y = activation(x Wᵀ + bias) whose weight has 8 or 4 bits an element, in groups of columns.

    >>> layer = QuantizedLinear(256, 8, bits=4)
    >>> layer.load_state_dict(nn.Linear(256, 8).state_dict())  # a plain checkpoint: the weight is quantized here
    <All keys matched successfully>
    >>> layer.packed.shape, layer.scales.shape
    (torch.Size([8, 128]), torch.Size([8, 2]))

    The weight is stored as `packed` and `scales` (`gemmery.torch.quantization` tells their format), which a state dict
    saves and loads; a state dict with a `weight` is quantized as it is loaded. `weight` computes it anew from these, in
    the type of `scales`. `.to(dtype)` converts `scales` and `bias`. A new layer has a weight of zeros.

    The layer is for inference: the input and the bias have gradients, the weight has none. `pack` makes it faster on
    the CPU. On a GPU of compute capability 9.0 its first product in half precision makes a copy of `packed` in the
    order of the kernel, of as many bits, which is in no state dict and is made anew after a change of the weight.

    Raises ArgumentError for `bits` other than 8 or 4 and for sizes and options that no layer has, ShapeError for a
    `group` that does not divide `in_features`, DTypeError for a `dtype` that factors cannot have.
    """

    bias: Tensor | None
    packed: Tensor
    scales: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bits: int,
        group: int = 128,
        activation: Activation | None = None,
        precision: Precision | None = None,
    ) -> None:
        _check_options(activation, precision)
        _check_size("in_features", in_features)
        _check_size("out_features", out_features)
        if dtype is not None:
            check_factors(dtype)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.activation: Activation | None = activation
        self.precision: Precision | None = precision
        numbers = torch.zeros(out_features, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(numbers) if bias else None)
        self._hold(*quantize(numbers[:, None].expand(-1, in_features), bits, group), bits, group)

    def _hold(self, packed: Tensor, scales: Tensor, bits: int, group: int) -> None:
        """Take a weight in the format of `bits` and `group`."""
        self.bits, self.group = bits, group
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)

    format: str = ""  # of `of`; "" is that of `bits`

    @classmethod
    def of(
        cls,
        matrix: QuantizedMatrix,
        bias: Tensor | None = None,
        *,
        activation: Activation | None = None,
        precision: Precision | None = None,
    ) -> QuantizedLinear:
        """Return the layer of a quantized matrix (in_features, out_features) of PyTorch's tensors, of every format.

        >>> import gemmery as gm
        >>> QuantizedLinear.of(gm.quantize(torch.eye(64), "mxfp4"))
        QuantizedLinear(in_features=64, out_features=64, bias=False, bits=4, group=32, format='mxfp4')

        So a layer is made of a checkpoint's: `QuantizedLinear.of(gemmery.from_checkpoint("awq", tensors))`. A state
        dict has the matrix's `zeros` and `scale` too, the latter by its bits. `gemmery.matmul` computes it; where
        PyTorch records or compiles, the expanded weight is multiplied.

        Raises ArgumentError and ShapeError for what is no such matrix.
        """
        if not isinstance(getattr(matrix, "packed", None), Tensor) or type(matrix) is not QuantizedMatrix:
            raise ArgumentError(f"matrix={brief(matrix)} is no QuantizedMatrix of tensors: pass gm.quantize(w.T, ...)")
        if len(matrix.shape) != 2:
            raise ShapeError(f"matrix has shape {matrix.shape}: pass one matrix of the stack")
        layer = cls(0, 0, bias=False, bits=8, activation=activation, precision=precision)
        layer.in_features, layer.out_features = matrix.shape
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        layer._hold(matrix.packed, matrix.scales, 8 if matrix.packed.shape[1] == matrix.shape[0] else 4, matrix.group)
        layer.format = matrix.format
        layer.register_buffer("zeros", matrix.zeros)
        # As an integer it stays float32 where the layer's type changes.
        layer.register_buffer("scale", None if matrix.scale is None else matrix.scale.view(torch.int32))
        return layer

    _matrix: tuple[tuple[int, ...], QuantizedMatrix] | None = None  # with the state of what it has

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weight as the right operand of `gemmery.matmul`, (in_features, out_features), of the layer's tensors."""
        state = self._state()
        if self._matrix is None or self._matrix[0] != state:
            zeros, scale = map(self._buffers.get, ("zeros", "scale"))
            scale = None if scale is None else scale.view(torch.float32)
            format_ = self.format or f"int{self.bits}"
            self._matrix = state, QuantizedMatrix(format_, self.packed, self.scales, zeros, scale)
        return self._matrix[1]

    @property
    def weight(self) -> Tensor:
        """The weight, computed from `packed` and `scales` at each use."""
        if self.format:
            weight: Tensor = self.matrix.dequantize().T
            return weight
        return dequantize(self.packed, self.scales, self.bits, self.scales.dtype)

    _copy: tuple[Any, tuple[int, ...]] | None = None  # with the state of what it was made of

    def pack(self) -> QuantizedLinear:
        """Keep a copy of the levels in panels, for inference on the CPU, and return the layer.

        >>> layer = QuantizedLinear(256, 8, bits=4).pack()
        >>> with torch.inference_mode():
        ...     layer(torch.ones(5, 256)).shape
        torch.Size([5, 8])

        Products of up to 64 rows that record no gradients and that nothing in PyTorch watches then widen the levels as
        they read them, in float32, and multiply sums by the factors: no element of the weight is rounded. The copy has
        the bits of the levels, is in no state dict, and is made anew in the call after a change of the weight.

        Raises DeviceError for a weight that is not on the CPU.
        """
        if self.packed.numel():
            self._copy = panels(self.packed, self.scales), self._state()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return _state_of(self)

    def _state(self) -> tuple[int, ...]:
        return tuple(n for z in self._buffers.values() if z is not None for n in _state(z))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # nn.Linear's name for it
        """Return the layer's output for an input of shape (..., in_features)."""
        if self.format:
            if _unwatched(input, self.bias):
                result: Tensor = api.matmul(input, self.matrix, bias=self.bias, activation=self.activation)
                return result
            weight = self.weight.to(input.dtype)
            return linear(input, weight, self.bias, self.activation, precision=_precision(self, input))
        if self._copy is not None and reads_panels(input) and _by_copy(input, self.scales, self.bias):
            if self._copy[1] != self._state():
                self.pack()
            return by_panels(input, self._copy[0], self.bias, self.activation)
        precision = _precision(self, input)
        return quantized_linear(input, self.packed, self.scales, self.bias, self.activation, precision=precision)

    def extra_repr(self) -> str:
        """Return the sizes, the format and the options, which print(layer) shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        kind = f", format={self.format!r}" if self.format else ""
        return f"{sizes}, bits={self.bits}, group={self.group}{kind}{_options(self)}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Quantize the weight of a plain checkpoint before nn.Module looks for the packed one."""
        packed, scales, plain = f"{prefix}packed", f"{prefix}scales", f"{prefix}weight"
        if plain in state_dict and packed not in state_dict:
            weight = state_dict.pop(plain)  # of nn.Module's own copy
            try:
                state_dict[packed], state_dict[scales] = self._quantized(weight)
            except GemmeryError as error:
                others[-1].append(f"{plain}: {error}")  # of the messages
                state_dict[packed], state_dict[scales] = self.packed, self.scales
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _quantized(self, weight: Any) -> tuple[Tensor, Tensor]:
        """Return another weight in the format of this one. Raises GemmeryError if the layer cannot have it."""
        shape = (self.out_features, self.in_features)
        if self.format:
            raise ArgumentError(f"a layer of {self.format} takes no plain weight: QuantizedLinear.of makes a new one")
        if isinstance(weight, Tensor):
            if tuple(weight.shape) != shape:
                raise ShapeError(f"size mismatch: the checkpoint has {tuple(weight.shape)}, the layer {shape}")
            if weight.is_meta and not self.packed.is_meta:
                raise DeviceError("the checkpoint's weight is on the device meta, without memory: load it to another")
            if not self.packed.is_meta:
                weight = weight.to(self.packed.device)
        return quantize(weight, self.bits, self.group, self.scales.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises ArgumentError for `weight`, which is computed."""
        if name == "weight":
            raise ArgumentError(
                "the weight of a QuantizedLinear is computed from packed and scales, and cannot be set or tied: call "
                "load_state_dict({'weight': w}, strict=False) to quantize another"
            )
        super().__setattr__(name, value)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict with each packed weight expanded, as the model had it before `replace_linear`.

    >>> model = nn.Sequential(QuantizedLinear(256, 8, bits=4))
    >>> nn.Sequential(nn.Linear(256, 8)).load_state_dict(plain_state_dict(model))
    <All keys matched successfully>

    `weight` has the type of `scales` and takes the place of `packed` and `scales`; all else is as in
    `model.state_dict()`. The weights hold what quantizing left of the original ones.

    Raises ArgumentError for a model that is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={brief(model)} is not a torch.nn.Module: pass the model whose weights to expand")
    state: dict[str, Tensor] = model.state_dict()
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, QuantizedLinear):
            prefix = f"{name}." if name else ""
            for part in ("packed", "scales", "zeros", "scale"):
                state.pop(f"{prefix}{part}", None)
            state[f"{prefix}weight"] = layer.weight
    return state


def become_linear(layer: Any, precision: Precision | None) -> None:
    """Make an nn.Linear a `Linear` where it stands: whatever refers to it, refers to the new layer."""
    layer.__class__ = Linear
    layer.activation, layer.precision = None, precision


def become_quantized(
    layer: Any, packed: Tensor, scales: Tensor, bits: int, group: int, precision: Precision | None
) -> None:
    """Make an nn.Linear or a `Linear` a `QuantizedLinear` where it stands, with its weight in this format."""
    activation = layer.activation if isinstance(layer, Linear) else None
    del layer.weight
    layer.__class__ = QuantizedLinear
    layer.activation, layer.precision, layer._copy = activation, precision, None
    layer._hold(packed, scales, bits, group)


def _state_of(layer: Linear | QuantizedLinear) -> dict[str, Any]:
    """What a pickle and a copy of a layer hold: instead of its packed copy, that one is to be made."""
    return {**vars(layer), "_copy": None if layer._copy is None else (None, ()), "_matrix": None}


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes with the numbers of a weight: where it is, and how often PyTorch wrote to it."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _by_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True where a packed copy of the weight takes its place: on the CPU, where PyTorch watches nothing."""
    alike = x.dtype is weight.dtype and x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)
    return alike and _unwatched(x, weight, bias)


def _unwatched(x: Tensor, *others: Tensor | None) -> bool:
    """Return True where PyTorch neither compiles nor records nor transforms a product of these."""
    if is_compiling() or type(x) not in PLAIN or watched():
        return False
    return not torch.is_grad_enabled() or not any(z is not None and z.requires_grad for z in (x, *others))


def _precision(layer: Linear | QuantizedLinear, x: Tensor) -> Precision | None:
    """The layer's precision where it means something: for float32 on a GPU, outside autocast."""
    applies = x.is_cuda and x.dtype is torch.float32 and not torch.is_autocast_enabled("cuda")
    return layer.precision if applies else None


def _check_size(name: str, size: Any) -> None:
    """Raise ArgumentError unless a layer can have so many features."""
    if not isinstance(size, int) or size < 0:
        raise ArgumentError(f"{name}={brief(size)}: a layer has a whole number of features, 0 or more; pass one")


def _check_options(activation: Any, precision: Any) -> None:
    """Raise ArgumentError unless a layer can have these options."""
    check_activation(activation, "f32")
    check_precision(precision)


def check_precision(precision: Any) -> None:
    """Raise ArgumentError unless float32 products can be computed so."""
    if precision is not None and not is_one(precision, config.FLOAT32_PRECISIONS):
        raise ArgumentError(
            f"precision={brief(precision)}: pass one of {', '.join(config.FLOAT32_PRECISIONS)}, or None for float32 "
            "itself"
        )


def _options(layer: Linear | QuantizedLinear) -> str:
    """The options that are set, as text."""
    options = {"activation": layer.activation, "precision": layer.precision}
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
