"""What has arrived of a step's sum: shards cut the gradient, only providers count, complete is complete."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from perdure.core.exchange import Exchange, merge, shard
from perdure.schema.plan import Leaf, Source, Span


@given(st.integers(0, 5000), st.integers(1, 9))
def test_shards_cut_a_bucket(size: int, members: int) -> None:
    cuts = [shard(size, rank, members) for rank in range(members)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == size
    assert all(hi == lo for (_, hi), (lo, _) in itertools.pairwise(cuts))
    if size >= 64 * members:
        assert all(lo % 64 == 0 for lo, _ in cuts)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20))))
def test_merging_spans_keeps_their_elements(triples: list[tuple[int, int, int]]) -> None:
    spans = [Span(bucket, min(a, b), max(a, b)) for bucket, a, b in triples]
    elements = {(span.bucket, i) for span in spans for i in range(span.lo, span.hi)}
    merged = merge(spans)
    assert {(span.bucket, i) for span in merged for i in range(span.lo, span.hi)} == elements
    assert all(a.bucket < b.bucket or a.hi < b.lo for a, b in itertools.pairwise(merged))


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_shard_is_complete_with_the_last_providers_piece(
    members: int, count: int, data: st.DataObject
) -> None:
    ranks = range(members)
    leaves = [Leaf(first, 1, first % members) for first in range(count)]
    exchange = Exchange(0, ranks, leaves, (), (10, 3))
    pieces = [(leaf.first, worker) for leaf in leaves for worker in ranks]
    order = data.draw(st.permutations([*pieces, *pieces]))
    told = [exchange.leaf(0, first, worker) for first, worker in order]
    assert told.count(True) == 1
    last = max(order.index((leaf.first, leaf.worker)) for leaf in leaves)
    assert told[last]
    assert not exchange.leaf(1, count, 0), "a leaf that is no term of the sum"


@given(st.integers(1, 5), st.data())
def test_complete_means_every_element(members: int, data: st.DataObject) -> None:
    buckets = (7, 0, 4)
    exchange = Exchange(0, range(members), [Leaf(0, 1, 0)], (), buckets)
    spans = [exchange.of(bucket, rank) for bucket in range(3) for rank in range(members)]
    wanted = {span for span in spans if span.lo < span.hi}
    for span in data.draw(st.permutations(spans)):
        assert not exchange.complete or not wanted
        exchange.span(span)
        wanted.discard(span)
    assert exchange.complete
    assert exchange.reduced == (Span(0, 0, 7), Span(2, 0, 4))


def test_a_gather_needs_the_spans_only() -> None:
    source = Source(Span(0, 0, 6), 1)
    exchange = Exchange(0, (0, 1), (), (source,), (6,))
    assert exchange.own_leaves == ()
    assert not exchange.leaf(0, 0, 1)
    exchange.span(source.span)
    assert exchange.complete
    assert exchange.mine(0) == Span(0, 0, 3)
