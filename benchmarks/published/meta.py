"""Meta's formula of effective training time, the best checkpoint interval, mean times to failure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from perdure.schema.cluster import Cluster, GpuRange, Hours, Job, Scenario, Severity, Simulate
from perdure.schema.measured import Measured
from perdure.sim.experiment import mean_of
from perdure.sim.scenario import prepare
from perdure.sim.studies import STUDIES
from published.page import Page

RSC1, RSC2 = 6.50e-3, 2.34e-3
"""Failures per node-day of Meta's two clusters."""
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
FAILURES = 500
"""Expected failures of one trace; its length follows."""


@dataclass(frozen=True)
class Trial:
    """One job on `gpus` GPUs in nodes of eight: failures per node-day, restart u0 and write w in s."""

    gpus: int
    rate: float
    restart_s: float
    write_s: float

    @property
    def nodes(self) -> int:
        return self.gpus // 8

    @property
    def best_s(self) -> float:
        """Δ* = √(2w / (N·r_f)), in s."""
        return math.sqrt(2 * self.write_s / (self.nodes * self.rate / 86_400))

    def formula(self, every_s: float) -> float:
        """ETTR ≈ (1 − N·r_f·(u0 + Δ/2)) / (1 + w/Δ)."""
        per_s = self.nodes * self.rate / 86_400
        return (1 - per_s * (self.restart_s + every_s / 2)) / (1 + self.write_s / every_s)

    def simulated(self, every_s: float, seeds: int, failures: float = FAILURES) -> list[float]:
        """Useful time of the job's own GPUs, a value for each trace; the traces are those of any other Δ."""
        scenario = self.scenario(every_s, failures / (self.nodes * self.rate))
        case = prepare(scenario, ("megatron",))
        runs = [case.run("megatron", case.trace(seed)) for seed in range(seeds)]
        return [run.gpu_seconds["useful"] / (self.gpus * run.span_s) for run in runs]

    def scenario(self, every_s: float, days: float) -> Scenario:
        """The job with a checkpoint every `every_s`, and spares enough."""
        job = Job(
            name="job",
            gpus=GpuRange(min=self.gpus, max=self.gpus, step=8),
            throughput="measured",
            measured=Measured(unit="step_s", gpus=(self.gpus,), values=(5.0,)),
            global_batch=1024,
            flop_per_sample=1e15,
            state_gb=0.001,
        )
        cluster = Cluster(
            nodes=self.nodes,
            gpus_per_node=8,
            gpu="A100-80GB",
            mtbf_hours_per_node=24 / self.rate,
            severity=Severity(sev1=1, sev2=0, sev3=0),
            repair_hours=Hours(fixed=1.0),
            spares=8,
            storage_gb_s=1e6,
        )
        settings = {
            "connection_s": 0.0,
            "timeout_s": 0.0,
            "queue_s": 0.0,
            "setup_s": self.restart_s,
            "write_s": self.write_s,
            "save_every_s": every_s,
        }
        return Scenario(
            cluster=cluster, job=(job,), simulate=Simulate(days=days), policy={"megatron": settings}
        )


def meta(page: Page, seeds: int) -> None:
    """Effective training time, the best interval, mean times to failure."""
    page.section(
        "Meta's formula and interval",
        """
HPCA'25: ETTR ≈ (1 − N·r_f·(u0 + Δ/2)) / (1 + w/Δ), best interval Δ* = √(2w / (N·r_f)); r_f = 6.50 and 2.34
failures per 1,000 node-days. One job under `megatron` with spares, restart u0, a checkpoint of w every Δ*.
""",
    )
    trials = [
        Trial(gpus, rate, restart_s, write_s)
        for gpus in (1024, 2048, 4096, 8192, 16_384)
        for rate, restart_s, write_s in ((RSC1, 300, 60), (RSC1, 600, 300), (RSC2, 600, 300))
    ]
    rows, worst = [], 0.0
    for trial in trials:
        ours, theirs = mean_of(trial.simulated(trial.best_s, seeds)), trial.formula(trial.best_s)
        worst = max(worst, abs(ours.mean - theirs))
        simulated = f"{ours.mean:.2%} ± {ours.ci95:.2%}"
        rows.append((*described(trial), f"{theirs:.2%}", simulated, f"{100 * (ours.mean - theirs):+.2f}"))
    head = ("GPUs", "r_f × 1000", "u0, min", "w, min", "Δ*, min", "formula", "simulated", "points apart")
    page.table(head, rows)
    words = f"{100 * worst:.2f} points at most"
    page.bound("ETTR against Meta's formula, at Δ*", "within 2 points", words, worst <= 0.02)
    far_from_best(page, seeds)
    intervals(page, seeds)
    mean_times(page)


def described(trial: Trial) -> tuple[str, ...]:
    """GPUs, rate, restart, write, best interval."""
    minutes = (trial.restart_s / 60, trial.write_s / 60, trial.best_s / 60)
    return (f"{trial.gpus:,}", f"{trial.rate * 1000:g}", *(f"{value:.3g}" for value in minutes))


def far_from_best(page: Page, seeds: int) -> None:
    """Where the formula stops to hold."""
    page.say(
        """
The formula is of first order in N·r_f·(u0 + Δ): it charges every failure half an interval, also those that
come while a restart or an interval has hardly begun. Far from Δ* it goes astray:
"""
    )
    trial = Trial(16_384, RSC1, 600, 300)
    rows = []
    for every_s in (1800, 3600, 7200):
        ours, theirs = statistics.fmean(trial.simulated(every_s, seeds)), trial.formula(every_s)
        rows.append((f"{every_s / 60:.0f}", f"{theirs:.2%}", f"{ours:.2%}", f"{100 * (ours - theirs):+.2f}"))
    page.table(("Δ, min, at 16,384 GPUs, u0 = 10, w = 5", "formula", "simulated", "points apart"), rows)


def intervals(page: Page, seeds: int) -> None:
    """The interval by the formula against the best found."""
    page.say("Goodput at Δ* against the best found among ten multiples of it, on the same traces:")
    rows, worst = [], 0.0
    for trial in (
        Trial(1024, RSC1, 300, 60),
        Trial(4096, RSC1, 600, 300),
        Trial(16_384, RSC1, 300, 60),
        Trial(16_384, RSC1, 600, 300),
    ):
        values = {
            factor: statistics.fmean(trial.simulated(factor * trial.best_s, seeds, 4 * FAILURES))
            for factor in FACTORS
        }
        best = max(values, key=values.__getitem__)
        apart = 100 * (values[best] - values[1.0])
        worst = max(worst, apart)
        found = (f"{values[1.0]:.2%}", f"{best:g} × Δ*", f"{values[best]:.2%}", f"{apart:.2f}")
        rows.append((*described(trial), *found))
    head = ("GPUs", "r_f × 1000", "u0, min", "w, min", "Δ*, min")
    page.table((*head, "goodput at Δ*", "best found at", "goodput there", "points apart"), rows)
    words = f"{worst:.2f} point at most"
    page.bound("Goodput at Δ* against the best interval found", "within 0.3 point", words, worst <= 0.3)


def mean_times(page: Page) -> None:
    """Mean times to failure from the rates alone."""
    rsc1, llama = (STUDIES[name].mtbf_hours_per_node for name in ("meta-rsc1", "llama3"))
    rows = [
        ("Meta, 1,024 GPUs, r_f = 6.50", "28.8 (7.9 measured)", f"{rsc1 / 128:.2f}"),
        ("Meta, 16,384 GPUs", "1.8", f"{rsc1 / 2048:.2f}"),
        ("Meta, 131,072 GPUs", "0.23", f"{rsc1 / 16_384:.2f}"),
        ("Llama 3, 16,384 GPUs", "3.1", f"{llama / 2048:.2f}"),
    ]
    page.say("Mean time to failure, hours, from the rates alone:")
    page.table(("cluster", "published", "ours"), rows)
