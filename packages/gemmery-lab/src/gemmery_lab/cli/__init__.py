"""The command `gemmery`: parses its arguments, calls `lab`, passes the records to `report`, prints errors in one line.

Exit codes: 0 success; 1 a result outside its error bound, a problem found by `doctor`, or something that this machine
cannot run; 2 wrong usage; 130 interrupted.
"""

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ModuleNotFoundError:
    from gemmery_lab.cli.plain import main, run
else:
    from gemmery_lab.cli import measuring, tune, exhibiting, looking  # noqa: F401, I001 - they add their commands to the app, in this order
    from gemmery_lab.cli.app import app as app
    from gemmery_lab.cli.app import main, run

__all__ = ["main", "run"]
