"""Many runs, each from one integer: what was found, and how to see it again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from perdure.sim.protocol import faults
from perdure.sim.protocol.simulation import Outcome, Rig, Simulation, Verdict
from perdure.sim.protocol.trace import Trace
from perdure.sim.protocol.world import Chance


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is searched: the kinds and places of faults, the parts that run, when to stop."""

    kinds: tuple[str, ...] = faults.KINDS
    points: tuple[str, ...] = tuple(faults.POINTS)
    faults_max: int = 4
    rig: Rig = field(default_factory=Rig)
    findings_max: int = 1
    seconds_max: float | None = None


@dataclass
class Findings:
    """The outcome of a search."""

    runs: int = 0
    events: int = 0
    commits: int = 0
    seconds: float = 0.0
    found: list[Outcome] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    """How many faults struck, by kind and by point."""

    def __str__(self) -> str:
        rate = self.runs / self.seconds if self.seconds else 0.0
        head = f"{self.runs} runs, {self.commits} commits, {self.events} events, {rate:.0f} runs/s"
        lines = [f"{o.verdict.value}: seed {o.seed}: {o.detail.strip().splitlines()[-1]}" for o in self.found]
        return "\n".join([head, *lines])


def search(seeds: Iterable[int], config: Config | None = None) -> Findings:
    """Run the protocol once for each seed; stop after `findings_max` findings."""
    config = config or Config()
    findings = Findings()
    began_s = time.monotonic()
    for seed in seeds:
        outcome = run(seed, config)
        findings.runs += 1
        findings.events += outcome.events
        findings.commits += outcome.commits
        findings.struck.update(word for fault in outcome.fired for word in (fault.kind, fault.point))
        if outcome.verdict is not Verdict.PASSED:
            findings.found.append(outcome)
        findings.seconds = time.monotonic() - began_s
        late = config.seconds_max is not None and findings.seconds > config.seconds_max
        if len(findings.found) >= config.findings_max or late:
            break
    return findings


def run(seed: int, config: Config, trace: Trace | None = None) -> Outcome:
    """One run; the same seed and code give the same run, with or without a trace."""
    schedule = faults.draw(seed, config.kinds, config.points, config.faults_max)
    return Simulation(schedule, config.rig, Chance(seed ^ 0x5EED), trace).run()
