"""Taking and giving the state: a joiner pulls pieces from several donors, which go on computing.

    joiner ── ask(step) ──▶ donor          once for each donor of the plan
           ◀── offer(step, digest, records) or no
           ── want(index) ──▶              the next piece that nobody was asked for
           ◀── piece(step, digest, index)

A session is keyed by (step, digest): pieces of another are thrown away, and on a mismatch it starts from
zero (P14). What came is staged and swapped in when it is complete and its digest is right.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from perdure.schema import messages as msg
from perdure.schema.ids import NONE, WorkerId
from perdure.schema.plan import Plan, Record
from perdure.sim.protocol import symbols

if TYPE_CHECKING:
    from perdure.sim.protocol.worker import SimWorker


@dataclass
class State:
    """What a worker trains: pieces that are equal between commits, and change one by one in a commit."""

    chunks: list[str]

    @property
    def digest(self) -> str:
        """The state's name; a torn one has a name that no other state has."""
        first = self.chunks[0]
        return first if all(chunk == first for chunk in self.chunks) else "torn " + "+".join(self.chunks)


@dataclass
class Session:
    """What a joiner has of one state."""

    step: int
    digest: str
    chunks: dict[int, str] = field(default_factory=dict)
    records: tuple[Record, ...] = ()


class Healing:
    """Both sides of it, for one worker."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.session: Session | None = None
        self._answers: dict[WorkerId, tuple[str, tuple[Record, ...]] | None] = {}
        self._wanted: dict[int, WorkerId] = {}
        self._failed: set[WorkerId] = set()
        self._noted = NONE

    # ── the joiner ──────────────────────────────────────────────────────────────────────────────────

    def heal(self, plan: Plan) -> Generator[float | None]:
        """Main thread: take the state at the plan's base; ends when it is in place or was superseded."""
        worker, step = self.worker, self.worker.member.committed
        donors = [m.worker for m in plan.donors if m.worker != worker.id]
        self._answers, self._wanted, self._failed = {}, {}, set()
        self.session = self.continued(step)
        worker.hook("heal")
        if self._noted != plan.generation:
            self._noted = plan.generation
            names = " ".join(f"w{donor}" for donor in donors)
            worker.sim.note(f"w{worker.id}", f"takes the state after step {step} from {names}")
        for donor in donors:
            self._ask(donor, step)
        while not self._over(plan):
            ready = [d for d in donors if self._answers.get(d) is not None and d not in self._failed]
            if not ready and all(d in self._answers or d in self._failed for d in donors):
                yield worker.sim.pace.wire_s * 3  # nobody can give it now: ask again
                return
            self._want(step, ready)
            session = self.session
            if session is not None and len(session.chunks) == symbols.CHUNKS:
                self._swap_in(session, plan)
                return
            yield None

    def continued(self, step: int) -> Session | None:
        """What is already here of the session for this step."""
        return self.session if self.session is not None and self.session.step == step else None

    def _ask(self, donor: WorkerId, step: int) -> None:
        other = self.worker.sim.workers[donor]
        link = self.worker.sim.line(self.worker.id, donor)
        link.send(self._reaching(donor, lambda: other.healing.asked(self.worker.id, step)))

    def _want(self, step: int, ready: list[WorkerId]) -> None:
        if not ready:
            return
        have = self.session.chunks if self.session is not None else {}
        for index in range(symbols.CHUNKS):
            if index in have or self._wanted.get(index) in ready:
                continue
            donor = self.worker.sim.world.chance.pick(ready)
            self._wanted[index] = donor
            other = self.worker.sim.workers[donor]
            self.worker.sim.line(self.worker.id, donor).send(
                self._reaching(donor, partial(other.healing.wanted, self.worker.id, step, index))
            )

    def answered(self, donor: WorkerId, step: int, offer: tuple[str, tuple[Record, ...]] | None) -> None:
        """A donor offers its state, or says no."""
        if step != self.worker.member.committed or not self.worker.member.healing:
            return
        self._answers[donor] = offer
        if offer is not None:
            self.key(donor, step, offer[0])
            if self.session is not None:
                self.session.records = offer[1]
        self.worker.wake()

    def key(self, donor: WorkerId, step: int, digest: str) -> bool:
        """P14: whether a piece belongs to this session; another one's starts it from zero if it is due."""
        plan = self.worker.member.plan
        if plan is None or donor not in {m.worker for m in plan.donors} or not self.worker.member.healing:
            return False
        session = self.session
        if session is None or (session.step, session.digest) != (step, digest):
            self.session = Session(step, digest)
            self._wanted = {}
        return True

    def landed(self, donor: WorkerId, step: int, digest: str, index: int, chunk: str) -> None:
        """A piece of the state arrived."""
        if self.key(donor, step, digest) and self.session is not None:
            self.session.chunks[index] = chunk
            self.worker.hook("chunk")
            self.worker.wake()

    def donor_failed(self, donor: WorkerId) -> None:
        """The connection to a donor ended."""
        self._failed.add(donor)
        self.worker.wake()

    def _swap_in(self, session: Session, plan: Plan) -> None:
        worker = self.worker
        state = State([session.chunks[index] for index in range(symbols.CHUNKS)])
        worker.sim.judge.healed(worker, session, state)
        worker.state = state
        worker.healed_late = plan.generation < worker.member.sealed
        worker.hook("healed")
        worker.sim.note(f"w{worker.id}", f"has the state {state.digest} after step {session.step}")
        worker.perform(worker.member.healed(state.digest, session.records))
        worker.tell(msg.Healed(plan.generation, session.step, symbols.CHUNKS, 0.0, "replica"))

    def _over(self, plan: Plan) -> bool:
        member = self.worker.member
        return not member.healing or member.plan is None or member.plan.generation != plan.generation

    # ── the donor ───────────────────────────────────────────────────────────────────────────────────

    def asked(self, joiner: WorkerId, step: int) -> None:
        """A joiner asks for the state after a step."""
        worker = self.worker
        offer = (worker.state.digest, tuple(worker.member.records.values())) if self.gives(step) else None
        self._reply(joiner, lambda other: other.healing.answered(worker.id, step, offer))

    def wanted(self, joiner: WorkerId, step: int, index: int) -> None:
        """A joiner wants one piece."""
        worker = self.worker
        if not self.gives(step):
            self._reply(joiner, lambda other: other.healing.donor_failed(worker.id))
            return
        worker.hook("give")
        digest, chunk = worker.state.digest, worker.state.chunks[index]
        self._reply(joiner, lambda other: other.healing.landed(worker.id, step, digest, index, chunk))

    def gives(self, step: int) -> bool:
        """P3: a worker donates what it has committed, not while it commits.

        A donor that was corrupted since the last headers is not modelled: nothing would tell.
        """
        member = self.worker.member
        settled = not member.committing and not member.healing and not self.worker.corrupt
        return member.committed == step and settled

    def _reply(self, joiner: WorkerId, what: Callable[[SimWorker], None]) -> None:
        other = self.worker.sim.workers[joiner]
        link = self.worker.sim.line(self.worker.id, joiner)
        link.send(lambda: what(other) if other.alive else None)

    def _reaching(self, donor: WorkerId, what: Callable[[], None]) -> Callable[[], None]:
        other = self.worker.sim.workers[donor]

        def reach() -> None:
            if other.alive:
                what()
            elif self.worker.alive:
                self.donor_failed(donor)

        return reach
