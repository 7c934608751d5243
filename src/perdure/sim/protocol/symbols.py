"""What the simulated workers compute: sums as expressions, states as chains of digests.

The gradient of a micro-batch is a symbol that names the step, the micro-batch, the bucket and the state
it was computed from; adding makes a pair. So a term that is missing, doubled, out of order, of another
step or of another state is seen, and a zero that was added for an absent gradient too (E1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from perdure.schema.plan import Entry, Shape

Expression = Any
"""A symbol (str), a pair of expressions, or None: no gradient."""

UNFIT = "not finite"
"""What comes of a micro-batch that went wrong; its worker's header says so (P7)."""

CHUNKS = 3
"""The state travels in so many pieces."""


def gradient(step: int, micro_batch: int, bucket: int, state: str) -> Expression:
    """One micro-batch's gradient; some have none in bucket 1, as a frozen or unused parameter."""
    if bucket == 1 and (step + micro_batch) % 3 == 2:
        return None
    return f"{step}.{micro_batch}.{bucket}@{state}"


def add(left: Expression, right: Expression) -> Expression:
    """The sum of two terms, in this order; what is absent is skipped."""
    if left is None:
        return right
    return left if right is None else (left, right)


def fold(shape: Shape, terms: Iterable[tuple[int, Expression]]) -> Expression:
    """The canonical sum of leaves, given as (first micro-batch, term): inside the blocks, then over them."""
    size = shape.per_step // shape.blocks
    total = inside = None
    block = 0
    for first, term in sorted(terms, key=lambda pair: pair[0]):
        if first // size != block:
            total, inside, block = add(total, inside), None, first // size
        inside = add(inside, term)
    return add(total, inside)


@lru_cache(maxsize=4096)
def canonical(shape: Shape, step: int, state: str) -> tuple[Expression, ...]:
    """The sum that the step must have, in each bucket, when it is computed from this state."""
    return tuple(
        fold(shape, ((m, gradient(step, m, bucket, state)) for m in range(shape.present(step))))
        for bucket in range(len(shape.buckets))
    )


@lru_cache(maxsize=4096)
def advance(state: str, step: int, sums: tuple[Expression, ...]) -> str:
    """The state after a commit: a digest of the one before and of what was added to it."""
    return hashlib.blake2b(repr((state, step, sums)).encode(), digest_size=4).hexdigest()


def entry(step: int, micro_batch: int) -> Entry:
    """Loss and weight of a micro-batch."""
    weight = 1.0 + micro_batch % 2
    return Entry(micro_batch, weight * ((31 * step + 7 * micro_batch) % 17) / 4, weight)


def loss(shape: Shape, step: int) -> float:
    """The loss that a step's record must have."""
    entries = [entry(step, m) for m in range(shape.present(step))]
    return sum(e.weighted_loss for e in entries) / sum(e.weight for e in entries)


def value(step: int, item: int) -> float:
    """What evaluating one micro-batch after a step gives."""
    return step + item / 8
