"""A simulated worker's half of the exchange: pieces of leaves out, folds, finished spans back.

It keeps P1 (finished spans lie apart from the leaves), P2 (it knows when its own sends are complete; what
is still being sent when the commit overwrites it arrives as garbage, as gloo's zero-copy sends do) and
the parking of what arrives before its round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.core.exchange import Exchange
from perdure.core.member import StartExchange
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Leaf, Shape, Span
from perdure.sim.protocol import symbols
from perdure.sim.protocol.symbols import Expression

if TYPE_CHECKING:
    from perdure.sim.protocol.worker import SimWorker

GARBAGE = "overwritten while it was sent"


@dataclass(slots=True)
class Attempt:
    """One (generation, step) as this worker carries it out. Until it has begun one send is pending."""

    generation: Generation
    step: int
    exchange: Exchange
    pieces: list[dict[int, Expression]]
    leaves_sent: set[int] = field(default_factory=set)
    folded: int = 0
    pending: int = 1
    out_s: float = 0.0
    overwritten_s: float = math.inf
    said: bool = False


@dataclass(slots=True)
class Piece:
    """A leaf's part of one shard."""

    step: int
    span: Span
    first: int
    value: Expression
    attempt: Attempt
    complete_s: float = math.inf


@dataclass(slots=True)
class Finished:
    """A finished span."""

    step: int
    span: Span
    values: tuple[Expression, ...]
    attempt: Attempt
    complete_s: float = math.inf


class Reducing:
    """Carries out the exchanges of one worker."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.attempt: Attempt | None = None
        self.runs: dict[int, tuple[Expression, ...]] = {}
        self.results: list[list[Expression]] = []
        self._parked: dict[tuple[Generation, int], list[tuple[WorkerId, Piece | Finished]]] = {}
        self.clear()

    @property
    def shape(self) -> Shape:
        """The cut of the job."""
        return self.worker.member.shape

    def clear(self) -> None:
        """The step's leaves and finished spans may go: it is committed, or they are void."""
        self.runs = {}
        self.results = [[None] * size for size in self.shape.buckets]

    # ── leaves ──────────────────────────────────────────────────────────────────────────────────────

    def accumulate(self, micro_batch: int, values: tuple[Expression, ...]) -> None:
        """Put a micro-batch's gradient where the member booked it: into its run, or a leaf of its own."""
        for run in self.worker.member.work.held:
            if run.first <= micro_batch < run.stop and run.count > 1:
                grown = zip(self.runs[run.first], values, strict=True)
                self.runs[run.first] = tuple(symbols.add(old, new) for old, new in grown)
                return
        self.runs[micro_batch] = values

    def leaf_value(self, leaf: Leaf, span: Span) -> Expression:
        """A leaf's part of a shard."""
        return self.runs[leaf.first][span.bucket]

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────────

    def begin(self, start: StartExchange) -> None:
        """A round begins: give what is final, take in what came before it."""
        exchange = start.exchange
        buckets = range(len(self.shape.buckets))
        attempt = Attempt(start.plan.generation, start.step, exchange, [{} for _ in buckets])
        self.attempt = attempt
        if exchange.gather:
            for source in exchange.gather:
                if source.worker == self.worker.id:
                    self._give(attempt, source.span)
        else:
            self.results = [[None] * size for size in self.shape.buckets]
        self.offer()
        key = (attempt.generation, attempt.step)
        for peer, message in self._parked.pop(key, ()):
            self.arrived(attempt.generation, peer, message)
        self._parked = {k: parked for k, parked in self._parked.items() if k > key}
        attempt.pending -= 1
        self._check_sent(attempt)

    def offer(self) -> None:
        """Send the pieces of the leaves that are final by now."""
        attempt = self.attempt
        if attempt is None:
            return
        held = {run.first: run.count for run in self.worker.member.work.held}
        for leaf in attempt.exchange.own_leaves:
            if leaf.first not in attempt.leaves_sent and held.get(leaf.first) == leaf.count:
                attempt.leaves_sent.add(leaf.first)
                self._contribute(attempt, leaf)
        self._check_sent(attempt)

    def _contribute(self, attempt: Attempt, leaf: Leaf) -> None:
        for bucket in range(len(self.shape.buckets)):
            for rank, owner in enumerate(attempt.exchange.ranks):
                span = attempt.exchange.of(bucket, rank)
                piece = Piece(attempt.step, span, leaf.first, self.leaf_value(leaf, span), attempt)
                if owner == self.worker.id:
                    self._take_piece(attempt, self.worker.id, piece)
                else:
                    self._send(attempt, owner, piece)

    def _give(self, attempt: Attempt, span: Span) -> None:
        values = tuple(self.results[span.bucket][span.lo : span.hi])
        for peer in attempt.exchange.ranks:
            if peer != self.worker.id:
                self._send(attempt, peer, Finished(attempt.step, span, values, attempt))

    def _send(self, attempt: Attempt, peer: WorkerId, message: Piece | Finished) -> None:
        attempt.pending += 1
        self.worker.hook("send")

        def sent(at_s: float) -> None:
            message.complete_s = at_s
            attempt.pending -= 1
            attempt.out_s = max(attempt.out_s, at_s)
            self._check_sent(attempt)

        self.worker.sim.fabric.send(attempt.generation, self.worker.id, peer, message, sent)

    def _check_sent(self, attempt: Attempt) -> None:
        """P2: say once that all own sends are complete."""
        exchange = attempt.exchange
        folded = exchange.gather or attempt.folded == len(self.shape.buckets)
        given = len(attempt.leaves_sent) == len(exchange.own_leaves)
        if self.attempt is attempt and folded and given and not attempt.pending and not attempt.said:
            attempt.said = True
            self.worker.sim.world.at(attempt.out_s, self.worker.guarded(lambda: self._all_sent(attempt)))

    def _all_sent(self, attempt: Attempt) -> None:
        if self.counts(attempt):
            self.worker.perform(self.worker.member.sends_complete())

    def counts(self, attempt: Attempt) -> bool:
        """P1: whether this is the member's round; the next may be planned already, and not begun here."""
        return self.attempt is attempt and self.worker.member.round.exchange is attempt.exchange

    # ── arrivals ────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, generation: Generation, peer: WorkerId, message: Piece | Finished) -> None:
        """Take a piece or a span in, park what is early, drop what is old."""
        attempt, key = self.attempt, (generation, message.step)
        if attempt is None or key > (attempt.generation, attempt.step):
            self._parked.setdefault(key, []).append((peer, message))
            return
        if key < (attempt.generation, attempt.step):
            return
        overwritten = message.complete_s > message.attempt.overwritten_s
        if isinstance(message, Piece):
            if overwritten:
                message.value = GARBAGE
            self._take_piece(attempt, peer, message)
        else:
            if overwritten:
                message.values = (GARBAGE,) * len(message.values)
            self._take_span(attempt, message.span, message.values)

    def _take_piece(self, attempt: Attempt, peer: WorkerId, piece: Piece) -> None:
        bucket = piece.span.bucket
        if piece.span != attempt.exchange.mine(bucket):
            raise AssertionError(
                f"a piece of {piece.span} reached the owner of {attempt.exchange.mine(bucket)}"
            )
        pieces = attempt.pieces[bucket]
        provider = next((leaf for leaf in attempt.exchange.leaves if leaf.first == piece.first), None)
        if provider is None or provider.worker != peer:
            return
        pieces[piece.first] = piece.value
        if not self.counts(attempt) or not self.worker.member.leaf_arrived(bucket, piece.first, peer):
            return
        self.worker.hook("fold")
        total = symbols.fold(self.shape, pieces.items())
        attempt.folded += 1
        span = piece.span
        self._take_span(attempt, span, (total,) * (span.hi - span.lo))
        if self.attempt is attempt:
            self._give(attempt, span)
            self._check_sent(attempt)

    def _take_span(self, attempt: Attempt, span: Span, values: Sequence[Expression]) -> None:
        self.store(span, values)
        if self.counts(attempt):
            self.worker.perform(self.worker.member.span_finished(span))

    def store(self, span: Span, values: Sequence[Expression]) -> None:
        """P1: finished spans land in buffers of their own."""
        self.results[span.bucket][span.lo : span.hi] = values

    # ── commit ──────────────────────────────────────────────────────────────────────────────────────

    def swap(self) -> tuple[Expression, ...]:
        """The global gradient becomes `.grad`, in the critical section that enters commit (P1)."""
        if self.attempt is not None:
            self.attempt.overwritten_s = self.worker.sim.world.now
        return tuple(_same(bucket) for bucket in self.results)


def _same(values: Sequence[Any]) -> Expression:
    """The one expression that all elements of a bucket have; a tuple that no sum equals if they differ."""
    if all(value == values[0] for value in values):
        return values[0]
    return ("elements differ", *values)
