"""One job as the coordinator sees it, composed of the pure parts beside this module.

    agents and workers ── events ──▶ Job ── actions ──▶ the server

The job is in one phase at a time:

    gathering   workers start; when the expected number is at its first step, generation 1 is opened
    training    generations follow one another (membership)
    saving      every member has finished (P17); the last state is being written
    released    workers run the rest of their scripts and exit
    over        the run has an exit code

`now` is any monotonic clock in seconds; the job itself has none. What follows from a death is in `deaths`,
checkpoints and the end in `saving`, what may not last in `deadlines`, a script without perdure in `plain`,
a coordinator's restart in `rejoin`; they meet in `office`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.core.actions import (
    Action,
    Discard,
    End,
    Event,
    GiveUp,
    Kill,
    Persist,
    PublishCheckpoint,
    PublishSave,
    Say,
    Send,
    Start,
    TurnAway,
    WriteRecord,
)
from perdure.core.deadlines import Deadlines
from perdure.core.deaths import Deaths
from perdure.core.failures import Failures
from perdure.core.membership import Membership
from perdure.core.office import Office
from perdure.core.plain import PlainScript
from perdure.core.records import Records
from perdure.core.rejoin import REJOIN_S, Rejoin
from perdure.core.saving import Saving
from perdure.core.settings import Settings
from perdure.core.staff import Node, Staff, Worker
from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Address


class Job:
    """The coordinator's state machine for one job."""

    def __init__(
        self, settings: Settings, membership: Membership | None = None, records: Records | None = None
    ) -> None:
        """
        Args:
            settings: what is fixed for this run.
            membership: the generations; None: a new one of the settings' incarnation.
            records: the view of metrics.jsonl; None: as the settings tell it.
        """
        self.settings = settings
        self._office = Office(
            settings,
            membership or Membership(settings.incarnation),
            records or Records(settings.last_step, settings.digests),
        )
        self._saving = Saving(self._office)
        self._plain = PlainScript(self._office)
        self._deaths = Deaths(self._office, self._saving, self._plain)
        self._deadlines = Deadlines(self._office, self._deaths)
        self._restoring: WorkerId | None = None
        self._warned = False
        self._askers: set[str] = set()
        self._saves: dict[msg.SaveRequest, str | None] = {}
        self._blocks = settings.blocks
        self._rejoin = Rejoin(self._office)

    # ── what can be seen of it ──────────────────────────────────────────────────────────────────────

    @property
    def phase(self) -> str:
        """See this module's docstring."""
        return self._office.phase

    @property
    def staff(self) -> Staff:
        """Nodes and worker processes."""
        return self._office.staff

    @property
    def membership(self) -> Membership:
        """Generations."""
        return self._office.membership

    @property
    def records(self) -> Records:
        """Committed steps, in order."""
        return self._office.records

    @property
    def failures(self) -> Failures:
        """How many there were."""
        return self._office.failures

    def rows(self) -> tuple[msg.PsRow, ...]:
        """One row a worker for `perdure ps`."""
        return self._office.rows()

    # ── events from the server ──────────────────────────────────────────────────────────────────────

    def agent_joined(self, hello: msg.AgentHello, now: float) -> list[Action]:
        """A node's agent said hello, for the first time or again."""
        node = self.staff.nodes.get(hello.node)
        most = self.settings.max_nodes
        if hello.key not in ("", self.settings.key):
            text = f"this node's workers are of another job than {self.settings.job}, or of before --fresh"
            text += ": start it again to join; to go on from their state start the coordinator in its RUN_DIR"
            self._office.want(TurnAway(hello.node, text, 1))
            return self._go_on(now)
        if node is None and most is not None and self.staff.present >= most:
            text = "the job has all the nodes that --nnodes allows; start this one again when one is gone"
            self._office.want(TurnAway(hello.node, text))
            return self._go_on(now)
        if node is None:
            node = Node(hello.node, hello.host, hello.workers, hello.standby, self.staff.free_rank)
            self.staff.nodes[hello.node] = node
            if not hello.seen:
                self._rejoin.expect(now)
            self._say_missing()
        else:
            self._reconnected(hello, now)
            if hello.node not in self.staff.nodes:
                return self._go_on(now)
        node.lost_at = None
        for seen in hello.seen:
            self._seen(hello, seen, now)
        if hello.asked and hello.node not in self._askers:
            return self.asked(hello.asked, now, hello.node)
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
            self._office.event("worker_started", worker=worker, pid=pid)
        return self._go_on(now)

    def worker_ending(self, ending: msg.WorkerEnding, now: float) -> list[Action]:
        """A worker process has begun to end; how, is not known yet."""
        worker = self.staff.workers.get(ending.worker)
        if worker is not None:
            self._deaths.ending(worker, ending, now)
        return self._go_on(now)

    def worker_exited(self, exited: msg.WorkerExited, now: float) -> list[Action]:
        """A worker process ended, its socket drained.

        It may be one that was missing when its agent came back, or that an earlier coordinator had.
        """
        worker = self.staff.workers.pop(exited.worker, None)
        if worker is not None:
            self._deaths.exited(worker, exited, now)
        else:
            self._deaths.exited_unseen(exited, now)
        return self._go_on(now)

    def worker_said(self, worker: WorkerId, message: msg.WorkerMessage, now: float) -> list[Action]:
        """A worker's message; one of a worker that is already gone changes nothing (G4)."""
        who = self.staff.workers.get(worker)
        if who is not None and (not (who.stopped or who.ending) or isinstance(message, msg.Crashed)):
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

    def asked(self, signum: int, now: float, node: str = "") -> list[Action]:
        """SIGINT or SIGTERM at the launcher of a node: end at the boundary, the state saved.

        A second one there ends at once. That each node's launcher is asked is how a cluster ends a job.
        """
        office = self._office
        if node in self._askers or self.phase == "released":
            office.end(128 + signum, "ended at once")
        elif self._askers:
            pass  # it is under way
        elif self.phase in ("training", "saving"):
            office.say(f"signal {signum}: finishing the step and saving; again to end at once")
        elif self._rejoin.may_come(now):
            what = f"waiting {REJOIN_S:g} s at most for workers of before, to save their state"
            office.say(f"signal {signum}: {what}; again to end at once")
        elif self._plain.is_plain() and self.staff.workers:
            self._plain.asked(signum, now)
        else:
            office.end(128 + signum, self._saving.without())
        self._askers.add(node)
        office.stopping = office.stopping or signum
        return self._go_on(now)

    def saved(self, worker: WorkerId, request: msg.SaveRequest, reason: str, now: float) -> list[Action]:
        """The answer to `PublishSave`."""
        self._saves[request] = reason
        self._office.send(worker, msg.SaveAnswer(request.step, request.index, reason))
        return self._go_on(now)

    def published(self, written: msg.CheckpointWritten, path: str, reason: str, now: float) -> list[Action]:
        """The answer to `PublishCheckpoint`: `path` is in place, or why not."""
        self._saving.published(written, path, reason)
        return self._go_on(now)

    def tick(self, now: float) -> list[Action]:
        """Time passed: look at deadlines."""
        self._deadlines.look(now)
        return self._go_on(now)

    # ── workers' messages ───────────────────────────────────────────────────────────────────────────

    def _on_joined(self, worker: Worker, message: msg.Joined, now: float) -> None:
        worker.joined = self.staff.joins = True
        settings = self.settings
        welcome = msg.Welcome(
            job=settings.job,
            blocks=self._blocks or self.staff.target,
            digest_every=settings.digest_every,
            log_samples=settings.log_samples,
        )
        self._office.send(worker.id, welcome)

    def _on_ready(self, worker: Worker, message: msg.Ready, now: float) -> None:
        if worker.ready:
            return  # its agent's hello had said so
        known = self.membership.shape
        if known is not None and known != message.shape:
            what = f"trains something else than the others: {known.difference(message.shape)}"
            self._refuse(worker, what, now)
            return
        asked = message.shape.blocks
        if self._blocks and self._blocks != asked:
            text = f"asks for blocks={asked}, and the job was started with blocks={self._blocks}"
            self._refuse(worker, f"{text}; bits depend on it: keep it, or start anew with --fresh", now, 4)
            return
        if not self._blocks:
            self._blocks = asked
            self._office.want(Persist(self._blocks))
        if message.warning and not self._warned:
            self._warned = True
            self._office.say(message.warning)
        worker.ready = True
        self.failures.reached_first_step()
        address = Address(worker.id, worker.node, message.host, message.port)
        self.membership.ready(address, message.position, message.shape)

    def _refuse(self, worker: Worker, what: str, now: float, exit_code: int = 1) -> None:
        """A worker does not fit. Where others train, or have done so, it is not the job that is wrong."""
        if not (self._office.in_training or self.membership.begun):
            self._office.end(exit_code, f"worker {worker.id} {what}")
        else:
            self._deaths.unfit(worker, what, now)

    def _on_report(self, worker: Worker, message: msg.Report, now: float) -> None:
        self._office.carry(self.membership.report(worker.id, message.generation, message.position), now)

    def _on_adopted(self, worker: Worker, message: msg.Adopted, now: float) -> None:
        self._office.carry(self.membership.adopted(worker.id, message.generation, message.base), now)

    def _on_computed(self, worker: Worker, message: msg.Computed, now: float) -> None:
        if worker.first_step is None:
            worker.first_step = message.step
        self._office.event(
            "first_micro_batch",
            worker=worker.id,
            generation=str(message.generation),
            step=message.step,
            micro_batch=message.micro_batch,
        )

    def _on_published(self, worker: Worker, message: msg.Published, now: float) -> None:
        self._saving.record(message.record)
        self._saving.ask(now)

    def _on_trouble(self, worker: Worker, message: msg.Trouble, now: float) -> None:
        self._deadlines.trouble(message.generation, message.peer, now)

    def _on_refusal(self, worker: Worker, message: msg.Refusal, now: float) -> None:
        current = self.membership.current
        if current is None or current.generation != message.generation or self.membership.opening is not None:
            return
        if not self._deaths.outvoted(message.digests, f"before step {message.step}", now):
            self._office.event("refused_step", step=message.step, unfit=message.unfit)
            self._office.carry(self.membership.again(void=message.unfit), now)

    def _on_healstarted(self, worker: Worker, message: msg.HealStarted, now: float) -> None:
        step, nbytes, donors = message.step, message.nbytes, message.donors
        self._office.event("heal_started", worker=worker.id, step=step, bytes=nbytes, donors=donors)

    def _on_healed(self, worker: Worker, message: msg.Healed, now: float) -> None:
        self._office.carry(self.membership.healed(worker.id, message.generation), now)
        self._office.event(
            "healed",
            worker=worker.id,
            step=message.step,
            bytes=message.nbytes,
            seconds=message.seconds,
            source=message.source,
        )

    def _on_healfailed(self, worker: Worker, message: msg.HealFailed, now: float) -> None:
        current = self.membership.current
        if current is not None and message.generation < current.generation:
            return  # in a later one it may have other donors
        self._deaths.refuse(worker, f"it could not take the state: {message.reason}", now)

    def _on_leaving(self, worker: Worker, message: msg.Leaving, now: float) -> None:
        if worker.leaving or self.phase == "over":
            return
        event, text = self._office.event, "asked to leave (SIGTERM)"
        event("fault_detected", worker=worker.id, kind="leave", detected_by="peer", message=text)
        event("fault_decided", worker=worker.id, severity="SEV2", action="leave")
        if self.phase not in ("gathering", "training"):
            return  # it has done its part, and ends with the others
        worker.leaving = True
        if not self.membership.leaving(worker.id) and not self._rejoin.waits:
            self._office.let_go(worker.id)

    def _on_finished(self, worker: Worker, message: msg.Finished, now: float) -> None:
        worker.finished = message.step
        worker.broke_off = message.by_itself
        worker.last_digest = message.digest
        worker.last_record = message.record

    def _on_restored(self, worker: Worker, message: msg.Restored, now: float) -> None:
        office = self._office
        if self._restoring != worker.id:
            return
        self._restoring = None
        for path, reason in message.refused:
            office.event("checkpoint_refused", path=path, message=reason)
            office.say(f"checkpoint {path} was not used: {reason}")
        if message.step < 0:
            office.end(5, "no checkpoint could be restored; see above, or start anew with --fresh")
            return
        self._saving.restorable = (message.path,)
        office.say(f"going on from {message.path}: step {message.step} is the last committed one")
        if message.differs:
            office.say(f"that one was written with {message.differs}: bits are others from here on")
        step = message.step
        office.event("healed", worker=worker.id, step=step, bytes=0, seconds=0.0, source="disk")
        self.membership.restored(worker.id, step, message.digest)
        self.records.resumed(message.step)
        self._open_first(now, message.step)

    def _on_checkpointwritten(self, worker: Worker, message: msg.CheckpointWritten, now: float) -> None:
        self._saving.written(worker.id, message, now)

    def _on_checkpointfailed(self, worker: Worker, message: msg.CheckpointFailed, now: float) -> None:
        self._saving.failed(worker.id, message, now)

    def _on_saverequest(self, worker: Worker, message: msg.SaveRequest, now: float) -> None:
        if message in self._saves:  # said again after a seal; the answer may have been lost
            known = self._saves[message]
            if known is not None:
                self._office.send(worker.id, msg.SaveAnswer(message.step, message.index, known))
        elif worker.id in self.membership.members:
            self._saves = {said: answer for said, answer in self._saves.items() if said.step >= message.step}
            self._saves[message] = None
            self._office.want(PublishSave(worker.id, message))
        elif self.membership.current is not None:  # else it asks again after the seal that is to come
            why = "this worker is not a member any more"
            self._office.send(worker.id, msg.SaveAnswer(message.step, message.index, why))

    def _on_evaluationask(self, worker: Worker, message: msg.EvaluationAsk, now: float) -> None:
        key = (message.step, message.index)
        self._office.carry_tasks(self._office.tasks.ask(worker.id, key, message.count))

    def _on_evaluationresult(self, worker: Worker, message: msg.EvaluationResult, now: float) -> None:
        key, item = (message.step, message.index), message.micro_batch
        result = self._office.tasks.result(worker.id, key, item, message.values, message.weight)
        self._office.carry_tasks(result)

    def _on_stranger(self, worker: Worker, message: msg.Stranger, now: float) -> None:
        self._office.event("refused", worker=worker.id, peer=message.peer, message=message.reason)
        self._office.say(f"worker {worker.id} refused a connection from {message.peer}: {message.reason}")

    def _on_crashed(self, worker: Worker, message: msg.Crashed, now: float) -> None:
        if worker.crash is None:
            worker.crash = message
            self._deaths.crashed(worker, message, now)

    # ── going on ────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self, now: float) -> list[Action]:
        """After every event: start what is missing, open, switch, finish; hand the actions over."""
        office = self._office
        if self.phase in ("gathering", "training"):
            self._fill_vacancies(now)
            if self.membership.current is not None or self.membership.opening is not None:
                office.phase = "training"
                self._steer(now)
            elif any(worker.ending for worker in self.staff.workers.values()):
                pass  # in a moment it is known how they ended
            elif self.phase == "gathering" or self._office.stopping or not self._ended_as_all_are_lost():
                office.phase = "gathering"
                self._gather(now)
        if self.phase == "training":
            self._finish(now)
        if self.phase == "released" and not (self.staff.workers or self._deaths.missing):
            office.end(office.exit_code, "")
        if self._plain.signalled and self._plain.ended(now):
            office.end(128 + self._office.stopping, "")
        return office.take()

    def _ended_as_all_are_lost(self) -> bool:
        """No member is left: what follows; true if that is the end of the run."""
        office = self._office
        decision = self.failures.all_lost(max(self.records.last + 1, self._deaths.furthest))
        if decision.action == "stop":
            office.end(decision.exit_code, decision.message)
            return True
        newest = next(iter(self._saving.restorable), "")
        office.say(f"every worker was lost; training goes on from {newest or 'the beginning'}")
        self._say_missing()
        return False

    def _say_missing(self) -> None:
        if (missing := self.settings.min_nodes - len(self.staff.nodes)) > 0:
            self._office.say(f"waiting for {missing} more node{'s' if missing > 1 else ''} (--nnodes)")

    @property
    def _enough_nodes(self) -> bool:
        """Only a tail that is run again can do with fewer than the job began with."""
        return len(self.staff.nodes) >= self.settings.min_nodes or self._saving.in_tails

    def _fill_vacancies(self, now: float) -> None:
        if self._office.stopping or not self._enough_nodes:
            return
        plain = self._plain.is_plain()
        if plain and not self._plain.may_start(now):
            return
        for vacancy in list(self.staff.vacancies(standbys=not plain)):
            if now >= self.staff.nodes[vacancy.node].hire_from:
                self._office.hire(vacancy)

    def _gather(self, now: float) -> None:
        """Open the first generation when everybody who is expected is at the first step."""
        if self._rejoin.waits and not self._rejoin.is_vain(now):
            return
        if self._office.stopping and not self._plain.signalled:
            self._office.end(128 + self._office.stopping, self._saving.without())
            return
        self._saving.keep_tail_going(now)
        restoring = self.staff.workers.get(self._restoring) if self._restoring is not None else None
        if restoring is None or restoring.stopped:
            self._restoring = None
        spare = self.membership.spare
        if len(spare) < max(1, self.staff.target) or not self._enough_nodes:
            return
        if self._saving.restorable and self._restoring is None and self.membership.progress < 0:
            self._restoring = min(self._office.at_home(spare) or spare)
            self._office.send(self._restoring, msg.Restore(self._saving.restorable, self._saving.left_after))
        elif self._restoring is None:
            self._open_first(now)

    def _open_first(self, now: float, step: int = -1) -> None:
        self._saving.restart(step)
        self._office.restart(step)
        spare = self.membership.spare
        held = [w for w in spare if self.membership.peers[w].position.committed >= 0]
        ordered = [*held, *(w for w in spare if w not in held)][: max(1, self.staff.target)]
        self._office.carry(self.membership.start(ordered), now)

    def _seen(self, hello: msg.AgentHello, seen: msg.WorkerSeen, now: float) -> None:
        """A worker that the agent had before this coordinator knew it."""
        if seen.worker in self.staff.workers:
            return
        of_before = seen.worker < self.settings.first_worker
        opened = self.membership.begun or self._restoring is not None
        unopened = not self.membership.peers or (of_before and not opened)
        fresh = self.phase == "gathering" and (unopened or self._rejoin.waits)
        slot = len(self.staff.on(hello.node))
        worker = Worker(seen.worker, hello.node, slot=slot, pid=seen.pid, joined=seen.joined)
        self.staff.workers[seen.worker] = worker
        self.staff.joins = self.staff.joins or seen.joined
        self.staff.first_id = max(self.staff.first_id, seen.worker + 1)
        if not fresh or seen.ready is None or seen.worker in self.settings.given_up:
            self._office.kill(seen.worker)
            return
        self._rejoin.seen(seen.worker, now)
        worker.ready = worker.proven = True  # as far as can be known: it was at its first step
        if self.membership.shape not in (None, seen.ready.shape):
            self.membership.shape = seen.ready.shape
            for other in list(self.staff.workers.values()):
                if other.ready and not (other.proven or other.stopped):
                    self._deaths.unfit(other, "trains something else than those of before", now)
        address = Address(seen.worker, hello.node, seen.ready.host, seen.ready.port)
        self.membership.ready(address, seen.ready.position, seen.ready.shape)

    def _reconnected(self, hello: msg.AgentHello, now: float) -> None:
        """What was under way when the connection broke is lost: say it again, and ask for positions anew."""
        there = {seen.worker: seen for seen in hello.seen}
        for worker in self.staff.on(hello.node):
            if worker.id not in self.staff.workers:
                continue  # turned away with its node just now
            self._saving.lost(worker.id)
            if self._restoring == worker.id:
                self._restoring = None
            if worker.id not in there:
                if worker.stopped:
                    self._office.kill(worker.id)  # lost as well: it may be about to start
                if worker.pid or worker.stopped:
                    self._deaths.vanished(worker, now)
                else:
                    self._office.start(worker)  # the order may be lost; an agent that has it goes on
                continue
            seen = there[worker.id]
            if seen.joined and not worker.ready:
                self._on_joined(worker, msg.Joined(), now)  # that was lost, or the answer to it
            if seen.ready is not None and not (worker.ready or worker.stopped):
                self._on_ready(worker, seen.ready, now)
            if worker.stopped:
                self._office.kill(worker.id)
            elif worker.released:
                self._office.send(worker.id, msg.Release(self._office.exit_code))
        if self.phase == "saving":
            self._saving.save_again()
        elif self.membership.current is not None or self.membership.opening is not None:
            self._office.carry(self.membership.again(), now)

    def _steer(self, now: float) -> None:
        """Switch to the members that the job is to have, when a planned switch is possible."""
        membership = self.membership
        if not membership.settled:
            return
        current = membership.members
        if self._office.stopping:
            self._office.carry(membership.prepare(current, stop=True), now)
            return
        staying = [w for w in current if not membership.peers[w].leaving]
        room = max(0, self.staff.target - len(staying))
        offered = membership.prepared
        joining = [w for w in offered.joiners if w in membership.peers] if offered is not None else []
        able = sorted({*membership.spare, *(w for w in joining if not membership.peers[w].leaving)})
        wanted = [*staying, *able[:room]]
        if wanted and wanted != list(current):
            self._office.carry(membership.prepare(wanted, resting=self._office.heal_is_long), now)

    def _finish(self, now: float) -> None:
        """P17: when every member has finished, with the same state, the last one is written."""
        members, workers = self.membership.members, self.staff.workers
        if not members or self.membership.opening is not None:
            return
        if any(workers[w].finished is None for w in members):
            self._deaths.one_sided_break([workers[w] for w in members], now)
            return
        digests = {w: workers[w].last_digest for w in members}
        if not self._deaths.outvoted(digests, "after the last step", now):
            self._saving.finish(self._office.stopping)


__all__ = [
    "Action",
    "Discard",
    "End",
    "Event",
    "GiveUp",
    "Job",
    "Kill",
    "Persist",
    "PublishCheckpoint",
    "PublishSave",
    "Say",
    "Send",
    "Settings",
    "Start",
    "TurnAway",
    "WriteRecord",
]
