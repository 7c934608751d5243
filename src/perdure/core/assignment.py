"""Who computes which micro-batch, and which leaves the canonical sum is made of. Pure.

A step's micro-batches are cut into blocks. Nominally one worker computes each block, in order, and folds
it into one leaf. What has no owner is dealt out, fewest outstanding first, in contiguous runs,
whole blocks and prefixes before the rest, because only a run that starts at its block's first
micro-batch may be folded locally (P5): the canonical sum inside a block is ((g0+g1)+g2)+….
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perdure.schema.ids import WorkerId
from perdure.schema.plan import Leaf, Run, Shape

Shares = dict[WorkerId, tuple[int, ...]]


def add(shape: Shape, held: Sequence[Run], micro_batch: int) -> tuple[Run, ...]:
    """The runs that a worker holds after it computed one more micro-batch.

    The one rule of local folding: a block's first micro-batch opens a run, the next in order extends
    it, everything else stays a leaf of its own.
    """
    start = shape.run(shape.block(micro_batch)).first
    for index, run in enumerate(held):
        if run.first == start and run.stop == micro_batch:
            return (*held[:index], Run(run.first, run.count + 1), *held[index + 1 :])
    return (*held, Run(micro_batch, 1))


def runs(shape: Shape, held: Sequence[Run], share: Iterable[int]) -> tuple[Run, ...]:
    """The runs that a worker will hold once it has computed its share, in the order given."""
    result = tuple(held)
    for micro_batch in share:
        result = add(shape, result, micro_batch)
    return result


def leaves(
    shape: Shape, held: Mapping[WorkerId, Sequence[Run]], shares: Mapping[WorkerId, Sequence[int]]
) -> tuple[Leaf, ...]:
    """The terms of the canonical sum, in order, when every worker has computed its share."""
    workers = {**dict.fromkeys(held), **dict.fromkeys(shares)}
    return tuple(
        sorted(
            Leaf(run.first, run.count, worker)
            for worker in workers
            for run in runs(shape, held.get(worker, ()), shares.get(worker, ()))
        )
    )


def deal(
    shape: Shape, missing: Iterable[int], outstanding: Mapping[WorkerId, int], ends: Mapping[int, WorkerId]
) -> Shares:
    """Deal micro-batches out: fewest outstanding first, contiguous runs, prefixes of blocks first.

    `outstanding` gives, for each worker that may take work (in rank order), how many micro-batches it
    still has to compute; `ends` maps a micro-batch to the worker whose folded prefix it would extend.
    """
    todo = _contiguous(shape, missing)
    todo.sort(key=lambda run: (run.first != shape.run(shape.block(run.first)).first, -run.count, run.first))
    load = dict(outstanding)
    dealt: dict[WorkerId, list[int]] = {worker: [] for worker in load}
    if not todo:
        return {}
    if not load:
        raise ValueError("micro-batches are missing and nobody can compute them")
    goal = -(-(sum(load.values()) + sum(run.count for run in todo)) // len(load))
    order = {worker: rank for rank, worker in enumerate(load)}
    for run in todo:
        first = run.first
        while first < run.stop:
            extends = ends.get(first)
            worker = min(load, key=lambda w: (load[w], w != extends, order[w]))
            count = max(1, min(run.stop - first, goal - load[worker]))
            if shape.first_block_whole and shape.block(first) == 0:
                count = run.stop - first
            dealt[worker].extend(range(first, first + count))
            load[worker] += count
            first += count
    return {worker: tuple(share) for worker, share in dealt.items() if share}


def nominal(
    shape: Shape,
    step: int,
    home: Sequence[WorkerId],
    ranks: Sequence[WorkerId],
    resting: Iterable[WorkerId] = (),
) -> tuple[Shares, tuple[Leaf, ...]]:
    """Shares and leaves of a step that starts undisturbed.

    Args:
        home: for each block the worker that computes it; −1 (or one that rests) leaves an orphan.
        ranks: the members, in rank order.
        resting: members that compute nothing in this step, unless all of them rest.
    """
    if step >= shape.until:
        return {}, ()
    present = shape.present(step)
    working = [worker for worker in ranks if worker not in set(resting)] or list(ranks)
    shares: dict[WorkerId, list[int]] = {worker: [] for worker in working}
    orphans: list[int] = []
    for block in range(shape.blocks):
        run = shape.run(block)
        present_run = range(run.first, min(run.stop, present))
        shares.get(home[block], orphans).extend(present_run)
    load = {worker: len(share) for worker, share in shares.items()}
    for worker, extra in deal(shape, orphans, load, {}).items():
        shares[worker].extend(extra)
    _even_out(shape, shares)
    final = {worker: tuple(share) for worker, share in shares.items() if share}
    return final, leaves(shape, {}, final)


def homes(blocks: int, home: Sequence[WorkerId], ranks: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Keep every living owner's block, give orphans to members that have none, in rank order."""
    kept = [worker if worker in set(ranks) else -1 for worker in (*home, *([-1] * (blocks - len(home))))]
    free = [worker for worker in ranks if worker not in set(kept)]
    for block, worker in enumerate(kept):
        if worker == -1 and free:
            kept[block] = free.pop(0)
    return tuple(kept)


def _even_out(shape: Shape, shares: dict[WorkerId, list[int]]) -> None:
    """More workers than blocks: idle ones take the last micro-batches of the most loaded."""
    if not shares:
        return
    goal = max(1, sum(map(len, shares.values())) // len(shares))

    def movable(worker: WorkerId) -> int:
        share = shares[worker]
        pinned = bool(share) and shape.first_block_whole and shape.block(share[-1]) == 0
        return 0 if pinned else len(share)

    for idle in [worker for worker, share in shares.items() if not share]:
        while len(shares[idle]) < goal:
            richest = max(shares, key=movable)
            if movable(richest) <= goal:
                break
            shares[idle].insert(0, shares[richest].pop())


def _contiguous(shape: Shape, micro_batches: Iterable[int]) -> list[Run]:
    """Maximal contiguous runs, none across the border of a block."""
    found: list[Run] = []
    for micro_batch in sorted(set(micro_batches)):
        last = found[-1] if found else None
        if last and last.stop == micro_batch and shape.block(last.first) == shape.block(micro_batch):
            found[-1] = Run(last.first, last.count + 1)
        else:
            found.append(Run(micro_batch, 1))
    return found
