"""The command `gemmery`: parses its arguments, calls `lab`, passes the records to `report`, prints errors in one line.

Exit codes: 0 success; 1 a result outside its error bound, a problem found by `doctor`, or something that this machine
cannot run; 2 wrong usage; 130 interrupted. Without the extra `lab` it shows the version alone, and what to install.
"""

import sys
from collections.abc import Sequence

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ModuleNotFoundError:
    import gemmery
    from gemmery.errors import missing

    def run(arguments: Sequence[str]) -> int:
        """Run `--version`; report the missing extra for any other command line."""
        if list(arguments) == ["--version"]:
            sys.stdout.write(f"gemmery {gemmery.__version__}\n")
            return 0
        sys.stderr.write(f"gemmery: {missing('lab', 'the commands need rich and typer')}\n")
        return 2

    def main() -> None:
        """Run the command line of this process and exit."""
        sys.exit(run(sys.argv[1:]))
else:
    from gemmery_lab.cli import measuring, looking  # noqa: F401, I001 - they add their commands to the app, in this order
    from gemmery_lab.cli.parser import app as app
    from gemmery_lab.cli.parser import main, run

__all__ = ["main", "run"]
