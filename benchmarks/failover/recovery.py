"""What a SIGKILL at a random moment costs: seen, regrouped, stalled, recomputed, replaced, healed."""

from __future__ import annotations

import json
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from figures import Figure, interval
from rundir import Kill, RunDir
from settings import STEP_1S, WORKERS, Workload

import jobs

KILLS = 9
WARM_UP = 4
PAUSE = 2
END_S = 60.0


@dataclass(frozen=True)
class Case:
    """One kill's figures; times in seconds."""

    detect_s: float
    regroup_s: float
    stall_s: float
    recomputed: int
    replaced_s: float
    joining_delay_s: float


def measure(scale: float) -> list[Figure]:
    """With replacements from the zygote, then with a standby."""
    kills = max(2, round(KILLS * scale))
    plain, step_s = run(STEP_1S, kills, standby=0)
    ready, ready_step_s = run(STEP_1S, kills, standby=1)
    own = STEP_1S.per_step // WORKERS
    in_hand_s = step_s / own
    note = f"{len(plain)} kills, step {step_s:.2f} s"
    return [
        figure("SIGKILL → the agent knows", [c.detect_s for c in plain], 0.05, note),
        figure(
            "SIGKILL → all survivors in the new generation",
            [c.regroup_s for c in plain],
            0.1 + in_hand_s,
            f"{note}; bound: 0.1 s + a micro-batch of {in_hand_s:.2f} s",
        ),
        figure("stall of a SIGKILL", [c.stall_s for c in plain], 0.25 * step_s + 0.1, note),
        Figure(
            name="recomputed micro-batches, at most",
            value=max(c.recomputed for c in (*plain, *ready)),
            bound=own,
            samples=[c.recomputed for c in (*plain, *ready)],
            note=f"a worker's own are {own}",
        ),
        figure(
            "killed → replacement computes, from the zygote",
            [c.replaced_s for c in plain],
            1 + 2 * step_s,
            note,
        ),
        figure(
            "killed → replacement computes, with --standby 1",
            [c.replaced_s for c in ready],
            0.3 + ready_step_s,
            f"{len(ready)} kills, step {ready_step_s:.2f} s",
        ),
        figure(
            "survivors' delay by a joiner, of a step",
            [c.joining_delay_s / step_s for c in plain],
            0.1,
            "first step with the joiner against the median step",
            unit="",
        ),
    ]


def figure(name: str, samples: list[float], bound: float, note: str, unit: str = "s") -> Figure:
    return Figure(
        name=name,
        value=statistics.median(samples),
        bound=bound,
        unit=unit,
        interval=interval(samples),
        samples=samples,
        note=f"{note}; largest {max(samples):.3f}",
    )


def run(workload: Workload, kills: int, standby: int) -> tuple[list[Case], float]:
    """One job with `kills` kills, each after the one before was replaced; the cases and the median step."""
    drawn = random.Random(standby)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as name:
        files = RunDir(Path(name) / "run")
        launcher = ("--standby", str(standby)) if standby else ()
        with jobs.perdure(workload, files.path, 100_000, launcher=launcher) as job:
            files.wait(lambda: len(files.members) == WORKERS and files.last_step >= WARM_UP)
            for _ in range(kills):
                files.wait_steps(1)
                if standby:
                    files.wait(lambda: ready_standbys(files) >= standby)
                pause(files, drawn.random() * files.step_s())
                kill = files.kill(drawn.choice(files.members))
                files.wait_replaced(kill)
                files.wait_steps(PAUSE)
                print(f"  {case(files, kill)}", flush=True)
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(END_S)
            files.refresh()
        stalls = reported(files, json.loads((files.path / "report.json").read_text()))
        cases = [case(files, kill) for kill in files.kills]
        return [
            replace(found, stall_s=stall) for found, stall in zip(cases, stalls, strict=True)
        ], files.step_s()


def pause(files: RunDir, seconds: float) -> None:
    """A random moment: let so much time pass."""
    time.sleep(seconds)
    files.refresh()


def ready_standbys(files: RunDir) -> int:
    """Workers that have started and are neither members nor dead."""
    gone = {kill.worker for kill in files.kills}
    started = {event["worker"] for event in files.find("worker_started")}
    return len(started - gone - set(files.members))


def case(files: RunDir, kill: Kill) -> Case:
    """A kill's figures from the job's own files."""
    ending = files.find("worker_ending", kill.time, worker=kill.worker)
    detected = files.find("fault_detected", kill.time, worker=kill.worker)[0]
    known = ending[0]["noticed_s"] if ending else detected["wall_s"]
    opened = next(e for e in files.find("generation_opened", kill.time) if kill.worker in e["lost"])
    computing = files.find("generation_computing", kill.time, generation=opened["generation"])[0]
    newcomer = files.newcomer(kill)
    first = files.find("first_micro_batch", kill.time, worker=newcomer)[0]
    joined = next(e for e in files.find("generation_computing", kill.time) if newcomer in e["members"])
    times = {commit["step"]: commit["time"] for commit in files.commits}
    base = joined["base"]
    return Case(
        detect_s=known - kill.time,
        regroup_s=computing["wall_s"] - kill.time,
        stall_s=files.stall_s(kill),
        recomputed=opened["dealt"],
        replaced_s=first["wall_s"] - kill.time,
        joining_delay_s=times[base + 1] - times[base] - files.step_s(),
    )


def reported(files: RunDir, report: dict[str, Any]) -> list[float]:
    """The kills' stalls by the job's own report, which has to tell of the same deaths."""
    faults = [fault for fault in report["faults"] if fault["kind"] == "signal"]
    told, expected = [fault["worker"] for fault in faults], [kill.worker for kill in files.kills]
    if told != expected:
        raise RuntimeError(f"report.json tells of the deaths of {told}; killed were {expected}")
    return [fault["stall_s"] for fault in faults]
