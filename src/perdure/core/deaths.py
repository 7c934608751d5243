"""A worker or a node is gone, or must go: what that means for the job.

1. `Failures` judges each death: replace the worker, or end the run (G7). An exception is judged when it is
   told: the interpreter takes a quarter of a second to end after it, a script's own cleaning up any time.
2. A replaced worker leaves the membership at once; the vacancy is filled when events have been handled.
3. What it had in hand besides the step (an evaluation's item, a checkpoint) goes to another worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perdure.core.actions import GiveUp, TurnAway
from perdure.core.failures import LOOP_LIMIT, Death, Decision
from perdure.core.heals import CAUSE
from perdure.core.office import Office
from perdure.core.plain import PlainScript
from perdure.core.saving import Saving
from perdure.core.staff import Node, Worker
from perdure.core.waste import Doing
from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId

MISSING_S = 1.0
"""How a missing worker ended is told in the moment after its agent came back, if at all."""

IDLE = ("script", "heal", "wait")
"""Phases in which a worker has begun nothing of a step."""


class Deaths:
    """Answers every death of a process, every lost node and every fault of a living worker."""

    def __init__(self, office: Office, saving: Saving, plain: PlainScript) -> None:
        self._office = office
        self._saving = saving
        self._plain = plain
        self._missing: dict[WorkerId, tuple[Worker, float]] = {}
        self._accounted: set[WorkerId] = set()
        self._hired_at_start = 0
        self.furthest = -1
        """The last step that a worker which died had in hand."""

    def ending(self, worker: Worker, ending: msg.WorkerEnding, now: float) -> None:
        """A worker process has begun to end: the others go on without it; the rest waits for its exit."""
        office = self._office
        if office.phase != "training" or worker.stopped or worker.released or not worker.ready:
            return
        worker.ending, worker.ending_since = True, now
        worker.progress = ending.doing or worker.progress
        event = {"node": worker.node, "noticed_s": ending.wall_s} | self._in_hand(worker)
        office.event("worker_ending", worker=worker.id, **event)
        self._put_down(worker.id)
        self._lost(worker.id, now, _doing(ending.doing))

    def exited(self, worker: Worker, exited: msg.WorkerExited, now: float) -> None:
        """A worker process is gone; it is not among the staff any more."""
        office = self._office
        self._put_down(worker.id)
        worker.progress = exited.doing or worker.progress
        doing = _doing(exited.doing)
        clean = exited.exit_code == 0
        if worker.crash is not None and exited.tail:
            office.event("worker_exited", worker=worker.id, node=worker.node, last_lines=exited.tail)
        if worker.stopped or (worker.leaving and worker.released):
            self._lost(worker.id, now, doing)
        elif worker.released and (clean or office.exit_code):
            office.membership.forget(worker.id)
            office.staff.done.add((worker.node, worker.slot))
        elif office.phase == "released" and worker.ending:
            # It was lost in training, and the others were through before it was known how.
            self._tell(worker, _death(worker, exited), "pidfd", exited.detect_s, Decision("SEV2", "replace"))
        elif self._plain.is_plain():
            if clean:
                self._plain.finished(worker)
            elif not self._stops(worker, _death(worker, exited), exited, self._plain.lasted(now)):
                office.say(f"worker {worker.id}: {_death(worker, exited).message}; all workers start again")
                self._plain.start_again()
        elif not self._stops(worker, _death(worker, exited), exited, self._begun(worker)):
            self._replace(worker, _death(worker, exited), now, doing)

    def crashed(self, worker: Worker, crash: msg.Crashed, now: float) -> None:
        """A worker's script raised. What its process still does concerns nobody; its exit means nothing."""
        office = self._office
        as_told = worker.released and (office.exit_code or worker.leaving)
        if worker.stopped or as_told or not worker.joined or office.phase == "over":
            return
        worker.stopped = True
        worker.ending_since = now
        worker.progress = crash.doing or worker.progress
        self._put_down(worker.id)
        death = _exception(crash, crash.exit_code, None)
        if not self._stops(worker, death, None, self._begun(worker)):
            self._replace(worker, death, now, _doing(crash.doing))

    def fault(self, worker: WorkerId, death: Death, detected_by: str, now: float) -> None:
        """A fault of a living worker: end it and go on without it."""
        office = self._office
        who = office.staff.workers.get(worker)
        if who is None:
            return
        decision = self._decide(who, death, detected_by, 0.0, who.ready)
        if decision.action == "stop":
            office.end(decision.exit_code, decision.message)
            return
        office.kill(worker)
        office.carry(office.membership.lost(worker, corrupt=death.kind == "corrupt"), now)

    def node_lost(self, node: Node, now: float) -> None:
        """A node is out of reach: its workers are lost; it may come back as a new one."""
        office = self._office
        office.say(f"node {node.name} is lost")
        lost = self._strike_off(node)
        for worker in lost:
            self._put_down(worker.id)
            death = Death("node", None, None, message=f"node {node.name} is out of reach")
            decision = self._decide(worker, death, "lease", now - (node.lost_at or now), worker.ready)
            if decision.action == "stop":
                office.end(decision.exit_code, decision.message)
                return
            self._lost(worker.id, now)
        if not office.staff.nodes:
            office.end(1, "every node is lost")
        self._saving.save_again()
        self._saving.tails_lost(lost)

    def unfit(self, worker: Worker, what: str, now: float) -> None:
        """A worker that is not like those in training: its script or arguments are not what they were.

        A node of only such workers was started wrongly; elsewhere another is tried, as after a failed start.
        """
        office, node = self._office, self._office.staff.nodes[worker.node]
        if node.name != office.settings.home_node and not any(w.ready for w in office.staff.on(node.name)):
            why = f"worker {worker.id} {what}; start it with the script and arguments of the other nodes"
            self._turn_away(node, why, now)
            return
        self.refuse(worker, f"it {what}; was the script changed?", now)

    def refuse(self, worker: Worker, why: str, now: float) -> None:
        """A living worker is of no use to those in training: another is tried, as after a failed start."""
        office, death = self._office, Death("exit", None, None, message=why)
        decision = self._decide(worker, death, "peer", 0.0, False)
        if decision.action == "stop":
            office.end(decision.exit_code, decision.message)
            return
        office.kill(worker.id)
        self._start_failed(worker, death, now)

    def one_sided_break(self, members: Sequence[Worker], now: float) -> None:
        """Whoever is at work on a step that another member's script will never begin waits for ever."""
        for gone in members:
            step = gone.finished
            if step is None or not gone.broke_off or gone.stopped:
                continue
            for other in members:
                at = other.progress
                inside = at is not None and at.step > step and at.phase in ("compute", "reduce")
                if inside and other.finished is None and not other.stopped:
                    self._broke_off_alone(gone, step, other, now)
                    return

    def _broke_off_alone(self, gone: Worker, step: int, other: Worker, now: float) -> None:
        current = self._office.membership.current
        took_part = gone.proven or gone.began_at <= step
        if current and other.id in current.joiners and other.began_at > step and took_part:
            # It has come too late to do so as well; the state is the others'.
            self._office.say(f"worker {other.id} came when the script left job.steps: not needed any more")
            self._office.kill(other.id)
            return
        when = f"after step {step}" if step >= 0 else "before the first step"
        text = f"left job.steps by `break` {when}, worker {other.id} did not"
        other_did = other.proven or other.began_at <= step
        if gone.began_at > other.began_at and gone.began_at >= step and other_did:
            self.unfit(gone, text, now)  # its first step: it may be its script that is another
            return
        advice = "let all workers decide alike, by step.loss or what job.evaluate returned"
        self._office.end(4, f"worker {gone.id} {text}: {advice}")

    def _turn_away(self, node: Node, why: str, now: float, exit_code: int = 4) -> None:
        """A node that has nobody at work is not of the job."""
        for worker in self._strike_off(node):
            self._put_down(worker.id)
            self._lost(worker.id, now)
        self._office.want(TurnAway(node.name, why, exit_code))
        self._office.say(f"node {node.name} is turned away: {why}")

    def _start_failed(self, worker: Worker, death: Death, now: float) -> None:
        """A node on which nobody gets to work is not waited for while others do."""
        office, node = self._office, self._office.staff.nodes.get(worker.node)
        if node is None:
            return
        killed = worker.ready and death.kind == "signal"
        node.start_failed(worker.id, office.staff.first_id - 1, now, killed)
        at_work = any(other.proven for other in office.staff.on(node.name))
        if (
            office.in_training
            and node.failed_starts >= LOOP_LIMIT
            and not at_work
            and death.kind != "signal"
            and node.name != office.settings.home_node
        ):
            text = f"{node.failed_starts} workers in a row ended here before they had done a step"
            self._turn_away(node, f"{text}; the last one {death.message}", now, 1)

    def _begun(self, worker: Worker) -> bool:
        """Whether a worker's death is one in training: where others are at work, it has to have been too.

        What fails on a node that is new, or in a replacement, may be the fault of that alone.
        """
        doing, first = worker.progress, worker.first_step
        # What it had in hand may be known before its commits are.
        further = doing is not None and doing.phase not in IDLE and first is not None and doing.step > first
        return worker.ready and (worker.proven or further or not self._office.staff.at_work(worker.id))

    def _strike_off(self, node: Node) -> list[Worker]:
        """The node's workers, of whom nothing more is expected."""
        office = self._office
        del office.staff.nodes[node.name]
        there = office.staff.on(node.name)
        if there:
            office.want(GiveUp(tuple(worker.id for worker in there)))
        for worker in there:
            del office.staff.workers[worker.id]
            self._accounted.add(worker.id)
        return there

    def vanished(self, worker: Worker, now: float) -> None:
        """An agent that said hello again does not have this worker any more: how it ended may be told yet."""
        del self._office.staff.workers[worker.id]
        self._put_down(worker.id)
        self._lost(worker.id, now)
        if worker.stopped:
            self._accounted.add(worker.id)
        else:
            self._missing[worker.id] = (worker, now)

    def exited_unseen(self, exited: msg.WorkerExited, now: float) -> None:
        """The exit of a worker that is not among the staff."""
        if exited.worker in self._missing:
            worker, _ = self._missing.pop(exited.worker)
            self.exited(worker, exited, now)
        elif exited.worker not in self._accounted and exited.exit_code != 0 and self._office.phase != "over":
            # It ended while no coordinator was there: nobody knows whether it had reached its first step.
            unknown = Worker(exited.worker, "", -1, joined=True)
            self._stops(unknown, _death(unknown, exited), exited, ready=True)

    @property
    def missing(self) -> bool:
        """Whether it may yet be told how a worker ended that is gone."""
        return bool(self._missing)

    def give_up_missing(self, now: float) -> None:
        """Nothing was told of these in time: they ended, it is not known how."""
        for worker, since in list(self._missing.values()):
            if now - since > MISSING_S:
                del self._missing[worker.id]
                self._accounted.add(worker.id)
                death = Death("node", None, None, message="it was gone when its node came back")
                if not self._stops(worker, death, None, worker.ready):
                    self._saving.tails_lost([worker])

    def outvoted(self, digests: Mapping[WorkerId, str], when: str, now: float) -> bool:
        """P8: those whose state is not the majority's are ended; true if there are such.

        A joiner has its state from one of the others and is no witness for that. Joiners that differ twice
        in a row end the run instead (E14).
        """
        office = self._office
        votes = [d for w, d in digests.items() if w not in office.heals.unproved] or list(digests.values())
        counts = [(votes.count(d), -w, w) for w, d in digests.items()]
        right = digests[max(counts)[2]]
        wrong = [w for w, d in digests.items() if d != right]
        death = Death("corrupt", None, None, message=f"its state {when} differs from the others'")
        if wrong and office.heals.refuted(wrong):
            for who in [office.staff.workers[w] for w in wrong if w in office.staff.workers]:
                self._tell(who, death, "digest", 0.0, Decision("SEV2", "stop", 1, CAUSE))
            office.end(1, CAUSE)
            return True
        for w in wrong:
            self.fault(w, death, "digest", now)
        return bool(wrong)

    def _stops(self, worker: Worker, death: Death, exited: msg.WorkerExited | None, ready: bool) -> bool:
        """Judge a death; true if it ended the run, its traceback shown first."""
        detected_by = "exception" if death.exception else "lease" if death.kind == "node" else "pidfd"
        detect_s = exited.detect_s if exited else 0.0
        decision = self._decide(worker, death, detected_by, detect_s, ready)
        if decision.action != "stop":
            return False
        for record in worker.crash.records if worker.crash else ():
            self._office.record(record)
        if worker.crash and worker.crash.kind.startswith("perdure."):
            self._office.end(
                decision.exit_code,
                f"{death.where}: {decision.message.removeprefix(f'{worker.crash.kind}: ')}",
            )
            return True
        tail = exited.tail if exited else ""
        trace = (worker.crash.traceback if worker.crash else tail).rstrip()
        text = trace if trace.endswith(decision.message) else f"{trace}\nperdure: {decision.message}".lstrip()
        self._office.end(decision.exit_code, text)
        return True

    def _decide(
        self, worker: Worker, death: Death, detected_by: str, detect_s: float, ready: bool
    ) -> Decision:
        office = self._office
        again = worker.id >= self._hired_at_start
        decision = office.failures.judge(death, ready, office.in_training, again)
        if worker.released and decision.action == "replace":
            decision = office.failures.tail_lost((worker.node, worker.slot), death)
        doing = worker.progress
        at_work = doing is not None and doing.phase in ("data", "compute")
        if doing is not None and at_work and decision.action == "replace":
            decision = office.failures.at_micro_batch(death, doing.step, doing.micro_batch)
        if not ready:
            self._hired_at_start = office.staff.first_id
        self._tell(worker, death, detected_by, detect_s, decision)
        return decision

    def _tell(
        self, worker: Worker, death: Death, detected_by: str, detect_s: float, decision: Decision
    ) -> None:
        event = self._office.event
        event(
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
            last_lines=death.last_lines,
            **self._in_hand(worker),
        )
        event(
            "fault_decided",
            worker=worker.id,
            node=worker.node,
            severity=decision.severity,
            action=decision.action,
            message=decision.message,
            **self._in_hand(worker),
        )
        if decision.action == "replace" and not self._plain.is_plain():
            again = worker.released and self._saving.restorable
            over = self._office.phase == "saving" or (self._office.phase == "released" and not again)
            nobody = self._office.stopping or over or death.kind == "node"
            then = "" if nobody else "; another takes its place"
            self._office.say(f"worker {worker.id}: {death.message}{then}")
        if decision.exit_code == 3:
            event("given_up", message=decision.message)

    def _in_hand(self, worker: Worker) -> dict[str, int]:
        """The step that the worker had in hand, for its events; it may be ahead of what is known here."""
        progress = worker.progress
        ahead = progress is not None and progress.phase not in IDLE and progress.step > self._office.committed
        if progress is None or not ahead:
            return {}
        self.furthest = max(self.furthest, progress.step)
        return {"step": progress.step}

    def _replace(self, worker: Worker, death: Death, now: float, doing: Doing | None) -> None:
        begun = self._begun(worker)
        if self._office.phase == "released":
            self._saving.tail_crashed(worker)
            return
        self._lost(worker.id, now, doing)
        self._saving.save_again()
        if not begun:
            self._start_failed(worker, death, now)

    def _lost(self, worker: WorkerId, now: float, doing: Doing | None = None) -> None:
        self._office.carry(self._office.membership.lost(worker, doing=doing), now)

    def _put_down(self, worker: WorkerId) -> None:
        """What a dead worker had in hand is somebody else's."""
        self._office.carry_tasks(self._office.tasks.lost(worker))
        self._office.heals.lost(worker)
        self._saving.gone(worker)


def _doing(progress: msg.Progress | None) -> Doing | None:
    """A dead worker's progress page in the words of `waste`."""
    if progress is None:
        return None
    return Doing() if progress.phase in IDLE else Doing(progress.step, progress.micro_batch)


def _death(worker: Worker, exited: msg.WorkerExited) -> Death:
    """How a worker ended, in the words of the report."""
    if worker.crash is not None:
        return replace(_exception(worker.crash, exited.exit_code, exited.signal), last_lines=exited.tail)
    if exited.signal is not None:
        kind, message = "signal", f"ended by signal {exited.signal}"
    else:
        kind, message = "exit", f"exited with code {exited.exit_code} before the loop ended"
    return Death(kind, exited.exit_code, exited.signal, message=message, last_lines=exited.tail)


def _exception(crash: msg.Crashed, exit_code: int | None, signum: int | None) -> Death:
    text = crash.traceback.strip().splitlines()[-1] if crash.traceback.strip() else crash.kind
    return Death("exception", exit_code, signum, crash.kind, crash.where, text, crash.user)
