"""What the simulator itself costs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from perdure.core.policies import POLICIES
from perdure.schema.cluster import load_scenario
from perdure.sim.experiment import compare
from published.page import SCENARIOS, Page

MEASURE = """
import json, resource, sys, time
from pathlib import Path
from perdure.schema.cluster import load_scenario
from perdure.sim.experiment import compare
started, busy = time.perf_counter(), time.process_time()
found = compare(load_scenario(Path(sys.argv[1])), sys.argv[2].split(","), 1)
print(json.dumps({"cpu_s": time.process_time() - busy, "wall_s": time.perf_counter() - started,
                  "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "notes": [f"{job} never ran: {result.note}" for runs in found.runs.values()
                            for job, result in runs[0].jobs.items() if result.note]}))
"""


class Cost(msgspec.Struct, frozen=True):
    """Seconds of the processor and of the clock, peak memory, and which jobs did nothing, and why."""

    cpu_s: float
    wall_s: float
    mib: float
    notes: tuple[str, ...]


def cost_of_simulating(page: Page) -> None:
    """Seconds and memory of the simulator itself."""
    page.section(
        "What the simulator itself costs",
        """
One trace in a process of its own, imports not counted; curves, plans and templates are made within the
time and kept. Seconds are CPU time on one core, which is what a quiet machine's clock would show; wall
time on the machine that wrote this page, which did other things too, stands beside it.
""",
    )
    week = measured("unicron-a", tuple(POLICIES))
    rows = [("8 weeks, 128 GPUs, 6 jobs, 7 policies", *shown(week))]
    page.bound(
        "8-week trace, 128 GPUs, 6 jobs, 7 policies", "≤ 10 s", f"{week.cpu_s:.1f} s", week.cpu_s <= 10
    )
    months = {name: measured("hundred-thousand", (name,)) for name in POLICIES}
    rows += [(f"30 days, 100,000 GPUs, {name}", *shown(month)) for name, month in months.items()]
    cpu_s, mib = max(month.cpu_s for month in months.values()), max(month.mib for month in months.values())
    idle = [name for name, month in months.items() if month.notes]
    words = f"{cpu_s:.1f} s, {mib:.0f} MiB at most, of seven policies"
    if idle:
        words += f"; of an idle cluster under {', '.join(idle)}"
    page.bound("100,000 GPUs, 30 days, one policy", "≤ 15 s, ≤ 1 GiB", words, cpu_s <= 15 and mib <= 1024)
    page.table(("run", "CPU time", "wall time", "memory"), rows)
    for name in idle:
        page.say(
            f"""
Under `{name}` nothing was computed at 100,000 GPUs ({"; ".join(months[name].notes)}): its time there is that
of an idle simulation.
"""
        )
    page.say("Ten times the cluster (10,000 to 100,000 GPUs) at the same rate per GPU, one job, 30 days:")
    small, large = ({name: grown(name, factor) for name in POLICIES} for factor in (0.1, 1.0))
    growth = {name: large[name][0] / small[name][0] for name in POLICIES}
    stood = [name for name in POLICIES if not (small[name][1] and large[name][1])]
    growth_rows = [(name, f"{value:.1f}", "no" if name in stood else "yes") for name, value in growth.items()]
    page.table(("policy", "times the cost", "computes at both sizes"), growth_rows)
    most = max(growth.values())
    words = f"{most:.1f} × at most, of seven policies"
    if stood:
        words += f"; {', '.join(stood)} stood idle"
    page.bound("Cost as the cluster grows ten times", "≤ 12 ×", words, most <= 12)


def shown(found: Cost) -> tuple[str, str, str]:
    """CPU time, wall time, memory."""
    return f"{found.cpu_s:.2f} s", f"{found.wall_s:.1f} s", f"{found.mib:.0f} MiB"


def measured(name: str, policies: Sequence[str]) -> Cost:
    """Seconds and peak memory of one scenario in a process of its own."""
    command = [sys.executable, "-c", MEASURE, str(SCENARIOS / f"{name}.toml"), ",".join(policies)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return msgspec.json.decode(ended.stdout, type=Cost)


def grown(policy: str, factor: float) -> tuple[float, bool]:
    """CPU seconds of three traces of `hundred-thousand` at a part of its size, plans included; whether it
    got anything done.
    """
    scenario = load_scenario(SCENARIOS / "hundred-thousand.toml")
    cluster, job = scenario.cluster, scenario.job[0]
    assert job.model is not None
    part = msgspec.structs.replace(
        scenario,
        cluster=msgspec.structs.replace(
            cluster, nodes=round(cluster.nodes * factor), spares=round(cluster.spares * factor)
        ),
        job=(
            msgspec.structs.replace(
                job,
                model=msgspec.structs.replace(job.model, global_batch=round(job.model.global_batch * factor)),
                gpus=msgspec.structs.replace(
                    job.gpus, min=round(job.gpus.min * factor), max=round(job.gpus.max * factor)
                ),
            ),
        ),
    )
    started = time.process_time()
    found = compare(part, (policy,), 3)
    return time.process_time() - started, found.waf(policy).mean > 0
