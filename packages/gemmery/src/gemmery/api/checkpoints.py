"""Quantized matrices in files: gemmery's own, and those of AWQ, GPTQ, HQQ, compressed-tensors and MXFP4 checkpoints.

Files are read and written by the library safetensors, which is imported when it is needed.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal

import numpy as np

from gemmery.api.codes import bits_of, cast, library_of, name_of, paired
from gemmery.api.quantized import VERSION, QuantizedMatrix, check_version
from gemmery.errors import ArgumentError, GemmeryError, InstallError, LayoutError, ShapeError, brief, is_one, unknown

CheckpointName = Literal["awq", "gptq", "hqq", "compressed-tensors", "mxfp4"]
Tensors = Mapping[str, Any]
_KEY = "gemmery"  # of a file's metadata
_PARTS = ("packed", "scales", "zeros", "scale")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 columns


def _safetensors(what: str = "") -> Any:
    """Return safetensors, or its module for arrays of NumPy or PyTorch. Raises InstallError without it."""
    try:
        return import_module(f"safetensors{what}")
    except ModuleNotFoundError as error:
        raise InstallError(
            "files of quantized matrices need the library safetensors: pip install safetensors", name=error.name
        ) from error


def save_quantized(path: Any, matrices: Mapping[str, QuantizedMatrix], others: Tensors | None = None) -> None:
    """Write quantized matrices to a safetensors file, each under its name.

    >>> import numpy as np, gemmery as gm
    >>> gm.save_quantized("layer.safetensors", {"up": gm.quantize(np.eye(4), "int8")})  # doctest: +SKIP
    >>> gm.load_quantized("layer.safetensors")  # doctest: +SKIP
    {'up': QuantizedMatrix(shape=(4, 4), format=int8, group=4, factors=float64, nbytes=48)}

    The arrays of a matrix "up" are the tensors "up.packed", "up.scales", "up.zeros" and "up.scale", contiguous, in the
    layout of `QuantizedMatrix`. The file's metadata has an entry "gemmery": JSON with the version and the format of
    each matrix. `others` are plain arrays to keep beside them. All arrays are of one library, NumPy or PyTorch.

    Raises ArgumentError for arrays of another library, for two of one name, and for a path that cannot be written, and
    InstallError without safetensors.
    """
    own: Any = matrices
    if not isinstance(own, Mapping) or any(type(matrix) is not QuantizedMatrix for matrix in own.values()):
        raise ArgumentError(f"matrices={brief(matrices)}: pass a dict of what gm.quantize returns, by names")
    tensors = dict(_mapping("others", others))
    for name, matrix in matrices.items():
        parts = {f"{name}.{part}": z for part, z in zip(_PARTS, matrix.parts, strict=True) if z is not None}
        if twice := sorted(parts.keys() & tensors.keys()):
            raise ArgumentError(f"others has a {twice[0]}, and so has the matrix {name!r}: rename one of them")
        tensors |= parts
    libraries = {library_of(z).__name__: library_of(z) for z in tensors.values()}
    if len(libraries) > 1 or "cupy" in libraries:
        raise ArgumentError(f"arrays of {', '.join(libraries)}: a file has those of NumPy, or those of PyTorch")
    module, *_ = *libraries, "numpy"
    dense = {
        name: np.array(z, order="C", copy=None) if module == "numpy" else z.contiguous() for name, z in tensors.items()
    }
    formats = {name: matrix.format for name, matrix in matrices.items()}
    metadata = {_KEY: json.dumps({"version": VERSION, "formats": formats}), "format": "pt"}
    try:
        _safetensors(f".{module}").save_file(dense, os.path.realpath(os.fsdecode(path)), metadata=metadata)
    except (_safetensors().SafetensorError, OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"path={brief(path)}: {error}; choose another place, or arrays that it can have") from error


def load_quantized(path: Any, library: Literal["numpy", "torch"] = "numpy") -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices of a file of `save_quantized`, by their names, with the same bits.

    Arrays are those of `library`, in the memory of the CPU: `matrix.to("cuda")` copies a matrix of PyTorch's to a GPU.
    With NumPy, factors of bfloat16 need ml_dtypes to be imported.

    Raises LayoutError for a file without quantized matrices or of another version, and InstallError without
    safetensors.
    """
    if not is_one(library, ("numpy", "torch")):
        raise ArgumentError(f"library={brief(library)}: arrays are those of 'numpy' or 'torch'")
    library_, framework = _safetensors(), "np" if library == "numpy" else "pt"
    try:
        with library_.safe_open(os.fsdecode(path), framework) as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise LayoutError(f"{path} has no quantized matrices of gemmery: gm.save_quantized writes such files")
            header = json.loads(text)
            check_version(header.get("version"), str(path))
            names = set(file.keys())
            return {
                name: QuantizedMatrix(
                    format_,
                    *(file.get_tensor(key) if (key := f"{name}.{part}") in names else None for part in _PARTS),
                )
                for name, format_ in header["formats"].items()
            }
    except (library_.SafetensorError, ValueError, AttributeError, KeyError, TypeError, OSError) as error:
        if isinstance(error, LayoutError | FileNotFoundError):
            raise
        raise LayoutError(f"{path} is damaged, or no file of gm.save_quantized: {error}; write it again") from error


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None) or not all(isinstance(key, str) for key in value or ()):
        raise ArgumentError(f"{name}={brief(value)}: pass a dict with names as keys")
    return value or {}


# ---- checkpoints of others ----


def from_checkpoint(kind: CheckpointName, tensors: Tensors, config: Mapping[str, Any] | None = None) -> QuantizedMatrix:
    """Return the weight of a layer from the tensors that a quantized checkpoint has for it.

    >>> import numpy as np, gemmery as gm
    >>> blocks, scales = np.full((8, 2, 16), 0x22, np.uint8), np.full((8, 2), 127, np.uint8)
    >>> gm.from_checkpoint("mxfp4", {"blocks": blocks, "scales": scales}).dequantize()[0, :3]
    array([1., 1., 1.], dtype=float32)

    Only the order of codes changes, and zero points take the type of the factors: the weight is that of the
    checkpoint. `config` is its `quantization_config`. `tensors` are arrays of NumPy, PyTorch or CuPy under the names
    that the checkpoint has after the layer's name, and "." ("_" for MXFP4):

    | kind | tensors |
    | --- | --- |
    | "awq" | `qweight`, `qzeros`, `scales`, of 4 bits, version gemm |
    | "gptq" | `qweight`, `qzeros`, `scales`, perhaps `g_idx`, of 4 or 8 bits; `checkpoint_format` gptq or gptq_v2 |
    | "hqq" | `W_q`, `scale`, `zero` of 4 or 8 bits, groups along axis 1; `config` needs `shape` (n, k) |
    | "compressed-tensors" | `weight_packed`, `weight_scale`, and others of pack-quantized |
    | "mxfp4" | `blocks` (..., n, k / 32, 16) and `scales`, as gpt-oss has them |

    Source: the public code of AutoAWQ, GPTQModel, HQQ, compressed-tensors and gpt-oss.

    Raises ArgumentError for another kind, for tensors that are missing, and for a layer whose groups follow no order of
    k (`g_idx` of `desc_act`), and ShapeError for tensors that do not belong together.
    """
    if not is_one(kind, READERS):
        raise unknown(f"kind={brief(kind)}: no checkpoint of this kind is read", kind, READERS)
    read, names = READERS[kind]
    tensors, config = _mapping("tensors", tensors), _mapping("config", config)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ArgumentError(
            f"a layer of {kind} without {', '.join(missing)}: it has {', '.join(tensors) or 'no tensors'}; pass all"
        )
    try:
        return read(tensors, config)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # of what is no array, or of other dimensions
        if isinstance(error, GemmeryError):
            raise
        shapes = ", ".join(f"{name} {tuple(getattr(z, 'shape', ()))}" for name, z in tensors.items())
        raise ShapeError(
            f"no layer of {kind} has these tensors: {shapes} ({error}); pass those of one layer"
        ) from error


def _words(z: Any, bits: int) -> Any:
    """Return the codes of 32-bit words, the lowest bits first, in a last dimension of their own."""
    xp, each = library_of(z), 32 // bits
    return xp.stack([cast(z >> bits * i & 2**bits - 1, "uint8") for i in range(each)], -1)


def _columns(z: Any, bits: int) -> Any:
    """Return codes whose words lie along the last dimension."""
    return _words(z, bits).reshape((*z.shape[:-1], -1))


def _matrix(codes: Any, scales: Any, zeros: Any, bits: int) -> QuantizedMatrix:
    """Return a matrix of codes from 0 on (n, k), factors and zero points (n, groups); symmetric where all are so."""
    xp = library_of(codes)
    (n, k), (count, groups) = codes.shape, scales.shape
    divides = n == count and groups and k % groups == 0 and (k // groups * bits) % 8 == 0
    if not divides or (zeros is not None and zeros.shape != scales.shape):
        raise ShapeError(
            f"codes of shape {tuple(codes.shape)}, factors {tuple(scales.shape)} and zero points "
            f"{None if zeros is None else tuple(zeros.shape)}: each row needs as many factors as zero points, whose "
            "number divides k, and 4-bit groups are even"
        )
    middle = 2 ** (bits - 1)
    if zeros is not None and not bool((zeros != middle).any()):
        zeros = None
    scales = xp.ascontiguousarray(scales) if xp is np else scales.contiguous() if hasattr(scales, "to") else scales
    if bits == 4:
        return QuantizedMatrix("int4", paired(codes), scales, None if zeros is None else cast(zeros, name_of(scales)))
    packed = bits_of(codes ^ 128, "int8")
    zeros = None if zeros is None else cast(cast(zeros, "f32") - middle, name_of(scales))
    return QuantizedMatrix("int8", packed, scales, zeros)


def _awq(tensors: Tensors, config: Mapping[str, Any]) -> QuantizedMatrix:
    """AutoAWQ: words of 8 columns, in the order 0 2 4 6 1 3 5 7 from the lowest bits on; rows are k."""
    _only_bits(config, "w_bit" if "w_bit" in config else "bits", (4,))
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ArgumentError(f"version={config['version']!r} of AWQ has another order of codes: gemm is read")
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    place = list(_AWQ_ORDER)
    codes, zeros = (_words(z, 4)[..., place].reshape((z.shape[0], -1)) for z in (qweight, qzeros))
    return _matrix(_turned(codes), _turned(scales), _turned(zeros), 4)


def _gptq(tensors: Tensors, config: Mapping[str, Any]) -> QuantizedMatrix:
    """GPTQ: words of 8 or 4 rows of k; zero points in words of columns, less 1 in all files but those of gptq_v2."""
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    bits = 32 * qzeros.shape[1] // max(1, scales.shape[1])
    _only_bits({"bits": bits}, "bits", (4, 8))
    _only_bits(config, "bits", (bits,))
    codes = _turned(_words(qweight, bits).swapaxes(1, 2).reshape((-1, qweight.shape[1])))
    zeros = _columns(qzeros, bits)
    if config.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1 & 2**bits - 1
    order, groups = tensors.get("g_idx"), max(1, scales.shape[0])
    if order is not None:
        own, k = np.asarray(order.tolist(), np.int64), codes.shape[1]
        if len(own) != k or k % groups or not np.array_equal(own, np.arange(k) // (k // groups)):
            raise ArgumentError(
                "g_idx gives neighboring elements of k to different groups (desc_act): sort the rows of the weight "
                "and the columns of the input by g_idx first, or take a checkpoint without desc_act"
            )
    return _matrix(codes, _turned(scales), _turned(zeros), bits)


def _hqq(tensors: Tensors, config: Mapping[str, Any]) -> QuantizedMatrix:
    """HQQ: groups follow each other, those of the first half in the high half of a byte; zero points have fractions."""
    w, scale, zero = (tensors[name] for name in ("W_q", "scale", "zero"))
    if config.get("axis", 1) != 1:
        raise ArgumentError(f"axis={config['axis']!r}: groups lie along n; quantize with axis=1, along k")
    if "shape" not in config:
        raise ArgumentError("HQQ's shape is missing: pass config={'shape': (n, k), 'nbits': 4}")
    (n, k), bits = config["shape"], int(config.get("nbits", 4))
    _only_bits({"nbits": bits}, "nbits", (4, 8))
    codes = w if bits == 8 else library_of(w).concatenate((w >> 4, w & 15), 0)
    if int(np.prod(codes.shape)) != n * k:
        raise ShapeError(f"W_q of shape {tuple(w.shape)} has not the {n} x {k} elements of shape={(n, k)}")
    return _matrix(codes.reshape((n, k)), scale.reshape((n, -1)), zero.reshape((n, -1)), bits)


def _compressed(tensors: Tensors, config: Mapping[str, Any]) -> QuantizedMatrix:
    """compressed-tensors, pack-quantized: words of 8 or 4 columns of k, codes from 0 on; zero points in words of n."""
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    if name_of(packed) != "int32" or len(scales.shape) != 2:
        raise ArgumentError(f"weight_packed of {packed.dtype}: pack-quantized has int32, and factors (n, groups)")
    own = tensors.get("weight_shape")
    n, k = (int(x) for x in own) if own is not None else (packed.shape[0], packed.shape[1] * 8)
    bits = 32 * packed.shape[1] // max(1, k)
    _only_bits({"num_bits": bits}, "num_bits", (4, 8))
    order = tensors.get("weight_g_idx")
    if order is not None and any(int(x) != i * scales.shape[1] // k for i, x in enumerate(order)):
        raise ArgumentError("weight_g_idx gives neighboring elements of k to different groups: quantize without it")
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and name_of(zeros) == "int32":
        zeros = _turned(_columns(_turned(zeros), bits)[:, :n])
    elif zeros is not None:
        zeros = cast(zeros, "int32") + 2 ** (bits - 1)
    return _matrix(_columns(packed, bits)[:, :k], scales, zeros, bits)


def _mxfp4(tensors: Tensors, _: Mapping[str, Any]) -> QuantizedMatrix:
    """gpt-oss: 32 codes of e2m1 in 16 bytes, the even one in the low half, and a byte of e8m0 for them."""
    blocks, scales = tensors["blocks"], tensors["scales"]
    return QuantizedMatrix("mxfp4", blocks.reshape((*blocks.shape[:-2], -1)), scales)


def _turned(z: Any) -> Any:
    """Return the transposed matrix, contiguous."""
    return np.ascontiguousarray(z.T) if library_of(z) is np else z.T.contiguous() if hasattr(z, "to") else z.T.copy()


def _only_bits(config: Mapping[str, Any], name: str, allowed: tuple[int, ...]) -> None:
    if name in config and config[name] not in allowed:
        raise ArgumentError(f"{name}={config[name]!r}: these tensors have {' or '.join(map(str, allowed))} bits")


# Kind -> how a layer is read, and the tensors that it must have, of which the first holds the codes.
READERS: dict[str, tuple[Callable[[Tensors, Mapping[str, Any]], QuantizedMatrix], tuple[str, ...]]] = {
    "awq": (_awq, ("qweight", "qzeros", "scales")),
    "gptq": (_gptq, ("qweight", "qzeros", "scales")),
    "hqq": (_hqq, ("W_q", "scale", "zero")),
    "compressed-tensors": (_compressed, ("weight_packed", "weight_scale")),
    "mxfp4": (_mxfp4, ("blocks", "scales")),
}
