"""However the launcher ends, nothing of the run is left; and it goes on where it was, with the same bits."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from jobs import Running, launch, port_of, refuses, undisturbed
from perdure.chaos.verdict import Evidence, Outcome, judge
from scenario import Scenario

TASK = "mlp"
STEPS = 24


def start(directory: Path, *options: str, compute_ms: int = 20, num_workers: int = 0) -> Running:
    return launch(
        directory,
        TASK,
        STEPS,
        Scenario(),
        ("--checkpoint-every", "3", *options),
        ("--compute-ms", str(compute_ms), "--num-workers", str(num_workers)),
    )


def assert_whole(running: Running, ended: Evidence, redone: bool) -> None:
    """The run is done, and equal to the undisturbed one; its first life left `ended`.

    After a total loss the steps since the checkpoint are computed again; within one life nothing is.
    """
    old = frozenset(start.pid for start in ended.starts)
    evidence = dataclasses.replace(running.evidence(), struck=old)
    if redone:
        starts = [start for start in evidence.starts if start.pid not in old]
        evidence = dataclasses.replace(evidence, starts=starts)
    verdict = judge(evidence, undisturbed(TASK, STEPS))
    assert verdict.outcome is Outcome.PASS, f"{verdict}\n{running.story()}"
    assert running.leftovers() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_launcher_is_killed(num_workers: int, tmp_path: Path) -> None:
    first = start(tmp_path, num_workers=num_workers)
    try:
        first.until_step(7)
        port = port_of(first.run_dir)
    finally:
        first.end()  # by SIGKILL
    assert first.leftovers() == [], "a killed launcher leaves nothing for 5 s"
    assert refuses(port)
    before = first.evidence()
    second = start(tmp_path, num_workers=num_workers)
    try:
        assert second.wait() == 0
    finally:
        second.end()
    assert "going on from" in second.story()
    assert_whole(second, before, redone=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_launcher_is_asked_to_end(signum: signal.Signals, tmp_path: Path) -> None:
    """The step is finished and the state saved, so that nothing is computed again afterwards."""
    first = start(tmp_path)
    try:
        first.until_step(4)
        first.process.send_signal(signum)
        assert first.wait() == 128 + signum, first.story()
    finally:
        first.end()
    assert first.leftovers() == []
    before = first.evidence()
    last = max(before.steps)
    assert last < STEPS - 1, "it was to end early"
    assert (first.run_dir / "checkpoints" / f"step-{last:09d}").is_dir()
    second = start(tmp_path)
    try:
        assert second.wait() == 0
    finally:
        second.end()
    assert_whole(second, before, redone=False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(signum: signal.Signals, tmp_path: Path) -> None:
    running = start(tmp_path, compute_ms=60_000)
    try:
        running.until_printed("run directory")
        running.until_working()
        running.process.send_signal(signum)
        running.until_printed(f"signal {signum.value}")
        running.process.send_signal(signum)
        assert running.wait() == 128 + signum, running.story()
    finally:
        running.end()
    assert running.leftovers() == []
    assert running.evidence().steps == []


def test_a_worker_is_asked_to_leave(tmp_path: Path) -> None:
    """SIGTERM to a worker: it hands over at a boundary, ends as asked, and is replaced."""
    running = start(tmp_path)
    try:
        running.until_step(4)
        started = [event for event in running.events() if event["event"] == "worker_started"]
        leaver = started[2]
        os.kill(leaver["pid"], signal.SIGTERM)
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    pids = frozenset([leaver["pid"]])
    evidence = dataclasses.replace(running.evidence(), struck=pids, leavers=pids)
    verdict = judge(evidence, undisturbed(TASK, STEPS))
    assert verdict.outcome is Outcome.PASS, f"{verdict}\n{running.story()}"
    assert running.leftovers() == []
    told = [event["event"] for event in running.events() if event["worker"] == leaver["worker"]]
    assert told[-1] == "left"
    assert any(event["event"] == "healed" and event["worker"] == 4 for event in running.events())
