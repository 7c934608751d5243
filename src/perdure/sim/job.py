"""One job in virtual time: what it is doing, how far it is, and where the time of its GPUs goes.

States: `run` (a step beyond the furthest so far), `recompute` (one that was done before and lost),
`checkpoint` (stalls until state is saved), `detect`, `transition` and `wait` (for nodes; also before it is
submitted and after it has ended). Between two events the position grows at the constant pace of the
layout, slowed by the slowest node; nothing is stepped through.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from perdure.core.policies.base import Decision, Later, Layout, Lost, Policy, Saving, Stage, View
from perdure.core.policies.work import Workload
from perdure.sim.ledger import INDEX, Account, Journal, Rates
from perdure.sim.queue import Timers
from perdure.sim.storage import Storage

EPSILON = 1e-9
"""Steps: positions closer than this are the same."""


@dataclass(slots=True)
class Services:
    """What all jobs of a simulation share."""

    timers: Timers
    storage: Storage[JobRun]
    journal: Journal


@dataclass(slots=True)
class Phase:
    """Something a job does before it can run: `cause` takes its GPUs until the time or the transfer is
    over.
    """

    name: str
    cause: str
    seconds: float = 0.0
    nbytes: float = 0.0
    saves: bool = False


@dataclass(slots=True)
class Counts:
    """What happened to a job."""

    faults: int = 0
    restarts: int = 0
    stops: int = 0
    saves: int = 0
    skipped_saves: int = 0
    recomputed_steps: float = 0.0


@dataclass(slots=True)
class Progress:
    """How far a job is, in steps: now, at most so far, and in the newest complete checkpoint."""

    position: float = 0.0
    furthest: float = 0.0
    saved: float = 0.0
    since_save_s: float = 0.0
    flop: float = 0.0

    def roll_back(self, lost: Lost, share: float, memory_steps: int) -> None:
        """Give up what is lost."""
        whole = math.floor(self.position + EPSILON)
        part = max(0.0, self.position - whole)
        if lost is Lost.SHARE:
            self.position = whole + part * (1.0 - share)
        elif lost is Lost.STEP:
            self.position = float(whole)
        elif lost is Lost.MEMORY and memory_steps:
            self.position = max(self.saved, float(whole - whole % memory_steps))
        elif lost in (Lost.CHECKPOINT, Lost.MEMORY):
            self.position = self.saved
            self.since_save_s = 0.0


class JobRun:
    """The state of one job; its methods carry decisions out."""

    def __init__(
        self, work: Workload, policy: Policy, services: Services, gpus_per_node: int, end_steps: float
    ) -> None:
        self.work = work
        self.policy = policy
        self.services = services
        self.gpus_per_node = gpus_per_node
        self.end_steps = end_steps
        self.nominal = 0
        self.state = "wait"
        self.active = False
        self.begun = False
        self.unfit: set[int] = set()  # numbers of nodes that it cannot begin on
        self.reason = "was never submitted"
        self.waiting_since = 0.0
        self.layout: Layout | None = None
        self.later: Later | None = None
        self.saving = Saving()
        self.held: dict[int, None] = {}
        self.slow: dict[int, float] = {}
        self.progress = Progress()
        self.counts = Counts()
        self.account = Account()
        self._since = 0.0
        self._token = 0
        self._later_token = 0
        self._phases: deque[Phase] = deque()
        self._phase_end = 0.0
        self._transfer: int | None = None
        self._upload: tuple[int, float] | None = None
        self._save_due = math.inf

    @property
    def name(self) -> str:
        return self.work.name

    @property
    def running(self) -> bool:
        """It computes, or stalls for a planned checkpoint."""
        return self.state in ("run", "recompute", "checkpoint")

    @property
    def step_done(self) -> float:
        """How much of the step in progress is done; 0 while nothing is computed."""
        if not self.running:
            return 0.0
        return max(0.0, self.progress.position - math.floor(self.progress.position + EPSILON))

    @property
    def pace(self) -> float:
        """Steps per second of the layout with its slowest node."""
        assert self.layout is not None  # asked while it runs
        return 1.0 / (self.layout.speed.step_s * self.slowdown)

    @property
    def slowdown(self) -> float:
        return max(self.slow.values(), default=1.0)

    def view(self, free: tuple[int, ...], give: tuple[int, ...], running_s: float) -> View:
        """What the policy is shown."""
        return View(self.layout, self.held.keys(), self.nominal, free, give, running_s)

    # -- time ------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Bring position and time since the last save up to `now`."""
        span = now - self._since
        self._since = now
        if span <= 0 or self.state not in ("run", "recompute"):
            return
        progress = self.progress
        before = progress.position
        progress.position = before + span * self.pace
        progress.since_save_s += span
        if before < progress.furthest:
            self.counts.recomputed_steps += min(progress.position, progress.furthest) - before
        if progress.position > progress.furthest:
            progress.flop += (progress.position - progress.furthest) * self.work.step_flop
            progress.furthest = progress.position

    def enter(self, now: float, state: str) -> None:
        """Go into `state`: account for it, write it down, set the timer for what comes next."""
        self.state = state
        self._token += 1
        self.account.change(now, self._rates())
        self._write(now)
        if state in ("run", "recompute"):
            self.services.timers.set(self._next_change(now), (self, self._token))

    def refresh(self, now: float) -> None:
        """Nodes came, went, or changed their pace: settle, and go on in the same state."""
        self.settle(now)
        if self.state in ("run", "recompute"):
            self.resume(now)
        else:
            self.account.change(now, self._rates())
            self._write(now)

    def resume(self, now: float) -> None:
        """Compute: a step that was done before, or a new one."""
        behind = self.progress.position < self.progress.furthest - EPSILON
        self.enter(now, "recompute" if behind else "run")

    def _next_change(self, now: float) -> float:
        """When the job's own course changes next: it catches up, saves, or ends."""
        pace, progress = self.pace, self.progress
        times = [(self.end_steps - progress.position) / pace]
        if self.state == "recompute":
            times.append((progress.furthest - progress.position) / pace)
        saving = self.saving
        if saving.every_s is not None:
            times.append(saving.every_s - progress.since_save_s)
        if saving.every_steps is not None:
            times.append((self._save_due - progress.position) / pace)
        return now + max(0.0, min(times))

    def fire(self, now: float, token: int) -> str | None:
        """The timer of `enter` or of a phase has come.

        Answers `ended`, `ready` (it runs again), `waits` (for nodes, from now on), or None.
        """
        if token != self._token:
            return None
        self.settle(now)
        if self.state in ("run", "recompute"):
            return self._course(now)
        return self._phase_over(now)

    def _course(self, now: float) -> str | None:
        progress, saving = self.progress, self.saving
        if progress.position >= self.end_steps - EPSILON * max(1.0, self.end_steps):
            return "ended"
        due = saving.every_s is not None and progress.since_save_s >= saving.every_s - 1e-6
        if saving.every_steps is not None and progress.position >= self._save_due - 1e-6:
            progress.position = max(progress.position, self._save_due)
            due = True
        if due:
            self._save(now)
        elif self.state == "recompute" and progress.position >= progress.furthest - 1e-6:
            progress.position = max(progress.position, progress.furthest)
            self.enter(now, "run")
        else:
            self.resume(now)
        return None

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _save(self, now: float) -> None:
        """A planned checkpoint: a stall, and a transfer within it or in the background."""
        saving, progress = self.saving, self.progress
        progress.since_save_s = 0.0
        self._schedule_save()
        if self._upload is not None:
            self.counts.skipped_saves += 1  # the one before is still on its way
            self.resume(now)
            return
        if saving.write_bytes and not saving.waits:
            self._upload = (self.services.storage.start(now, saving.write_bytes, self), progress.position)
        nbytes = saving.write_bytes if saving.waits else 0.0
        if saving.stall_s == 0 and nbytes == 0:
            if self._upload is None:
                self._saved(progress.position)
            self.resume(now)
            return
        self._phases = deque(
            [Phase("checkpoint", "checkpoint", saving.stall_s, nbytes, saves=self._upload is None)]
        )
        self._next_phase(now)

    def _schedule_save(self) -> None:
        """The next multiple of `every_steps`."""
        every = self.saving.every_steps
        if every is not None:
            self._save_due = (math.floor(self.progress.position / every + 1e-9) + 1) * float(every)

    def _saved(self, position: float) -> None:
        self.progress.saved = max(self.progress.saved, position)
        self.counts.saves += 1

    def transfer_over(self, now: float, number: int) -> str | None:
        """A transfer has ended; answers as `fire` does."""
        if self._upload is not None and self._upload[0] == number:
            self._saved(self._upload[1])
            self._upload = None
            return None
        if number != self._transfer:
            return None
        self._transfer = None
        self.settle(now)
        return self._timed(now)

    # -- decisions -------------------------------------------------------------------------------------------

    def apply(self, now: float, decision: Decision, fault: bool) -> None:
        """Carry a decision out; the nodes it takes and releases are in `held` already."""
        self.settle(now)
        progress = self.progress
        progress.roll_back(decision.lost, decision.share, self.saving.memory_steps)
        later = decision.later
        self._later_token += 1
        self.later = later
        if later is not None:
            self.services.timers.set(now + later.after_s + decision.detect_s, (self, -self._later_token))
        left = self._phase_left(now) if not fault and self.state == "detect" else 0.0
        waits = self.state == "wait" and decision.layout is None
        seamless = self.running and not fault and _interrupts_nobody(decision)
        self._set_layout(decision.layout)
        if seamless or waits:
            self.refresh(now)
            return
        if not fault and not decision.stages and not self.running and self.state != "wait" and self._phases:
            self.refresh(now)  # it is recovering already: the change rides along
            return
        self._drop_phases(now)
        phases = [Phase("detect", "detection", decision.detect_s + left)]
        if decision.save_first and self.layout_saves:
            phases.append(self._leaving_save())
        phases.extend(_as_phase(stage) for stage in decision.stages)
        self._phases = deque(phase for phase in phases if phase.seconds > 0 or phase.nbytes > 0)
        if fault:
            self.counts.faults += 1
        if decision.lost in (Lost.CHECKPOINT, Lost.MEMORY):
            self.counts.restarts += 1
        self._next_phase(now)

    @property
    def layout_saves(self) -> bool:
        """Whether there is something to save."""
        return self.progress.position > self.progress.saved + EPSILON

    def _leaving_save(self) -> Phase:
        """A checkpoint before the job exits on purpose: all of it has to be written."""
        saving = self.saving
        if saving.stall_s <= 0 and saving.write_bytes <= 0:
            self._saved(self.progress.position)
        return Phase("checkpoint", "checkpoint", saving.stall_s, saving.write_bytes, saves=True)

    def _set_layout(self, layout: Layout | None) -> None:
        self.layout = layout
        if layout is not None:
            self.begun = True
            self.saving = self.policy.saving(self.work, layout)
            self._schedule_save()

    def later_over(self, now: float, token: int) -> bool:
        """The change that was made ready takes place; False if it was overtaken by another."""
        if token != self._later_token or self.later is None:
            return False
        later, self.later = self.later, None
        if not self.running:  # it recovers from something else: the nodes are ready when it is
            self._set_layout(later.layout)
            self.refresh(now)
            return True
        self.apply(now, Decision(later.layout, "made ready", stages=later.stages), fault=False)
        return True

    def drop_upload(self, now: float) -> None:
        """The node that was writing the checkpoint is lost."""
        if self._upload is not None:
            self.services.storage.stop(now, self._upload[0])
            self._upload = None

    def leave(self, now: float) -> None:
        """The job has ended, or is not there yet."""
        self._drop_phases(now)
        self.drop_upload(now)
        self.layout = None
        self.later = None
        self.active = False
        self.enter(now, "wait")

    # -- phases ----------------------------------------------------------------------------------------------

    def _phase_left(self, now: float) -> float:
        return max(0.0, self._phase_end - now)

    def _drop_phases(self, now: float) -> None:
        if self._transfer is not None:
            self.services.storage.stop(now, self._transfer)
            self._transfer = None
        self._phases.clear()

    def _next_phase(self, now: float) -> str | None:
        """Begin the first phase of the queue, or run, or wait for nodes."""
        if not self._phases:
            if self.layout is None:
                if self.state != "wait":
                    self.waiting_since = now
                    self.counts.stops += 1
                self.enter(now, "wait")
                return "waits"
            self.resume(now)
            return "ready"
        phase = self._phases[0]
        state = {"detection": "detect", "checkpoint": "checkpoint"}.get(phase.cause, "transition")
        self.enter(now, state)
        if phase.nbytes > 0:
            self._transfer = self.services.storage.start(now, phase.nbytes, self)
            self._phase_end = math.inf
            return None
        return self._timed(now)

    def _timed(self, now: float) -> str | None:
        """The part of a phase that takes a fixed time, after its transfer."""
        phase = self._phases[0]
        self._phase_end = now + phase.seconds
        if phase.seconds <= 0:
            return self._phase_over(now)
        self._token += 1
        self.services.timers.set(self._phase_end, (self, self._token))
        return None

    def _phase_over(self, now: float) -> str | None:
        phase = self._phases.popleft()
        if phase.saves:
            self._saved(self.progress.position)
        return self._next_phase(now)

    # -- accounting ------------------------------------------------------------------------------------------

    def _rates(self) -> Rates:
        held = len(self.held) * self.gpus_per_node
        if self.state == "wait" or held == 0:
            return ((INDEX["idle"], held),)
        if self.state in ("run", "recompute"):
            return self._computing(held)
        cause = {"detect": "detection", "checkpoint": "checkpoint"}.get(self.state, "transition")
        return ((INDEX[cause], held),)

    def _computing(self, held: int) -> Rates:
        assert self.layout is not None  # it computes
        speed, slower = self.layout.speed, self.slowdown
        used = min(held, speed.gpus)
        useful, overhead = used * speed.useful / slower, used * speed.overhead / slower
        spare = "transition" if self.later is not None else "idle"
        return (
            (INDEX["useful" if self.state == "run" else "recomputed"], useful),
            (INDEX["healthy_overhead"], overhead),
            (INDEX["degraded"], used - useful - overhead),
            (INDEX[spare], held - used),
        )

    def _write(self, now: float) -> None:
        journal = self.services.journal
        if not journal.keep:
            return
        fields: dict[str, object] = {"job": self.name, "state": self.state, "nodes": len(self.held)}
        fields |= {"position": self.progress.position, "furthest": self.progress.furthest}
        if self.layout is not None and self.state in ("run", "recompute"):
            speed = self.layout.speed
            fields |= {"gpus": speed.gpus, "useful": speed.useful, "overhead": speed.overhead}
            fields |= {"slowdown": self.slowdown, "joining": self.later is not None, "step_s": speed.step_s}
        journal.write(now, "job_state", **fields)


def _interrupts_nobody(decision: Decision) -> bool:
    """The job goes on computing through the change."""
    quick = decision.detect_s == 0 and not decision.stages and not decision.save_first
    return quick and decision.layout is not None and decision.lost is Lost.NOTHING


def _as_phase(stage: Stage) -> Phase:
    return Phase(stage.name, "transition", stage.seconds, stage.read_bytes)
