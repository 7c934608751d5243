"""One job as the coordinator sees it, composed of the pure parts beside this module.

    agents and workers ── events ──▶ Job ── actions ──▶ the server

The job is in one phase at a time:

    gathering   workers start; when the expected number is at its first step, generation 1 is opened
    training    generations follow one another (membership)
    saving      every member has finished (P17); the last state is being written
    released    workers run the rest of their scripts and exit
    over        the run has an exit code

`now` is any monotonic clock in seconds; the job itself has none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perdure.core import checkpoints as ckpt
from perdure.core import membership as mem
from perdure.core import records as rec
from perdure.core import tasks
from perdure.core.failures import Death, Decision, Failures
from perdure.core.staff import Node, Staff, Vacancy, Worker
from perdure.schema import messages as msg
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Address, Position, Record, Shape

SIGTERM, SIGKILL = 15, 9
NODE_GRACE_S = 0.5
TROUBLE_S = 1.0
TROUBLES_MAX = 3
SAVES_MAX = 10
REPORT_S = 30.0
HEAL_S = 60.0
REJOIN_S = 10.0
HEAL_BYTES_PER_S = 500e6
REST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed for one run of the coordinator.

    `first_worker` and `last_step` … come from the run directory; `home_node` is the node whose disk the
    checkpoints are on.
    """

    job: str
    incarnation: int
    home_node: str
    min_nodes: int = 1
    max_failures: int = 1000
    checkpoint_every: int | None = None
    digest_every: int = 1
    log_samples: bool = False
    blocks: int = 0
    first_worker: WorkerId = 0
    last_step: int = -1
    digests: dict[int, str] = field(default_factory=dict)
    checkpoints: tuple[str, ...] = ()
    checkpoint_dir: str = ""


# ── actions ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Send:
    """A message for a worker."""

    worker: WorkerId
    message: msg.CoordinatorMessage


@dataclass(frozen=True)
class Start:
    """Start a worker process; ranks are torchrun's."""

    node: str
    worker: WorkerId
    local_rank: int
    rank: int
    world: int
    attempt: int


@dataclass(frozen=True)
class Kill:
    """Send a signal to a worker."""

    worker: WorkerId
    signum: int = SIGKILL


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class WriteRecord:
    """A line of metrics.jsonl."""

    record: Record


@dataclass(frozen=True)
class PublishCheckpoint:
    """Rename a checkpoint into place and prune."""

    written: msg.CheckpointWritten


@dataclass(frozen=True)
class Discard:
    """Remove what was written aside."""

    partial: str


@dataclass(frozen=True)
class PublishSave:
    """Rename what `job.save` wrote aside to the path that the script named; answer with `saved`."""

    worker: WorkerId
    request: msg.SaveRequest


@dataclass(frozen=True)
class Persist:
    """Keep the number of blocks with the job: it never changes again."""

    blocks: int


@dataclass(frozen=True)
class Say:
    """A line for the people at the terminals."""

    text: str


@dataclass(frozen=True)
class End:
    """The run is over."""

    exit_code: int
    message: str = ""


Action = (
    Send | Start | Kill | Event | WriteRecord | PublishCheckpoint | Discard | PublishSave | Persist | Say | End
)  # fmt: skip


class Job:
    """The coordinator's state machine for one job."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = "gathering"
        self.staff = Staff(settings.first_worker)
        self.membership = mem.Membership(settings.incarnation)
        self.records = rec.Records(settings.last_step, settings.digests)
        self.checkpoints = ckpt.Checkpoints(settings.checkpoint_every)
        self.failures = Failures(settings.max_failures)
        self.tasks = tasks.Tasks()
        self.stopping = 0
        self.attempt = 0
        self._restorable = settings.checkpoints
        self._restoring: WorkerId | None = None
        self._publishing = False
        self._saves = 0
        self._blocks = settings.blocks
        self._rejoin_until: float | None = None
        self._opened_at = 0.0
        self._lost_at: dict[WorkerId, float] = {}
        self._troubles: dict[WorkerId, tuple[Generation, float]] = {}
        self._trouble_count = 0
        self._times: list[float] = []
        self._exit_code = 0
        self._out: list[Action] = []

    # ── events from the server ──────────────────────────────────────────────────────────────────────

    def agent_joined(self, hello: msg.AgentHello, now: float) -> list[Action]:
        """A node's agent said hello, for the first time or again."""
        node = self.staff.nodes.get(hello.node)
        if node is None:
            rank = len(self.staff.nodes)
            node = Node(hello.node, hello.host, hello.workers, hello.standby, rank)
            self.staff.nodes[hello.node] = node
        else:
            self._reconnected(hello, now)
        node.lost_at = None
        for seen in hello.seen:
            self._seen(hello, seen, now)
        return self._go_on(now)

    def agent_lost(self, name: str, now: float) -> list[Action]:
        """A node's connection broke; it has a moment to come back."""
        if name in self.staff.nodes and self.phase != "over":
            self.staff.nodes[name].lost_at = now
        return self._go_on(now)

    def worker_started(self, worker: WorkerId, pid: int, now: float) -> list[Action]:
        """A worker process exists."""
        if worker in self.staff.workers:
            self.staff.workers[worker].pid = pid
            self._event("worker_started", worker=worker, pid=pid)
        return self._go_on(now)

    def worker_exited(self, exited: msg.WorkerExited, now: float) -> list[Action]:
        """A worker process ended, its socket drained."""
        worker = self.staff.workers.pop(exited.worker, None)
        if worker is not None:
            self._exited(worker, exited, now)
        return self._go_on(now)

    def worker_said(self, worker: WorkerId, message: msg.WorkerMessage, now: float) -> list[Action]:
        """A worker's message; one of a worker that is already gone changes nothing (G4)."""
        who = self.staff.workers.get(worker)
        if who is not None and (not who.stopped or isinstance(message, msg.Crashed)):
            handler: Callable[[Worker, Any, float], None] = getattr(
                self, f"_on_{type(message).__name__.lower()}"
            )
            handler(who, message, now)
        return self._go_on(now)

    def status(self, status: msg.Status) -> None:
        """What the workers of a node are doing."""
        for progress in status.workers:
            if progress.worker in self.staff.workers:
                self.staff.workers[progress.worker].progress = progress

    def asked(self, signum: int, now: float) -> list[Action]:
        """SIGINT or SIGTERM at a launcher: end at the boundary with the state saved; the second one at once."""
        if self.stopping or self.membership.current is None or self.phase in ("saving", "released"):
            self._end(128 + signum, "ended at once" if self.stopping else "ended before training began")
        elif self.phase == "training":
            self._say(f"signal {signum}: finishing the step and saving; again to end at once")
        self.stopping = self.stopping or signum
        return self._go_on(now)

    def saved(self, worker: WorkerId, path: str, step: int, reason: str, now: float) -> list[Action]:
        """The answer to `PublishSave`."""
        self._out.append(Send(worker, msg.SaveAnswer(step, path, reason)))
        return self._go_on(now)

    def published(self, written: msg.CheckpointWritten, path: str, reason: str, now: float) -> list[Action]:
        """The answer to `PublishCheckpoint`: `path` is in place, or why not."""
        self._publishing = False
        if reason:
            self._event("checkpoint_refused", path=written.partial, message=reason)
        else:
            self._restorable = (path, *(p for p in self._restorable if p != path))[:2]
            self._event(
                "checkpoint_written",
                step=written.step,
                bytes=written.nbytes,
                seconds=written.seconds,
                path=path,
            )
        if self.phase == "saving" and written.step >= self.records.last:
            self._release()
        return self._go_on(now)

    def tick(self, now: float) -> list[Action]:
        """Time passed: look at deadlines."""
        for node in list(self.staff.nodes.values()):
            if node.lost_at is not None and now - node.lost_at > NODE_GRACE_S:
                self._node_lost(node, now)
        self._watch_opening(now)
        self._watch_troubles(now)
        return self._go_on(now)

    # ── workers' messages ───────────────────────────────────────────────────────────────────────────

    def _on_joined(self, worker: Worker, message: msg.Joined, now: float) -> None:
        worker.joined = True
        blocks = self._blocks or self.staff.target
        self._send(
            worker.id,
            msg.Welcome(
                job=self.settings.job,
                blocks=blocks,
                digest_every=self.settings.digest_every,
                log_samples=self.settings.log_samples,
            ),
        )

    def _on_ready(self, worker: Worker, message: msg.Ready, now: float) -> None:
        known = self.membership.shape
        if known is not None and known != message.shape:
            self._end(
                1,
                f"worker {worker.id} trains something else than the others: {_difference(known, message.shape)}",
            )
            return
        if self._blocks and self._blocks != message.shape.blocks:
            text = f"the job was started with blocks={self._blocks}; the script now asks for {message.shape.blocks}"
            self._end(4, f"{text}; bits depend on it: keep it, or start anew with --fresh")
            return
        if not self._blocks:
            self._blocks = message.shape.blocks
            self._out.append(Persist(self._blocks))
        worker.ready = True
        self.failures.reached_first_step()
        address = Address(worker.id, worker.node, message.host, message.port)
        self.membership.ready(address, message.position, message.shape)

    def _on_report(self, worker: Worker, message: msg.Report, now: float) -> None:
        self._carry(self.membership.report(worker.id, message.generation, message.position), now)

    def _on_adopted(self, worker: Worker, message: msg.Adopted, now: float) -> None:
        self._carry(self.membership.adopted(worker.id, message.generation, message.base), now)

    def _on_computed(self, worker: Worker, message: msg.Computed, now: float) -> None:
        self._event(
            "first_micro_batch",
            worker=worker.id,
            generation=str(message.generation),
            step=message.step,
            micro_batch=message.micro_batch,
        )

    def _on_published(self, worker: Worker, message: msg.Published, now: float) -> None:
        self._record(message.record, now)
        self._ask_checkpoint(now)

    def _on_trouble(self, worker: Worker, message: msg.Trouble, now: float) -> None:
        if self.membership.concerns(message.generation):
            self._troubles.setdefault(message.peer, (message.generation, now))

    def _on_refusal(self, worker: Worker, message: msg.Refusal, now: float) -> None:
        current = self.membership.current
        if current is None or current.generation != message.generation or self.membership.opening is not None:
            return
        if not self._outvoted(message.digests, f"before step {message.step}", now):
            self._event("refused_step", step=message.step, unfit=message.unfit)
            self._carry(self.membership.again(void=message.unfit), now)

    def _outvoted(self, digests: Mapping[WorkerId, str], when: str, now: float) -> bool:
        """P8: those whose state is not the majority's are ended."""
        counts = [(list(digests.values()).count(d), -w, w) for w, d in digests.items()]
        right = digests[max(counts)[2]]
        wrong = [w for w, d in digests.items() if d != right]
        for w in wrong:
            if w in self.staff.workers:
                text = f"its state {when} differs from the others'"
                self._fault(w, Death("corrupt", None, None, message=text), "digest", 0.0, now)
        return bool(wrong)

    def _on_healstarted(self, worker: Worker, message: msg.HealStarted, now: float) -> None:
        self._event(
            "heal_started", worker=worker.id, step=message.step, bytes=message.nbytes, donors=message.donors
        )

    def _on_healed(self, worker: Worker, message: msg.Healed, now: float) -> None:
        self._carry(self.membership.healed(worker.id), now)
        self._event(
            "healed",
            worker=worker.id,
            step=message.step,
            bytes=message.nbytes,
            seconds=message.seconds,
            source=message.source,
        )

    def _on_healfailed(self, worker: Worker, message: msg.HealFailed, now: float) -> None:
        self._say(f"worker {worker.id} could not take the state: {message.reason}")
        self._kill(worker.id)

    def _on_leaving(self, worker: Worker, message: msg.Leaving, now: float) -> None:
        if not worker.leaving and self.phase in ("gathering", "training"):
            worker.leaving = True
            self._event(
                "fault_detected",
                worker=worker.id,
                kind="leave",
                detected_by="peer",
                message="asked to leave (SIGTERM)",
            )
            self._event("fault_decided", worker=worker.id, severity="SEV2", action="leave")
            if not self.membership.leaving(worker.id) and self._rejoin_until is None:
                self._let_go(worker.id)

    def _on_finished(self, worker: Worker, message: msg.Finished, now: float) -> None:
        worker.finished = message.step
        worker.last_record = message.record
        worker.last_digest = message.digest

    def _on_restored(self, worker: Worker, message: msg.Restored, now: float) -> None:
        if self._restoring != worker.id:
            return
        self._restoring = None
        for path, reason in message.refused:
            self._event("checkpoint_refused", path=path, message=reason)
            self._say(f"checkpoint {path} was not used: {reason}")
        if message.step < 0:
            self._end(5, "no checkpoint could be restored; see above, or start anew with --fresh")
            return
        self._restorable = (message.path,)
        self._say(f"going on from {message.path}: step {message.step} is the last committed one")
        self.membership.restored(worker.id, message.step, message.digest)
        self.records.resumed(message.step)
        self._open_first(now, message.step)

    def _on_checkpointwritten(self, worker: Worker, message: msg.CheckpointWritten, now: float) -> None:
        member = worker.id in self.membership.members
        self._carry_checkpoint(
            self.checkpoints.written(worker.id, message, member, self.records.agreed, now)
        )

    def _on_checkpointfailed(self, worker: Worker, message: msg.CheckpointFailed, now: float) -> None:
        self._event("checkpoint_refused", step=message.step, path="", message=message.reason)
        self._say(f"checkpoint of step {message.step} failed: {message.reason}; training goes on")
        self.checkpoints.failed(now)
        if self.phase == "saving" and message.step >= self.records.last:
            self._release()

    def _on_saverequest(self, worker: Worker, message: msg.SaveRequest, now: float) -> None:
        if worker.id in self.membership.members:
            self._out.append(PublishSave(worker.id, message))
        else:
            self._send(
                worker.id, msg.SaveAnswer(message.step, message.path, "this worker is not a member any more")
            )

    def _on_evaluationask(self, worker: Worker, message: msg.EvaluationAsk, now: float) -> None:
        self._carry_tasks(self.tasks.ask(worker.id, (message.step, message.index), message.count))

    def _on_evaluationresult(self, worker: Worker, message: msg.EvaluationResult, now: float) -> None:
        key = (message.step, message.index)
        self._carry_tasks(
            self.tasks.result(worker.id, key, message.micro_batch, message.values, message.weight)
        )

    def _on_crashed(self, worker: Worker, message: msg.Crashed, now: float) -> None:
        worker.crash = message

    # ── going on ────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self, now: float) -> list[Action]:
        """After every event: start what is missing, open, switch, finish; hand the actions over."""
        if self.phase in ("gathering", "training"):
            self._fill_vacancies()
            if self.membership.current is None and self.membership.opening is None:
                self.phase = "gathering"
                self._gather(now)
            else:
                self.phase = "training"
                self._steer(now)
        if self.phase == "training":
            self._finish(now)
        if self.phase == "released" and not self.staff.workers:
            self._end(self._exit_code, "")
        out, self._out = self._out, []
        return out

    def _fill_vacancies(self) -> None:
        if self.stopping or len(self.staff.nodes) < self.settings.min_nodes:
            return
        perdure = any(worker.joined for worker in self.staff.workers.values())
        for vacancy in list(self.staff.vacancies(standbys=perdure)):
            if not perdure and self.attempt == 0 and self.phase == "training":
                continue
            self._hire(vacancy)

    def _hire(self, vacancy: Vacancy) -> None:
        node = self.staff.nodes[vacancy.node]
        worker = self.staff.hire(vacancy)
        before = sum(n.workers for n in self.staff.nodes.values() if n.rank < node.rank)
        self._out.append(
            Start(node.name, worker.id, vacancy.slot, before + vacancy.slot, self.staff.target, self.attempt)
        )

    def _gather(self, now: float) -> None:
        """Open the first generation when everybody who is expected is at the first step."""
        if self.stopping:
            self._end(128 + self.stopping, "every worker was lost before the state could be saved")
            return
        if self._rejoin_until is not None:
            self._rejoin(now)
            return
        spare = self.membership.spare
        if len(spare) < max(1, self.staff.target) or len(self.staff.nodes) < self.settings.min_nodes:
            return
        if self._restorable and self._restoring is None and self.membership.progress < 0:
            self._restore(spare)
        elif self._restoring is None:
            self._open_first(now)

    def _restore(self, spare: Sequence[WorkerId]) -> None:
        at_home = [w for w in spare if self.staff.workers[w].node == self.settings.home_node]
        self._restoring = min(at_home or spare)
        self._send(self._restoring, msg.Restore(self._restorable))

    def _open_first(self, now: float, step: int = -1) -> None:
        self._carry_checkpoint(self.checkpoints.restart(step))
        spare = self.membership.spare
        held = [w for w in spare if self.membership.peers[w].position.committed >= 0]
        ordered = [*held, *(w for w in spare if w not in held)][: max(1, self.staff.target)]
        self._carry(self.membership.start(ordered), now)

    def _rejoin(self, now: float) -> None:
        """P9: after the coordinator's restart, everybody's position is collected before anything opens."""
        seen = [w for w in self.staff.workers.values() if w.ready]
        complete = len(seen) >= self.staff.target and len(self.staff.nodes) >= self.settings.min_nodes
        assert self._rejoin_until is not None
        if complete or (seen and now > self._rejoin_until):
            self._rejoin_until = None
            self.membership.progress = self.records.last
            self._carry(self.membership.start(sorted(self.membership.peers)), now)

    def _steer(self, now: float) -> None:
        """Switch to the members that the job is to have, when a planned switch is possible."""
        membership = self.membership
        if not membership.settled:
            return
        current = membership.members
        if self.stopping:
            self._carry(membership.prepare(current, stop=True), now)
            return
        staying = [w for w in current if not membership.peers[w].leaving]
        room = max(0, self.staff.target - len(staying))
        offered = membership.prepared
        joining = [w for w in offered.joiners if w in membership.peers] if offered is not None else []
        able = sorted({*membership.spare, *(w for w in joining if not membership.peers[w].leaving)})
        wanted = [*staying, *able[:room]]
        if wanted and wanted != list(current):
            self._carry(membership.prepare(wanted, resting=self._heal_is_long()), now)

    def _heal_is_long(self) -> bool:
        shape = self.membership.shape
        if shape is None or len(self._times) < 2:
            return True
        step_s = statistics.median(b - a for a, b in zip(self._times, self._times[1:], strict=False))
        return shape.state_bytes / HEAL_BYTES_PER_S > REST_SHARE * step_s

    def _finish(self, now: float) -> None:
        """P17: when every member has finished, write the last state, then release."""
        members = self.membership.members
        if not members or self.membership.opening is not None:
            return
        if any(self.staff.workers[w].finished is None for w in members):
            return
        if self._outvoted({w: self.staff.workers[w].last_digest for w in members}, "after the last step", now):
            return
        self.phase = "saving"
        step = self.staff.workers[members[0]].finished
        assert step is not None
        for record in [self.staff.workers[w].last_record for w in members]:
            if record is not None:
                self._record(record, now)  # P18: now all are known to have the last step
        # Without `stopping` it was an earlier life of the coordinator that was asked to stop.
        self._exit_code = 128 + (self.stopping or SIGTERM) if step + 1 < self._until() else 0
        writers = [w for w in members if self.staff.workers[w].node == self.settings.home_node] or list(
            members
        )
        if self.checkpoints.off or step < 0 or (self.checkpoints.last >= step and not self._publishing):
            self._release()
        elif self.checkpoints.last >= step:
            return  # it is being published
        else:
            self._carry_checkpoint(self.checkpoints.final(step, writers[0]))

    def _release(self) -> None:
        """Members run the rest of their scripts; workers that only waited are ended."""
        self.phase = "released"
        for worker in self.staff.workers.values():
            if worker.finished is None:
                self._kill(worker.id)
            elif not worker.released:
                worker.released = True
                self._send(worker.id, msg.Release(self._exit_code))
        self.membership.end()

    # ── deaths ──────────────────────────────────────────────────────────────────────────────────────

    def _exited(self, worker: Worker, exited: msg.WorkerExited, now: float) -> None:
        """A worker process is gone: what does that mean?"""
        self._carry_tasks(self.tasks.lost(worker.id))
        self.checkpoints.lost(worker.id)
        if self._restoring == worker.id:
            self._restoring = None
        clean = exited.exit_code == 0
        if worker.released and (clean or self._exit_code) and self.phase in ("released", "over"):
            self.membership.forget(worker.id)
            return
        if worker.stopped or (worker.leaving and worker.released):
            self._gone(worker.id, now)
            return
        if not any(w.joined for w in [worker, *self.staff.workers.values()]):
            self._plain_exited(worker, exited, clean, now)
            return
        self._judge(worker, exited, now)

    def _judge(self, worker: Worker, exited: msg.WorkerExited, now: float) -> None:
        death = _death(worker, exited)
        detected_by = "exception" if death.exception else "pidfd"
        decision = self._decide(worker, death, detected_by, exited.detect_s)
        if decision.action == "stop":
            trace = worker.crash.traceback if worker.crash else exited.tail
            self._end(
                decision.exit_code, f"{trace.rstrip()}\n{decision.message}" if trace else decision.message
            )
            return
        if self.phase == "released":
            self._tail_crashed(worker)
            return
        self._gone(worker.id, now)
        if self.phase == "saving":
            self._saver_lost()

    def _decide(self, worker: Worker, death: Death, detected_by: str, detect_s: float) -> Decision:
        self._event(
            "fault_detected",
            worker=worker.id,
            node=worker.node,
            kind=death.kind,
            detected_by=detected_by,
            detect_s=detect_s,
            exit_code=death.exit_code,
            signal=death.signal,
            message=death.message,
            traceback=worker.crash.traceback if worker.crash else "",
        )
        decision = self.failures.judge(death, worker.ready)
        self._event(
            "fault_decided",
            worker=worker.id,
            severity=decision.severity,
            action=decision.action,
            message=decision.message,
        )
        if decision.exit_code == 3:
            self._event("given_up", message=decision.message)
        return decision

    def _fault(self, worker: WorkerId, death: Death, detected_by: str, detect_s: float, now: float) -> None:
        """A fault of a living worker: end it and go on without it."""
        who = self.staff.workers[worker]
        decision = self._decide(who, death, detected_by, detect_s)
        if decision.action == "stop":
            self._end(decision.exit_code, decision.message)
            return
        self._kill(worker)
        self._carry(self.membership.lost(worker, corrupt=death.kind == "corrupt"), now)

    def _gone(self, worker: WorkerId, now: float) -> None:
        self._lost_at[worker] = now
        self._troubles.pop(worker, None)
        self._carry(self.membership.lost(worker), now)

    def _saver_lost(self) -> None:
        """The last checkpoint's writer died, or what it wrote was refused: another finished member writes it."""
        self._saves += 1
        left = [w for w in self.staff.workers.values() if w.finished is not None]
        if not left:
            self.phase = "gathering"
        elif self._saves > SAVES_MAX:
            self._release()
        elif self.checkpoints.asked is None:
            assert left[0].finished is not None
            self._carry_checkpoint(self.checkpoints.final(left[0].finished, left[0].id))

    def _tail_crashed(self, worker: Worker) -> None:
        """P17: a crash in the script's tail is mended by running it again, from the last checkpoint."""
        self.membership.forget(worker.id)
        if not self._restorable:
            self._end(
                1,
                f"worker {worker.id} failed after the last step, and without checkpoints it cannot run again",
            )
            return
        for other in self.staff.workers.values():
            if other.released:
                self.membership.forget(other.id)
        self._hire(Vacancy(worker.node, worker.slot))
        self.phase = "gathering"

    def _plain_exited(self, worker: Worker, exited: msg.WorkerExited, clean: bool, now: float) -> None:
        """A script that does not use perdure: torchrun's answer, all workers start again."""
        if clean:
            self.attempt = self.attempt
            worker.finished = 0
            self.staff.workers[worker.id] = worker
            worker.stopped = False
            if all(w.finished is not None for w in self.staff.workers.values()):
                self._end(0, "")
            return
        decision = self._decide(worker, _death(worker, exited), "pidfd", exited.detect_s)
        if decision.action == "stop":
            trace = worker.crash.traceback if worker.crash else exited.tail
            self._end(
                decision.exit_code, f"{trace.rstrip()}\n{decision.message}" if trace else decision.message
            )
            return
        self.attempt += 1
        for other in list(self.staff.workers.values()):
            if other.finished is not None:
                del self.staff.workers[other.id]
            else:
                self._kill(other.id)

    def _node_lost(self, node: Node, now: float) -> None:
        """A node is out of reach: its workers are lost; it may come back as a new one."""
        del self.staff.nodes[node.name]
        self._say(f"node {node.name} is lost")
        for worker in self.staff.on(node.name):
            del self.staff.workers[worker.id]
            self._carry_tasks(self.tasks.lost(worker.id))
            self.checkpoints.lost(worker.id)
            death = Death("node", None, None, message=f"node {node.name} is out of reach")
            decision = self._decide(worker, death, "lease", now - (node.lost_at or now))
            if decision.action == "stop":
                self._end(decision.exit_code, decision.message)
                return
            self._gone(worker.id, now)
        if self.phase == "saving" and self.checkpoints.asked is None:
            self._saver_lost()
        if not self.staff.nodes:
            self._end(1, "every node is lost")

    def _reconnected(self, hello: msg.AgentHello, now: float) -> None:
        """What was under way when the connection broke is lost: say it again, and ask for positions anew."""
        there = {seen.worker: seen for seen in hello.seen}
        for worker in self.staff.on(hello.node):
            self.checkpoints.lost(worker.id)
            if self._restoring == worker.id:
                self._restoring = None
            if worker.id not in there:
                del self.staff.workers[worker.id]
                self._carry_tasks(self.tasks.lost(worker.id))
                self._gone(worker.id, now)
                continue
            ready = there[worker.id].ready
            if ready is not None and not worker.ready:
                self._on_ready(worker, ready, now)
            if worker.stopped:
                self._kill(worker.id)
            elif worker.released:
                self._send(worker.id, msg.Release(self._exit_code))
        if self.phase == "saving":
            self._saver_lost()
        elif self.membership.current is not None or self.membership.opening is not None:
            self._carry(self.membership.again(), now)

    def _seen(self, hello: msg.AgentHello, seen: msg.WorkerSeen, now: float) -> None:
        """A worker that the agent had before this coordinator knew it."""
        if seen.worker in self.staff.workers:
            return
        fresh = not self.membership.peers or self._rejoin_until is not None
        worker = Worker(
            seen.worker, hello.node, slot=len(self.staff.on(hello.node)), pid=seen.pid, joined=seen.joined
        )
        self.staff.workers[seen.worker] = worker
        self.staff.first_id = max(self.staff.first_id, seen.worker + 1)
        if not fresh or seen.ready is None:
            self._kill(seen.worker)
            return
        self._rejoin_until = self._rejoin_until or now + REJOIN_S
        worker.ready = True
        address = Address(seen.worker, hello.node, seen.ready.host, seen.ready.port)
        self.membership.ready(address, seen.ready.position, seen.ready.shape)

    # ── deadlines ───────────────────────────────────────────────────────────────────────────────────

    def _watch_opening(self, now: float) -> None:
        opening = self.membership.opening
        if opening is not None and now - self._opened_at > REPORT_S:
            for member in opening.members:
                if member.worker not in opening.positions:
                    self._hung(member.worker, f"no answer to a seal within {REPORT_S:.0f} s", now)
        elif opening is None and self.membership.current is not None and now - self._opened_at > HEAL_S:
            for worker in self.membership.current.ranks:
                if worker in self.membership.peers and not self.membership.peers[worker].healed:
                    self._hung(worker, f"no complete state within {HEAL_S:.0f} s", now)

    def _hung(self, worker: WorkerId, message: str, now: float) -> None:
        if worker in self.staff.workers:
            self._fault(worker, Death("hang", None, None, message=message), "progress", 0.0, now)

    def _watch_troubles(self, now: float) -> None:
        """P11: a connection that failed without a death is a new generation of the same members."""
        for peer, (generation, since) in list(self._troubles.items()):
            if not self.membership.concerns(generation):
                del self._troubles[peer]
            elif now - since > TROUBLE_S and peer in self.membership.peers:
                self._troubles.clear()
                self._trouble_count += 1
                if self._trouble_count > TROUBLES_MAX:
                    self._trouble_count = 0
                    self._hung(peer, "its connections keep failing", now)
                else:
                    self._opened_at = now
                    self._carry(self.membership.again(), now)
                return

    # ── carrying out ────────────────────────────────────────────────────────────────────────────────

    def _carry(self, actions: Sequence[mem.Action], now: float) -> None:
        for action in actions:
            match action:
                case mem.Tell(worker, message):
                    if isinstance(message, msg.Seal):
                        self._opened_at = now
                    self._send(worker, message)
                case mem.Opened(plan, lost, dealt, reason):
                    self._opened_at = now
                    self._event(
                        "generation_opened",
                        generation=str(plan.generation),
                        members=plan.ranks,
                        base=plan.base,
                        lost=lost,
                        dealt=dealt,
                        joiners=plan.joiners,
                        gather=bool(plan.gather),
                        reason=reason,
                    )
                    for worker in plan.joiners:
                        self._event("joined", worker=worker, generation=str(plan.generation))
                case mem.Computing(plan, base):
                    self._event(
                        "generation_computing", generation=str(plan.generation), members=plan.ranks, base=base
                    )
                case mem.Left(worker):
                    self._let_go(worker)
                case mem.Stale(worker, reason):
                    self._say(f"worker {worker} is ended: {reason}")
                    self._kill(worker)

    def _let_go(self, worker: WorkerId) -> None:
        """A leaver is not needed any more."""
        who = self.staff.workers.get(worker)
        if who is not None and not who.released:
            who.released = True
            self._event("left", worker=worker)
            if who.ready:
                self._send(worker, msg.Release(128 + SIGTERM))
            else:
                self._kill(worker)

    def _carry_tasks(self, actions: Sequence[tasks.Deal | tasks.Answer]) -> None:
        for action in actions:
            step, index = action.key
            if isinstance(action, tasks.Deal):
                self._send(action.worker, msg.EvaluationDeal(step, index, (action.item,)))
            else:
                values = tuple(dict(value) for value in action.values)
                self._send(action.worker, msg.EvaluationAll(step, index, values, action.weights))

    def _carry_checkpoint(self, actions: Sequence[ckpt.Action]) -> None:
        for action in actions:
            match action:
                case ckpt.Ask(worker, step):
                    self._send(worker, msg.Checkpoint(step, self.settings.checkpoint_dir))
                case ckpt.Publish(written):
                    self._publishing = True
                    self._out.append(PublishCheckpoint(written))
                case ckpt.Discard(written, reason):
                    self._event("checkpoint_refused", step=written.step, path=written.partial, message=reason)
                    self._out.append(Discard(written.partial))
                    if self.phase == "saving" and self.checkpoints.asked is None and not self._publishing:
                        self._saver_lost()

    def _record(self, record: Record, now: float) -> None:
        for written in self.records.add(record):
            if isinstance(written, rec.Write):
                self.failures.progress()
                self._trouble_count = 0
                self._times = [*self._times[-9:], written.record.time]
                self._out.append(WriteRecord(written.record))
            else:
                self._event("digest_differs", step=written.step, was=written.was, now=written.now)
                self._say(
                    f"step {written.step} came again with another digest: {written.was} → {written.now}"
                )
        for worker in self.membership.members:
            self._send(worker, msg.Acknowledged(self.records.last))
        self._carry_checkpoint(self.checkpoints.known(self.records.agreed))

    def _ask_checkpoint(self, now: float) -> None:
        if self.phase != "training":
            return
        at_home = [
            w for w in self.membership.members if self.staff.workers[w].node == self.settings.home_node
        ]
        step = max(self.records.last, self.membership.progress)
        self._carry_checkpoint(self.checkpoints.due(step, at_home[0] if at_home else None, now))

    def _until(self) -> int:
        return self.membership.shape.until if self.membership.shape else 0

    def _send(self, worker: WorkerId, message: msg.CoordinatorMessage) -> None:
        if worker in self.staff.workers:
            self._out.append(Send(worker, message))

    def _kill(self, worker: WorkerId, signum: int = SIGKILL) -> None:
        if worker in self.staff.workers:
            self.staff.workers[worker].stopped = True
            self._out.append(Kill(worker, signum))

    def _event(self, name: str, **fields: Any) -> None:
        if "worker" in fields and "node" not in fields and fields["worker"] in self.staff.workers:
            fields["node"] = self.staff.workers[fields["worker"]].node
        current = self.membership.current
        fields.setdefault("generation", str(current.generation) if current else None)
        fields.setdefault("step", self.records.last + 1)
        self._out.append(Event(name, fields))

    def _say(self, text: str) -> None:
        self._out.append(Say(text))

    def _end(self, exit_code: int, message: str) -> None:
        if self.phase == "over":
            return
        self.phase = "over"
        self._event("run_ended", exit_code=exit_code, message=message.splitlines()[-1] if message else "")
        for worker in list(self.staff.workers.values()):
            if worker.finished is None or not worker.released:
                self._kill(worker.id)
        self._out.append(End(exit_code, message))

    def rows(self) -> tuple[msg.PsRow, ...]:
        """One row a worker for `perdure ps`."""
        return tuple(self._row(worker) for worker in sorted(self.staff.workers.values(), key=lambda w: w.id))

    def _row(self, worker: Worker) -> msg.PsRow:
        progress, current = worker.progress, self.membership.current
        if worker.leaving:
            state = "leaving"
        elif worker.id in self.membership.members:
            state = "active" if self.membership.peers[worker.id].healed else "joining"
        else:
            state = "standby" if worker.ready else "starting"
        return msg.PsRow(
            id=worker.id,
            node=worker.node,
            pid=worker.pid,
            state=state,
            generation=str(current.generation) if current else "",
            step=progress.step if progress else -1,
            phase=progress.phase if progress else "script",
            micro_batch=progress.micro_batch if progress else -1,
        )


def _death(worker: Worker, exited: msg.WorkerExited) -> Death:
    """How a worker ended, in the words of the report."""
    crash = worker.crash
    if crash is not None:
        text = crash.traceback.strip().splitlines()[-1] if crash.traceback.strip() else crash.kind
        return Death("exception", exited.exit_code, exited.signal, crash.kind, crash.where, text, crash.user)
    if exited.signal is not None:
        return Death("signal", None, exited.signal, message=f"ended by signal {exited.signal}")
    return Death(
        "exit", exited.exit_code, None, message=f"exited with code {exited.exit_code} before the loop ended"
    )


def _difference(known: Shape, other: Shape) -> str:
    """The first field in which two shapes differ, in words."""
    for name in known.__struct_fields__:
        a, b = getattr(known, name), getattr(other, name)
        if a != b:
            return f"{name} is {msgspec.json.encode(b).decode()[:80]}, not {msgspec.json.encode(a).decode()[:80]}"
    return "nothing"


__all__ = ["Job", "Position", "Settings"]
