"""How many micro-batches a loss costs, by hand: four workers, two blocks each of two micro-batches."""

from __future__ import annotations

import pytest

from perdure.core import assignment
from perdure.core.waste import Doing, wasted
from perdure.schema.ids import Generation
from perdure.schema.plan import Address, Plan, Shape

SHAPE = Shape(per_step=8, blocks=4, until=10, buckets=(8,))
RANKS = (0, 1, 2, 3)


def plan(number: int, base: int, ranks: tuple[int, ...] = RANKS) -> Plan:
    home = assignment.homes(SHAPE.blocks, RANKS, ranks)
    shares, leaves = assignment.nominal(SHAPE, base + 1, home, ranks)
    members = tuple(Address(worker, "node", "host", 1) for worker in ranks)
    return Plan(Generation(1, number), members, base, home, shares, leaves)


BEFORE = plan(1, base=4)


@pytest.mark.parametrize(
    ("doing", "cost"),
    [
        (Doing(step=5, micro_batch=4), 1),  # its first was in hand
        (Doing(step=5, micro_batch=5), 2),
        (Doing(step=5), 2),  # its share was done
        (Doing(step=4), 0),  # it was in the commit of the step before
        (Doing(), 0),  # it had not begun anything
        (None, 2),  # nobody saw it: all of its share
    ],
)
def test_what_a_dead_worker_had_begun_of_the_step_in_hand(doing: Doing | None, cost: int) -> None:
    after = plan(2, base=4, ranks=(0, 1, 3))
    assert wasted(SHAPE, BEFORE, after, dealt=(4, 5), lost={2: doing}) == cost


def test_what_somebody_else_has_is_not_computed_again() -> None:
    after = plan(2, base=4, ranks=(0, 1, 3))
    assert wasted(SHAPE, BEFORE, after, dealt=(), lost={2: Doing(step=5)}) == 0


def test_a_later_step_of_the_same_plan_and_two_losses_at_once() -> None:
    after = plan(2, base=7, ranks=(0, 3))
    lost = {1: Doing(step=8, micro_batch=2), 2: Doing(step=8)}
    assert wasted(SHAPE, BEFORE, after, dealt=(2, 3, 4, 5), lost=lost) == 3


def test_micro_batches_that_nobody_had_are_not_counted() -> None:
    """A joiner that rests leaves its block to others: dealt out, but never begun before."""
    after = plan(2, base=7, ranks=(0, 1, 3))
    assert wasted(SHAPE, BEFORE, after, dealt=(0, 1, 4, 5), lost={2: Doing(step=8)}) == 2
