"""What is published: the source distribution holds all that its tests need, the package its suites and styles."""

import tomllib
from pathlib import Path

import pytest

from test_docs import ROOT, tracked

UNPUBLISHED = {".gitignore", "pyproject.toml", "PKG-INFO"}  # the last two are in every distribution


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout, so there is no list of tracked files")
def test_the_source_distribution_holds_every_tracked_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert {Path(name).parts[0] for name in tracked("*")} - UNPUBLISHED <= included


@pytest.mark.parametrize("pattern", ["*.toml", "*.css", "*.html", "*.cu", "*.cuh", "*py.typed"])
def test_data_is_where_the_wheel_takes_it_from(pattern):
    assert [name for name in tracked(pattern) if name.startswith("src/gemmery/")]
