"""Jobs keep their nodes, give back the last ones, and take the first free ones."""

from __future__ import annotations

import pytest

from perdure.core.placement import place


def test_nothing_moves_that_need_not() -> None:
    first = place({}, {"a": 2, "b": 3}, range(6))
    assert first == {"a": (0, 1), "b": (2, 3, 4)}
    assert place(first, {"a": 2, "b": 3}, {0, 1, 3, 4, 5}) == {"a": (0, 1), "b": (3, 4, 5)}
    assert place(first, {"a": 3, "b": 2}, range(6)) == {"a": (0, 1, 4), "b": (2, 3)}
    assert place(first, {"b": 3}, range(6)) == {"b": (2, 3, 4)}
    assert place(first, {"a": 2, "b": 3, "c": 1}, range(6))["c"] == (5,)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for 3 nodes of 2"):
        place({}, {"a": 3}, range(2))
