"""What the library says in a chapter, in another language: captions, names of bars, reasons for refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

HOLE = r"([\w.,:%+/-]*[\w%])"  # what {} in a phrase stands for: a number, a name, a place in a file
FULL_WIDTH = re.compile(r"(?<=[。：；，）]) ")


def translated(text: str, phrases: Mapping[str, str]) -> str:
    """Return a text with every phrase replaced, the longest first; {0} is what the first {} of the English stands for.

    >>> translated("3 sectors, 4 bytes", {"{} sectors": "{0} 个扇区", ", {} bytes": "，{0} 字节"})
    '3 个扇区，4 字节'
    """
    for english in sorted(phrases, key=len, reverse=True):
        text = _pattern(english).sub(lambda at, own=phrases[english]: own.format(*at.groups()), text)  # type: ignore[misc]
    return FULL_WIDTH.sub("", text) if phrases else text


@cache
def _pattern(english: str) -> re.Pattern[str]:
    return re.compile(re.escape(english).replace(r"\{\}", HOLE))
