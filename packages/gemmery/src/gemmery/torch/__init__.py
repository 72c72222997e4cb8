"""gemmery's products as operators of PyTorch: with gradients, torch.compile, CUDA graphs, autocast and torch.func.

>>> import torch, gemmery.torch
>>> gemmery.torch.linear(torch.ones(1, 3), torch.ones(2, 3), torch.tensor([-9.0, 1.0]), activation="relu")
tensor([[0., 4.]])
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    from gemmery.errors import InstallError

    raise InstallError(
        "gemmery.torch needs PyTorch: run pip install torch, or choose a build for your GPU on "
        "https://pytorch.org/get-started/locally",
        name="torch",
    ) from error

from gemmery.torch import functions
from gemmery.torch.aten import install, uninstall
from gemmery.torch.epilogue_function import FusedProduct, fused
from gemmery.torch.functions import grouped_mm, linear, matmul, quantized_linear
from gemmery.torch.modules import Linear, QuantizedLinear, plain_state_dict
from gemmery.torch.quantization import quantize
from gemmery.torch.replacing import Replacement, join_linear, replace_linear

functions.register_flops()
functions.register_sharding()

__all__ = [
    "FusedProduct",
    "Linear",
    "QuantizedLinear",
    "Replacement",
    "fused",
    "grouped_mm",
    "install",
    "join_linear",
    "linear",
    "matmul",
    "plain_state_dict",
    "quantize",
    "quantized_linear",
    "replace_linear",
    "uninstall",
]
