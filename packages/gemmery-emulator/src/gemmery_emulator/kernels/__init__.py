"""Anyone's kernel on the emulator: compiled, run, timed by prediction, and shown."""
