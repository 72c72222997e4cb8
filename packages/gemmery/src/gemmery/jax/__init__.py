"""Products for JAX: `gemmery.jax.matmul`, under `jit`, `grad` and `vmap`.

A product is a custom call through XLA's foreign function interface. On the CPU its handler is compiled (`cpu/xla.py`)
and no ctypes callback: XLA runs it on threads of its own, where a callback would wait for the interpreter, up to 5 ms
while another thread runs Python. Shapes are known when JAX traces a function, so products are planned and compiled
then. A call looks up its job, sets three pointers and runs it. For CUDA devices the handler is Python, as launches are.
"""

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    from gemmery.errors import InstallError

    raise InstallError("gemmery.jax needs JAX: run pip install jax", name="jax") from error

from contextlib import suppress

from gemmery.errors import GemmeryError
from gemmery.jax.handler import register
from gemmery.jax.traced import matmul

with suppress(GemmeryError):  # where there are no compiled workers; `matmul` raises it then
    register()  # a program that jax.export stored calls the handler without a trace; this takes 2 ms

__all__ = ["matmul"]


def __dir__() -> list[str]:
    return __all__
