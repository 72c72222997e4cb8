"""The command of an installation without the extra `lab`: it shows the version, and what to install for the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import gemmery
from gemmery.errors import missing


def run(arguments: Sequence[str]) -> int:
    """Run `--version`; report the missing extra for any other command line.

    >>> run(["--version"])
    gemmery 0.1.0
    0
    """
    if list(arguments) == ["--version"]:
        sys.stdout.write(f"gemmery {gemmery.__version__}\n")
        return 0
    sys.stderr.write(f"gemmery: {missing('lab', 'the commands need rich and typer')}\n")
    return 2


def main() -> None:
    """Run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))
