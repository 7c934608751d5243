"""What must never happen in a run, looked at from outside with everything in view."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from perdure.core.membership import Stale
from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record
from perdure.sim.protocol import symbols
from perdure.sim.protocol.symbols import Expression

if TYPE_CHECKING:
    from perdure.sim.protocol.healing import Session, State
    from perdure.sim.protocol.simulation import Simulation
    from perdure.sim.protocol.worker import SimWorker


class WrongError(Exception):
    """Something happened that must not."""


class Judge:
    """Watches a run; the first wrong thing ends it."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.commits = 0
        self._blind = False
        """Nobody is left who could tell a corrupt state from a sound one."""
        self._late_leaver = False
        self._epoch: dict[int, str] = {}
        self._reached: dict[int, set[str]] = defaultdict(set)
        self._done: dict[tuple[int, int], set[WorkerId]] = defaultdict(set)

    def wrong(self, what: str) -> None:
        """Say so, and end the run."""
        if not self._blind:
            raise WrongError(what)

    def _look_for_corruption(self) -> None:
        """Where sound members are no majority any more, nobody can tell who is right: stop judging."""
        members = [w for w in self.sim.workers.values() if self.counts(w) and w.member.plan is not None]
        corrupt = sum(worker.corrupt for worker in members)
        self._blind |= 0 < corrupt >= len(members) - corrupt

    def counts(self, worker: SimWorker) -> bool:
        """Whether this worker is one of the job's: alive, and not declared lost (G4)."""
        return worker.alive and not worker.excluded

    def _before_the_restart(self, worker: SimWorker) -> bool:
        """Whether what this worker does is still by the word of a coordinator that is no more."""
        plan = worker.member.plan
        return plan is not None and plan.generation.incarnation < self.sim.durable.incarnation

    # ── computing ───────────────────────────────────────────────────────────────────────────────────

    def started(self, worker: SimWorker, step: int, micro_batch: int) -> None:
        """G2: nothing is computed that a survivor has finished."""
        self._not_twice(worker, step, micro_batch)

    def computed(self, worker: SimWorker, step: int, micro_batch: int) -> None:
        """G2: and nothing that a survivor finished meanwhile (a claim was dealt again, P4)."""
        self._not_twice(worker, step, micro_batch)
        self._done[step, micro_batch].add(worker.id)

    def voided(self, worker: WorkerId) -> None:
        """P7, P8: this worker's leaves are worth nothing and may be computed again."""
        for workers in self._done.values():
            workers.discard(worker)

    def _not_twice(self, worker: SimWorker, step: int, micro_batch: int) -> None:
        if not self.counts(worker):
            return
        for other in self._done[step, micro_batch]:
            process = self.sim.workers[other]
            if self.counts(process) and process.member.committed < step and not process.leaving:
                self.wrong(f"G2: w{worker.id} computes {step}.{micro_batch}, which w{other} has")

    # ── committing ──────────────────────────────────────────────────────────────────────────────────

    def entered(self, worker: SimWorker, step: int, sums: tuple[Expression, ...]) -> None:
        """G1: the sum is the canonical one, from the state that this worker has."""
        state = worker.state.digest
        if worker.corrupt:  # it is found out at the next headers; until then it sums what the others sum
            state = self._epoch.get(step - 1, state)
            self._look_for_corruption()
        right = symbols.canonical(self.sim.shape, step, state)
        if sums != right:
            self.wrong(f"G1: w{worker.id} commits step {step} with {sums}, not {right}")

    def committed(self, worker: SimWorker, step: int, digest: str) -> None:
        """G1: whoever commits a step, commits the same."""
        self.commits += 1
        if worker.corrupt:
            return
        self._reached[step].add(digest)
        if not self.counts(worker):
            return
        known = self._epoch.setdefault(step, digest)
        if known != digest:
            self.wrong(f"G1: step {step} was committed as {known}, now as {digest} by w{worker.id}")

    def healed(self, worker: SimWorker, session: Session, state: State) -> None:
        """P14: what is swapped in is one state that the job reached."""
        if state.digest != session.digest:
            self.wrong(f"P14: w{worker.id} took {state.digest} for {session.digest} at step {session.step}")
        known = self._epoch.get(session.step)
        if known is not None and known != state.digest and self.counts(worker):
            self.wrong(f"P14: w{worker.id} took {state.digest} at step {session.step}, which is {known}")

    def evaluated(self, worker: SimWorker, step: int, answer: msg.EvaluationAll) -> None:
        """Everybody gets all results, in order."""
        right = tuple({"value": symbols.value(step, item)} for item in range(2))
        if answer.values != right:
            self.wrong(f"w{worker.id} got {answer.values} for the evaluation after step {step}")

    # ── the coordinator ─────────────────────────────────────────────────────────────────────────────

    def stale(self, action: Stale) -> None:
        """G3: nobody who holds the state is thrown away; who leaves may lag behind the others."""
        worker = self.sim.workers[action.worker]
        member = worker.member
        synced = member.plan is not None or member.committed >= 0
        holds = worker.alive and not member.healing and synced and not worker.healed_late
        if holds and not worker.excluded and not worker.leaving:
            self.wrong(f"G3: w{worker.id} is ended although it has step {member.committed}: {action.reason}")

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """A line of events.jsonl."""
        if name == "generation_opened":
            self._look_for_corruption()
            self._exclude_the_unheard()
            reason = fields["reason"]
            if reason == "start":
                self._start_over(fields["base"])
            elif reason not in ("switch", "stop") and not (self.sim.faults.disturbing or self._late_leaver):
                self.wrong(f"generation {fields['generation']} interrupts training without a fault")
        elif name == "fault_detected" and fields["kind"] == "hang":
            network = {"partition", "blip", "sever", "machine"}
            if not any(fault.kind in network for fault in self.sim.faults.fired):
                self.wrong(f"G3: w{fields['worker']} is ended as if it hung: {fields['message']}")
        elif name == "refused_step":
            for worker in fields["unfit"]:
                self.voided(worker)
        elif name == "digest_differs" and self.sim.schedule.seeded and "corrupt" not in str(fields):
            self.wrong(f"P18: {fields}")

    def _exclude_the_unheard(self) -> None:
        """A new coordinator opens without those whose agent did not come to it in time: they are lost."""
        coordinator = self.sim.coordinator
        known = coordinator.job.staff.workers if coordinator is not None else {}
        for worker in self.sim.workers.values():
            if worker.alive and worker.id not in known and self._before_the_restart(worker):
                self.sim.exclude(worker.id)

    def _start_over(self, base: int) -> None:
        holders = [w for w in self.sim.workers.values() if self.counts(w) and w.member.plan is not None]
        ahead = [w.id for w in holders if w.member.committed > base and not w.member.healing]
        if ahead:
            self.wrong(f"G3: the job starts over after step {base} although {ahead} have more")
        if self._epoch and max(self._epoch) > base:
            self._epoch = {step: digest for step, digest in self._epoch.items() if step <= base}
            self._done.clear()

    def trouble(self, worker: SimWorker, peer: WorkerId) -> None:
        """P12: a connection that is in use is not taken away without a fault."""
        leaver = worker.leaving or self.sim.workers[peer].leaving
        # Its old group may end before it is through with its last commit; the real mesh says goodbye there.
        self._late_leaver = self._late_leaver or worker.leaving
        if not self.sim.faults.disturbing and not leaver and not self.sim.ending:
            self.wrong(f"P12: w{worker.id} lost its connection to w{peer} without a fault")

    def written(self, record: Record) -> None:
        """P18: each step once, in order, as it was committed, and only when all have it."""
        lines = self.sim.durable.records
        if record.step != len(lines):
            self.wrong(f"P18: line {len(lines)} of metrics.jsonl is step {record.step}")
        for worker in self.sim.workers.values():
            member = worker.member
            working = self.counts(worker) and member.plan is not None and not member.left
            if working and self._before_the_restart(worker):
                continue  # what it has is still to be collected (P9)
            if working and not worker.leaving and member.committed < record.step:
                self.wrong(f"P18: step {record.step} is written, but w{worker.id} has not committed it")
        if record.digest not in self._reached[record.step]:
            self.wrong(f"P18: step {record.step} is written with digest {record.digest!r}")
        if record.loss != symbols.loss(self.sim.shape, record.step):
            self.wrong(f"P18: step {record.step} is written with loss {record.loss}")

    def published(self, written: msg.CheckpointWritten) -> None:
        """G4, G5: a checkpoint is a state that the job reached and wrote down."""
        if written.digest not in self._reached[written.step]:
            self.wrong(f"G5: a checkpoint of step {written.step} is {written.digest}")
        if written.step >= len(self.sim.durable.records):
            self.wrong(f"P18: a checkpoint of step {written.step} comes before its line")

    def ended(self, exit_code: int, message: str) -> None:
        """P17: all steps are written, the last state is saved, everybody is done."""
        sim, durable = self.sim, self.sim.durable
        cut = any(fault.kind in ("partition", "blip", "machine") for fault in sim.faults.fired)
        alone = cut and message == "every node is lost"
        no_checkpoint = not sim.schedule.checkpoint_every and "without checkpoints" in message
        living = any(self.counts(worker) and worker.member.committed >= 0 for worker in sim.workers.values())
        early = "before training" in message and not living
        before = exit_code == 143 and (early or "no worker had the state" in message)
        if alone or no_checkpoint or before:
            return
        last = len(durable.records) - 1
        if exit_code not in (0, 143) or (exit_code == 143 and not sim.stopped):
            self.wrong(f"the job ended with {exit_code}: {message}")
        if exit_code == 0 and last != sim.shape.until - 1:
            self.wrong(f"P17: the job ended, but metrics.jsonl ends with step {last}")
        ahead = [w.id for w in sim.workers.values() if self.counts(w) and w.member.committed > last]
        if ahead:
            self.wrong(f"P18: the job ended, but {ahead} committed more than step {last}")
        if sim.schedule.checkpoint_every and last >= 0:
            newest = max((step for step, _ in durable.checkpoints.values()), default=-1)
            # A life that began anew and was stopped may end before the lines of an earlier one do.
            reached = last if exit_code == 0 else max(self._epoch, default=-1)
            if newest != reached:
                self.wrong(f"P17: the job ended after step {reached}, its last checkpoint is of {newest}")

    def heard(self, worker: WorkerId, body: msg.WorkerMessage) -> None:
        """A worker's message reached the coordinator."""
