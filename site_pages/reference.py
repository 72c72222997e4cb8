"""The API reference: a page for each group of public names, which mkdocstrings fills from the docstrings."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import gemmery_lab as lab

TITLES = {  # home of public names -> page; a home that is not listed has a page of its own
    "gemmery.api": "products",
    "gemmery.api.grouped": "products",
    "gemmery.api.contractions": "products",
    "gemmery.api.device_operands": "products",
    "gemmery.api.packing": "products",
    "gemmery.api.checkpoints": "products",
    "gemmery.api.quantized": "products",
    "gemmery.api.splitting": "products",
    "gemmery.api.explanation": "explain-and-warm",
    "gemmery.epilogues.trace": "products",
    "gemmery.epilogues.functions_of_symbols": "products",
    "gemmery.api.warm": "explain-and-warm",
    "gemmery_emulator.kernels.kernel": "emulator",
    "gemmery_emulator.arguments": "emulator",
    "gemmery_emulator.hopper.tensormap": "emulator",
    "gemmery_emulator.textures": "emulator",
    "gemmery_lab.inspection.notebook": "inspect",
    "gemmery.errors": "errors",
}
ALSO = {  # page -> what its functions return
    "emulator": (
        "gemmery_emulator.kernels.kernel_run.KernelRun",
        "gemmery_emulator.run.EmulatedRun",
        "gemmery_emulator.counters.counts.Counts",
        "gemmery_emulator.findings.messages.Finding",
    ),
    "inspect": ("gemmery_lab.inspection.records.Inspection",),
}
MODULES = ("gemmery.torch", "gemmery.jax")  # public modules that need more packages, each with a page
FIRST = (
    "gemmery.api.matmul",
    "gemmery_emulator.kernels.kernel.emulate",
    "gemmery_lab.climb.ladder",
    "gemmery_lab.suites.bench",
)


def pages(homes: Mapping[str, tuple[str, ...]], root: Path) -> dict[str, list[str]]:
    """Return page -> names of the library with their modules, from `gemmery._HOMES` and the source in a checkout."""
    listed: dict[str, list[str]] = {}
    for home, names in homes.items():
        page = TITLES.get(home, home.removeprefix("gemmery.").replace(".", "-").replace("_", "-"))
        listed.setdefault(page, []).extend(f"{home}.{name}" for name in names)
    for page, also in ALSO.items():
        listed[page] += also
    for module in MODULES:
        beside = public(root / "packages/gemmery/src" / module.replace(".", "/"))
        listed |= {module.rpartition(".")[2]: [f"{module}.{name}" for name in beside]} if beside else {}
    listed["lab"] = [f"{home}.{name}" for home, names in lab._HOMES.items() for name in names]
    return {page: sorted(names, key=lambda name: name not in FIRST) for page, names in listed.items()}


def public(module: Path) -> list[str]:
    """The names in `__all__` of a module or a package, read without importing it; none where it does not exist."""
    files = [file for file in (module / "__init__.py", module.with_suffix(".py")) if file.exists()]
    for node in ast.parse(files[0].read_text(encoding="utf-8")).body if files else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as names):
                return [str(name) for name in ast.literal_eval(names)]
    return []
