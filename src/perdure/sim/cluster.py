"""A cluster in virtual time: one policy, one trace, several jobs; every GPU-second has a cause.

At each moment, in this order: nodes fail, leave, come and change their pace; jobs' own timers fire (a
checkpoint is due, a phase is over, a transfer has ended); then every job that lost something is decided
on, once, whatever hit it at that moment; then nodes are dealt: by the plan, or to whoever wants one, first
come first served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.core.policies.base import (
    CAUSES,
    Decision,
    Event,
    Fault,
    Leaving,
    Method,
    Offered,
    Policy,
    Slowed,
)
from perdure.core.policies.work import Workload
from perdure.sim.dealing import Planner, moves
from perdure.sim.happenings import Happening, Kind, Trace
from perdure.sim.job import JobRun, Services
from perdure.sim.ledger import Journal
from perdure.sim.nodes import Pool
from perdure.sim.queue import Timers
from perdure.sim.storage import Storage


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to simulate: what it is, when it is submitted, after how many steps it ends."""

    work: Workload
    arrive_s: float = 0.0
    steps: float = math.inf


@dataclass(frozen=True, slots=True)
class Setup:
    """The cluster: `nodes` of which jobs may use that many, `spares` more, and the shared storage."""

    nodes: int
    spares: int
    gpus_per_node: int
    storage_bytes_s: float
    span_s: float
    jobs: tuple[JobSpec, ...]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job; `note` says why it never ran, if it did not.

    `skipped_saves` are checkpoints that were due while the one before was still on its way to the storage.
    """

    steps: float
    flop: float
    faults: int
    restarts: int
    stops: int
    saves: int
    skipped_saves: int
    recomputed_steps: float
    gpu_seconds: dict[str, float]
    note: str


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `waf` is Σ weight × FLOP of steps done once; `series` its growth as (seconds, weighted
    FLOP).
    """

    policy: str
    span_s: float
    gpus: int
    gpu_seconds: dict[str, float]
    waf: float
    jobs: dict[str, JobResult]
    series: tuple[tuple[float, float], ...]
    decisions: int
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Useful GPU-time of all GPU-time."""
        return self.gpu_seconds["useful"] / (self.span_s * self.gpus)


SAMPLES = 60
"""Points of the curve of accumulated WAF."""
Dealt = tuple[tuple[int, ...], tuple[int, ...]]
_NOTHING: Dealt = ((), ())


class Cluster:
    """A simulation under way."""

    def __init__(self, setup: Setup, policy: Policy, trace: Trace, planner: Planner, keep_log: bool) -> None:
        self._setup = setup
        self._policy = policy
        self._trace = trace
        self._planner = planner
        self._journal = Journal(keep_log)
        self._timers = Timers()
        self._storage: Storage[JobRun] = Storage(setup.storage_bytes_s)
        services = Services(self._timers, self._storage, self._journal)
        self._jobs = [
            JobRun(spec.work, policy, services, setup.gpus_per_node, spec.steps) for spec in setup.jobs
        ]
        total = setup.nodes + setup.spares
        self._pool = Pool(total, trace.absent, setup.gpus_per_node, self._journal)
        self._owner: dict[int, JobRun] = {}
        self._lost: dict[int, tuple[JobRun, list[int], Method]] = {}
        self._errors: dict[int, tuple[JobRun, Happening]] = {}
        self._notices: dict[int, tuple[JobRun, list[int], float]] = {}
        self._replan = False
        self._now = 0.0
        self._decisions = 0
        self._series: list[tuple[float, float]] = []

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """From the start to the end of the time span."""
        span_s, happenings, next_one = self._setup.span_s, self._trace.happenings, 0
        self._begin()
        while True:
            now = happenings[next_one].time_s if next_one < len(happenings) else math.inf
            timer, transfer = self._timers.next_time(), self._storage.next_end()
            now = min(now, math.inf if timer is None else timer, math.inf if transfer is None else transfer)
            if now > span_s:
                break
            self._now = now
            while next_one < len(happenings) and happenings[next_one].time_s <= now:
                self._happen(now, happenings[next_one])
                next_one += 1
            if transfer is not None and transfer <= now:
                for number, job in self._storage.advance(now):
                    self._follow(now, job, job.transfer_over(now, number))
            while (timer := self._timers.next_time()) is not None and timer <= now:
                self._timer(now, self._timers.pop())
            self._settle_events(now)
        return self._finish(span_s)

    def _begin(self) -> None:
        for fraction in range(1, SAMPLES + 1):
            self._timers.set(self._setup.span_s * fraction / SAMPLES, ("sample", None))
        first = [job for job, spec in zip(self._jobs, self._setup.jobs, strict=True) if spec.arrive_s <= 0]
        shares = self._planner.plan({job.name: 0 for job in first}, self._setup.nodes)
        for job, spec in zip(self._jobs, self._setup.jobs, strict=True):
            if spec.arrive_s > 0:
                self._timers.set(spec.arrive_s, ("submit", job))
        for job in first:
            job.active = True
            job.nominal = shares[job.name]
            nodes = self._pool.some(job.nominal)
            layout = self._policy.begin(job.work, nodes) if nodes else None
            if layout is None and self._policy.deals == "planner":
                job.reason = "the plan gives it no node"
                continue
            self._give(job, nodes)
            job.reason = f"cannot be laid out on {len(nodes)} nodes" if nodes else "the plan gives it no node"
            job.refresh(0.0)
            if layout is not None:
                job.apply(0.0, Decision(layout, "starts"), fault=False)
        self._pool.settle(0.0)
        self._replan = True
        self._settle_events(0.0)

    def _finish(self, now: float) -> Result:
        total = dict.fromkeys(CAUSES, 0.0)
        jobs = {}
        self._pool.account.change(now, ())
        for cause, seconds in zip(CAUSES, self._pool.account.totals, strict=True):
            total[cause] += seconds
        for job in self._jobs:
            job.settle(now)
            job.account.change(now, ())
            spent = dict(zip(CAUSES, job.account.totals, strict=True))
            for cause, seconds in spent.items():
                total[cause] += seconds
            counts, progress = job.counts, job.progress
            jobs[job.name] = JobResult(
                steps=progress.furthest,
                flop=progress.flop,
                faults=counts.faults,
                restarts=counts.restarts,
                stops=counts.stops,
                saves=counts.saves,
                skipped_saves=counts.skipped_saves,
                recomputed_steps=counts.recomputed_steps,
                gpu_seconds=spent,
                note="" if progress.furthest > 0 else job.reason,
            )
        self._journal.write(now, "end")
        gpus = (self._setup.nodes + self._setup.spares) * self._setup.gpus_per_node
        series = ((0.0, 0.0), *self._series)
        name = self._policy.name
        return Result(name, now, gpus, total, self._waf(), jobs, series, self._decisions, self._journal.lines)

    def _waf(self) -> float:
        return sum(job.work.weight * job.progress.flop for job in self._jobs)

    # -- what happens ----------------------------------------------------------------------------------------

    def _happen(self, now: float, event: Happening) -> None:
        node, owner = event.node, self._owner.get(event.node)
        if event.kind is Kind.ADD:
            self._pool.brought(node)
            self._return(now, node)
        elif event.kind is Kind.REMOVE:
            self._pool.taken(node)
            self._lose(now, node, owner, Method.NODE)
        elif node in self._pool.down:
            return
        elif event.kind is Kind.FAULT and event.severity == 1:
            self._pool.repairing[node] = now + event.lasts_s
            self._timers.set(now + event.lasts_s, ("repaired", node))
            self._lose(now, node, owner, event.method)
        elif event.kind is Kind.FAULT and owner is not None:
            self._errors.setdefault(id(owner), (owner, event))
        elif event.kind is Kind.NOTICE:
            self._notice(now, event, owner)
        elif event.kind is Kind.SLOW:
            self._slow(now, event, owner)

    def _lose(self, now: float, node: int, owner: JobRun | None, method: Method) -> None:
        """A node is gone: from its job, or from the pool."""
        if node in self._pool.down:
            return
        self._journal.write(now, "node_lost", node=node, job=owner.name if owner else None)
        if owner is not None:
            owner.settle(now)
            owner.held.pop(node)
            owner.slow.pop(node, None)
            del self._owner[node]
            self._lost.setdefault(id(owner), (owner, [], method))[1].append(node)
        self._pool.lose(node)
        self._pool.settle(now)
        self._replan = True

    def _return(self, now: float, node: int) -> None:
        """A node works again, unless something else still keeps it away."""
        if self._pool.recovered(node):
            self._pool.down.discard(node)
            self._pool.admit(node)
            self._pool.settle(now)
            self._journal.write(now, "node_back", node=node)
            self._replan = True

    def _notice(self, now: float, event: Happening, owner: JobRun | None) -> None:
        self._pool.leaving.add(event.node)
        if owner is not None:
            self._notices.setdefault(id(owner), (owner, [], event.lasts_s))[1].append(event.node)
        elif event.node in self._pool.free:
            self._pool.free.pop(event.node)
            self._pool.resting.add(event.node)
        self._pool.settle(now)
        self._replan = True

    def _slow(self, now: float, event: Happening, owner: JobRun | None) -> None:
        until = now + event.lasts_s
        self._pool.slow[event.node] = (event.factor, until)
        self._timers.set(until, ("fast", event.node))
        if owner is None:
            if event.node in self._pool.free:
                self._pool.free.pop(event.node)
                self._pool.resting.add(event.node)
                self._pool.settle(now)
            return
        owner.settle(now)
        owner.slow[event.node] = event.factor
        owner.refresh(now)
        if owner.running:
            # A node that is given up leaves the plan, or the job, one short.
            self._replan |= self._decide(now, owner, Slowed(event.node, event.factor), self._pool.some(1), ())

    def _fast(self, now: float, node: int) -> None:
        """A slow spell is over, unless a later one has begun."""
        known = self._pool.slow.get(node)
        if known is None or known[1] > now:
            return
        del self._pool.slow[node]
        owner = self._owner.get(node)
        if owner is not None:
            owner.settle(now)
            owner.slow.pop(node, None)
            owner.refresh(now)
        elif node in self._pool.resting:
            self._pool.admit(node)
            self._pool.settle(now)
            self._replan = True

    def _timer(self, now: float, what: Any) -> None:
        owner, argument = what
        if isinstance(owner, JobRun):
            if argument > 0:
                self._follow(now, owner, owner.fire(now, argument))
            elif owner.later_over(now, -argument):
                self._replan = True
        elif owner == "sample":
            for job in self._jobs:
                job.settle(now)
            self._series.append((now, self._waf()))
        elif owner == "repaired":
            if self._pool.repairing.get(argument, math.inf) <= now:
                del self._pool.repairing[argument]
                self._return(now, argument)
        elif owner == "returned":
            if argument in self._pool.returning:
                self._pool.admit(argument)
                self._pool.settle(now)
                self._replan = True
        elif owner == "fast":
            self._fast(now, argument)
        elif owner == "submit":
            self._submit(now, argument)

    def _follow(self, now: float, job: JobRun, outcome: str | None) -> None:
        """A job ended, or may want nodes: it computes again, or it waits from now on.

        Nodes that came while it was busy with something else were not offered to it.
        """
        if outcome == "ended":
            self._journal.write(now, "job_ended", job=job.name)
            nodes = tuple(job.held)
            for node in nodes:
                self._take_away(job, node)
                self._pool.admit(node)
            job.leave(now)
            self._pool.settle(now)
            self._replan = True
        elif outcome == "waits":
            self._replan = True
        elif outcome == "ready" and self._pool.free and len(job.held) < job.nominal:
            self._replan |= self._policy.deals == "queue"

    def _submit(self, now: float, job: JobRun) -> None:
        """A late job joins the plan; without a planner it waits for its first nodes."""
        job.active = True
        job.waiting_since = now
        self._journal.write(now, "job_submitted", job=job.name)
        job.reason = "waits for its first nodes"
        self._replan = True

    # -- decisions -------------------------------------------------------------------------------------------

    def _settle_events(self, now: float) -> None:
        """Decide on everything that came up at this moment."""
        if not (self._replan or self._lost or self._errors or self._notices):
            return
        planned = self._policy.deals == "planner" and self._replan
        dealt = self._plan(now) if planned else {}
        for key, (job, error) in self._errors.items():
            if key not in self._lost and job.running:
                fault = Fault(error.severity, error.method, (error.node,), job.step_done)
                self._fault(now, job, fault, ((), ()))
        self._errors.clear()
        pending = self._pending(dealt)
        # Those that only give come first, so that what they give can be taken.
        for job, event in sorted(pending, key=lambda item: bool(dealt.get(item[0].name, _NOTHING)[0])):
            if isinstance(event, Fault):
                self._fault(now, job, event, dealt.get(job.name, _NOTHING))
            else:
                self._decide(now, job, event, *dealt.get(job.name, _NOTHING))
        if self._replan and not planned:
            self._offer(now)
        self._replan = False

    def _pending(self, dealt: dict[str, Dealt]) -> list[tuple[JobRun, Event]]:
        """What every job has to be decided on: nodes it lost, nodes it will lose, or a change of plan."""
        found: dict[str, tuple[JobRun, Event]] = {}
        for job, nodes, method in self._lost.values():
            job.drop_upload(self._now)
            found[job.name] = (job, Fault(1, method, tuple(nodes), job.step_done))
        for job, nodes, notice_s in self._notices.values():
            still = tuple(node for node in nodes if node in job.held)
            if still and job.active and job.name not in found:
                found[job.name] = (job, Leaving(still, notice_s))
        self._lost.clear()
        self._notices.clear()
        for job in self._jobs:
            if job.name in dealt and job.name not in found:
                found[job.name] = (job, Offered())
        return list(found.values())

    def _fault(self, now: float, job: JobRun, fault: Fault, dealt: Dealt) -> None:
        take, give = dealt
        if self._policy.deals == "queue":
            away = 0 if fault.severity == 1 else len(fault.nodes)
            take = self._pool.some(job.nominal - len(job.held) + away)
        self._journal.write(
            now,
            "fault",
            job=job.name,
            severity=fault.severity,
            method=fault.method.value,
            nodes=list(fault.nodes),
        )
        self._decide(now, job, fault, take, give)

    def _decide(
        self, now: float, job: JobRun, event: Event, free: tuple[int, ...], give: tuple[int, ...]
    ) -> bool:
        """Ask the policy and carry its answer out; False if nothing changes."""
        job.settle(now)
        decision = self._policy.decide(job.work, job.view(free, give, self._planner.running_s), event)
        if decision is None:
            return False
        self._decisions += 1
        self._journal.write(now, "decision", job=job.name, reason=decision.reason)
        job.reason = decision.reason
        for node in decision.release:
            if node in job.held:
                self._take_away(job, node)
                self._pool.admit(node)
        for node, seconds in decision.returning:
            if node in job.held:
                self._take_away(job, node)
                self._pool.returning.add(node)
                self._timers.set(now + decision.detect_s + seconds, ("returned", node))
        self._give(job, decision.take)
        job.apply(now, decision, fault=isinstance(event, Fault))
        self._pool.settle(now)
        return True

    def _give(self, job: JobRun, nodes: Sequence[int]) -> None:
        for node in nodes:
            del self._pool.free[node]
            job.held[node] = None
            self._owner[node] = job

    def _take_away(self, job: JobRun, node: int) -> None:
        job.held.pop(node)
        job.slow.pop(node, None)
        del self._owner[node]

    def _plan(self, now: float) -> dict[str, Dealt]:
        """What every job has to take and give under the plan for the nodes that work now."""
        jobs, leaving = [job for job in self._jobs if job.active], self._pool.leaving
        if not jobs:
            return {}
        holding = {
            job.name: len(job.held) - (sum(node in job.held for node in leaving) if leaving else 0)
            for job in jobs
        }
        hit = frozenset(job.name for job, _, _ in self._lost.values())
        # A node that is still owed to the job by a change under way is not dealt twice: it is held already.
        targets = self._planner.plan(holding, sum(holding.values()) + len(self._pool.free), hit)
        short = sum(max(0, targets[name] - count) for name, count in holding.items())
        return moves(jobs, targets, leaving, self._pool.slow, self._pool.some(short))

    def _offer(self, now: float) -> None:
        """Free nodes to jobs that wait, then to those that run on fewer than they were given, the oldest
        first.
        """
        for job in sorted(self._jobs, key=lambda job: (job.state != "wait", job.waiting_since)):
            if not job.active or job.state not in ("wait", "run", "recompute"):
                continue
            if not job.begun and self._first_nodes(now, job):
                continue
            free = self._pool.some(job.nominal - len(job.held))
            if free or job.state == "wait":
                self._decide(now, job, Offered(), free, ())

    def _first_nodes(self, now: float, job: JobRun) -> bool:
        """A job that has not run yet begins on what is free, which is then its share. False if it cannot.

        The first plan gave it nothing, or fewer nodes than the policy can lay it out on, or was made before
        it came. Nodes that other jobs were given are theirs, also while they are being repaired, and spares
        replace nodes: only planned ones that nobody was given can be had.
        """
        given = sum(other.nominal for other in self._jobs if other.active and other is not job)
        share = min(len(job.held) + len(self._pool.free), self._setup.nodes - given, job.work.curve.nodes_max)
        if share <= job.nominal or share < job.work.nodes_min or share in job.unfit:
            return False
        more = self._pool.some(share - len(job.held))
        if self._policy.begin(job.work, (*job.held, *more)) is None:
            job.unfit.add(share)
            return False
        job.nominal = share
        return self._decide(now, job, Offered(), more, ())


def simulate(setup: Setup, policy: Policy, trace: Trace, planner: Planner, keep_log: bool = False) -> Result:
    """One run of `policy` over `trace`; the same arguments give the same result."""
    return Cluster(setup, policy, trace, planner, keep_log).run()
