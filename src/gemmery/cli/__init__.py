"""The command `gemmery`: parses, calls `lab`, hands the records to `report`, and turns errors into one line.

Exit codes: 0 fine; 1 a result outside its bound, a finding of `doctor`, or what cannot run on this machine;
2 bad usage; 130 interrupted.
"""

import sys

from gemmery.errors import missing

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ModuleNotFoundError as error:
    print(f"gemmery: {missing('lab', f'the commands need {error.name}')}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2) from None

from gemmery.cli import measuring, looking  # noqa: F401, I001 - they add their commands to the app, in this order
from gemmery.cli.app import app
from gemmery.cli.line import main, run

__all__ = ["app", "main", "run"]
