"""How a product of float32 or float64 on a device may be computed, for one call or for a process."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
from typing import Any

from gemmery import config, dtypes
from gemmery.api.device_call import table
from gemmery.cuda import driver
from gemmery.errors import ArgumentError, RefusedError, brief

_UNSET = "unset"  # the environment has not been asked
_default: str | None = _UNSET


def set_float32_precision(precision: config.Float32Precision | None) -> None:
    """Set how float32 products on a device may be computed from now on; None restores the default.

    >>> import gemmery as gm
    >>> gm.set_float32_precision("f32_tensor")
    >>> gm.get_float32_precision()
    'f32_tensor'
    >>> gm.set_float32_precision(None)

    It applies where a call names no `precision`, to products of float32 into float32; `matmul` has the values. The
    default is GEMMERY_FLOAT32_PRECISION, else plain float32. A product captured in a CUDA graph stays as it was.

    Raises ArgumentError for any other value.
    """
    global _default
    if precision is not None and precision not in config.FLOAT32_PRECISIONS:
        raise ArgumentError(f"precision={brief(precision)}: {_CHOICES}, or None for the default")
    _default = config.float32_precision() if precision is None else precision
    table.forget()  # what it has was prepared with the precision of before


def get_float32_precision() -> str | None:
    """Return how float32 products on a device may be computed; None for plain float32.

    It is what was passed to `set_float32_precision`, else GEMMERY_FLOAT32_PRECISION, else None.

    >>> import gemmery as gm
    >>> gm.get_float32_precision() is None
    True
    """
    global _default
    if _default == _UNSET:
        _default = config.float32_precision()
    return _default


def resolved(precision: Any, common: str, result: str, device: str) -> str | None:
    """Return the precision of a product of `common` into `result` on a device: that of the call, or the default.

    Raises ArgumentError for one that the product cannot have, RefusedError for one that the device cannot have.
    """
    effective = checked(precision, common, result)
    if effective is None and (common, result) == ("f32", "f32"):
        effective = get_float32_precision()
    if effective in _ON_HOPPER and driver.find(device).capability != 90:
        card = driver.find(device)
        raise RefusedError(
            f"precision={effective!r} on {card.name}: only devices of compute capability 9.0 (Hopper) have it, and "
            f"this one has {card.capability // 10}.{card.capability % 10}; {_ON_HOPPER[effective]}"
        )
    return effective


def checked(precision: Any, common: str, result: str) -> str | None:
    """Return the precision that a call names, or None.

    Raises ArgumentError for one that a product of `common` into `result` cannot have on any device.
    """
    if precision is None:
        return None
    float32, float64 = ((common, result) == (name, name) for name in ("f32", "f64"))
    known = config.FLOAT32_PRECISIONS if float32 else (_OF_FLOAT64,) if float64 else ()
    if not (isinstance(precision, str) and precision in known):  # `in` compares an array element by element
        raise ArgumentError(
            f"precision={brief(precision)} of a product of {dtypes.get(common).numpy} into "
            f"{dtypes.get(result).numpy}: {_CHOICES}, for float32 products, and {_OF_FLOAT64!r} for float64; leave it "
            "out for others"
        )
    return str(precision)


_OF_FLOAT64 = "f64_normwise"
_ON_HOPPER = {"f32_plus": "take 'f32_strict', or float64 operands", _OF_FLOAT64: "leave it out for float64 itself"}
_CHOICES = f"it can be {', '.join(map(repr, config.FLOAT32_PRECISIONS[:-1]))} or {config.FLOAT32_PRECISIONS[-1]!r}"
