"""What the simulator itself costs."""

from __future__ import annotations

import json
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
compare(load_scenario(Path(sys.argv[1])), sys.argv[2].split(","), 1)
print(json.dumps({"cpu_s": time.process_time() - busy, "wall_s": time.perf_counter() - started,
                  "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


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
        "8-week trace, 128 GPUs, 6 jobs, 7 policies", "≤ 10 s", f"{week['cpu_s']:.1f} s", week["cpu_s"] <= 10
    )
    slowest = {"cpu_s": 0.0, "mib": 0.0}
    for name in POLICIES:
        month = measured("hundred-thousand", (name,))
        slowest = {key: max(value, month[key]) for key, value in slowest.items()}
        rows.append((f"30 days, 100,000 GPUs, {name}", *shown(month)))
    page.bound(
        "100,000 GPUs, 30 days, one policy",
        "≤ 15 s, ≤ 1 GiB",
        f"{slowest['cpu_s']:.1f} s, {slowest['mib']:.0f} MiB at most, of seven policies",
        slowest["cpu_s"] <= 15 and slowest["mib"] <= 1024,
    )
    page.table(("run", "CPU time", "wall time", "memory"), rows)
    page.say("Ten times the cluster (10,000 to 100,000 GPUs) at the same rate per GPU, one job, 30 days:")
    growth = {name: grown(name, 1.0) / grown(name, 0.1) for name in POLICIES}
    page.table(("policy", "times the cost"), [(name, f"{value:.1f}") for name, value in growth.items()])
    most = max(growth.values())
    words = f"{most:.1f} × at most, of seven policies"
    page.bound("Cost as the cluster grows ten times", "≤ 12 ×", words, most <= 12)


def shown(found: dict[str, float]) -> tuple[str, str, str]:
    """CPU time, wall time, memory."""
    return f"{found['cpu_s']:.2f} s", f"{found['wall_s']:.1f} s", f"{found['mib']:.0f} MiB"


def measured(name: str, policies: Sequence[str]) -> dict[str, float]:
    """Seconds and peak memory of one scenario in a process of its own."""
    command = [sys.executable, "-c", MEASURE, str(SCENARIOS / f"{name}.toml"), ",".join(policies)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def grown(policy: str, factor: float) -> float:
    """CPU seconds of three traces of `hundred-thousand` at a part of its size, plans included."""
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
    compare(part, (policy,), 3)
    return time.process_time() - started
