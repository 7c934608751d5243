"""The canonical sum equals a naive loop over the parameters, bit by bit, whatever is absent or late."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perdure.schema.errors import ProtectError, ProtocolError
from perdure.schema.plan import Span
from perdure.worker.float_mode import flush_denormals, flushes_denormals
from perdure.worker.fold import FAN_IN, Fold, Scratch
from perdure.worker.gradients import Buckets, Results, bytes_of

Leaf = list[Tensor | None]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Negative zero, denormals, infinities, a NaN: what a sum in another order or with added zeros would change.
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, float("inf"), float("-inf"), float("nan"))


def naive(leaves: Sequence[Sequence[Leaf]], weight: float) -> list[Tensor | None]:
    """The definition: per parameter, blocks of leaves, fan-in 32, one division."""

    def add(terms: Sequence[Tensor | None]) -> Tensor | None:
        total: Tensor | None = None
        for term in terms:
            if term is not None:
                total = term.clone() if total is None else total + term
        return total

    grads: list[Tensor | None] = []
    for parameter in range(len(leaves[0][0])):
        level = [add([leaf[parameter] for leaf in block]) for block in leaves]
        while len(level) > FAN_IN:
            level = [add(level[start : start + FAN_IN]) for start in range(0, len(level), FAN_IN)]
        total = add(level)
        grads.append(None if total is None else total.div_(weight))
    return grads


def assert_same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    assert len(found) == len(wanted)
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a is None) == (b is None), index
        if a is None or b is None:
            continue
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        real = ~b.isnan()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a[real].view(torch.uint8), b[real].view(torch.uint8)), index


def make_parameters(rng: random.Random, generator: torch.Generator) -> list[Tensor]:
    parameters: list[Tensor] = []
    dtypes = rng.sample(DTYPES, rng.randint(1, 2))
    for _ in range(rng.randint(1, 7)):
        dtype = rng.choice(dtypes)
        kind = rng.randrange(5)
        if kind == 0:
            tensor = torch.zeros(rng.randint(1, 400))
        elif kind == 1:
            tensor = torch.zeros(rng.randint(1, 20), rng.randint(1, 20)).t()
        elif kind == 2:
            tensor = torch.zeros(2, 3, 4, rng.randint(1, 5)).to(memory_format=torch.channels_last)
        elif kind == 3:
            tensor = torch.zeros(())
        else:
            tensor = torch.zeros(rng.randint(0, 2), 5)
        parameters.append(tensor.to(dtype))
    return parameters


def make_leaf(parameters: Sequence[Tensor], rng: random.Random, generator: torch.Generator) -> Leaf:
    absent = rng.choice((0.0, 0.0, 0.4))
    leaf: Leaf = []
    for parameter in parameters:
        if rng.random() < absent or not parameter.numel():
            leaf.append(None)
            continue
        gradient = torch.empty_like(parameter, dtype=torch.float32).normal_(generator=generator)
        for _ in range(3):
            where = tuple(rng.randrange(size) for size in gradient.shape)
            gradient[where] = rng.choice(SPECIAL)
        gradient = gradient.to(parameter.dtype)
        if gradient.dim() == 2 and rng.random() < 0.3:
            # The same values lying otherwise: not contiguous in the parameter's own order.
            gradient = gradient.t().contiguous().t()
        leaf.append(gradient)
    return leaf


def reduce_all(
    buckets: Buckets, leaves: Sequence[Sequence[Leaf]], owners: int, weight: float, rng: random.Random
) -> Results:
    """Every owner's fold of every bucket, terms in any order and from any side, results in one place."""
    results, scratch = Results(buckets), Scratch()
    firsts: list[list[int]] = []
    number = 0
    for block in leaves:
        firsts.append(list(range(number, number + len(block))))
        number += len(block)
    flat = [leaf for block in leaves for leaf in block]
    for bucket in range(len(buckets)):
        portions = [buckets.portion(bucket, leaf) for leaf in flat]
        for owner in range(owners):
            lo, hi = buckets.shard(bucket, owner, owners)
            if lo == hi:
                continue
            fold = Fold(buckets, Span(bucket, lo, hi), firsts, results, scratch)
            order = rng.sample(range(number), number)
            for first in order:
                assert not fold.complete
                if rng.random() < 0.5:
                    fold.contribute(first, portions[first])
                else:
                    place = fold.place(first, portions[first].presence)
                    place[:] = b"".join(portions[first].slices(lo, hi))
                    fold.received(first)
            assert fold.complete
            fold.finish(weight)
    return results


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_equals_the_naive_loop(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parameters = make_parameters(rng, generator)
    blocks = rng.choice((1, 2, 3, 5, 33, 40)) if rng.random() < 0.9 else 70
    per_block = rng.choice((1, 1, 3)) if blocks > 5 else rng.randint(1, 4)
    leaves = [
        [make_leaf(parameters, rng, generator) for _ in range(rng.randint(1, per_block))]
        for _ in range(blocks)
    ]
    before = [[[g.clone() if g is not None else None for g in leaf] for leaf in block] for block in leaves]
    buckets = Buckets(parameters, bucket_bytes=rng.choice((64, 1000, 10**6)), first_bytes=100)
    weight = rng.choice((1.0, 3.0, 16.0, 0.7))
    results = reduce_all(buckets, leaves, rng.randint(1, 5), weight, rng)
    assert results.complete
    assert results.spans() == tuple(Span(index, 0, size) for index, size in enumerate(buckets.sizes))
    assert_same(results.as_grads(), naive(leaves, weight))
    for grad, parameter in zip(results.as_grads(), parameters, strict=True):
        if grad is not None:
            assert grad.stride() == torch.empty_like(parameter).stride()
    for block, old in zip(leaves, before, strict=True):
        for leaf, old_leaf in zip(block, old, strict=True):
            assert_same(leaf, old_leaf)


def test_more_threads_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.zeros(300_000)]
    leaves: list[list[Leaf]] = [[[torch.randn(300_000, generator=generator)]] for _ in range(3)]
    buckets = Buckets(parameters)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        results = reduce_all(buckets, leaves, 1, 3.0, random.Random(0))
    finally:
        torch.set_num_threads(threads)
    assert_same(results.as_grads(), naive(leaves, 3.0))


def test_cut_follows_the_parameter_list_from_its_end() -> None:
    parameters = [torch.zeros(100), torch.zeros(50, dtype=torch.bfloat16), torch.zeros(1000), torch.zeros(10)]
    buckets = Buckets(parameters, bucket_bytes=2000, first_bytes=40)
    where = [[(m.parameter, m.start, m.stop) for m in bucket.members] for bucket in buckets.buckets]
    assert where == [[(3, 0, 10)], [(2, 0, 500)], [(2, 500, 1000)], [(1, 0, 50)], [(0, 0, 100)]]
    assert buckets.sizes == (10, 500, 500, 50, 100)
    assert buckets.homes == ((4,), (3,), (1, 2), (0,))
    shards = [buckets.shard(1, rank, 4) for rank in range(4)]
    assert shards == [(0, 128), (128, 256), (256, 384), (384, 500)]
    assert buckets.shard(0, 0, 4) == (0, 0)
    assert buckets.shard(0, 3, 4) == (0, 10)


def test_a_large_model_gets_few_buckets() -> None:
    parameters = [torch.empty(1 << 20, device="meta") for _ in range(500)]
    assert 64 <= len(Buckets(parameters)) <= 200


def test_slices_are_the_gradients_own_memory() -> None:
    gradient = torch.arange(100.0).view(10, 10)
    buckets = Buckets([torch.zeros(10, 10)])
    (piece,) = buckets.slices(0, 10, 20, [gradient])
    gradient[1, 0] = -5.0
    assert torch.frombuffer(piece, dtype=torch.float32)[0] == -5.0
    assert piece.nbytes == 40


def test_only_terms_in_turn_are_wanted() -> None:
    buckets = Buckets([torch.zeros(8)])
    results = Results(buckets)
    fold = Fold(buckets, Span(0, 0, 8), [[0], [4], [8]], results, Scratch())
    assert [fold.wants(first) for first in (0, 4, 8, 5)] == [True, False, False, False]
    # The first term lands where the result will be.
    place = fold.place(0, 1)
    place[:] = bytes_of(torch.ones(8))
    assert results.tensor(0, 0, 8).eq(1).all()
    assert fold.place(0, 1) == place
    assert fold.expects(0)
    fold.received(0)
    assert not fold.expects(0)
    assert fold.wants(4)
    with pytest.raises(ProtocolError, match="P2"):
        fold.finish(1.0)
    with pytest.raises(ProtocolError, match="P4"):
        fold.contribute(0, buckets.portion(0, [torch.ones(8)]))
    with pytest.raises(ProtocolError, match="P4"):
        fold.place(7, 1)
    with pytest.raises(ProtocolError, match="P4"):
        fold.received(4)


def test_a_term_that_came_before_the_fold_is_added_in_its_turn() -> None:
    buckets = Buckets([torch.zeros(300), torch.zeros(5)])
    results, scratch = Results(buckets), Scratch()
    fold = Fold(buckets, Span(0, 0, 305), [[0], [1]], results, scratch)
    early = scratch.take(300, torch.float32).fill_(2.0)
    fold.accept(1, 0b10, early)
    fold.contribute(0, buckets.portion(0, [torch.ones(300), torch.ones(5)]))
    assert fold.finish(3.0) == 0b11
    assert_same(results.as_grads(), [torch.ones(300), torch.full((5,), 1 / 3)])
    assert scratch.take(300, torch.float32) is early


def test_results_refuse_to_be_used_before_they_are_complete() -> None:
    buckets = Buckets([torch.zeros(200)])
    results = Results(buckets)
    results.mark(0, 128, 200, 1)
    assert results.spans() == (Span(0, 128, 200),)
    with pytest.raises(ProtocolError, match="128 elements"):
        results.as_grads()
    results.mark(0, 100, 150, 1)
    assert results.spans() == (Span(0, 100, 200),)
    with pytest.raises(ProtocolError, match="100 elements"):
        results.as_grads()
    results.mark(0, 0, 100, 1)
    assert results.complete
    assert results.as_grads()[0] is not None
    results.clear()
    assert results.spans() == ()
    assert not results.complete


def test_gradients_that_cannot_be_cut_are_refused() -> None:
    buckets = Buckets([torch.zeros(4, 4)])
    with pytest.raises(ProtectError, match="bfloat16"):
        buckets.portion(0, [torch.zeros(4, 4, dtype=torch.bfloat16)])
    with pytest.raises(ProtectError, match="dense"):
        buckets.portion(0, [torch.zeros(4, 4).to_sparse()])


def test_a_folding_thread_takes_the_main_threads_mode() -> None:
    denormal = torch.tensor([1e-39])
    seen: list[tuple[bool, float]] = []

    def fold(mode: bool) -> None:
        flush_denormals(mode)
        seen.append((flushes_denormals(), float(denormal.add(denormal).item())))

    assert not flushes_denormals()
    for mode in (False, True):
        thread = threading.Thread(target=fold, args=(mode,))
        thread.start()
        thread.join()
    assert [mode for mode, _ in seen] == [False, True]
    assert seen[0][1] > 0.0
    assert seen[1][1] == 0.0
    assert not flushes_denormals()
