"""Jobs that are not exact: what a worker computes in a step is one term, used whole or not at all."""

from __future__ import annotations

import torch

from perdure.core.exchange import Exchange
from perdure.core.member import Member, Void
from perdure.core.resume import gatherable, provided
from perdure.schema import messages as msg
from perdure.schema.ids import Generation
from perdure.schema.plan import Address, Entry, Leaf, Plan, Position, Run, Shape, Source, Span
from perdure.worker.leaves import Leaves

SHAPE = Shape(per_step=8, blocks=4, until=10, buckets=(6,), exact=False)
LEAVES = (Leaf(0, 2, 1), Leaf(2, 2, 2), Leaf(4, 1, 1), Leaf(5, 1, 2), Leaf(6, 2, 1))


def test_a_workers_leaves_are_one_term() -> None:
    exchange = Exchange(1, (1, 2), LEAVES, (), (6,), exact=False)
    assert exchange.terms == (Leaf(0, 5, 1), Leaf(2, 3, 2))
    assert exchange.own_terms == (Leaf(0, 5, 1),)
    assert exchange.term_of(6) == 0
    assert exchange.final([Run(0, 2), Run(4, 1)]) == ()
    assert exchange.final([Run(0, 2), Run(4, 1), Run(6, 2)]) == (0,)
    assert not exchange.leaf(0, 0, 1)
    assert exchange.leaf(0, 2, 2), "two terms are all there are"


def test_of_an_exact_job_they_are_terms_of_their_own() -> None:
    exchange = Exchange(1, (1, 2), LEAVES, (), (6,))
    assert exchange.terms == LEAVES
    assert exchange.final([Run(0, 2), Run(4, 1)]) == (0, 4)
    assert exchange.term_of(6) == 6


def test_a_pile_that_somebody_else_provides_a_part_of_is_not_used() -> None:
    positions = {
        1: Position(worker=1, held=(Run(0, 2), Run(4, 1)), in_hand=6, queue=(7,)),
        2: Position(worker=2, held=(Run(2, 2), Run(4, 1), Run(5, 1))),
    }
    pieces = provided(SHAPE, 0, positions)
    assert {leaf.worker for leaf in pieces} == {1}
    assert sorted(leaf.first for leaf in pieces) == [0, 4, 6, 7]


def test_spans_of_two_generations_are_never_mixed() -> None:
    old, new = Generation(1, 1), Generation(1, 2)
    low = Position(worker=1, generation=old, reduced=(Span(0, 0, 3),), ledger_complete=True)
    high = Position(worker=2, generation=new, reduced=(Span(0, 3, 6),), ledger_complete=True)
    assert gatherable({1: low, 2: high}, SHAPE) == ()
    same = Position(worker=2, generation=old, reduced=(Span(0, 3, 6),), ledger_complete=True)
    assert gatherable({1: low, 2: same}, SHAPE) == (Source(Span(0, 0, 3), 1), Source(Span(0, 3, 6), 2))


def plan(number: int, leaves: tuple[Leaf, ...], shares: dict[int, tuple[int, ...]]) -> Plan:
    members = (Address(1, "a", "h", 1), Address(2, "a", "h", 2))
    return Plan(Generation(1, number), members, base=-1, home=(1, 2, 1, 2), shares=shares, leaves=leaves)


def member() -> Member:
    """One that computed micro-batches 0 and 1, and has 4 in hand."""
    found = Member(1, SHAPE)
    first = plan(1, LEAVES, {1: (0, 1, 4, 6, 7), 2: (2, 3, 5)})
    found.seal(msg.Seal(first.generation, first.members))
    found.open(first)
    for micro_batch in (0, 1, 4):
        found.start(micro_batch)
        if micro_batch != 4:
            found.computed(Entry(micro_batch, 1.0, 1.0))
    found.seal(msg.Seal(Generation(1, 2), first.members))
    return found


def test_a_member_keeps_its_pile_if_the_plan_does() -> None:
    one = member()
    one.open(plan(2, LEAVES, {1: (4, 6, 7), 2: (2, 3, 5)}))
    assert one.work.held == (Run(0, 2),)
    assert one.work.queue == [6, 7]


def test_a_member_whose_pile_is_not_wanted_starts_it_anew() -> None:
    one = member()
    others = (Leaf(0, 2, 2), Leaf(2, 2, 2), Leaf(4, 1, 1), Leaf(5, 1, 2), Leaf(6, 2, 1))
    actions = one.open(plan(2, others, {1: (4, 6, 7), 2: (0, 1, 2, 3, 5)}))
    assert Void() in actions
    assert one.work.held == ()
    assert one.computed(Entry(4, 1.0, 1.0))[0] == Void(), "it was added to what is thrown away"
    assert one.work.queue == [4, 6, 7]


def test_a_failed_backward_voids_the_whole_pile() -> None:
    one = member()
    one.open(plan(2, LEAVES, {1: (4, 6, 7), 2: (2, 3, 5)}))
    one.voided(4)
    assert one.work.held == ()
    assert one.work.queue == [0, 1, 4, 6, 7]


def test_all_runs_accumulate_in_one_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    leaves = Leaves([parameter], ["w"], exact=False)
    for first in (0, 4, 6):
        leaves.bind(first)
        (parameter * (first + 1.0)).sum().backward()
        leaves.capture()
    assert leaves.get(6)[0] is leaves.get(0)[0]
    assert torch.equal(leaves.get(0)[0], torch.full((3,), 1.0 + 5.0 + 7.0))
    leaves.keep([Run(4, 1)])
    assert leaves.get(4)
