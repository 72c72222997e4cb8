"""An extension of griffe: the examples of docstrings become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*(?:\n(?!\n).*)*\n?)+", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Puts a fence around every example of a docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The same text with a fence around each example."""
    return EXAMPLE.sub(lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", text)
