"""One profile for every random test: the same examples each time, and no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("repeatable")
