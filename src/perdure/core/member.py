"""One worker's side of the step transaction: what it may start, send and commit. Pure.

The rules of docs/protocol.md live here as they concern a worker:

1. `adopt` a plan (P11: only of the highest sealed number), or go on `nominal`ly after a commit.
2. `next` says what the main thread does now: compute a micro-batch, close the step's compute (send the
   header), commit, take state, wait, or leave the loop.
3. Results, headers and 'hold' messages come in; when this member holds the whole gradient, all headers
   agree and its own sends are complete it says 'hold'; when all have said so it may commit (P2).
4. `enter_commit` and `seal` exclude one another (P3): after a seal nobody commits in an older generation.
5. After the commit: switch if all headers of the step named the same prepared generation (P6), or wait
   for the plan if sealed, or go on.

Every method returns actions for the runtime (or the simulator) to carry out; none blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from perdure.core import assignment
from perdure.core.exchange import Exchange, covered, merge
from perdure.core.step import Round, Work, with_digest
from perdure.schema import messages as msg
from perdure.schema.errors import ProtocolError
from perdure.schema.ids import NONE, Generation, WorkerId
from perdure.schema.plan import (
    SWITCH,
    Address,
    Entry,
    Header,
    Hold,
    Leaf,
    Ledger,
    PeerMessage,
    Plan,
    Position,
    Record,
    Shape,
    Span,
    Switched,
)

# ── actions ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tell:
    """Send a message to the coordinator."""

    message: msg.WorkerMessage


@dataclass(frozen=True)
class FormGroup:
    """Build this generation's group in the background."""

    generation: Generation
    members: tuple[Address, ...]


@dataclass(frozen=True)
class Interrupt:
    """Tear every collective of a generation older than this one; its results are not waited for."""

    below: Generation


@dataclass(frozen=True)
class DropGroups:
    """Destroy the groups older than this generation (P12)."""

    below: Generation


@dataclass(frozen=True)
class StartExchange:
    """Exchange the step's leaves or finished spans under `plan`, as `exchange` books it."""

    plan: Plan
    step: int
    exchange: Exchange


@dataclass(frozen=True)
class Broadcast:
    """Send this to every other member of the generation."""

    generation: Generation
    body: PeerMessage


@dataclass(frozen=True)
class Void:
    """Throw away leaves and finished spans of the step in progress (P8)."""


@dataclass(frozen=True)
class Wake:
    """The main thread should ask `next` again."""


Action = Tell | FormGroup | Interrupt | DropGroups | StartExchange | Broadcast | Void | Wake


# ── what the main thread does next ──────────────────────────────────────────────────────────────────


class Do(Enum):
    """The answers of `Member.next`."""

    COMPUTE = "compute"
    HEADER = "header"
    COMMIT = "commit"
    HEAL = "heal"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True)
class Next:
    """What to do now; `micro_batch` for COMPUTE."""

    do: Do
    micro_batch: int = -1


class Member:
    """The state machine of one worker. Not thread-safe: the caller holds one lock around every call."""

    def __init__(self, worker: WorkerId, shape: Shape, committed: int = -1, digest: str = "") -> None:
        self.worker = worker
        self.shape = shape
        self.committed = committed
        self.digest = digest
        self.sealed = NONE
        self.plan: Plan | None = None
        self.work = Work()
        self.round = Round()
        self.prepared: Plan | None = None
        self.formed: set[Generation] = set()
        self.committing = False
        self.healing = False
        self.must_commit = False
        self.left = False
        self.ended = False
        self.void_next = False
        self.unfit = False
        self.records: dict[int, Record] = {}
        self._confirmed = -1
        self._pending: Plan | None = None
        self._offers: dict[Generation, Plan] = {}
        self._switch: Plan | None = None
        self._announced: Plan | None = None
        self._switched_at: int | None = None
        self._final = False
        self.broke_off = False
        self._early: list[Header | Hold | Ledger] = []
        self._dropped_below = NONE
        self._computes_in = NONE

    # ── the coordinator speaks ──────────────────────────────────────────────────────────────────────

    def seal(self, message: msg.Seal) -> list[Action]:
        """Give up committing below a generation and report the position (P3, P4)."""
        generation = message.generation
        if generation <= self.sealed:
            return []
        self.sealed = generation
        self.prepared, self._offers = None, {}
        return [
            Interrupt(generation),
            FormGroup(generation, message.members),
            Tell(msg.Report(generation, self.position())),
        ]

    def open(self, plan: Plan) -> list[Action]:
        """Act on a plan, if it is that of the highest sealed number (P11); after a running commit.

        A planned generation's, its base known by now, tells a joiner what its peers tell it too.
        """
        if plan.generation in self._offers:
            return self._join(plan.generation, plan.base)
        if plan.generation != self.sealed or (self.plan and plan.generation <= self.plan.generation):
            return []
        if self.committing:
            self._pending = plan
            return []
        return self._adopt(plan, plan.base)

    def prepare(self, plan: Plan) -> list[Action]:
        """Form the next generation's group in the background (P6); switch where all headers agree."""
        base = self.plan.generation if self.plan else NONE
        newcomer = self.plan is None or self.worker not in self.plan.ranks
        if plan.generation <= self.sealed or (not newcomer and plan.follows != base):
            return []
        if self.prepared and plan.generation <= self.prepared.generation:
            return []
        self.prepared = plan
        if newcomer:
            self._offers[plan.generation] = plan
        if plan.stop or self.worker not in plan.ranks:
            self.formed.add(plan.generation)
            return []
        return [FormGroup(plan.generation, plan.members)]

    def group_formed(self, generation: Generation) -> list[Action]:
        """The group of a generation is connected to all its members."""
        self.formed.add(generation)
        return [Wake()]

    def acknowledged(self, step: int) -> list[Action]:
        """Records up to `step` are on disk: they need not be kept (P18)."""
        self.records = {s: record for s, record in self.records.items() if s > step}
        return []

    # ── the peers speak ─────────────────────────────────────────────────────────────────────────────

    def heard(self, body: PeerMessage) -> list[Action]:
        """A header, a hold or a switch from a peer; what is early is kept, what is old is dropped."""
        if isinstance(body, Switched):
            return self._join(body.generation, body.base)
        generation = self.plan.generation if self.plan else NONE
        if (body.generation, body.step) > (generation, self.committed + 1):
            self._early.append(body)
            return []
        if (body.generation, body.step) != (generation, self.committed + 1) or self.committing:
            return []
        if isinstance(body, Hold):
            self.round.holds.add(body.worker)
            return self._progress()
        self.work.ledger.update((entry.micro_batch, entry) for entry in body.entries)
        if isinstance(body, Header):
            self.round.headers[body.worker] = body
            self.work.vouch(body)
        return self._progress()

    def _join(self, generation: Generation, base: int) -> list[Action]:
        """The old members have switched after `base`: a joiner follows; they do so at their own commit."""
        plan = self._offers.get(generation)
        if plan is None or self.worker not in plan.ranks:
            return []
        return self._adopt(plan, base)

    def leaf_arrived(self, bucket: int, first: int, worker: WorkerId) -> bool:
        """A leaf's piece of my shard is here; true when the shard can be folded."""
        exchange = self.round.exchange
        return exchange is not None and not self.superseded and exchange.leaf(bucket, first, worker)

    def span_finished(self, span: Span) -> list[Action]:
        """A span of the finished gradient is here, folded or received.

        After a seal nothing more is taken note of: the leaves it was folded from may change, now that
        the position is reported (P1).
        """
        if self.round.exchange is None or self.superseded:
            return []
        self.round.exchange.span(span)
        self.work.reduced = merge((*self.work.reduced, span))
        return self._progress()

    def sends_complete(self) -> list[Action]:
        """All of this member's own sends of the round are in the kernel's hands (P2)."""
        self.round.sends_complete = True
        return self._progress()

    # ── the main thread asks and tells ──────────────────────────────────────────────────────────────

    def next(self) -> Next:
        """What the main thread does now."""
        if self.healing:
            return Next(Do.HEAL)
        if self.ended or self.left:
            return Next(Do.END)
        if self.committing:
            return Next(Do.COMMIT)
        if self.work.queue:
            return Next(Do.COMPUTE, self.work.queue[0])
        if self._may_commit():
            return Next(Do.COMMIT)
        if self._header_due():
            return Next(Do.HEADER)
        return Next(Do.WAIT)

    def start(self, micro_batch: int) -> list[Action]:
        """The main thread starts the first micro-batch of its queue: after a seal only claims start (P4)."""
        assert self.work.queue[:1] == [micro_batch], "only the head of the queue may start"
        self.work.queue.pop(0)
        self.work.in_hand = micro_batch
        if self.plan is None or self._computes_in == self.plan.generation:
            return []
        self._computes_in = self.plan.generation
        return [Tell(msg.Computed(self.plan.generation, self.committed + 1, micro_batch))]

    def computed(self, entry: Entry) -> list[Action]:
        """The micro-batch in hand is a leaf now (or the end of a run)."""
        micro_batch = self.work.in_hand
        assert micro_batch == entry.micro_batch, "only the micro-batch in hand can be finished"
        self.work.in_hand = None
        if self.void_next:
            self.void_next = False
            return [Void(), Wake()]
        self.work.held = assignment.add(self.shape, self.work.held, micro_batch)
        self.work.entries[micro_batch] = entry
        self.work.ledger[micro_batch] = entry
        return []

    def voided(self, micro_batch: int) -> list[Action]:
        """The backward of the micro-batch in hand failed after it had begun: its whole run is void (E4)."""
        start = self.shape.run(self.shape.block(micro_batch)).first
        pile = not self.shape.exact
        lost = [run for run in self.work.held if pile or (run.first == start and run.stop == micro_batch)]
        self.work.held = tuple(run for run in self.work.held if run not in lost)
        again = [m for run in lost for m in range(run.first, run.stop)]
        self.work.in_hand = None
        self.work.queue[:0] = [*again, micro_batch]
        return [Wake()]

    def header(self, digest: str) -> list[Action]:
        """All of this member's share is computed and its state verified: say so to all (P6, P8, P15)."""
        plan, exchange = self.plan, self.round.exchange
        assert self._header_due(), "one header per round"
        assert plan is not None
        assert exchange is not None
        self.digest = digest
        self._announced = self.prepared if self.prepared and self.prepared.generation in self.formed else None
        own = covered(exchange.own_leaves)
        entries = self.work.ledger if exchange.gather else {m: self.work.entries[m] for m in own}
        mine = Header(
            generation=plan.generation,
            step=self.committed + 1,
            worker=self.worker,
            digest=digest,
            entries=tuple(entry for _, entry in sorted(entries.items())),
            ready=self._announced.generation if self._announced else NONE,
            fine=not self.unfit,  # and again in the next generation, until the leaves are thrown away
        )
        self.round.headers[self.worker] = mine
        self.work.vouch(mine)
        return [Broadcast(plan.generation, mine), *self._progress()]

    def enter_commit(self) -> bool:
        """Enter the commit of step committed+1, unless the generation was sealed meanwhile (P3)."""
        if not self._may_commit():
            return False
        self.committing = True
        ready = {header.ready for header in self.round.headers.values()}
        if not self.must_commit and self._announced and ready == {self._announced.generation}:
            # After the last step nobody needs to join or leave any more.
            last = self.committed + 2 >= self.shape.until
            self._switch = None if last and not self._announced.stop else self._announced
        return True

    def commit_ended(self, record: Record) -> list[Action]:
        """The user's optimizer code is through: the step is committed."""
        assert self.committing, "only a commit that was entered can end"
        self.committed += 1
        self.records[self.committed] = record
        self.committing = self.must_commit = self._final = self.unfit = False
        self.work, self.round = Work(), Round()
        switch, self._switch, self._announced = self._switch, None, None
        pending, self._pending = self._pending, None
        if pending is not None and pending.generation == self.sealed:
            return self._adopt(pending, pending.base)
        if switch is not None and self.sealed <= switch.generation:
            return self._adopt(switch, self.committed)
        if switch is not None:
            self.left = self.worker not in switch.ranks and not switch.stop
            self.ended = switch.stop
        if self.superseded:
            return [Wake()]
        return self._begin()

    def healed(self, digest: str, records: Sequence[Record] = ()) -> list[Action]:
        """The state at the plan's base is complete and verified.

        `records` are the donor's, not yet acknowledged: whoever has the state has the lines too (P18). If
        sealed meanwhile, the position is out and claims nothing (P4).
        """
        self.healing = False
        self.digest = digest
        for record in records:
            self.records.setdefault(record.step, record)
        self._confirmed = max(self._confirmed, self.committed - 1)
        if self.superseded:
            self.work.queue = []
            return [Wake()]
        return [Wake(), *self._resend_records(), *self._progress()]

    def finished(self, digest: str) -> list[Action]:
        """The loop ended here; the state's digest is known (P17)."""
        self.digest = digest
        self._final = True
        return self._say_finished()

    def stop_here(self) -> list[Action]:
        """The script left the loop by itself after the last committed step, as it does on all workers."""
        self.ended = self.broke_off = True
        self.work, self.round = Work(), Round()
        return [Wake()]

    @property
    def superseded(self) -> bool:
        """Whether the generation of the plan is sealed: nothing more of it counts."""
        return self.plan is not None and self.sealed > self.plan.generation

    # ── what follows from it ────────────────────────────────────────────────────────────────────────

    def position(self) -> Position:
        """What this worker has, as it is reported after a seal (P4)."""
        present = self.shape.present(self.committed + 1)
        # A joiner without its state has nothing either: what it folded may be of a state that dies out (E10).
        work = Work() if self.committing or self.healing else self.work
        # P6: a switch that the headers agreed on applies, although this commit has not ended yet.
        switch = self._switch
        leaves = switch is not None and not switch.stop and self.worker not in switch.ranks
        return Position(
            worker=self.worker,
            generation=self.plan.generation if self.plan else NONE,
            committed=-1 if self.healing else self.committed + self.committing,
            committing=self.committing,
            held=work.held,
            in_hand=work.in_hand,
            queue=tuple(work.queue),
            whole=not self.committing and (self.round.whole or self.must_commit),
            reduced=work.reduced,
            ledger_complete=len(work.vouched) >= present and len(work.digests) == 1,
            healing=self.healing,
            left=self.left or leaves,
            done=self.ended or (switch is not None and switch.stop),
            digest=self.digest,
        )

    def _adopt(self, plan: Plan, base: int) -> list[Action]:
        """Work under a plan from the step after `base` on."""
        switched = plan.base == SWITCH
        self.plan = plan
        self.prepared = self._announced = None
        self._offers = {}
        self.round = Round()
        if self.healing:
            # E10: should the plan begin anew from this worker, its own state is still the initial one.
            self.work = Work()
            self.committed = min(self.committed, base)
        self.must_commit = self.left = self.ended = self.healing = False
        self.formed = {generation for generation in self.formed if generation >= plan.generation}
        self._switched_at = base if switched else None
        actions: list[Action] = [Tell(msg.Adopted(plan.generation, base)), Wake()]
        if self.worker not in plan.ranks and not plan.stop:
            self.left = True
            return actions
        if switched and not plan.stop:
            actions.append(Broadcast(plan.generation, Switched(plan.generation, base, self.worker)))
        if plan.void:
            actions += self._drop_void(plan)
        if self.worker in plan.joiners:
            self.healing = True
            self.unfit = False
            self.committed = base
            self.work = Work()
        elif self.committed == base - 1:
            self.must_commit = True
            return actions + self._resend_records()
        elif self.committed != base:
            raise ProtocolError(
                f"P2: worker {self.worker} has step {self.committed}, the plan builds on {base}"
            )
        return actions + self._begin() + self._resend_records()

    def _drop_void(self, plan: Plan) -> list[Action]:
        """P8: what was folded from a corrupt worker's leaves is void, its own leaves too."""
        self.work.reduced = ()
        if self.worker not in plan.void:
            return []
        self.work.held, self.work.entries, self.work.ledger = (), {}, {}
        self.work.vouched, self.work.digests = set(), set()
        self.unfit = False
        self.void_next = self.work.in_hand is not None
        return [Void()]

    def _begin(self) -> list[Action]:
        """Begin (or go on with) the step after the last committed one under the plan."""
        plan = self.plan
        assert plan is not None
        step = self.committed + 1
        planned = plan.base == self.committed
        if plan.stop or self.broke_off or step >= self.shape.until:
            self.ended = True
            return [*self._say_finished(), Wake()]
        if planned:
            shares, leaves, gather = plan.shares, plan.leaves, plan.gather
        else:
            resting = plan.resting if self._switched_at == self.committed else ()
            shares, leaves = assignment.nominal(self.shape, step, plan.home, plan.ranks, resting)
            gather = ()
        void = [] if self.shape.exact or gather else self._drop_spoilt_pile(leaves)
        have = covered(self.work.held) | ({self.work.in_hand} if not self.void_next else set())
        self.work.queue = [m for m in shares.get(self.worker, ()) if m not in have]
        if not gather:
            # Folding begins anew in the memory of the finished spans.
            self.work.reduced = ()
        exchange = Exchange(self.worker, plan.ranks, leaves, gather, self.shape.buckets, self.shape.exact)
        for span in self.work.reduced if gather else ():
            exchange.span(span)
        self.round.exchange = exchange
        actions: list[Action] = [*void, StartExchange(plan, step, exchange), Wake()]
        early, self._early = self._early, []
        for body in early:
            actions += self.heard(body)
        return actions

    def _drop_spoilt_pile(self, leaves: Sequence[Leaf]) -> list[Action]:
        if not self.work.pile_is_spoilt(leaf for leaf in leaves if leaf.worker == self.worker):
            return []
        self.work.held, self.work.entries = (), {}
        self.void_next = self.work.in_hand is not None
        return [Void()]

    def _progress(self) -> list[Action]:
        """See whether the round came further: headers complete, whole, everybody holds."""
        plan, now = self.plan, self.round
        if plan is None or now.exchange is None or now.refused or self.superseded:
            return []  # after a seal nothing is promised any more: the position is out
        actions: list[Action] = []
        if set(now.headers) >= set(plan.ranks) and not now.whole:
            actions += self._all_headers(plan, now)
            if not now.refused and now.exchange.complete and now.sends_complete:
                now.whole = True
                now.holds.add(self.worker)
                actions.append(
                    Broadcast(plan.generation, Hold(plan.generation, self.committed + 1, self.worker))
                )
        if self._may_commit():
            actions.append(Wake())
        return actions

    def _all_headers(self, plan: Plan, now: Round) -> list[Action]:
        """All headers are here: the state before this step is agreed upon, or the step is refused."""
        actions: list[Action] = []
        if self._dropped_below < plan.generation:
            self._dropped_below = plan.generation
            actions.append(DropGroups(plan.generation))
        digests = {worker: header.digest for worker, header in now.headers.items()}
        unfit = tuple(sorted(worker for worker, header in now.headers.items() if not header.fine))
        if unfit or len(set(digests.values())) > 1:
            now.refused = True
            return [*actions, Tell(msg.Refusal(plan.generation, self.committed + 1, digests, unfit))]
        if self._confirmed < self.committed:
            self._confirmed = self.committed
            if self.committed in self.records:
                self.records[self.committed] = with_digest(self.records[self.committed], self.digest)
            actions += self._publish(self.committed)
        return actions

    def _publish(self, step: int) -> list[Action]:
        """The lowest member tells the coordinator a step's record once all are known to have it (P18)."""
        record = self.records.get(step)
        if record is None or self.plan is None or self.plan.ranks[0] != self.worker:
            return []
        return [Tell(msg.Published(record))]

    def _resend_records(self) -> list[Action]:
        """A new lowest member repeats what may have died with the old one."""
        return [
            action
            for step in sorted(self.records)
            if step <= self._confirmed
            for action in self._publish(step)
        ]

    def _say_finished(self) -> list[Action]:
        if not (self.ended and self._final):
            return []
        record = self.records.get(self.committed)
        last = with_digest(record, self.digest) if record else None
        earlier = [
            Tell(msg.Published(self.records[step])) for step in sorted(self.records) if step < self.committed
        ]
        return [*earlier, Tell(msg.Finished(self.committed, self.digest, last, self.broke_off))]

    def _may_commit(self) -> bool:
        plan, now = self.plan, self.round
        if plan is None or self.committing or self.healing or self.ended or self.sealed > plan.generation:
            return False
        return self.must_commit or (now.whole and now.holds >= set(plan.ranks))

    def _header_due(self) -> bool:
        plan, now = self.plan, self.round
        return (
            plan is not None
            and now.exchange is not None
            and self.worker not in now.headers
            and not (self.healing or self.must_commit or self.committing or self.ended or self.left)
            and not self.work.queue
            and self.work.in_hand is None
            and self.sealed <= plan.generation
        )
