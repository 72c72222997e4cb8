"""One profile for every random test, the same examples each time, no deadline; and interrupts as in a terminal."""

import signal

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("repeatable")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would its tests


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("leaks_references", "slow", "thread_unsafe", "valgrind_error"):
        config.addinivalue_line("markers", f"{mark}: of NumPy's own tests, which test_numpy_suite imports")
