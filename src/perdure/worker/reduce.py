"""The tensor side of a step's exchange: leaves out, folds, finished spans back.

    main thread             leaf_final, early ──┐
    transport's thread      ────────────────────┴─▶ contribute to own folds, post pieces to the owners;
                            pieces that arrive are folded; finished spans are posted to everybody

Everything that touches a fold runs on the transport's one thread (a member alone has none and folds
where it stands), so folds need no lock; what the protocol has to know is told to the `Member` under
the runtime's lock. What arrives for a round that has not begun here is left with its sender, or parked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from perdure.core import assignment
from perdure.core.exchange import Exchange
from perdure.core.member import Action, Member, StartExchange
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Entry, Ledger, PeerMessage, Run, Shape, Span
from perdure.worker.buffers import Buffers
from perdure.worker.float_mode import flush_denormals
from perdure.worker.fold import Fold, Scratch
from perdure.worker.gradients import Buckets, Results
from perdure.worker.leaves import Gradients, Leaves
from perdure.worker.transport import LATER, Bulk, Later, Transport

LEAF, RESULT = 1, 2
_PRESENCE_ORDER: Final = "little"


@dataclass
class Attempt:
    """One round as this worker carries it out; abandoned when another begins."""

    generation: Generation
    step: int
    exchange: Exchange
    transport: Transport | None
    folds: list[Fold | None] = field(default_factory=list)
    put_off: dict[int, dict[int, tuple[WorkerId, Bulk]]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    given: set[tuple[int, int]] = field(default_factory=set)
    early: set[tuple[int, int]] = field(default_factory=set)
    expected: int = 0
    sent: int = 0
    said: bool = False
    began: bool = False
    spoilt: bool = False
    told: tuple[Entry, ...] = ()
    untold: tuple[Entry, ...] = ()


@dataclass
class _Parked:
    """A payload that came before its round: left with its sender, or (with a `place`) received here."""

    peer: WorkerId
    header: Bulk
    place: memoryview | None
    full: bool = False


class Reducer:
    """Carries out exchanges for one worker."""

    def __init__(
        self,
        member: Member,
        lock: threading.RLock,
        perform: Callable[[Sequence[Action]], None],
        buckets: Buckets,
        leaves: Leaves,
        buffers: Buffers,
    ) -> None:
        self.flush_denormals = False
        self._member = member
        self._lock = lock
        self._perform = perform
        self._buckets = buckets
        self._leaves = leaves
        self._buffers = buffers
        self.results = Results(buckets)
        self._scratch = Scratch()
        self._attempt: Attempt | None = None
        self._parked: dict[tuple[Generation, int], list[_Parked]] = {}
        self._arriving: list[_Parked] = []

    @property
    def _extra(self) -> int | None:
        """The number of the span that carries block 0's buffers, if there are any."""
        return len(self._buckets) if self._buffers.nbytes else None

    @property
    def _shape(self) -> Shape:
        return self._member.shape

    # ── under the runtime's lock ────────────────────────────────────────────────────────────────────

    def begin(self, start: StartExchange, transport: Transport | None) -> None:
        """A round begins: nothing of an older attempt may be running any more (P1)."""
        attempt = Attempt(start.plan.generation, start.step, start.exchange, transport)
        peers = len(start.exchange.ranks) - 1
        if start.exchange.gather:
            attempt.expected = peers * sum(s.worker == self._member.worker for s in start.exchange.gather)
        else:
            self.results.clear()
            self._make_folds(attempt)
            pieces = sum(
                span.lo < span.hi
                for bucket in range(len(self._buckets))
                for rank, worker in enumerate(start.exchange.ranks)
                if worker != self._member.worker
                for span in [start.exchange.of(bucket, rank)]
            )
            attempt.expected = pieces * len(start.exchange.own_terms)
            attempt.expected += peers * sum(fold is not None for fold in attempt.folds)
            if self._extra is not None and self._gives_buffers(attempt):
                attempt.expected += peers
        self._attempt = attempt
        # Taken here: by the time they are contributed another plan may have let them go.
        final = [(first, self._leaves.get(first)) for first in attempt.exchange.final(self._member.work.held)]
        gives = self._extra is not None and self._gives_buffers(attempt) and self._buffers.left is not None
        parked = (attempt.generation, attempt.step) in self._parked
        if start.exchange.gather or final or gives or parked or not attempt.expected:
            self._on_thread(attempt, lambda: self._started(attempt, final))

    def void(self) -> None:
        """Leaves and finished spans of the step are worth nothing (P8)."""
        self._leaves.clear()
        self.results.clear()

    def spoil(self) -> None:
        """Something wrong went early: no more of this worker's goes into the round, which nobody commits."""
        if self._attempt is not None:
            self._attempt.spoilt = True

    def committed(self) -> None:
        """The step is committed: its leaves may go."""
        self._attempt = None
        self._leaves.clear()

    def forget_older(self, generation: Generation, step: int) -> None:
        """Drop parked payloads that no round will ask for."""
        self._parked = {key: parked for key, parked in self._parked.items() if key >= (generation, step)}

    # ── main thread ─────────────────────────────────────────────────────────────────────────────────

    def leaf_final(self, micro_batch: int, entries: Sequence[Entry]) -> None:
        """With this micro-batch a term may be complete that the round wants."""
        with self._lock:
            attempt = self._attempt
            first = self._term(attempt, self._member.work.held, micro_batch) if attempt is not None else None
            if attempt is None or attempt.spoilt or first is None:
                return
            gradients = self._leaves.get(first)
            self._note(attempt, entries)
        rest = [b for b in range(len(self._buckets)) if (first, b) not in attempt.early]
        if rest or attempt.untold:
            self._on_thread(attempt, lambda: self._contribute(attempt, first, gradients, rest))

    def early(self, micro_batch: int, bucket: int) -> None:
        """A bucket of the term that ends with this micro-batch is final under the last backward.

        The round may have changed since the micro-batch began: then the term may have to grow further.
        """
        with self._lock:
            attempt = self._attempt
            held = assignment.add(self._shape, self._member.work.held, micro_batch)
            first = self._term(attempt, held, micro_batch) if attempt is not None else None
        if attempt is not None and first is not None:
            attempt.early.add((first, bucket))
            gradients = [parameter.grad for parameter in self._leaves.parameters]
            self._on_thread(attempt, lambda: self._contribute(attempt, first, gradients, [bucket]))

    def entries_early(self, entries: Sequence[Entry]) -> None:
        """All entries of this member are known before its last backward; what goes first takes them along."""
        if self._attempt is not None:
            self._note(self._attempt, entries)

    def buffers_ready(self) -> None:
        """Block 0 is computed here: its buffers go to everybody."""
        attempt = self._attempt
        if attempt is not None and self._extra is not None and self._gives_buffers(attempt):
            self._on_thread(attempt, lambda: self._post_buffers(attempt))

    # ── transport's thread ──────────────────────────────────────────────────────────────────────────

    def buffer(
        self, generation: Generation, peer: WorkerId, header: Bulk, nbytes: int, deferrable: bool
    ) -> memoryview | Later | None:
        """Where to put a payload (`Handlers.buffer`)."""
        with self._lock:
            attempt = self._attempt
            if attempt is None or (attempt.generation, attempt.step) != (generation, header.step):
                return self._too_early(generation, peer, header, nbytes, deferrable)
        return self._place(attempt, peer, header, deferrable)

    def arrived(self, generation: Generation, peer: WorkerId, header: Bulk, view: memoryview) -> None:
        """A payload is complete (`Handlers.bulk`)."""
        with self._lock:
            parked = next((parked for parked in self._arriving if parked.place is view), None)
            if parked is not None:
                self._arriving.remove(parked)
                parked.full = True
            attempt = self._attempt
            if attempt is None or (attempt.generation, attempt.step) != (generation, header.step):
                return
        if parked is None:
            self._take_in(attempt, peer, header)
        elif attempt.began:  # its round began while it was still arriving
            self._take_parked(attempt, parked)

    def ledger_grew(self, generation: Generation) -> None:
        """More losses and weights are known: shards may be divided now. On that generation's thread."""
        attempt = self._attempt
        if attempt is not None and attempt.generation == generation:
            self._finish_folds(attempt)

    def _too_early(
        self, generation: Generation, peer: WorkerId, header: Bulk, nbytes: int, deferrable: bool
    ) -> memoryview | Later | None:
        current = self._member.plan.generation if self._member.plan else Generation(0, 0)
        if (generation, header.step) < (current, self._member.committed + 1):
            return None
        parked = _Parked(peer, header, None if deferrable else memoryview(bytearray(nbytes)))
        self._parked.setdefault((generation, header.step), []).append(parked)
        if parked.place is None:
            return LATER
        self._arriving.append(parked)
        return parked.place

    def _place(
        self, attempt: Attempt, peer: WorkerId, header: Bulk, deferrable: bool
    ) -> memoryview | Later | None:
        span = Span(header.bucket, header.lo, header.hi)
        if header.kind == RESULT:
            if header.bucket == self._extra:
                return self._buffers.landing().numpy().data
            if self._covered(span):
                return None
            return self.results.view(header.bucket, header.lo, header.hi)
        fold = attempt.folds[header.bucket] if attempt.folds else None
        term = next((term for term in attempt.exchange.terms if term.first == header.first), None)
        if (
            fold is None
            or fold.span != span
            or term is None
            or term.worker != peer
            or not fold.expects(header.first)
        ):
            return None
        if deferrable and not fold.wants(header.first):
            attempt.put_off.setdefault(header.bucket, {})[header.first] = (peer, header)
            return LATER
        return fold.place(header.first, int.from_bytes(header.meta, _PRESENCE_ORDER))

    def _take_in(self, attempt: Attempt, peer: WorkerId, header: Bulk) -> None:
        if header.kind == RESULT:
            if header.bucket != self._extra:
                presence = int.from_bytes(header.meta, _PRESENCE_ORDER)
                self.results.mark(header.bucket, header.lo, header.hi, presence)
            self._span_finished(attempt, Span(header.bucket, header.lo, header.hi))
            return
        fold = attempt.folds[header.bucket]
        assert fold is not None
        self._set_float_mode()
        fold.received(header.first)
        self._advance(attempt, header.bucket, header.first, peer)

    def _started(self, attempt: Attempt, final: Sequence[tuple[int, Gradients]]) -> None:
        """The round's own contributions that are ready, and what came before it."""
        if attempt.exchange.gather:
            self._post_gathered(attempt)
        for first, gradients in final:
            self._contribute(attempt, first, gradients, range(len(self._buckets)))
        if self._extra is not None and self._gives_buffers(attempt) and self._buffers.left is not None:
            self._post_buffers(attempt)
        with self._lock:
            parked = self._parked.pop((attempt.generation, attempt.step), [])
            attempt.began = True
        for payload in parked:
            if payload.place is None:
                assert attempt.transport is not None
                attempt.transport.take(payload.peer, payload.header)
            elif payload.full:
                self._take_parked(attempt, payload)
        self._maybe_all_sent(attempt)

    def _take_parked(self, attempt: Attempt, parked: _Parked) -> None:
        """A payload that was received before its round: put it where it belongs now."""
        assert parked.place is not None
        place = self._place(attempt, parked.peer, parked.header, deferrable=False)
        if isinstance(place, memoryview):
            place[:] = parked.place
            self._take_in(attempt, parked.peer, parked.header)

    def _contribute(self, attempt: Attempt, first: int, gradients: Gradients, buckets: Sequence[int]) -> None:
        """A leaf of mine: its pieces to the shards' owners, its own into my folds; each once a round."""
        self._set_float_mode()
        self._tell_ledger(attempt)
        for bucket in buckets:
            if (first, bucket) in attempt.given:
                continue
            attempt.given.add((first, bucket))
            portion = self._buckets.portion(bucket, gradients)
            meta = _bits(portion.presence)
            for rank, worker in enumerate(attempt.exchange.ranks):
                span = attempt.exchange.of(bucket, rank)
                if span.lo >= span.hi:
                    continue
                if worker != self._member.worker:
                    header = Bulk(LEAF, attempt.step, bucket, first, span.lo, span.hi, meta)
                    self._post(attempt, worker, header, portion.slices(span.lo, span.hi))
                    continue
                fold = attempt.folds[bucket]
                assert fold is not None
                fold.contribute(first, portion)
                self._advance(attempt, bucket, first, worker)
        self._finish_folds(attempt)

    def _advance(self, attempt: Attempt, bucket: int, first: int, worker: WorkerId) -> None:
        """A term joined the fold: take the next that waits for its turn; finish if it was the last."""
        fold = attempt.folds[bucket]
        assert fold is not None
        waiting = attempt.put_off.get(bucket)
        if waiting:
            for other in [other for other in waiting if fold.wants(other)]:
                peer, header = waiting.pop(other)
                assert attempt.transport is not None
                attempt.transport.take(peer, header)
        with self._lock:
            last = self._is_current(attempt) and self._member.leaf_arrived(bucket, first, worker)
        if last:
            attempt.complete.add(bucket)
            self._finish_folds(attempt)

    def _finish_folds(self, attempt: Attempt) -> None:
        """Divide the complete shards, once all weights are known, and give them to everybody."""
        with self._lock:
            weight = self._weight() if self._is_current(attempt) else None
        if weight is None:
            return
        for bucket in sorted(attempt.complete):
            attempt.complete.discard(bucket)
            fold = attempt.folds[bucket]
            assert fold is not None
            self._set_float_mode()
            presence = fold.finish(weight or 1.0)
            self._post_to_all(attempt, fold.span, presence)
            self._span_finished(attempt, fold.span)

    def _weight(self) -> float | None:
        """Σ weight over the step's micro-batches in order, once all are known."""
        ledger = self._member.work.ledger
        present = self._shape.present(self._member.committed + 1)
        if len(ledger) < present:
            return None
        return sum(ledger[micro_batch].weight for micro_batch in range(present))

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────

    def _make_folds(self, attempt: Attempt) -> None:
        blocks: dict[int, list[int]] = {}
        for term in attempt.exchange.terms:
            block = self._shape.block(term.first) if self._shape.exact else term.first
            blocks.setdefault(block, []).append(term.first)
        order = [blocks[block] for block in sorted(blocks)]
        for bucket in range(len(self._buckets)):
            span = attempt.exchange.mine(bucket)
            wanted = span.lo < span.hi and bool(order)
            attempt.folds.append(
                Fold(self._buckets, span, order, self.results, self._scratch) if wanted else None
            )

    def _term(self, attempt: Attempt, held: Sequence[Run], micro_batch: int) -> int | None:
        """The name of the term that this micro-batch is in, if `held` has the whole of it."""
        run = next((run for run in held if run.first <= micro_batch < run.stop), None)
        first = attempt.exchange.term_of(run.first) if run is not None else None
        return first if first in attempt.exchange.final(held) else None

    def _gives_buffers(self, attempt: Attempt) -> bool:
        return any(leaf.first == 0 for leaf in attempt.exchange.own_leaves)

    def _covered(self, span: Span) -> bool:
        """Whether the member knows of all of the span. What came after a seal may lie here unknown to it."""
        with self._lock:
            reduced = self._member.work.reduced
        return any(
            done.bucket == span.bucket and done.lo <= span.lo and span.hi <= done.hi for done in reduced
        )

    def _note(self, attempt: Attempt, entries: Sequence[Entry]) -> None:
        """Entries of this member that its next contribution tells everybody, unless that was done."""
        with self._lock:
            if entries and attempt.told != tuple(entries):
                attempt.told = attempt.untold = tuple(entries)
                self._member.work.ledger.update((entry.micro_batch, entry) for entry in entries)

    def _tell_ledger(self, attempt: Attempt) -> None:
        with self._lock:
            entries, attempt.untold = attempt.untold, ()
        if entries and attempt.transport is not None:
            ledger = Ledger(attempt.generation, attempt.step, self._member.worker, entries)
            tell_all(attempt.transport, self._member.worker, attempt.exchange.ranks, ledger)

    def _post_gathered(self, attempt: Attempt) -> None:
        for source in attempt.exchange.gather:
            if source.worker == self._member.worker:
                bucket = source.span.bucket
                presence = 0 if bucket == self._extra else self.results.presence(bucket)
                self._post_to_all(attempt, source.span, presence)

    def _post_buffers(self, attempt: Attempt) -> None:
        assert self._extra is not None
        if (0, self._extra) in attempt.given:
            return
        attempt.given.add((0, self._extra))
        span = Span(self._extra, 0, self._buffers.nbytes)
        self._post_to_all(attempt, span, 0)
        self._span_finished(attempt, span)

    def _post_to_all(self, attempt: Attempt, span: Span, presence: int) -> None:
        if span.bucket == self._extra:
            view = self._buffers.landing().numpy().data[span.lo : span.hi]
        else:
            view = self.results.view(span.bucket, span.lo, span.hi)
        header = Bulk(RESULT, attempt.step, span.bucket, 0, span.lo, span.hi, _bits(presence))
        for worker in attempt.exchange.ranks:
            if worker != self._member.worker:
                self._post(attempt, worker, header, [view])

    def _post(self, attempt: Attempt, worker: WorkerId, header: Bulk, buffers: Sequence[memoryview]) -> None:
        assert attempt.transport is not None

        def sent() -> None:
            with self._lock:
                attempt.sent += 1
                self._maybe_all_sent(attempt)

        attempt.transport.post(worker, header, buffers, sent)

    def _maybe_all_sent(self, attempt: Attempt) -> None:
        with self._lock:
            if self._is_current(attempt) and attempt.sent >= attempt.expected and not attempt.said:
                attempt.said = True
                self._perform(self._member.sends_complete())

    def _span_finished(self, attempt: Attempt, span: Span) -> None:
        with self._lock:
            if self._is_current(attempt):
                self._perform(self._member.span_finished(span))

    def _is_current(self, attempt: Attempt) -> bool:
        """Whether the attempt is that of the member's round: the next may be planned, and not begun here."""
        return self._attempt is attempt and self._member.round.exchange is attempt.exchange

    def _on_thread(self, attempt: Attempt, call: Callable[[], None]) -> None:
        if attempt.transport is None:
            call()
        else:
            attempt.transport.submit(call)

    def _set_float_mode(self) -> None:
        flush_denormals(self.flush_denormals)


def tell_all(transport: Transport, me: WorkerId, ranks: Sequence[WorkerId], body: PeerMessage) -> None:
    """One small message to every other member."""
    data = msgspec.msgpack.encode(body)
    for worker in ranks:
        if worker != me:
            transport.tell(worker, data)


def _bits(presence: int) -> bytes:
    return presence.to_bytes((presence.bit_length() + 7) // 8, _PRESENCE_ORDER)
