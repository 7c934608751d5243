"""Which workers make up a job's generations, and when a new one is opened. Pure.

Unplanned (a member is lost):
1. `lost` opens the next number: `Seal` goes to every survivor of the union of the current and the
   prepared memberships (P11).
2. Each survivor answers with its position (`report`).
3. When all have answered, `core.resume` makes the one plan of that number and `Open` carries it.
   A further loss meanwhile is simply the next number.

Planned (a joiner is ready, a worker leaves, the job is stopped):
1. `Prepare` names the generation it follows; it is sent once that one is adopted by all (P6). A later one
   may be sent before the switch; the headers agree on at most one of those on offer.
2. Members form its group while they train; the headers agree on the boundary; `adopted` tells. The first
   to tell names the boundary: joiners hear it from here too, in case no peer is left to tell them.
3. Leavers stay donors until every member of the new generation has switched and has its state (P16).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.core import assignment, resume
from perdure.core.waste import Doing, wasted
from perdure.schema import messages as msg
from perdure.schema.errors import ProtocolError
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import SWITCH, Address, Plan, Position, Shape

ASK_AGAIN_MAX = 2
"""So often joiners are asked again whether they have the state after all, when nobody else has it."""


@dataclass(frozen=True)
class Tell:
    """Send a message to a worker."""

    worker: WorkerId
    message: msg.CoordinatorMessage


@dataclass(frozen=True)
class Opened:
    """A generation's plan is out: `lost` since the one before, `dealt` micro-batches of theirs begun anew."""

    plan: Plan
    lost: tuple[WorkerId, ...]
    dealt: int
    reason: str


@dataclass(frozen=True)
class Computing:
    """Every member works in the generation."""

    plan: Plan
    base: int


@dataclass(frozen=True)
class Left:
    """A leaver is no longer needed as a donor."""

    worker: WorkerId


@dataclass(frozen=True)
class Stale:
    """This worker's state is of no use to anybody: end it and start another."""

    worker: WorkerId
    reason: str


Action = Tell | Opened | Computing | Left | Stale


@dataclass
class Peer:
    """A worker that reached its first step."""

    address: Address
    position: Position
    leaving: bool = False
    healed: bool = True
    released: bool = False


@dataclass
class Opening:
    """A generation whose positions are being collected."""

    generation: Generation
    members: tuple[Address, ...]
    positions: dict[WorkerId, Position] = field(default_factory=dict)
    asked_again: int = 0


class Membership:
    """The generations of one job under one incarnation of the coordinator."""

    def __init__(self, incarnation: int) -> None:
        self.peers: dict[WorkerId, Peer] = {}
        self.shape: Shape | None = None
        self.current: Plan | None = None
        self.opening: Opening | None = None
        self.adopted_by: set[WorkerId] = set()
        self.progress = -1
        self._offers: dict[Generation, Plan] = {}
        self._switched_by: dict[Generation, set[WorkerId]] = {}
        self._last = Generation(incarnation, 0)
        self._lost: dict[WorkerId, Doing | None] = {}
        self._void: list[WorkerId] = []

    # ── what is ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def begun(self) -> bool:
        """Whether a generation was ever opened, or was to be."""
        return self._last.number > 0

    @property
    def prepared(self) -> Plan | None:
        """The newest planned generation that the members may switch to."""
        return self._offers[max(self._offers)] if self._offers else None

    def concerns(self, generation: Generation) -> bool:
        """Whether a connection that failed in this generation may keep the job from going on."""
        current = self.current is not None and generation == self.current.generation
        return self.opening is None and (current or generation in self._offers)

    @property
    def _agreed(self) -> Plan | None:
        """The newest plan in force: an offer that somebody switched to is agreed by all."""
        switched = [self._offers[generation] for generation, workers in self._switched_by.items() if workers]
        return switched[0] if switched else self.current

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """Living members of the newest generation that is in force."""
        agreed = self._agreed
        return tuple(w for w in agreed.ranks if w in self.peers) if agreed else ()

    @property
    def spare(self) -> tuple[WorkerId, ...]:
        """Workers that wait at their first step and belong to no generation."""
        bound = self._bound()
        return tuple(w for w, peer in self.peers.items() if w not in bound and not peer.leaving)

    @property
    def settled(self) -> bool:
        """Whether the current generation is adopted by all and all of it have their state."""
        return (
            self.current is not None
            and self.opening is None
            and self._agreed is self.current
            and self.adopted_by >= set(self.members)
            and all(self.peers[w].healed for w in self.members)
        )

    def _bound(self) -> dict[WorkerId, Address]:
        """Everyone who belongs to a generation that may still matter, in rank order, then their donors."""
        plans = [plan for plan in (self.current, *self._offers.values()) if plan is not None]
        bound = {m.worker: m for plan in plans for m in plan.members}
        if self.current is not None and not self.settled:
            for donor in self.current.donors:
                if donor.worker not in self.peers or not self.peers[donor.worker].released:
                    bound.setdefault(donor.worker, donor)
        if self.opening is not None:
            bound.update((m.worker, m) for m in self.opening.members)
        return bound

    # ── what happens ────────────────────────────────────────────────────────────────────────────────

    def ready(self, address: Address, position: Position, shape: Shape) -> None:
        """A worker reached its first step (or is seen again after the coordinator's restart)."""
        self.shape = self.shape or shape
        self.peers[address.worker] = Peer(address, position)

    def restored(self, worker: WorkerId, step: int, digest: str) -> None:
        """A worker took its state from a checkpoint."""
        peer = self.peers[worker]
        self.progress = max(self.progress, step)
        peer.position = Position(worker=worker, committed=step, digest=digest)

    def start(self, workers: Iterable[WorkerId]) -> list[Action]:
        """Open the first generation of this incarnation with these workers, if there are any."""
        members = tuple(self.peers[w].address for w in workers)
        return self._open(members) if members else []

    def lost(self, worker: WorkerId, corrupt: bool = False, doing: Doing | None = None) -> list[Action]:
        """A worker is gone (reaped by its agent, or its node is out of reach); again it changes nothing.

        `doing` is what it was seen to do last, if that is known.
        """
        if worker not in self.peers:
            return []
        bound = self._bound()
        del self.peers[worker]
        if worker not in bound:
            if not bound and all(peer.position.committed < 0 for peer in self.peers.values()):
                self.progress = -1  # whoever had restored the state is gone with it
            return []
        self._lost[worker] = doing
        if corrupt:
            self._void.append(worker)
        survivors = tuple(address for w, address in bound.items() if w in self.peers)
        if not survivors:
            self.end()
            return []
        return self._open(survivors)

    def again(self, void: Iterable[WorkerId] = ()) -> list[Action]:
        """Retry in place: the same members in a new generation (P11), without the leaves of `void` (P7)."""
        self._void.extend(void)
        return self._open(tuple(address for w, address in self._bound().items() if w in self.peers))

    def report(self, worker: WorkerId, generation: Generation, position: Position) -> list[Action]:
        """A survivor's position; the last one makes the plan."""
        opening = self.opening
        if opening is None or generation != opening.generation or worker not in self.peers:
            return []
        opening.positions[worker] = position
        self.peers[worker].leaving |= position.left
        if any(m.worker not in opening.positions for m in opening.members):
            return []
        return self._plan(opening)

    def adopted(self, worker: WorkerId, generation: Generation, base: int) -> list[Action]:
        """A worker works in a generation; for a prepared one that means the switch happened."""
        actions: list[Action] = []
        offer = self._offers.get(generation)
        if offer is not None:
            switched = self._switched_by.setdefault(generation, set())
            if not switched:
                known = msgspec.structs.replace(offer, base=base)
                actions += [Tell(w, msg.Open(known)) for w in offer.joiners if w in self.peers]
            switched.add(worker)
            if switched >= {w for w in offer.ranks if w in self.peers}:
                actions += self._switched(offer, base)
        elif self.current is not None and generation == self.current.generation:
            news = worker not in self.adopted_by
            self.adopted_by.add(worker)
            if news and self.adopted_by >= set(self.members):
                self._void = []
                actions.append(Computing(self.current, base))
                actions += self._release_leavers()
        return actions

    def healed(self, worker: WorkerId, generation: Generation) -> list[Action]:
        """A joiner of a generation has its state; in a later one it may be a joiner once more."""
        if worker in self.peers and self.current is not None and generation >= self.current.generation:
            self.peers[worker].healed = True
        return self._release_leavers()

    def leaving(self, worker: WorkerId) -> bool:
        """A worker asks to leave; true if it belongs to a generation and must hand over first."""
        if worker in self.peers:
            self.peers[worker].leaving = True
        return worker in self._bound()

    def prepare(self, members: Sequence[WorkerId], resting: bool = False, stop: bool = False) -> list[Action]:
        """Ask for a planned switch to these members, unless one is under way or the time is not right."""
        current = self.current
        if current is None or not self.settled or self.shape is None:
            return []
        offered = self.prepared
        if offered is not None and (offered.ranks, offered.stop) == (tuple(members), stop):
            return []
        if not stop and tuple(members) == current.ranks:
            return []
        joiners = tuple(w for w in members if w not in current.ranks)
        plan = Plan(
            generation=self._number(),
            members=tuple(self.peers[w].address for w in members),
            base=SWITCH,
            home=assignment.homes(self.shape.blocks, current.home, members),
            joiners=joiners,
            donors=tuple(m for m in current.members if m.worker in self.peers),
            resting=joiners if resting else (),
            follows=current.generation,
            stop=stop,
        )
        self._offers[plan.generation] = plan
        for worker in joiners:
            self.peers[worker].healed = False
        told = dict.fromkeys([*current.ranks, *members])
        return [Tell(w, msg.Prepare(plan)) for w in told if w in self.peers]

    def forget(self, worker: WorkerId) -> None:
        """A worker ended after the job did: nothing follows from it."""
        self.peers.pop(worker, None)

    def end(self) -> None:
        """The job's generations are over, and no state is left; a later start begins anew."""
        self.current = self.opening = None
        self._offers, self._switched_by, self._void = {}, {}, []
        self.progress = -1

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────

    def _number(self) -> Generation:
        self._last = Generation(self._last.incarnation, self._last.number + 1)
        return self._last

    def _open(self, members: tuple[Address, ...], asked_again: int = 0) -> list[Action]:
        """Seal everything older and collect positions (P9, P10: at least one sealed old member)."""
        opening = Opening(self._number(), members, asked_again=asked_again)
        self.opening = opening
        return [Tell(m.worker, msg.Seal(opening.generation, members)) for m in members]

    def _plan(self, opening: Opening) -> list[Action]:
        """All positions are here: one plan for this number, ever."""
        assert self.shape is not None
        positions = opening.positions.values()
        if not any(resume.synced(position) for position in positions) and not self._untouched(opening):
            # P10, G5: what is left are joiners without state; they must not start the job anew.
            if opening.asked_again < ASK_AGAIN_MAX and any(position.healing for position in positions):
                # One may have had all of it by the time it reported; now it can say so.
                return self._open(opening.members, opening.asked_again + 1)
            self.end()
            return [Stale(p.worker, "no survivor holds the state of the job") for p in positions]
        try:
            outcome = resume.resume(
                opening.generation,
                opening.members,
                opening.positions,
                self.shape,
                self.current.home if self.current else (),
                tuple(self._void),
            )
        except ProtocolError as error:
            return [Stale(w, str(error)) for w in _hindmost(opening)]
        plan = outcome.plan
        # Before the first plan it may be what a file says: further than the members while steps come again.
        self.progress = plan.base if self.current is None else max(self.progress, plan.base)
        if any(position.done for position in positions) and plan.step < self.shape.until:
            plan = msgspec.structs.replace(plan, stop=True)
        before = self.current
        self.current, self.opening = plan, None
        self._offers, self._switched_by = {}, {}
        self.adopted_by = set()
        for worker in plan.ranks:
            self.peers[worker].healed = worker not in plan.joiners
        dealt = wasted(self.shape, before, plan, outcome.dealt, self._lost) if before is not None else 0
        reason = "start" if before is None else outcome.reason
        opened = Opened(plan, tuple(self._lost), dealt, reason)
        self._lost = {}
        return [opened, *(Tell(m.worker, msg.Open(plan)) for m in opening.members)]

    def _untouched(self, opening: Opening) -> bool:
        """Whether no step can have been committed, so that the job may begin with anybody's own state (E10).

        A member of the current generation that never had the job's state has sent no header in it.
        """
        if self.progress >= 0 or self.current is None:
            return self.progress < 0
        return self.current.base < 0 and any(w in self.current.ranks for w in opening.positions)

    def _switched(self, plan: Plan, base: int) -> list[Action]:
        """Every member of the prepared generation works in it."""
        self.current = plan
        self.adopted_by = self._switched_by[plan.generation]
        self._offers, self._switched_by = {}, {}
        self.progress = max(self.progress, base)
        actions: list[Action] = [
            Opened(plan, (), 0, "stop" if plan.stop else "switch"),
            Computing(plan, base),
        ]
        return actions + self._release_leavers()

    def _release_leavers(self) -> list[Action]:
        """P16: those who left may go, now that all members have switched and have their state."""
        if not self.settled or self.current is None or self.current.stop:
            return []
        gone = [
            w
            for w, peer in self.peers.items()
            if peer.leaving and not peer.released and w not in self._bound()
        ]
        for worker in gone:
            self.peers[worker].released = True
        return [Left(w) for w in gone]


def _hindmost(opening: Opening) -> list[WorkerId]:
    """The workers that keep a plan from being made: those furthest behind."""
    least = min(p.committed for p in opening.positions.values() if resume.synced(p))
    return [w for w, p in opening.positions.items() if resume.synced(p) and p.committed == least]
