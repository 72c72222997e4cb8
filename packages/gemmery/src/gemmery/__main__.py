"""`python -m gemmery` is the command `gemmery`."""

from gemmery.cli import main

if __name__ == "__main__":
    main()
