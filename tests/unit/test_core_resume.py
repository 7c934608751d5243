"""From positions to the next plan: nothing redone, one provider each, nobody left behind (P2 to P5, P16)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core import assignment, resume
from perdure.core.exchange import Exchange
from perdure.schema.errors import ProtocolError
from perdure.schema.ids import Generation
from perdure.schema.plan import Address, Leaf, Position, Run, Shape, Span

G1, G2 = Generation(1, 1), Generation(1, 2)
SHAPE = Shape(per_step=6, blocks=3, until=5, buckets=(6, 7))
WHOLE = (Span(0, 0, 6), Span(1, 0, 7))


def address(worker: int) -> Address:
    return Address(worker, "node", "host", worker)


def position(worker: int, committed: int = 0, **more: object) -> Position:
    return Position(worker, generation=G1, committed=committed, **more)  # type: ignore[arg-type]


def plan_of(
    positions: list[Position], shape: Shape = SHAPE, home: tuple[int, ...] = (0, 1, 2)
) -> resume.Outcome:
    members = [address(p.worker) for p in positions]
    return resume.resume(G2, members, {p.worker: p for p in positions}, shape, home)


@dataclass
class Broken:
    """A step under way: what each member had done when some of them died."""

    shape: Shape
    survivors: dict[int, Position]


@st.composite
def broken(draw: st.DrawFn) -> Broken:
    blocks, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = Shape(per_step=blocks * size, blocks=blocks, until=5, buckets=(6, 7))
    ranks = range(draw(st.integers(1, 5)))
    shares, _ = assignment.nominal(shape, 1, assignment.homes(blocks, (), ranks), ranks)
    survivors = {}
    for worker in ranks:
        share = shares.get(worker, ())
        done = draw(st.integers(0, len(share)))
        busy = done < len(share) and draw(st.booleans())
        survivors[worker] = position(
            worker,
            held=assignment.runs(shape, (), share[:done]),
            in_hand=share[done] if busy else None,
            queue=share[done + busy :],
        )
    for dead in draw(st.sets(st.sampled_from(ranks), max_size=len(ranks) - 1)):
        del survivors[dead]
    return Broken(shape, survivors)


@given(broken())
def test_survivors_keep_what_they_have_and_claim(step: Broken) -> None:
    outcome = plan_of(list(step.survivors.values()), step.shape)
    plan = outcome.plan
    elements = [m for leaf in plan.leaves for m in range(leaf.first, leaf.stop)]
    assert elements == list(range(step.shape.per_step)), "each micro-batch is one term, in order"
    provider = {m: leaf.worker for leaf in plan.leaves for m in range(leaf.first, leaf.stop)}
    for worker, had in step.survivors.items():
        held = {m for run in had.held for m in range(run.first, run.stop)}
        claims = [*([] if had.in_hand is None else [had.in_hand]), *had.queue]
        assert all(provider[m] == worker for m in (*held, *claims))
        assert plan.shares.get(worker, ())[: len(claims)] == tuple(claims)
        assert not held & {*plan.shares.get(worker, ())}
    kept = {m for p in step.survivors.values() for run in p.held for m in range(run.first, run.stop)}
    computed = [m for share in plan.shares.values() for m in share]
    assert sorted(computed) == sorted(set(range(step.shape.per_step)) - kept), "only what nobody has"


@given(broken())
def test_every_member_derives_the_same_runs(step: Broken) -> None:
    plan = plan_of(list(step.survivors.values()), step.shape).plan
    for worker, had in step.survivors.items():
        if not any(p.held or p.in_hand is not None or p.queue for p in step.survivors.values()):
            continue
        runs = assignment.runs(step.shape, had.held, plan.shares.get(worker, ()))
        mine = {Run(leaf.first, leaf.count) for leaf in plan.leaves if leaf.worker == worker}
        assert set(runs) == mine


def test_who_is_behind_commits_by_itself() -> None:
    ahead, behind = position(0, committed=1), position(1, whole=True, held=(Run(0, 2),))
    plan = plan_of([ahead, behind]).plan
    assert plan.base == 1
    assert plan.joiners == ()
    assert set(plan.ranks) == {0, 1}
    assert {m for share in plan.shares.values() for m in share} == set(range(6)), "a fresh step for both"


def test_a_commit_in_progress_counts_and_claims_nothing() -> None:
    plan = plan_of([position(0, committed=1, committing=True), position(1, whole=True)]).plan
    assert plan.base == 1
    assert {donor.worker for donor in plan.donors} == {0, 1}


def test_who_is_behind_without_the_gradient_breaks_p2() -> None:
    with pytest.raises(ProtocolError, match="P2"):
        plan_of([position(0, committed=1), position(1)])


def test_one_that_left_earlier_is_left_alone() -> None:
    plan = plan_of([position(0, committed=1), position(1, left=True)]).plan
    assert plan.ranks == (0,)
    assert [donor.worker for donor in plan.donors] == [0]


def test_joiners_take_the_state_and_compute_nothing_at_first() -> None:
    joiner = Position(7)
    plan = plan_of([position(0), position(1), joiner], home=(0, 1)).plan
    assert plan.joiners == (7,)
    assert 7 not in plan.shares
    assert {donor.worker for donor in plan.donors} == {0, 1}


def test_the_job_begins_with_the_lowest_members_state() -> None:
    plan = plan_of([Position(3), Position(4)], home=()).plan
    assert (plan.base, plan.joiners) == (-1, (4,))
    assert set(plan.shares) == {3, 4}, "nobody rests in the first step"


def test_a_leaver_gives_its_state_and_is_a_member_only_if_nobody_else_is_left() -> None:
    left = position(0, left=True)
    plan = plan_of([left, Position(5)]).plan
    assert (plan.ranks, plan.joiners) == ((5,), (5,))
    assert [donor.worker for donor in plan.donors] == [0]
    assert plan.shares, "the only member computes although it has just joined"
    assert plan_of([left]).plan.ranks == (0,)


def test_finished_spans_are_gathered_and_nothing_is_computed() -> None:
    one = position(0, reduced=(Span(0, 0, 6), Span(1, 0, 3)), ledger_complete=True)
    two = position(1, reduced=(Span(1, 2, 7),), ledger_complete=True, queue=())
    plan = plan_of([one, two]).plan
    assert plan.shares == {}
    assert [(s.span, s.worker) for s in plan.gather] == [
        (Span(0, 0, 6), 0),
        (Span(1, 0, 3), 0),
        (Span(1, 3, 7), 1),
    ]


def test_spans_that_no_header_vouches_for_are_not_gathered() -> None:
    plan = plan_of([position(0, reduced=WHOLE)]).plan
    assert plan.gather == ()
    assert {m for share in plan.shares.values() for m in share} == set(range(6))


def test_void_workers_provide_nothing() -> None:
    positions = [
        position(0, held=(Run(0, 2),), reduced=WHOLE, ledger_complete=True),
        position(1, held=(Run(2, 2),)),
    ]
    members = [address(0), address(1)]
    plan = resume.resume(G2, members, {p.worker: p for p in positions}, SHAPE, (0, 1, 1), void=(0,)).plan
    assert plan.gather == ()
    assert Leaf(2, 2, 1) in plan.leaves
    assert set(plan.shares.get(0, ())) | set(plan.shares.get(1, ())) == {0, 1, 4, 5}


def test_nothing_is_computed_after_the_last_step() -> None:
    plan = plan_of([position(0, committed=4), position(1, committed=3, whole=True)]).plan
    assert (plan.base, plan.shares, plan.leaves) == (4, {}, ())


@given(st.integers(1, 5), st.data())
def test_whoever_survives_can_gather_what_they_share(members: int, data: st.DataObject) -> None:
    exchange = Exchange(0, range(members), [], (), SHAPE.buckets)
    shards = [exchange.of(bucket, rank) for bucket in range(2) for rank in range(members)]
    holders = {span: data.draw(st.sets(st.sampled_from(range(members)), max_size=2)) for span in shards}
    positions = {
        w: position(w, reduced=tuple(s for s in shards if w in holders[s]), ledger_complete=True)
        for w in range(members)
    }
    sources = resume.gatherable(positions, SHAPE)
    if all(holders[span] for span in shards if span.lo < span.hi):
        elements = {(s.span.bucket, i) for s in sources for i in range(s.span.lo, s.span.hi)}
        assert elements == {(b, i) for b, size in enumerate(SHAPE.buckets) for i in range(size)}
        for source in sources:
            owned = {i for s in shards if source.worker in holders[s] and s.bucket == source.span.bucket
                     for i in range(s.lo, s.hi)}  # fmt: skip
            assert {*range(source.span.lo, source.span.hi)} <= owned
    else:
        assert sources == ()
