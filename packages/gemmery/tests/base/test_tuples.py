"""gemmery's NamedTuple is typing's, except for the time it takes to define one."""

from __future__ import annotations

import pickle
import typing

import pytest

from gemmery import tuples


class Theirs(typing.NamedTuple):
    """A pair."""

    x: int
    y: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The length of y."""
        return len(self.y)


class Ours(tuples.NamedTuple):
    """A pair."""

    x: int
    y: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The length of y."""
        return len(self.y)


def test_fields_defaults_and_methods_are_those_of_the_class_body():
    assert Ours._fields == Theirs._fields == ("x", "y")
    assert Ours._field_defaults == Theirs._field_defaults == {"y": ()}
    assert (Ours.__doc__, Ours.__module__, Ours.__qualname__) == ("A pair.", __name__, "Ours")
    assert typing.get_type_hints(Ours) == {"x": int, "y": tuple[int, ...]}
    assert Ours.__mro__[1:] == Theirs.__mro__[1:]


def test_values_behave_as_tuples():
    ours = Ours(1, (2, 3))
    assert ours == Theirs(1, (2, 3)) == (1, (2, 3))
    assert hash(ours) == hash((1, (2, 3)))
    assert repr(ours) == "Ours(x=1, y=(2, 3))"
    assert ours.length == 2
    assert ours._replace(x=5) == Ours(x=5, y=(2, 3))
    assert pickle.loads(pickle.dumps(ours)) == ours


@pytest.mark.parametrize("bad", [{}, {"x": 1, "z": 2}])
def test_wrong_arguments_are_refused(bad):
    with pytest.raises(TypeError):
        Ours(**bad)
    with pytest.raises(AttributeError):
        Ours(1).x = 2
