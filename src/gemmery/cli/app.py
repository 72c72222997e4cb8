"""The parser, to which the commands add themselves, and `gemmery` without a command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

Action = Callable[[], int]  # a parsed command line: it runs outside the parser and returns the exit code

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
ladder_app = typer.Typer(rich_markup_mode=None)
app.add_typer(ladder_app, name="ladder", short_help="Time every rung against NumPy or cuBLAS.")

Version = Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")]


@app.callback(invoke_without_command=True)
def gemmery(context: typer.Context, version: Version = False) -> None:
    """Fast matrix products, and the ladder of kernels that leads to them."""
    if version:
        from gemmery.bench import record

        sys.stdout.write(f"gemmery {record.version('gemmery')}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(f"{context.get_help()}\n")
