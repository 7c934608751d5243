"""What has arrived of one step's canonical sum in one generation. Pure bookkeeping, no tensors.

Each bucket is cut into one shard per member; a shard's owner folds the terms' pieces in canonical order
and sends the finished span to everybody. The terms are the leaves; of a job that is not exact they are what
each member added up in one place (its pile), in the order of their first micro-batches. With a `gather`
plan nothing is folded: the holders of finished spans send them. Whoever drives this (the worker's runtime
with tensors, the search with symbols) asks it what to send, tells it what came, and learns when a shard can
be folded and when all is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.schema.ids import WorkerId
from perdure.schema.plan import Leaf, Run, Source, Span

SHARD_UNIT = 64


def shard(size: int, rank: int, members: int) -> tuple[int, int]:
    """Elements [lo, hi) of a bucket of `size` elements that the member of this rank folds.

    Shards begin at multiples of 64 elements, so that two owners share no cache line; small buckets do not
    afford that.
    """
    unit = SHARD_UNIT if size >= SHARD_UNIT * members else 1
    units = -(-size // unit)
    return min(units * rank // members * unit, size), min(units * (rank + 1) // members * unit, size)


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same elements in as few spans as possible, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if last and last.bucket == span.bucket and span.lo <= last.hi:
            merged[-1] = Span(last.bucket, last.lo, max(last.hi, span.hi))
        elif span.lo < span.hi:
            merged.append(span)
    return tuple(merged)


def covered(runs: Iterable[Run | Leaf]) -> set[int]:
    """The micro-batches of some runs."""
    return {micro_batch for run in runs for micro_batch in range(run.first, run.stop)}


def _piles(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """One term for each worker: its first micro-batch, and how many there are in all."""
    workers = dict.fromkeys(leaf.worker for leaf in leaves)
    piles = [[leaf for leaf in leaves if leaf.worker == worker] for worker in workers]
    return tuple(
        sorted(Leaf(min(pile).first, sum(leaf.count for leaf in pile), pile[0].worker) for pile in piles)
    )


class Exchange:
    """Arrivals of one (generation, step) at one member."""

    def __init__(
        self,
        me: WorkerId,
        ranks: Sequence[WorkerId],
        leaves: Sequence[Leaf],
        gather: Sequence[Source],
        buckets: Sequence[int],
        exact: bool = True,
    ) -> None:
        self.me = me
        self.ranks = tuple(ranks)
        self.leaves = tuple(leaves)
        self.gather = tuple(gather)
        self.buckets = tuple(buckets)
        self.exact = exact
        self.terms = self.leaves if exact else _piles(self.leaves)
        self._providers = {term.first: term for term in self.terms}
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._done: set[Span] = set()
        self._missing = 0 if gather else len(buckets)
        rank = self.ranks.index(me)
        self._mine = [Span(b, *shard(size, rank, len(self.ranks))) for b, size in enumerate(buckets)]

    @property
    def own_leaves(self) -> tuple[Leaf, ...]:
        """The leaves that this member provides, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.worker == self.me)

    @property
    def own_terms(self) -> tuple[Leaf, ...]:
        """The terms that this member provides, in order."""
        return tuple(term for term in self.terms if term.worker == self.me)

    def term_of(self, first: int) -> int:
        """The name (first micro-batch) of the term that holds this member's run from `first` on."""
        return first if self.exact else next((term.first for term in self.own_terms), first)

    def final(self, held: Iterable[Run]) -> tuple[int, ...]:
        """The names of this member's terms that are complete with the runs in `held`."""
        if self.exact:
            there = {(run.first, run.count) for run in held}
            return tuple(leaf.first for leaf in self.own_leaves if (leaf.first, leaf.count) in there)
        complete = covered(held) == covered(self.own_leaves)
        return tuple(term.first for term in self.own_terms if complete)

    def mine(self, bucket: int) -> Span:
        """The shard of a bucket that this member folds."""
        return self._mine[bucket]

    def of(self, bucket: int, rank: int) -> Span:
        """The shard of a bucket that the member of that rank folds."""
        return Span(bucket, *shard(self.buckets[bucket], rank, len(self.ranks)))

    def leaf(self, bucket: int, first: int, worker: WorkerId) -> bool:
        """Take note of a term's piece of my shard; true when that completes the shard.

        Only the provider's piece counts (P4); others and repetitions are ignored.
        """
        provider = self._providers.get(first)
        if provider is None or provider.worker != worker or first in self._arrived[bucket]:
            return False
        self._arrived[bucket].add(first)
        return len(self._arrived[bucket]) == len(self._providers)

    def span(self, span: Span) -> None:
        """Take note of a finished span, folded here or received."""
        self._done.add(span)

    @property
    def reduced(self) -> tuple[Span, ...]:
        """All finished elements held, as few spans as possible."""
        return merge(self._done)

    @property
    def complete(self) -> bool:
        """Whether the whole gradient of the step is held."""
        whole = [Span(bucket, 0, size) for bucket, size in enumerate(self.buckets) if size]
        return len(self._done) >= len(whole) and self.reduced == tuple(whole)
