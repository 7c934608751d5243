"""The mapping of nodes to places: changes leave the old one as it was, however many there are."""

from __future__ import annotations

import random

import pytest

from perdure.core.policies.places import LIMIT, Places, spliced


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_dictionary_that_never_changes(seed: int) -> None:
    rng = random.Random(seed)
    model = {node: node % 7 for node in range(400)}
    places = Places(model)
    kept = []
    for _ in range(2 * LIMIT):
        changes = [
            (rng.randrange(500), rng.choice((None, rng.randrange(9)))) for _ in range(rng.randint(1, 4))
        ]
        kept.append((places, dict(model)))
        places = places.changed(changes)
        model = {**model, **dict(changes)}
        model = {node: place for node, place in model.items() if place is not None}
        node = rng.randrange(500)
        assert places.get(node) == model.get(node)
    assert dict(places.items()) == model
    for before, was in kept[:: LIMIT // 4]:
        assert dict(before.items()) == was
    assert places == Places(model)


@pytest.mark.parametrize(
    ("gaps", "new", "expected"),
    [
        ((), ("x",), "abcdex"),
        ((1,), ("x",), "axcde"),
        ((1, 3), ("x",), "axce"),
        ((4,), (), "abcd"),
        ((0, 4), (), "dbc"),
        ((0, 1, 2, 3, 4), (), ""),
        ((2,), ("x", "y"), "abxdey"),
    ],
)
def test_rows_stay_where_they_are_if_they_can(
    gaps: tuple[int, ...], new: tuple[str, ...], expected: str
) -> None:
    after, placed = spliced("abcde", gaps, new)
    assert "".join(after) == expected
    for row, index in placed:
        assert after[index] == row
    stayed = [row for index, row in enumerate("abcde") if index < len(after) and after[index] == row]
    assert {row for row, _ in placed}.isdisjoint(stayed)
