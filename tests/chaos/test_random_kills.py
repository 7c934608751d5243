"""An outside process hits workers at uniformly random times: `perdure chaos` itself, from a seed."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
from pathlib import Path

import pytest

from jobs import DEADLINE_S, PERDURE, launch, lines, undisturbed
from perdure.chaos.faults import Manner
from perdure.chaos.verdict import Outcome, judge

FOR_EVER = 1 << 30


@dataclasses.dataclass(frozen=True)
class Siege:
    """`kills` faults of one manner, `every_s` on average, on four workers and some standbys."""

    seed: int
    task: str
    kills: int
    standby: int
    manner: Manner = Manner.KILL
    every_s: float = 0.25
    num_workers: int = 0

    def __str__(self) -> str:
        loaders = f", {self.num_workers} loaders" if self.num_workers else ""
        return f"{self.kills} × {self.manner}, {self.task}, {self.standby} standby, seed {self.seed}{loaders}"


SHORT = [
    Siege(seed=1, task="mlp", kills=8, standby=0),
    Siege(seed=2, task="batchnorm", kills=8, standby=1),
    Siege(seed=3, task="weighted", kills=4, standby=0, manner=Manner.TERM),
    Siege(seed=4, task="weighted", kills=6, standby=0, manner=Manner.STOP),
]
TASKS_IN_TURN = ("gpt", "unused", "mixed", "two_optimizers", "mlp", "batchnorm", "weighted")
SOAK = [
    Siege(
        seed=100 + number,
        task=TASKS_IN_TURN[number % len(TASKS_IN_TURN)],
        kills=25,
        standby=number % 2,
        manner=Manner.SEGV if number == 3 else Manner.KILL,
        every_s=0.5,
        num_workers=2 if number == 6 else 0,
    )
    for number in range(8)
]


@pytest.mark.parametrize("siege", SHORT, ids=str)
def test_random_kills(siege: Siege, tmp_path: Path) -> None:
    withstand(siege, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("siege", SOAK, ids=str)
def test_many_random_kills(siege: Siege, tmp_path: Path) -> None:
    withstand(siege, tmp_path)


def test_a_siege_that_is_broken_off_leaves_nobody_stopped(tmp_path: Path) -> None:
    running = launch(tmp_path, "mlp", FOR_EVER, script_options=("--compute-ms", "20"))
    try:
        running.until_step(1)
        command = [PERDURE, "chaos", running.run_dir, "--kills", "1000", "--manner", "stop", "--every", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as siege:
            assert siege.stdout is not None
            assert siege.stdout.readline().startswith("stop: worker")
            siege.terminate()
            assert siege.wait(DEADLINE_S) == 128 + signal.SIGTERM
        running.until_step(lines(running.run_dir / "metrics.jsonl")[-1]["step"] + 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 128 + signal.SIGTERM
    finally:
        running.end()
    assert running.leftovers() == []


def withstand(siege: Siege, directory: Path) -> None:
    """The run outlasts the siege; ended by SIGTERM then, it is the undisturbed run up to there."""
    running = launch(
        directory,
        siege.task,
        FOR_EVER,
        options=("--standby", str(siege.standby), "--checkpoint-every", "7"),
        script_options=("--compute-ms", "20", "--num-workers", str(siege.num_workers)),
    )
    try:
        running.until_step(1)
        said = besiege(siege, running.run_dir)
        running.process.send_signal(signal.SIGTERM)
        exit_code = running.wait()
    finally:
        running.end()
    struck = re.findall(r"pid (\d+)", said)
    assert len(struck) == siege.kills
    pids = frozenset(map(int, struck)) if siege.manner is not Manner.STOP else frozenset()
    leavers = pids if siege.manner is Manner.TERM else frozenset()
    evidence = dataclasses.replace(running.evidence(), struck=pids, leavers=leavers)
    expected = undisturbed(siege.task, len(evidence.steps))
    verdict = judge(evidence, dataclasses.replace(expected, exit_code=128 + signal.SIGTERM))
    assert verdict.outcome is Outcome.PASS, f"{exit_code} {verdict}\n{said}\n{running.story()}"
    assert running.leftovers() == []


def besiege(siege: Siege, run_dir: Path) -> str:
    """What `perdure chaos` says; it has to be content with the run."""
    command = [
        *(str(PERDURE), "chaos", str(run_dir), "--kills", str(siege.kills), "--seed", str(siege.seed)),
        *("--manner", siege.manner, "--every", str(siege.every_s)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S + siege.kills)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
