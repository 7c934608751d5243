"""Who computes what: every micro-batch once, prefixes folded, everything else single leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core import assignment
from perdure.schema.plan import Leaf, Run, Shape


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    blocks = draw(st.integers(1, 5))
    size = draw(st.integers(1, 4))
    ragged = draw(st.booleans()) and blocks * size > 1
    return Shape(
        per_step=blocks * size,
        blocks=blocks,
        until=10,
        buckets=(5, 9),
        first_block_whole=draw(st.booleans()),
        epoch_steps=2 if ragged else 0,
        last_in_epoch=draw(st.integers(1, blocks * size - 1)) if ragged else 0,
    )


def covers(shape: Shape, step: int, leaves: tuple[Leaf, ...]) -> None:
    """The leaves are the step's micro-batches, each once, in order, folded only from a block's start (P5)."""
    assert [m for leaf in leaves for m in range(leaf.first, leaf.stop)] == list(range(shape.present(step)))
    for leaf in leaves:
        assert shape.block(leaf.first) == shape.block(leaf.stop - 1)
        assert leaf.count == 1 or leaf.first == shape.run(shape.block(leaf.first)).first


@given(shapes(), st.integers(1, 7), st.integers(0, 3), st.data())
def test_an_undisturbed_step_is_shared_out_once(
    shape: Shape, members: int, step: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.permutations(range(members)))
    home = assignment.homes(shape.blocks, data.draw(st.lists(st.integers(-1, 9), max_size=5)), ranks)
    resting = data.draw(st.sets(st.sampled_from(ranks)))
    shares, leaves = assignment.nominal(shape, step, home, ranks, resting)
    covers(shape, step, leaves)
    assert sorted(m for share in shares.values() for m in share) == list(range(shape.present(step)))
    for leaf in leaves:
        assert {*range(leaf.first, leaf.stop)} <= {*shares[leaf.worker]}
    if resting != set(ranks):
        assert not resting & set(shares)
    if shape.first_block_whole:
        assert leaves[0] == Leaf(0, min(shape.run(0).count, shape.present(step)), leaves[0].worker)


@given(shapes(), st.integers(1, 6))
def test_as_many_members_as_blocks_compute_a_block_each(shape: Shape, first: int) -> None:
    ranks = range(first, first + shape.blocks)
    home = assignment.homes(shape.blocks, (), ranks)
    shares, _ = assignment.nominal(shape, 0, home, ranks)
    for block, worker in enumerate(ranks):
        run = shape.run(block)
        assert shares.get(worker, ()) == tuple(m for m in range(run.first, run.stop) if m < shape.present(0))


@given(shapes(), st.data())
def test_missing_work_is_dealt_once_and_evenly(shape: Shape, data: st.DataObject) -> None:
    missing = data.draw(st.sets(st.integers(0, shape.per_step - 1)))
    load = data.draw(st.dictionaries(st.integers(0, 9), st.integers(0, 4), min_size=1, max_size=5))
    dealt = assignment.deal(shape, missing, load, {})
    assert sorted(m for share in dealt.values() for m in share) == sorted(missing)
    goal = -(-(sum(load.values()) + len(missing)) // len(load))
    if not shape.first_block_whole:
        for worker, share in dealt.items():
            assert load[worker] + len(share) <= max(goal, load[worker] + 1)


def test_work_without_workers_is_refused() -> None:
    shape = Shape(per_step=2, blocks=1, until=1, buckets=(1,))
    assert assignment.deal(shape, (), {}, {}) == {}
    with pytest.raises(ValueError, match="nobody can compute"):
        assignment.deal(shape, (1,), {}, {})


def test_a_prefix_is_extended_by_whoever_holds_it() -> None:
    shape = Shape(per_step=4, blocks=1, until=1, buckets=(1,))
    assert assignment.deal(shape, (2, 3), {1: 0, 2: 0}, {2: 2}) == {2: (2,), 1: (3,)}


@given(shapes(), st.data())
def test_only_a_blocks_beginning_is_folded(shape: Shape, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(shape.per_step)))
    held = assignment.runs(shape, (), order)
    assert sorted(m for run in held for m in range(run.first, run.stop)) == list(range(shape.per_step))
    assert all(run.count == 1 or run.first == shape.run(shape.block(run.first)).first for run in held)


@given(shapes(), st.lists(st.integers(-1, 6), max_size=6), st.data())
def test_living_owners_keep_their_blocks(shape: Shape, before: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 8), unique=True, min_size=1, max_size=6))
    after = assignment.homes(shape.blocks, before, ranks)
    assert len(after) >= shape.blocks
    for block, worker in enumerate(before):
        assert after[block] == worker or worker not in ranks
    free = set(ranks) - set(after)
    assert not free or -1 not in after, "an orphan is given to a member that has no block"


def test_more_workers_than_blocks_share_the_leaves() -> None:
    shape = Shape(per_step=8, blocks=2, until=1, buckets=(1,))
    shares, leaves = assignment.nominal(shape, 0, (0, 1), (0, 1, 2, 3))
    assert {worker: len(share) for worker, share in shares.items()} == {0: 2, 1: 2, 2: 2, 3: 2}
    assert leaves[0] == Leaf(0, 2, 0)
    assert assignment.add(shape, (Run(4, 1),), 6) == (Run(4, 1), Run(6, 1))
