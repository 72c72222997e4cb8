"""`NamedTuple` as in `typing`, defined faster: the text of annotations is not compiled.

The first product of a process defines two dozen of them.
"""

from __future__ import annotations

from collections import namedtuple

__all__ = ["NamedTuple"]

TYPE_CHECKING = False  # type checkers assume True; importing `typing` takes 2 ms
if TYPE_CHECKING:
    from typing import NamedTuple
else:

    class _Definition(type):
        def __new__(cls, name, bases, body):
            """Return a named tuple with the fields that a class body annotates, and with its methods."""
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = body["__annotations__"]
            defaults = [body.pop(field) for field in fields if field in body]
            definition = namedtuple(name, fields, defaults=defaults)
            for key, value in body.items():
                setattr(definition, key, value)
            return definition

    class NamedTuple(metaclass=_Definition):
        """The base of a named tuple."""
