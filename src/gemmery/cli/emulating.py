"""The command `emulate`, which is the emulator's."""

from gemmery.cli.app import app
from gemmery.emulation import command

app.command(short_help=command.SHORT_HELP, epilog=command.EPILOG)(command.emulate)
