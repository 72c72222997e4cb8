"""The arguments of a kernel as a command line writes them: arrays by element type and shape, files, numbers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from gemmery.dtypes import meanings_of_code
from gemmery.errors import ArgumentError, CheckError

TYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "uint16", "bool": "bool"}
TYPES |= {f"{name}{bits}": f"{name}{bits}" for name in ("int", "uint") for bits in (8, 16, 32, 64)}
TYPES |= {f"{name[0]}{bits}": f"{name}{bits}" for name in ("int", "uint") for bits in (16, 32, 64)}
TYPES |= {name: name for name in ("float16", "float32", "float64")} | {"bfloat16": "uint16"}
_OF_C = {"float": "f32", "double": "f64", "int": "i32", "half": "f16", "char": "int8", "short": "i16", "size_t": "u64"}
_OF_C |= {"__half": "f16", "__nv_bfloat16": "bf16", "bool": "bool", "long": "i64", "unsigned": "u32", "uint": "u32"}
_OF_C |= {"unsigned int": "u32", "unsigned char": "uint8", "float2": "f32", "float4": "f32", "long long": "i64"}
FILLS = ("zeros", "ones", "arange", "random", "nan")
FORMS = "write f32[64,32]=random, i32[64]=arange, x.npy, x.npz:key, n=64, f32=0.5 or null"
_ARRAY = re.compile(r"(\w+)\[([\d,\s]+)\](?:=(\S+))?")
_TOLERANCE = {2: 2e-2, 4: 1e-4, 8: 1e-10}  # by bytes of a float: sums in another order differ by more than a rounding
LARGEST = 1 << 30  # bytes of an array: the emulator holds a copy


def argument(text: str, place: int = 0) -> Any:
    """Return the value that a text stands for; `place` seeds random arrays, so that two differ.

    >>> argument("f32[2,2]=arange").tolist(), argument("n=64"), argument("i64=3"), argument("null")
    ([[0.0, 1.0], [2.0, 3.0]], 64, np.int64(3), None)

    Raises ArgumentError for another form, an unknown type or fill, and a file that cannot be read.
    """
    text = text.strip()
    if match := _ARRAY.fullmatch(text):
        return _array(text, match[1], match[2], match[3] or "zeros", place)
    if re.search(r"\.np[yz](:|$)", text):
        return _file(text)
    name, _, value = text.rpartition("=")
    if value in ("null", "None", "nullptr"):
        return None
    if "[" in text:
        raise ArgumentError(f"--arg {text}: {FORMS}")
    if name in (*TYPES, "i8", "u8"):
        return _typed(text, name, value)
    return _number(text, value)


def parameter(text: str) -> str:
    """Return the parameter that an argument names: "n" of "n=64"; "" for an argument without a name."""
    name = text.strip().rpartition("=")[0].strip()
    return name if name.isidentifier() and name not in TYPES else ""


def example(parameters: Sequence[str], launched: Sequence[Any], grid: Any, block: Any) -> str:
    """Return options to paste for a launch: the numbers of the program's own where they are known.

    >>> example(("int n", "const float* x", "float* y"), (1000, None, None), None, 256)
    '--grid 4 --block 256 -a n=1000 -a f32[1000]=random -a f32[1000]=zeros'
    """
    values = [*launched, *(None for _ in parameters)]
    whole = [value for value in values if isinstance(value, int) and value > 1]
    count, threads, options = whole[0] if whole else 1024, block or 256, list[str]()
    for declared, value in zip(parameters, values, strict=False):
        kind, _, name = re.sub(r"\b(const|__restrict__|restrict|struct)\b", " ", declared).strip().rpartition(" ")
        base = " ".join(kind.replace("*", " ").split()) or "float"
        if "*" in declared or "[" in declared:
            fill = "random" if "const" in declared else "zeros"
            options.append(f"{_OF_C.get(base.split('::')[-1], 'f32')}[{count}]={fill}")
        else:
            default = 1.0 if _OF_C.get(base, "i32").startswith(("f", "b")) else count
            options.append(f"{name.strip('*& ')}={default if value is None else value}")
    blocks = grid or -(-count // (threads if isinstance(threads, int) else 1))
    sides = (",".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in (blocks, threads))
    return " ".join([*map("{} {}".format, ("--grid", "--block"), sides), *(f"-a {each}" for each in options)])


def check_names(texts: Sequence[str], kernel: str, known: Collection[Sequence[str]]) -> None:
    """Check that each argument with a name stands in the place of that parameter.

    `known` are the names of the parameters, for each kernel of this name; "" is a name that is not known. Raises
    ArgumentError for an argument in another place, or with a name that no parameter has.
    """
    for place, text in enumerate(texts):
        there = {names[place] for names in known if place < len(names)}
        if parameter(text) and there and not there & {parameter(text), ""}:
            listed = " or ".join(f"({', '.join(names)})" for names in known)
            raise ArgumentError(
                f"--arg {text}: argument {place} of {kernel}{listed} is {', '.join(sorted(there))}; write one --arg "
                "for each parameter, in their order"
            )


def _array(text: str, kind: str, sides: str, fill: str, place: int) -> NDArray[Any]:
    kind = _known(text, kind)
    shape = tuple(int(side) for side in sides.split(",") if side.strip())
    dtype = np.dtype(TYPES[kind])
    if not shape or min(shape) < 1 or np.prod([float(side) for side in shape]) * dtype.itemsize > LARGEST:
        raise ArgumentError(f"--arg {text}: sides are whole numbers >= 1, and an array has at most 1 GiB; take fewer")
    random, is_float = np.random.default_rng(place), dtype.kind == "f" or kind == "bf16"
    if fill in ("random", "arange"):
        numbers: NDArray[Any] = np.arange(np.prod(shape)).reshape(shape)
        if fill == "random" and is_float:
            numbers = random.standard_normal(shape)
        elif fill == "random":
            numbers = random.integers(0 if dtype.kind in "ub" else -10, 2 if dtype.kind == "b" else 10, shape)
        return _bits(numbers) if kind == "bf16" else numbers.astype(dtype)
    value = {"zeros": "0", "ones": "1"}.get(fill, fill)
    if not (re.fullmatch(r"[-+.\d][-+.\deE]*", value) or (fill == "nan" and is_float)):
        raise ArgumentError(
            f"--arg {text}: {fill!r} cannot fill an array of {kind}; take a number or {', '.join(FILLS)}"
        )
    return np.full(shape, _typed(text, kind, value))


def _known(text: str, kind: str) -> str:
    if kind not in TYPES:
        known = f"it {meanings_of_code(kind)}" if meanings_of_code(kind) else f"known: {', '.join(TYPES)}"
        raise ArgumentError(f"--arg {text}: {kind!r} is no element type; {known}")
    return "bf16" if kind == "bfloat16" else kind


def _bits(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """Numbers as bfloat16, which NumPy lacks: their bits."""
    from gemmery_emulator.exact import to_bf16

    return np.asarray(to_bf16(numbers.astype(np.float32)), np.uint16)


def _typed(text: str, kind: str, value: str) -> Any:
    """A number of an element type; what the type cannot hold is refused, so that none wraps round."""
    kind = _known(text, kind)
    number, dtype = _number(text, value), np.dtype(TYPES[kind])
    if dtype.kind == "f" or kind == "bf16":
        most = float(np.finfo("float32" if kind == "bf16" else dtype).max)
        fits, rule = not most < abs(number) < np.inf, f"numbers up to {most:.4g}"
    else:
        least, most = (0, 1) if kind == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        fits, rule = number == number // 1 and least <= number <= most, f"whole numbers from {least} to {most}"
    if not fits:
        raise ArgumentError(f"--arg {text}: {kind} holds {rule}; take one of these, or a wider type")
    return _bits(np.asarray([number], np.float64))[0] if kind == "bf16" else dtype.type(number)


def _file(text: str) -> NDArray[Any]:
    path, _, key = text.partition(":")
    try:
        with Path(path).open("rb") as file:
            value = np.load(file, allow_pickle=False)
            keys = [] if isinstance(value, np.ndarray) else list(value.files)
            if key in keys:
                return np.asarray(value[key])
    except (OSError, ValueError, EOFError, BadZipFile) as error:  # of files that are damaged, too
        reason = getattr(error, "strerror", None) or "it holds no arrays of numbers"
        raise ArgumentError(f"--arg {text}: {path} cannot be read ({reason}); save it with numpy.save") from None
    if not isinstance(value, np.ndarray):
        way_out = f"{path}:{keys[0] if keys else 'key'}"
        raise ArgumentError(f"--arg {text}: this file has {', '.join(keys)}; write {way_out}")
    if key:
        raise ArgumentError(f"--arg {text}: this file has one array, without a key; write {path}")
    return value


def _number(text: str, value: str) -> int | float:
    try:
        return int(value, 0)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            raise ArgumentError(f"--arg {text}: {value!r} is no number; {FORMS}") from None


def sides(option: str, text: str) -> tuple[int, ...]:
    """Return the sides of a grid or block: "4,4". Raises ArgumentError for anything else."""
    parts = [part.strip() for part in text.replace("x", ",").split(",")]
    if not 1 <= len(parts) <= 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"{option} {text}: write one to three whole numbers >= 1, such as {option} 4,4")
    return tuple(map(int, parts))


def reference(text: str) -> Callable[..., Any]:
    """Return the function that `reference.py:function` names. Raises ArgumentError if it cannot be loaded."""
    path, _, name = text.rpartition(":")
    file = Path(path)
    if not path or not name or file.suffix != ".py":
        raise ArgumentError(f"--check {text}: write the file and a function in it, such as reference.py:add")
    if not file.is_file():
        raise ArgumentError(f"--check {text}: there is no file {path}; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any line of someone's file may fail
        raise ArgumentError(f"--check {text}: {path} fails with {_described(error)}; mend the file") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [known for known in vars(module) if callable(getattr(module, known)) and not known.startswith("_")]
        raise ArgumentError(f"--check {text}: {path} has no function {name}; it has {', '.join(names) or 'none'}")
    return function  # type: ignore[no-any-return]


def _described(error: BaseException) -> str:
    """An error of someone's code: its type, what it says, and the line where it was raised."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    file = frame.tb_frame.f_code.co_filename if frame else ""
    place = f" (line {frame.tb_lineno} of {Path(file).name})" if frame and file != __file__ else ""
    return f"{type(error).__name__}: {error}{'' if isinstance(error, SyntaxError) else place}"


def check(function: Callable[..., Any], before: Sequence[Any], after: Sequence[Any], tolerance: float = 0) -> None:
    """Compare the arrays after a launch with what a function makes of the arguments before it.

    The function may write to its arrays and return None, or return what the written arrays are after the launch: one
    array, or a tuple with an entry for each array argument, None for those that it does not tell. `tolerance` is
    relative to the largest element; 0 chooses one by element type.

    Raises CheckError for a difference, ArgumentError for a function that fails and a result that fits no array.
    """
    copies = [value.copy() if isinstance(value, np.ndarray) else value for value in before]
    try:
        result = function(*copies)
    except (Exception, SystemExit) as error:  # any line of someone's function may fail
        call = f"it is called with the kernel's {len(copies)} arguments, arrays as NumPy's"
        raise ArgumentError(f"--check: the reference fails with {_described(error)}; {call}") from error
    places = [place for place, value in enumerate(after) if isinstance(value, np.ndarray)]
    changed = [place for place in places if before[place].tobytes() != after[place].tobytes()]
    if result is None:
        expected = {place: copies[place] for place in places}
    elif isinstance(result, tuple | list):
        if len(result) != len(places):
            raise ArgumentError(
                f"--check: it returns {len(result)} arrays, and the kernel has {len(places)} array arguments"
            )
        expected = {place: value for place, value in zip(places, result, strict=True) if value is not None}
    else:
        written = changed or places[-1:]
        if len(written) != 1:
            listed = ", ".join(map(str, written))
            raise ArgumentError(
                f"--check: it returns one array, and the kernel wrote arguments {listed}: return a tuple"
            )
        expected = {written[0]: result}
    for place, value in expected.items():
        try:
            want = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise ArgumentError(f"--check: what it returns for argument {place} is no array; return one") from None
        _compare(place, want, after[place], tolerance)


def _compare(place: int, want: NDArray[Any], got: NDArray[Any], tolerance: float) -> None:
    if want.dtype.kind not in "biuf":
        raise ArgumentError(
            f"--check: argument {place} is an array of {got.dtype}, and the reference has {want.dtype}; return numbers"
        )
    if want.size != got.size:
        raise ArgumentError(f"--check: argument {place} has shape {got.shape}, and the reference {want.shape}")
    want = want.reshape(got.shape)
    if got.dtype.kind != "f":
        wrong = want != got
    else:
        share = tolerance or _TOLERANCE[got.dtype.itemsize]
        exact = got.astype(np.float64)
        close = np.abs(exact - want) <= share * max(
            1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want)))
        )
        wrong = ~(close | (exact == want) | (np.isnan(exact) & np.isnan(want)))
    if wrong.any():
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        count = f"{int(wrong.sum()):,} of {got.size:,} elements"
        raise CheckError(
            f"argument {place} is wrong in {count}; the first is {list(at)}: {got[at]}, "
            f"and the reference has {want[at]}"
        )
