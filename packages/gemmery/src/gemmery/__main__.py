"""`python -m gemmery` is the command `gemmery`, whose commands are those of the package gemmery-lab."""

import sys

from gemmery.errors import InstallError, not_installed


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        from gemmery_lab.cli import main as command
    except ModuleNotFoundError as error:
        reason = not_installed(error, "the command")
        if not isinstance(reason, InstallError):
            raise
        sys.exit(f"gemmery: {reason}")
    command()


if __name__ == "__main__":
    main()
