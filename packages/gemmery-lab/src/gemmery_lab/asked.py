"""The arguments of the commands, checked by modules that load in a moment: nothing here imports what measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral
from typing import TYPE_CHECKING

from gemmery import dtypes
from gemmery.errors import ArgumentError, DeviceError, DTypeError, brief, unknown

if TYPE_CHECKING:
    from gemmery.cuda.device import Device
    from gemmery.ladder.exhibits import Exhibit
    from gemmery.ladder.rung import Rung
    from gemmery_lab.measure.suite import Suite

EMULATED_AS = "h200"  # the card that the emulator runs as unless one is named
TF32 = "tf32"  # no element type, but f32 of which products may keep 10 bits of fraction


@dataclass(frozen=True)
class DeviceChoice:
    """Where a command runs: on the CPU, on the GPU `ordinal`, or on the emulator as `card`."""

    kind: str  # "cpu", "cuda" or "emulator"
    ordinal: int = 0
    card: str = ""

    def __str__(self) -> str:
        return f"cuda:{self.ordinal}" if self.kind == "cuda" else self.card if self.card else self.kind


def place(device: str, card: str = "") -> DeviceChoice:
    """Return where to run: `device` is "cpu", "cuda", "cuda:1", "emulator", or a card to emulate.

    >>> place("CUDA:1").ordinal, place("rtx3090").kind, place("emulator", "A100").card
    (1, 'emulator', 'a100')

    Raises ArgumentError for an unknown device or card, and for a card beside a device that is not the emulator.
    """
    name = device.strip().lower()
    kind, _, number = name.partition(":")
    if name == "emulator":
        return DeviceChoice("emulator", card=emulated_card(card).name)
    if kind == "cuda" and (number.isdecimal() or ":" not in name):
        choice = DeviceChoice("cuda", int(number or 0))
    elif name == "cpu":
        choice = DeviceChoice("cpu")
    else:
        try:
            choice = DeviceChoice("emulator", card=emulated_card(device).name)
        except ArgumentError as error:
            raise ArgumentError(f"{error}, or cpu, cuda, cuda:N for the Nth GPU, emulator") from None
    if card and choice.kind == "emulator":
        raise ArgumentError(f"card {card!r}: the device {device!r} is an emulated card already; name one of them")
    if card:
        raise ArgumentError(f"card {card!r}: only the emulator runs as a named card, and the device is {device!r}")
    return choice


def ordinal(device: str) -> int | None:
    """Return the number of a GPU: 0 for "cuda", 1 for "cuda:1", None for "cpu".

    Raises ArgumentError for any other name.
    """
    name, _, number = device.strip().lower().partition(":")
    if name == "cpu" and ":" not in device:
        return None
    if name != "cuda" or (":" in device and not number.isdecimal()):
        known = "it is cpu, cuda, or cuda:N for the Nth GPU"
        if name == "emulator":
            known += "; the emulator runs ladders, exhibits, sweeps and inspections; in Python call emulated_ladder, "
            known += "emulated_exhibit, emulated_sweep or inspect"
        raise ArgumentError(f"device {device!r} is not known: {known}")
    return int(number or 0)


def emulated_card(name: str) -> Device:
    """Return the card that the emulator runs as, by its name or architecture in any case; "" is an H200.

    Raises ArgumentError for an unknown one.
    """
    from gemmery.cuda.device import KNOWN, card

    try:
        return card(name or EMULATED_AS)
    except DeviceError:
        raise unknown(f"device {name!r} is not known", name.lower(), KNOWN) from None


def registry(kind: str) -> tuple[Rung, ...]:
    """Return the ladder of a kind of device: that of GPUs unless it is "cpu"."""
    if kind == "cpu":
        from gemmery.ladder.cpu import CPU

        return CPU
    from gemmery.ladder.cuda import CUDA

    return CUDA


def rungs(names: Sequence[str], kind: str) -> tuple[Rung, ...]:
    """Return the rungs of these names, all of the ladder for none; "cuda" and "emulator" have the same ladder.

    >>> [rung.name for rung in rungs(["packed"], "cpu")]
    ['packed']

    Raises ArgumentError for a name that is not known. It names the rung that was meant, or the device that has it.
    """
    ladder = registry(kind)
    by_name = {rung.name: rung for rung in ladder}
    for name in names:
        if name not in by_name and name in {rung.name for rung in registry("cuda" if kind == "cpu" else "cpu")}:
            other = (
                "a GPU: the device must be cuda, or emulator"
                if kind == "cpu"
                else "the CPU: name a rung of the GPU's ladder, or use the device cpu"
            )
            raise ArgumentError(f"rung {name!r} runs on {other}")
        if name not in by_name:
            raise unknown(f"rung {name!r} is not in the ladder", name, by_name)
    return tuple(by_name[name] for name in dict.fromkeys(names)) or ladder


def suites(names: Sequence[str], rivals: Sequence[str], device: str) -> list[Suite]:
    """Return the suites of these names or paths, for none all of a device; "" is the device that they are for.

    Raises ArgumentError for suites of several devices or of another one, and for rivals that suites do not have.
    """
    from gemmery_lab.measure import suite

    loaded = [suite.load(suite.find(name)) for name in names or suite.names()]
    kind = (device.strip().lower() or (loaded[0].device if names else "cpu")).partition(":")[0]
    if not names:
        loaded = [each for each in loaded if each.device == kind]
    for each in loaded:
        if each.device != kind:
            raise ArgumentError(
                f"suite {each.name!r} is for {each.device}, not {kind}; choose suites of one device, and that device"
            )
    if rivals and all(each.kind in suite.ALONE for each in loaded):
        listed = ", ".join(each.name for each in loaded)
        raise ArgumentError(f"rivals={', '.join(rivals)}: suite {listed} has no rivals; leave them out")
    for name in {*rivals, *(name for each in loaded for name in each.rivals)}:
        if kind == "cpu":
            from gemmery_lab.measure import libraries

            libraries.find(name)
        else:
            from gemmery_lab.measure import cublas  # loads NVIDIA's bindings

            cublas.find(name)
    return loaded


def element_type(dtype: str, kind: str) -> str:
    """Return gemmery's name of an element type that rungs of a device take, "tf32" among those of a GPU.

    >>> element_type("float32", "cpu"), element_type("TF32", "cuda")
    ('f32', 'tf32')

    Raises ArgumentError for a name that is not known, and for a type that no rung of the device takes.
    """
    if kind == "cpu" and dtype.strip().lower() == TF32:
        raise ArgumentError("dtype 'tf32' is for rungs of a GPU: the device must be cuda, or emulator")
    known = tuple(dict.fromkeys(name for rung in registry(kind) for name in rung.dtypes))
    where = f"rungs for {'the CPU' if kind == 'cpu' else 'a GPU'}: "
    return resolved(dtype, known, () if kind == "cpu" else (TF32,), where)


def resolved(dtype: str, known: Iterable[str], also: Iterable[str] = (), where: str = "") -> str:
    """Return gemmery's name of one of the element types that are `known`, or of what is taken `also`, as "tf32".

    Raises ArgumentError for any other, which begins with `where` it stands.
    """
    try:
        return dtypes.resolve(dtype, known, also)
    except DTypeError as error:
        raise ArgumentError(f"{where}{error}") from None


def stepped(old: str, new: str, dtype: str = "") -> str:
    """Return the element type in which two rungs of the GPU's ladder are compared: f32, or the first that both take.

    Raises ArgumentError for a rung that is not in that ladder, for the same one twice, and where they share no type.
    """
    if old == new:
        raise ArgumentError(f"rung {old!r} is compared with itself: name two, as in simt_naive simt_smem")
    first, second = rungs([old, new], "cuda")
    if dtype:
        return element_type(dtype, "cuda")
    both = [name for name in ("f32", *first.dtypes) if name in first.dtypes and name in second.dtypes]
    if not both:
        types = f"{old} takes {', '.join(first.dtypes)}, {new} {', '.join(second.dtypes)}"
        raise ArgumentError(f"{types}: they share no element type; explain steps between rungs that do")
    return both[0]


def spelled(dtype: str) -> str:
    """Return gemmery's name of any element type or of tf32; "" for "".

    Raises ArgumentError for a name that is not known.
    """
    return resolved(dtype, (*dtypes.NAMES, *dtypes.FLOAT8), (TF32,)) if dtype else ""


def result_type(dtype: str) -> str:
    """Return the type of C of a rung's product: that of its operands, bf16 for float8, and sums for integers of 8 bits.

    >>> result_type("f16"), result_type("e4m3"), result_type("int8")
    ('f16', 'bf16', 'int32')
    """
    return "int32" if dtype == "int8" else dtypes.written(dtype)


def inspectable(*names: str) -> str:
    """Return what all these names are: "a CPU rung", "a GPU rung" or "an exhibit".

    Raises ArgumentError for another name, with a close one, and for two of different kinds: counters do not compare.
    """
    from gemmery.ladder.exhibits import EXHIBITS

    rows: dict[str, Sequence[Rung | Exhibit]] = {
        "a CPU rung": registry("cpu"),
        "a GPU rung": registry("cuda"),
        "an exhibit": EXHIBITS,
    }
    kinds: dict[str, str] = {row.name: kind for kind, ladder in rows.items() for row in ladder}
    for name in names:
        if not hasattr(name, "encode"):
            raise ArgumentError(
                f"{brief(name)} is no rung: pass the name of a rung or an exhibit, such as 'simt_smem', or a run of "
                "gm.emulate"
            )
        if name not in kinds:
            raise unknown(f"rung {name!r} is neither in a ladder nor an exhibit", name, kinds)
        if kinds[name] != kinds[names[0]]:
            both = f"{names[0]} is {kinds[names[0]]} and {name} {kinds[name]}"
            raise ArgumentError(f"{both}: compare two rungs of one device, or two exhibits")
    return kinds[names[0]]


def keys(row: Rung | Exhibit, config: Mapping[str, int]) -> Mapping[str, int]:
    """Return the config. Raises ArgumentError for an unknown key, and for a value that is no whole number >= 1.

    0 is a value where the row's own values have one: it leaves the choice to the rung, or switches something off.
    """
    known = dict.fromkeys([*row.space, *row.default])
    if not isinstance(config, Mapping):
        raise ArgumentError(f"config {brief(config)}: pass a dict, such as {{'stages': 3}}")
    for key in config:
        if key not in known:
            having = f"its keys are {', '.join(known)}" if known else "it has no config"
            raise ArgumentError(f"config {key!r}: {row.name} has no such key; {having}")
        if not isinstance(config[key], Integral) or isinstance(config[key], bool):
            raise ArgumentError(f"config {key!r}: {config[key]!r} is not a whole number")
        values = sorted({*row.space.get(key, ()), row.default.get(key, 1)})
        least = min(1, values[0])
        if config[key] < least:
            few = ", ".join(map(str, values))
            raise ArgumentError(f"config {key}={config[key]}: {row.name} takes whole numbers >= {least}, such as {few}")
    return config


def looked_at(device: str, card: str = "") -> str:
    """Return the device that `inspect` compiles for, from a device or a card as `place` takes them; "" for "".

    Raises ArgumentError for an unknown one.
    """
    from gemmery.cuda.driver import find

    if card or device.strip().lower() == "emulator":
        return place(device or "emulator", card).card
    if not device or device.strip().lower().partition(":")[0] == "cuda":
        ordinal(device or "cuda")
        return device.strip().lower()
    try:
        find(device)
    except DeviceError as error:
        raise ArgumentError(str(error)) from None
    return device


def sides(sizes: Iterable[int], most: int = 0) -> tuple[int, ...]:
    """Return the sizes, each once, the smallest first.

    Raises ArgumentError for a size below 1, or above `most` where that is not 0.
    """
    lengths = sorted(set(sizes))
    for n in lengths:
        if n < 1:
            raise ArgumentError(f"size {n!r}: a side must be a whole number >= 1")
        if most and n > most:
            raise ArgumentError(f"size {n}: the emulator takes sides of 1 to {most}; a GPU takes larger ones")
    return tuple(lengths)


def budget(seconds: float) -> None:
    """Raise ArgumentError for a time to measure for that is not above 0, or has no end."""
    if not 0 < seconds < inf:
        raise ArgumentError(f"seconds={seconds}: the time to measure must be above 0 and finite")
