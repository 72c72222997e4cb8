"""Products for JAX on the CPU: `gemmery.jax.matmul`, under `jit`, `grad` and `vmap`.

A product is a custom call through XLA's foreign function interface. Its handler is compiled code (`cpu/xla.py`), not a
ctypes callback: XLA runs it on threads of its own, where a callback would wait for the interpreter, up to 5 ms while
another thread runs Python. Shapes are known when JAX traces a function, so products are planned and compiled then, and
a call looks up its job, sets three pointers and runs it.
"""

from gemmery.errors import not_installed

try:
    from gemmery.jax.traced import matmul
except ModuleNotFoundError as error:
    raise not_installed(error, "gemmery.jax") from error

__all__ = ["matmul"]
