"""Where each node is: a mapping that is cheap to change and never changes itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Row = TypeVar("Row")
LIMIT = 256
"""Changes that are kept aside before the whole mapping is written anew."""


class Places:
    """Node → place. `changed` answers a new mapping and leaves this one as it is.

    Both share one dictionary and differ in a few changes kept aside, so that a change costs next to nothing
    however many nodes there are. None as a place takes the node out.
    """

    __slots__ = ("_aside", "_base")

    def __init__(self, base: Mapping[int, int], aside: Mapping[int, int | None] | None = None) -> None:
        self._base = base
        self._aside = aside or {}

    def get(self, node: int) -> int | None:
        """The place of `node`, or None."""
        return self._aside[node] if node in self._aside else self._base.get(node)

    def changed(self, changes: Iterable[tuple[int, int | None]]) -> Places:
        """The mapping with some nodes elsewhere."""
        aside = {**self._aside, **dict(changes)}
        if len(aside) <= LIMIT:
            return Places(self._base, aside)
        base = dict(self._base)
        for node, place in aside.items():
            if place is None:
                base.pop(node, None)
            else:
                base[node] = place
        return Places(base)

    def items(self) -> Iterator[tuple[int, int]]:
        """Every node with its place. O(nodes)."""
        for node, place in self._base.items():
            if node not in self._aside:
                yield node, place
        for node, elsewhere in self._aside.items():
            if elsewhere is not None:
                yield node, elsewhere

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]


def spliced(
    rows: Sequence[Row], gaps: Iterable[int], new: Sequence[Row]
) -> tuple[tuple[Row, ...], list[tuple[Row, int]]]:
    """`rows` without those at `gaps` and with `new` ones, and every row that is new or stands elsewhere now.

    New rows take the gaps; the last rows move into what is left of them, so that all others stay where
    they are.
    """
    after, left = list(rows), sorted(set(gaps), reverse=True)
    placed: list[tuple[Row, int]] = []
    for row in new:
        if left:
            index = left.pop()
            after[index] = row
        else:
            index = len(after)
            after.append(row)
        placed.append((row, index))
    for index in left:  # from the last one on, so that the row at the end is never a gap itself
        row = after.pop()
        if index < len(after):
            after[index] = row
            placed.append((row, index))
    return tuple(after), placed
