"""What the parts of a job's state machine have in common: what is known, and the actions that wait.

`job`, `saving`, `deaths`, `deadlines` and `plain` decide; each says here what it wants done. The parts beside
them (membership, records, tasks) know nothing of one another: what they ask for becomes the job's
actions here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from perdure.core import membership as mem
from perdure.core import records as rec
from perdure.core import tasks
from perdure.core.actions import (
    SIGKILL,
    SIGTERM,
    Action,
    End,
    Event,
    Kill,
    Say,
    Send,
    Start,
    WriteRecord,
)
from perdure.core.failures import Failures
from perdure.core.heals import Heals
from perdure.core.settings import Settings
from perdure.core.staff import Staff, Vacancy, Worker
from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record

STEP_TIMES_KEPT = 10

HEAL_BYTES_PER_S = 500e6
"""A careful guess at how fast a joiner takes its state."""

REST_SHARE = 0.25
"""A joiner whose healing lasts longer than this share of a step computes nothing in its first."""


class Office:
    """The state that is shared, and the verbs. Not thread-safe, never blocks."""

    def __init__(self, settings: Settings, membership: mem.Membership, records: rec.Records) -> None:
        self.settings = settings
        self.phase = "gathering"
        self.staff = Staff(settings.first_worker)
        self.membership = membership
        self.records = records
        self.failures = Failures(settings.max_failures)
        self.heals = Heals()
        self.tasks = tasks.Tasks()
        self.attempt = 0
        self.exit_code = 0
        self.opened_at = 0.0
        self.stopping = 0  # the signal that asked for it
        self.troubles = 0
        self._step_times: list[float] = []
        self.committed = -1
        """The last step committed since training began; `records` may know later ones of an earlier life."""
        self._out: list[Action] = []

    # ── verbs ───────────────────────────────────────────────────────────────────────────────────────

    def want(self, action: Action) -> None:
        """One more thing to be done."""
        self._out.append(action)

    def take(self) -> list[Action]:
        """Hand over what waits to be done."""
        out, self._out = self._out, []
        return out

    def send(self, worker: WorkerId, message: msg.CoordinatorMessage) -> None:
        """Send to a worker, if it is still there."""
        if worker in self.staff.workers:
            self.want(Send(worker, message))

    def kill(self, worker: WorkerId, signum: int = SIGKILL) -> None:
        """End a worker; its death then means nothing more."""
        if worker in self.staff.workers:
            self.staff.workers[worker].stopped = True
            self.want(Kill(worker, signum))

    def hire(self, vacancy: Vacancy) -> None:
        """Start a worker in a place that is free."""
        self.start(self.staff.hire(vacancy))

    def start(self, worker: Worker) -> None:
        """Order a worker's process; again it changes nothing."""
        node = self.staff.nodes[worker.node]
        before = sum(n.workers for n in self.staff.nodes.values() if n.rank < node.rank)
        rank = before + worker.slot
        self.want(Start(node.name, worker.id, worker.slot, rank, self.staff.size, self.attempt))

    def let_go(self, worker: WorkerId) -> None:
        """A leaver is not needed any more."""
        who = self.staff.workers.get(worker)
        if who is not None and not who.released:
            who.released = True
            self.event("left", worker=worker)
            if who.ready:
                self.send(worker, msg.Release(128 + SIGTERM))
            else:
                self.kill(worker)

    def event(self, name: str, **fields: Any) -> None:
        """A line of events.jsonl; node, generation and step are filled in."""
        if "worker" in fields and "node" not in fields and fields["worker"] in self.staff.workers:
            fields["node"] = self.staff.workers[fields["worker"]].node
        current = self.membership.current
        fields.setdefault("generation", str(current.generation) if current else None)
        fields.setdefault("step", (self.reached if self.membership.begun else self.records.last) + 1)
        self.want(Event(name, fields))

    def say(self, text: str) -> None:
        """A line for the people at the terminals."""
        self.want(Say(text))

    def end(self, exit_code: int, message: str) -> None:
        """The run is over; whoever does not end by itself is ended."""
        if self.phase == "over":
            return
        self.phase = "over"
        self.event("run_ended", exit_code=exit_code, message=message.splitlines()[-1] if message else "")
        for worker in list(self.staff.workers.values()):
            if worker.finished is None or not worker.released:
                self.kill(worker.id)
        self.want(End(exit_code, message))

    # ── what the parts ask for ──────────────────────────────────────────────────────────────────────

    def carry(self, actions: Sequence[mem.Action], now: float) -> None:
        """Membership's actions."""
        for action in actions:
            match action:
                case mem.Tell(worker, message):
                    if isinstance(message, msg.Seal):
                        self.opened_at = now
                    self.send(worker, message)
                case mem.Opened():
                    self._opened(action, now)
                case mem.Computing(plan, base):
                    generation = str(plan.generation)
                    self.event("generation_computing", generation=generation, members=plan.ranks, base=base)
                case mem.Left(worker):
                    self.let_go(worker)
                case mem.Stale(worker, reason):
                    self.say(f"worker {worker} is ended: {reason}")
                    self.kill(worker)

    def _opened(self, opened: mem.Opened, now: float) -> None:
        self.opened_at = now
        plan = opened.plan
        if opened.reason == "start" and plan.base > self.committed:
            self.committed = plan.base  # its members were an earlier coordinator's
            self.records.forget(plan.base)
        self.event(
            "generation_opened",
            generation=str(plan.generation),
            members=plan.ranks,
            base=plan.base,
            lost=opened.lost,
            dealt=opened.dealt,
            joiners=plan.joiners,
            gather=bool(plan.gather),
            reason=opened.reason,
        )
        self.heals.joined(plan.joiners, max(plan.base, self.membership.progress))
        for worker in plan.joiners:
            self.event("joined", worker=worker, generation=str(plan.generation))

    def carry_tasks(self, actions: Sequence[tasks.Deal | tasks.Answer]) -> None:
        """Tasks' actions."""
        for action in actions:
            step, index = action.key
            if isinstance(action, tasks.Deal):
                self.send(action.worker, msg.EvaluationDeal(step, index, (action.item,)))
            else:
                values = tuple(dict(value) for value in action.values)
                self.send(action.worker, msg.EvaluationAll(step, index, values, action.weights))

    def restart(self, step: int) -> None:
        """Training begins after `step` (−1: anew)."""
        self.committed = step
        self.records.restart(step)
        self.tasks.restart()

    def record(self, record: Record) -> None:
        """A step is known to be committed: its line, once, and what follows from that."""
        if record.digest:
            self.heals.agreed(record.step)
        known = record.step <= self.records.last
        lines = self.records.add(record)
        if record.step > self.committed:
            self.committed = record.step
            if known:
                self.event("step_again", step=record.step, time=record.time)
            self.failures.progress(further=any(isinstance(line, rec.Write) for line in lines))
            self.troubles = 0
            self._prove()
        for written in lines:
            if isinstance(written, rec.Write):
                self._step_times = [*self._step_times, written.record.time][-STEP_TIMES_KEPT:]
                self.want(WriteRecord(written.record))
            else:
                step, was, now = written.step, written.was, written.now
                self.event("digest_differs", step=step, was=was, now=now)
                self.say(f"step {step} came again with another digest: {was} → {now}")
        for worker in self.membership.members:
            # No step that is still to come again: its record would be dropped before it is told.
            self.send(worker, msg.Acknowledged(min(self.records.last, self.committed)))

    def _prove(self) -> None:
        """A step was committed: who took part in it can do what is asked of a worker."""
        for worker in [self.staff.workers[w] for w in self.membership.members if w in self.staff.workers]:
            if not worker.proven and worker.first_step is not None and worker.first_step <= self.committed:
                worker.proven = True
                if worker.node in self.staff.nodes:
                    self.staff.nodes[worker.node].start_succeeded()

    # ── what is known ───────────────────────────────────────────────────────────────────────────────

    @property
    def reached(self) -> int:
        """The last step that is known to be committed or to have its gradient, since training began."""
        return max(self.committed, self.membership.progress)

    @property
    def in_training(self) -> bool:
        """Whether the job has workers that train: what fails beside them has not failed at the start.

        After the coordinator's restart they train before they are members again.
        """
        members = self.phase in ("training", "saving") and bool(self.membership.members)
        return members or self.staff.at_work()

    @property
    def heal_is_long(self) -> bool:
        """Whether a joiner should rest in its first step; true while that is not known."""
        shape, times = self.membership.shape, self._step_times
        if shape is None or len(times) < 2:
            return True
        step_s = statistics.median(b - a for a, b in pairwise(times))
        return shape.state_bytes / HEAL_BYTES_PER_S > REST_SHARE * step_s

    def at_home(self, workers: Sequence[WorkerId]) -> list[WorkerId]:
        """Those of these workers whose disk is the one that checkpoints lie on."""
        home = self.settings.home_node
        return [w for w in workers if self.staff.workers[w].node == home]

    def rows(self) -> tuple[msg.PsRow, ...]:
        """One row a worker for `perdure ps`."""
        return tuple(self._row(worker) for worker in sorted(self.staff.workers.values(), key=lambda w: w.id))

    def _row(self, worker: Worker) -> msg.PsRow:
        progress, current = worker.progress, self.membership.current
        if worker.stopped:
            state = "dead"
        elif worker.leaving:
            state = "leaving"
        elif worker.id in self.membership.members:
            state = "active" if self.membership.peers[worker.id].healed else "joining"
        else:
            state = "standby" if worker.ready else "starting"
        return msg.PsRow(
            id=worker.id,
            node=worker.node,
            pid=worker.pid or None,
            state=state,
            generation=str(current.generation) if current else "",
            step=progress.step if progress else -1,
            phase=progress.phase if progress else "script",
            micro_batch=progress.micro_batch if progress else -1,
        )
