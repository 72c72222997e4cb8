"""Fixtures of the emulated card, which test files name in `pytest_plugins`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def module_card():
    from emulated_card import installed

    with pytest.MonkeyPatch.context() as patch:
        yield installed(patch)


@pytest.fixture
def card(module_card):
    """A card on which nothing has run; a fault of any launch of the test fails it."""
    module_card.launched.clear()
    module_card.findings.clear()
    yield module_card
    assert module_card.findings == []
