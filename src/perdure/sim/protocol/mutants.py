"""The protocol with one rule switched off: the search must find the fault that the rule closes.

A mutant exchanges one part of a run (`Rig`) for a subclass that breaks exactly its rule. Rules that the
decisions in `core` keep are broken in a subclass of the production class. Rules that the worker's runtime
keeps (P1 memory, P12 connections, P14 transfer, P17 processes, the first half of P15) are broken in the
simulated runtime, which models them; the real one is held to them by the kill matrix. Nothing in
production code knows of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from perdure.core import assignment, resume
from perdure.core import member as core
from perdure.core.member import Do, Member, Next
from perdure.core.membership import Action, Left, Membership
from perdure.core.records import Differs, Records, Write
from perdure.core.step import Round
from perdure.schema import messages as msg
from perdure.schema.ids import NONE, Generation, WorkerId
from perdure.schema.plan import (
    Address,
    Header,
    Leaf,
    PeerMessage,
    Plan,
    Position,
    Record,
    Run,
    Shape,
    Span,
)
from perdure.sim.protocol.coordinator import SimCoordinator
from perdure.sim.protocol.faults import POINTS
from perdure.sim.protocol.healing import Healing, Session
from perdure.sim.protocol.reducing import Attempt, Reducing
from perdure.sim.protocol.search import Config
from perdure.sim.protocol.simulation import Rig
from perdure.sim.protocol.symbols import Expression
from perdure.sim.protocol.worker import SimWorker, Thread

# ── leaving a step and committing ───────────────────────────────────────────────────────────────────


class ResultsInLeaves(Reducing):
    """P1: finished spans land in the memory of the first leaf, as they would in `.grad` itself."""

    def clear(self) -> None:
        super().clear()
        self._landed: list[Span] = []

    def store(self, span: Span, values: Sequence[Expression]) -> None:
        super().store(span, values)
        self._landed.append(span)

    def leaf_value(self, leaf: Leaf, span: Span) -> Expression:
        hit = any(s.bucket == span.bucket and s.lo < span.hi and span.lo < s.hi for s in self._landed)
        return "a result" if hit and leaf.first == min(self.runs) else super().leaf_value(leaf, span)


class CountsAbandonedRounds(Reducing):
    """P1: what an abandoned attempt still does counts until the next has begun."""

    def counts(self, attempt: Attempt) -> bool:
        return self.attempt is attempt


class LeavesAlone(Member):
    """P2: commits as soon as it holds the gradient itself."""

    def _may_commit(self) -> bool:
        if self.plan is not None and self.round.whole:
            self.round.holds = set(self.plan.ranks)
        return super()._may_commit()


class CommitsWhenSealed(Member):
    """P3: a seal does not keep it from committing in the old generation."""

    @property
    def superseded(self) -> bool:
        return False

    def _may_commit(self) -> bool:
        sealed, self.sealed = self.sealed, NONE
        try:
            return super()._may_commit()
        finally:
            self.sealed = sealed


def claims_dealt_again(shape: Shape, step: int, positions: Mapping[WorkerId, Position]) -> tuple[Leaf, ...]:
    """P4: only what is held counts; what is in hand or queued is dealt again."""
    idle = {w: msgspec.structs.replace(p, in_hand=None, queue=()) for w, p in positions.items()}
    return _provided(shape, step, idle)


_provided = resume.provided


def folds_any_run(shape: Shape, held: Sequence[Run], micro_batch: int) -> tuple[Run, ...]:
    """P5: any contiguous run of a block is folded where it was computed."""
    for index, run in enumerate(held):
        if run.stop == micro_batch and shape.block(run.first) == shape.block(micro_batch):
            return (*held[:index], Run(run.first, run.count + 1), *held[index + 1 :])
    return (*held, Run(micro_batch, 1))


class ReadyForAnything(Member):
    """P6: 'ready' does not name the generation."""

    def enter_commit(self) -> bool:
        if not super().enter_commit():
            return False
        ready = all(header.ready != NONE for header in self.round.headers.values())
        if not self.must_commit and self._announced and ready:
            self._switch = self._announced
        return True


class ReadyAtTheLastMoment(Member):
    """P6: whether to switch is asked at the commit, not said once in the header."""

    def enter_commit(self) -> bool:
        if not super().enter_commit():
            return False
        now = self.prepared
        self._switch = now if now is not None and now.generation in self.formed else None
        return True


class NeverUnfit(Member):
    """P7: what a header says of its worker's fitness is not looked at."""

    def heard(self, body: PeerMessage) -> list[core.Action]:
        return super().heard(msgspec.structs.replace(body, fine=True) if isinstance(body, Header) else body)

    def header(self, digest: str) -> list[core.Action]:
        self.unfit = False
        return super().header(digest)


class TrustsEveryState(Member):
    """P8: digests are not compared."""

    def _all_headers(self, plan: Plan, now: Round) -> list[core.Action]:
        same = {w: msgspec.structs.replace(header, digest=self.digest) for w, header in now.headers.items()}
        now.headers = same
        return super()._all_headers(plan, now)


# ── generations ─────────────────────────────────────────────────────────────────────────────────────


class ForgetsItsNumber(SimCoordinator):
    """P9: the incarnation is not on disk: after a restart numbers are used again."""

    def next_incarnation(self) -> int:
        return 1


class ForgetsTheOtherMembership(Membership):
    """P11: a generation opened during a switch has the old members only."""

    def _bound(self) -> dict[WorkerId, Address]:
        offers, self._offers = self._offers, {}
        try:
            return super()._bound()
        finally:
            self._offers = offers


class DropsOldGroupsAtOnce(SimWorker):
    """P12: the old group is destroyed as soon as this worker works in the new one."""

    def perform(self, actions: Sequence[core.Action]) -> None:
        for action in actions:
            super().perform([action])
            if isinstance(action, core.StartExchange):
                self.sim.fabric.close(self.id, action.plan.generation)


# ── healing, leaving, ending ────────────────────────────────────────────────────────────────────────


class MixesSessions(Healing):
    """P14: pieces are taken whatever state they are of."""

    def __init__(self, worker: SimWorker) -> None:
        super().__init__(worker)
        self._kept: dict[int, str] = {}

    def key(self, donor: WorkerId, step: int, digest: str) -> bool:
        if not super().key(donor, step, digest) and not self.worker.member.healing:
            return False
        if self.session is None:
            self.session = Session(step, digest)
        self.session.chunks = {**self._kept, **self.session.chunks}
        self._kept = self.session.chunks
        return True

    def continued(self, step: int) -> Session | None:
        self._kept = dict(self.session.chunks) if self.session is not None else {}
        return super().continued(step)


class SaysItHasTheState(Member):
    """P15: a joiner sends its header before its state is complete."""

    def next(self) -> Next:
        healing, self.healing = self.healing, False
        due = healing and self._header_due()
        self.healing = healing
        return Next(Do.HEADER) if due else super().next()

    def header(self, digest: str) -> list[core.Action]:
        healing, self.healing = self.healing, False
        actions = super().header(digest)
        self.healing = healing
        return actions


class KnowsWhatItWillHave(SimWorker):
    """Lets `SaysItHasTheState` say the digest of what it is about to take."""

    def digest(self) -> str:
        plan = self.member.plan
        donors = [self.sim.workers[m.worker] for m in plan.donors] if plan is not None else []
        return donors[0].state.digest if self.member.healing and donors else super().digest()


class ReleasesLeaversAtTheSwitch(Membership):
    """P16: a leaver may go as soon as one member has switched."""

    def adopted(self, worker: WorkerId, generation: Generation, base: int) -> list[Action]:
        actions = super().adopted(worker, generation, base)
        gone = [w for w, p in self.peers.items() if p.leaving and not p.released and w not in self.members]
        for leaver in gone:
            self.peers[leaver].released = True
        return [*actions, *(Left(w) for w in gone)]


class LeavesWhenItHasFinished(SimWorker):
    """P17: after its last commit a worker exits without waiting for the others."""

    def _end(self) -> Thread:
        yield from super()._end()
        if self.member.ended:
            self.exit()
            yield None


class WritesWhateverComes(Records):
    """P18: lines are neither put in order nor dropped when they are there already."""

    def add(self, record: Record) -> list[Write | Differs]:
        self.last = max(self.last, record.step)
        self.agreed[record.step] = record.digest
        return [Write(record)]


class KeepsNoRecords(Member):
    """P18: a record is not kept until it is acknowledged."""

    def commit_ended(self, record: Record) -> list[core.Action]:
        self.records = {}
        return super().commit_ended(record)


class PublishesAtOnce(Member):
    """P18: a step is published when it is committed here, not when all are known to have it."""

    def commit_ended(self, record: Record) -> list[core.Action]:
        lowest = self.plan is not None and self.plan.ranks[0] == self.worker
        said: list[core.Action] = [core.Tell(msg.Published(record))] if lowest else []
        return [*said, *super().commit_ended(record)]


@dataclass(frozen=True)
class Mutant:
    """One rule off. `kinds` of faults at `points` bring it out; `seeds` runs are more than enough."""

    rule: str
    rig: Rig
    kinds: tuple[str, ...] = ("crash", "crash", "other")
    points: tuple[str, ...] = tuple(POINTS)
    seeds: int = 1000

    def config(self) -> Config:
        """The search that must find it."""
        return Config(kinds=self.kinds, points=self.points, rig=self.rig)


MUTANTS: dict[str, Mutant] = {
    "P1": Mutant("P1", Rig(reducing=ResultsInLeaves)),
    "P1 late": Mutant("P1", Rig(reducing=CountsAbandonedRounds), seeds=2000),
    "P2": Mutant("P2", Rig(member=LeavesAlone)),
    "P3": Mutant("P3", Rig(member=CommitsWhenSealed)),
    "P4": Mutant("P4", Rig(patches=((resume, "provided", claims_dealt_again),))),
    "P5": Mutant("P5", Rig(patches=((assignment, "add", folds_any_run),)), points=("start", "computed")),
    "P6": Mutant("P6", Rig(member=ReadyForAnything), ("leave", "grow", "stop", "crash")),
    "P6 late": Mutant("P6", Rig(member=ReadyAtTheLastMoment), ("leave", "grow", "stop")),
    "P7": Mutant("P7", Rig(member=NeverUnfit), ("unfit",)),
    "P8": Mutant("P8", Rig(member=TrustsEveryState), ("corrupt",)),
    "P9": Mutant("P9", Rig(coordinator=ForgetsItsNumber), ("restart",)),
    "P11": Mutant("P11", Rig(membership=ForgetsTheOtherMembership), ("leave", "grow", "crash", "other")),
    "P12": Mutant("P12", Rig(worker=DropsOldGroupsAtOnce), ("leave", "grow")),
    "P14": Mutant("P14", Rig(healing=MixesSessions), ("crash", "other"), ("give", "chunk")),
    "P15": Mutant("P15", Rig(member=SaysItHasTheState, worker=KnowsWhatItWillHave), ("grow", "leave")),
    "P16": Mutant("P16", Rig(membership=ReleasesLeaversAtTheSwitch), ("leave", "leave", "grow")),
    "P17": Mutant("P17", Rig(worker=LeavesWhenItHasFinished), ()),
    "P18": Mutant("P18", Rig(records=WritesWhateverComes)),
    "P18 kept": Mutant("P18", Rig(member=KeepsNoRecords), ("restart", "restart", "crash")),
    "P18 early": Mutant("P18", Rig(member=PublishesAtOnce), ()),
}
"""By name: the rule's number, and a word where a rule has several ways to be broken."""


def names(rules: Iterable[str]) -> list[str]:
    """The mutants of these rules."""
    return [name for name, mutant in MUTANTS.items() if mutant.rule in set(rules)]
