"""From the survivors' positions to the plan of the next generation. Pure.

The rules it keeps (docs/protocol.md):

P2   whoever has not committed what another has holds its gradient and commits by itself;
P3   a commit in progress counts for the target, but its worker claims nothing;
P4   a claim is never dealt again, held beats in hand beats queued, one provider per micro-batch;
P5   prefixes of blocks stay runs, everything else single leaves;
P16  one that already left is a donor, or a member again if nobody else is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from perdure.core import assignment
from perdure.schema.errors import ProtocolError
from perdure.schema.ids import NONE, Generation, WorkerId
from perdure.schema.plan import Address, Leaf, Plan, Position, Run, Shape, Source, Span

HELD, IN_HAND, QUEUED = 0, 1, 2
"""How far a micro-batch is with whoever may provide it."""


@dataclass(frozen=True)
class Outcome:
    """A plan, and what there is to say about it.

    `dealt` are the micro-batches that somebody computes although somebody else may have had them;
    `stale` are workers whose state nobody can use (they are ended and replaced).
    """

    plan: Plan
    dealt: tuple[int, ...] = ()
    stale: tuple[WorkerId, ...] = ()
    reason: str = ""


def synced(position: Position) -> bool:
    """Whether the worker's state is one that the job reached, not its own initial one (E10)."""
    return not position.healing and (position.generation != NONE or position.committed >= 0)


def resume(
    generation: Generation,
    members: Sequence[Address],
    positions: Mapping[WorkerId, Position],
    shape: Shape,
    home: Sequence[WorkerId],
    void: Collection[WorkerId] = (),
) -> Outcome:
    """The plan of an unplanned generation.

    Args:
        generation: its number; every position was reported after sealing below it.
        members: candidates in rank order; one without a position is not one.
        positions: by worker, as reported.
        shape: the cut of the step.
        home: block owners so far.
        void: workers whose leaves are not to be used (P8).

    Raises:
        ProtocolError: a survivor is neither at the target nor holds its gradient (P2 was broken).
    """
    present = [member for member in members if member.worker in positions]
    base = max(position.committed for position in positions.values())
    holders = [m for m in present if positions[m.worker].committed == base and synced(positions[m.worker])]
    start = not holders
    if start:
        # E10: nobody has state that the job reached yet: the lowest member's is the job's.
        holders = present[:1]
    behind, joiners = _behind(present, holders, positions, base)
    active = [m for m in present if not positions[m.worker].left] or list(present)
    ranks = tuple(m.worker for m in active)
    at_target = {m.worker: positions[m.worker] for m in holders if m.worker in ranks}
    plan = Plan(
        generation=generation,
        members=tuple(active),
        base=base,
        home=assignment.homes(shape.blocks, home, sorted(ranks, key=lambda w: w in joiners and not start)),
        joiners=tuple(w for w in joiners if w in ranks),
        donors=tuple(m for m in present if m in holders or m.worker in behind),
        void=tuple(void),
    )
    return _with_work(plan, at_target, shape, behind, start)


def _behind(
    present: Sequence[Address], holders: Sequence[Address], positions: Mapping[WorkerId, Position], base: int
) -> tuple[set[WorkerId], list[WorkerId]]:
    """Split those without `base` into the ones that commit it by themselves and the joiners.

    One that left at an earlier boundary is nobody's donor any more, and a joiner if it is needed again.
    """
    behind: set[WorkerId] = set()
    joiners: list[WorkerId] = []
    for member in present:
        position = positions[member.worker]
        if member in holders:
            continue
        if position.committed == base - 1 and position.whole and synced(position):
            behind.add(member.worker)
        elif synced(position) and not position.left:
            raise ProtocolError(
                f"P2: worker {member.worker} is at step {position.committed} without the gradient of "
                f"step {base}, which another worker committed"
            )
        else:
            joiners.append(member.worker)
    return behind, joiners


def _with_work(
    plan: Plan, at_target: Mapping[WorkerId, Position], shape: Shape, behind: set[WorkerId], start: bool
) -> Outcome:
    """Fill in what is computed: nothing after the end, a gather, or the missing micro-batches."""
    if plan.step >= shape.until:
        return Outcome(plan, reason="the last step is committed")
    gather = () if plan.void else gatherable(at_target, shape)
    if gather:
        return Outcome(
            msgspec.structs.replace(plan, gather=gather), reason="the survivors hold every finished span"
        )
    pieces = provided(shape, plan.step, {w: p for w, p in at_target.items() if w not in plan.void})
    covered = {m for leaf in pieces for m in range(leaf.first, leaf.stop)}
    missing = [m for m in range(shape.present(plan.step)) if m not in covered]
    if not pieces:
        resting = () if start else plan.joiners
        shares, leaves = assignment.nominal(shape, plan.step, plan.home, plan.ranks, resting)
        return Outcome(msgspec.structs.replace(plan, shares=shares, leaves=leaves), reason="a fresh step")
    held, claims = _kept(shape, at_target, pieces)
    able = [w for w in plan.ranks if w not in plan.joiners]
    load = {w: len(claims.get(w, ())) for w in able}
    ends = {leaf.stop: leaf.worker for leaf in pieces if leaf.worker in able}
    dealt = assignment.deal(shape, missing, load, ends)
    shares = {w: (*claims.get(w, ()), *dealt.get(w, ())) for w in able if w in claims or w in dealt}
    leaves = assignment.leaves(shape, held, shares)
    return Outcome(
        msgspec.structs.replace(plan, shares=shares, leaves=leaves),
        dealt=tuple(missing),
        reason="leaves are kept",
    )


def provided(shape: Shape, step: int, positions: Mapping[WorkerId, Position]) -> tuple[Leaf, ...]:
    """The provider of every micro-batch that a survivor holds, has in hand or has queued (P4).

    A run that grows by what is in hand is one piece: it can no longer be taken apart. Of a job that is not
    exact all that a worker holds is: a pile.
    """
    taken: dict[int, Leaf] = {}
    candidates: list[tuple[int, int, int, Leaf]] = []
    for worker, position in positions.items():
        if position.committing:
            continue
        grown = (
            position.held
            if position.in_hand is None
            else assignment.add(shape, position.held, position.in_hand)
        )
        for run in grown:
            in_hand = position.in_hand is not None and position.in_hand in range(run.first, run.stop)
            candidates.append(
                (
                    IN_HAND if in_hand and run.count == 1 else HELD,
                    -run.count,
                    run.first,
                    Leaf(run.first, run.count, worker),
                )
            )
        candidates.extend((QUEUED, -1, m, Leaf(m, 1, worker)) for m in position.queue)
    spoilt: set[WorkerId] = set()
    for rank, _, _, leaf in sorted(candidates):
        span = range(leaf.first, leaf.stop)
        if leaf.stop <= shape.present(step) and not any(m in taken for m in span):
            taken.update(dict.fromkeys(span, leaf))
        elif rank < QUEUED:
            spoilt.add(leaf.worker)
    if not shape.exact and spoilt:
        sound = {worker: position for worker, position in positions.items() if worker not in spoilt}
        return provided(shape, step, sound)
    return tuple(sorted(set(taken.values())))


def gatherable(positions: Mapping[WorkerId, Position], shape: Shape) -> tuple[Source, ...]:
    """If the survivors together hold the whole finished gradient: who gives which span; else nothing."""
    usable = {w: p for w, p in positions.items() if p.ledger_complete and not p.committing}
    if shape.exact:
        return _gathered(usable, shape)
    # The bits of a span depend on who computed what, so on the generation: never mix two.
    for generation in sorted({p.generation for p in usable.values()}, reverse=True):
        sources = _gathered({w: p for w, p in usable.items() if p.generation == generation}, shape)
        if sources:
            return sources
    return ()


def _gathered(usable: Mapping[WorkerId, Position], shape: Shape) -> tuple[Source, ...]:
    sources: list[Source] = []
    for bucket, size in enumerate(shape.buckets):
        spans = sorted(
            (span.lo, span.hi, w) for w, p in usable.items() for span in p.reduced if span.bucket == bucket
        )
        reached = 0
        while reached < size:
            best = max(((hi, w) for lo, hi, w in spans if lo <= reached < hi), default=None)
            if best is None:
                return ()
            sources.append(Source(Span(bucket, reached, best[0]), best[1]))
            reached = best[0]
    return tuple(sources)


def _kept(
    shape: Shape, positions: Mapping[WorkerId, Position], pieces: Sequence[Leaf]
) -> tuple[dict[WorkerId, tuple[Run, ...]], dict[WorkerId, tuple[int, ...]]]:
    """What each survivor keeps: the runs that it provides, and its claims in the order it has them."""
    mine: dict[WorkerId, set[int]] = defaultdict(set)
    for leaf in pieces:
        mine[leaf.worker].update(range(leaf.first, leaf.stop))
    held: dict[WorkerId, tuple[Run, ...]] = {}
    claims: dict[WorkerId, tuple[int, ...]] = {}
    for worker, numbers in mine.items():
        position = positions[worker]
        held[worker] = tuple(run for run in position.held if run.first in numbers)
        waiting = (*(() if position.in_hand is None else (position.in_hand,)), *position.queue)
        claims[worker] = tuple(m for m in waiting if m in numbers)
    return held, {worker: claim for worker, claim in claims.items() if claim}
