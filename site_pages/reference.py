"""The API reference: a page for each group of public names, which mkdocstrings fills from the docstrings."""

from __future__ import annotations

from collections.abc import Mapping

TITLES = {  # home of public names -> page; a home that is not listed has a page of its own
    "gemmery.api": "products",
    "gemmery.api.grouped": "products",
    "gemmery.api.explanation": "explain-and-warm",
    "gemmery.api.warm": "explain-and-warm",
    "gemmery.lab.kernel": "emulator",
    "gemmery.emulator.hopper.tensormap": "emulator",
    "gemmery.inspection.notebook": "inspect",
    "gemmery.errors": "errors",
}
ALSO = {  # names that public functions return or take
    "gemmery.api": (),
}


def pages(homes: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return page -> names of the library with their modules, from `gemmery._HOMES`."""
    listed: dict[str, list[str]] = {}
    for home, names in homes.items():
        page = TITLES.get(home, home.removeprefix("gemmery.").replace(".", "-").replace("_", "-"))
        listed.setdefault(page, []).extend(f"{home}.{name}" for name in names)
    return listed
