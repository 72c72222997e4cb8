"""What the library says in a chapter, in another language: captions, names of bars, reasons for refusals, drawings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from html import escape, unescape

HOLE = r"([\w.,:%+/-]*[\w%])"  # what {} in a phrase stands for: a number, a name, a place in a file
FULL_WIDTH = re.compile(r"(?<=[。：；，）]) ")
LETTERS = re.compile(r"(?<=>)[^<>]*[A-Za-z][^<>]*(?=</(?:text|title)>)")
WIDE = r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]"
BREAK = re.compile(rf"(?<={WIDE})\n[ \t]*(?={WIDE})|(?<=[。：；，、）])\n[ \t]*(?=[A-Za-z\[]|`(?!``))")


def translated(text: str, phrases: Mapping[str, str]) -> str:
    """Return a text with every phrase replaced, the longest first; {0} is what the first {} of the English stands for.

    >>> translated("3 sectors, 4 bytes", {"{} sectors": "{0} 个扇区", ", {} bytes": "，{0} 字节"})
    '3 个扇区，4 字节'
    """
    for english in sorted(phrases, key=len, reverse=True):
        text = _pattern(english).sub(lambda at, own=phrases[english]: own.format(*at.groups()), text)  # type: ignore[misc]
    return FULL_WIDTH.sub("", text) if phrases else text


def in_drawing(svg: str, phrases: Mapping[str, str]) -> str:
    """Return a drawing whose texts are translated, each as a whole; what `phrases` lacks stays, such as code.

    >>> in_drawing("<text>lanes 0–7</text><text>bank</text>", {"lanes {}": "lane {0}"})
    '<text>lane 0–7</text><text>bank</text>'
    """
    told: dict[str, str] = {}
    for text in set(LETTERS.findall(svg)) if phrases else ():
        english = unescape(text)
        for phrase, own in phrases.items():
            if at := _whole(phrase).fullmatch(english):
                told[text] = escape(own.format(*at.groups()), quote=False)
                break
    return LETTERS.sub(lambda at: told.get(at[0], at[0]), svg)


def joined(text: str) -> str:
    r"""Return Markdown without the breaks of lines between Chinese characters, which browsers show as spaces.

    >>> joined("一行，\n另一行。\n\n- 一项")
    '一行，另一行。\n\n- 一项'
    """
    return BREAK.sub("", text)


@cache
def _whole(english: str) -> re.Pattern[str]:
    return re.compile(re.escape(english).replace(r"\{\}", "(.+?)"))


@cache
def _pattern(english: str) -> re.Pattern[str]:
    return re.compile(re.escape(english).replace(r"\{\}", HOLE))
