"""What a script may do in a step, under the launcher, with a worker killed on the way: the judge's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import edge_tasks
import tasks
from launched import digests, expect, run
from reference import train

SCRIPT = Path(__file__).parent.parent / "edge_script.py"
STEPS = 6


def judged(task: str, steps: int = STEPS, blocks: int = 4) -> dict[int, str]:
    whole = (edge_tasks.TASKS | tasks.TASKS)[task]
    return dict(enumerate(train(whole, seed=0, steps=steps, blocks=blocks)))


@pytest.mark.parametrize("task", ["tied", "several_losses", "compiled", "renormed"])
def test_bits_with_three_workers_and_a_kill(task: str, tmp_path: Path) -> None:
    launched = run(
        tmp_path, SCRIPT, task, "--notes", tmp_path, "--blocks", 4, "--kill", "2:3", "--steps", STEPS,
        options=["--nproc-per-node", 3],
    )  # fmt: skip
    assert (tmp_path / "backward.struck").exists()
    assert launched.steps() == list(range(STEPS))
    expect(tmp_path, judged(task))


def test_a_joiner_has_the_modes_of_the_others(tmp_path: Path) -> None:
    words = [SCRIPT, "modes", "--notes", tmp_path, "--blocks", 4, "--pace-ms", 40]
    first = run(tmp_path, *words, "--steps", 40, "--kill", "2:3", options=["--nproc-per-node", 3])
    healed = [event["step"] for event in first.events("healed")]
    assert healed, "the replacement came in time"
    expect(tmp_path, judged("modes", steps=40))


def test_after_a_total_loss_modes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    words = ["modes", "--notes", tmp_path, "--blocks", 4, "--steps", 12, "--kill", "8:3"]
    launched = run(tmp_path, SCRIPT, *words, options=["--nproc-per-node", 1, "--checkpoint-every", 3])
    assert [event["source"] for event in launched.events("healed")] == ["disk"]
    expect(tmp_path, judged("modes", steps=12))


def test_what_was_sent_too_early_is_not_committed(tmp_path: Path) -> None:
    """E3: only some micro-batches have a second call of backward; whole buckets went with the first."""
    launched = run(
        tmp_path, SCRIPT, "uneven_losses", "--notes", tmp_path, "--blocks", 4, "--steps", STEPS,
        options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.events("refused_step")
    assert launched.steps() == list(range(STEPS))
    expect(tmp_path, judged("uneven_losses"))


def test_short_last_steps_loader_processes_and_fewer_workers_than_before(tmp_path: Path) -> None:
    """A step of 18 samples after one of 32; then the run goes on with a worker less, and a loader more."""
    words = [SCRIPT, "averaged", "--notes", tmp_path, "--blocks", 4, "--num-workers", 2]
    first = run(tmp_path, *words, "--steps", 4, "--kill", "1:3", options=["--nproc-per-node", 3])
    assert first.steps() == [0, 1, 2, 3]
    second = run(tmp_path, *words[:-1], 1, "--steps", STEPS, options=["--nproc-per-node", 2])
    assert "step 3 is the last committed one" in second.printed
    assert second.steps() == list(range(STEPS))
    expect(tmp_path, judged("averaged"))


def test_more_than_32_blocks_with_two_workers(tmp_path: Path) -> None:
    """Most blocks have no worker of their own, and are added up in runs of 32."""
    run(
        tmp_path, SCRIPT, "many_blocks", "--notes", tmp_path, "--blocks", 40, "--steps", 2, "--kill", "1:7",
        options=["--nproc-per-node", 2],
    )  # fmt: skip
    expect(tmp_path, judged("many_blocks", steps=2, blocks=40))


def test_without_exactness_replicas_agree_losses_are_close_and_less_memory_is_used(tmp_path: Path) -> None:
    words = ["wide", "--blocks", 8, "--steps", STEPS, "--print-values"]
    launched = run(
        tmp_path, SCRIPT, *words, "--notes", tmp_path, "--no-exact", "--kill", "2:5",
        options=["--nproc-per-node", 3, "--checkpoint-every", 0],
    )  # fmt: skip
    assert launched.steps() == list(range(STEPS))
    agreed = digests(tmp_path)
    assert all(len(found) == 1 for found in agreed.values())
    exact = alone(tmp_path / "exact", *words)
    piled = alone(tmp_path / "piled", *words, "--no-exact")
    assert exact.digests == judged("wide", blocks=8)
    assert {step: found.pop() for step, found in agreed.items()} != exact.digests
    assert [line["loss"] for line in launched.metrics()] == pytest.approx(exact.losses, rel=1e-4)
    gradient = 4 * edge_tasks.WIDE
    assert exact.grew - piled.grew > 6 * gradient, "one gradient instead of eight"


MEASURABLE = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
"""With a fixed threshold a tensor's memory goes back to the system when it is freed."""


@dataclass
class Alone:
    """What a script that ran without a launcher noted and printed."""

    digests: dict[int, str]
    losses: list[float]
    grew: int


def alone(notes: Path, *words: object) -> Alone:
    notes.mkdir()
    command = [sys.executable, SCRIPT, *words, "--notes", notes]
    printed = subprocess.run(
        list(map(str, command)), env={**os.environ, **MEASURABLE}, capture_output=True, text=True,
        check=True, timeout=120,
    ).stdout.splitlines()  # fmt: skip
    said = [line.split() for line in printed]
    return Alone(
        {step: found.pop() for step, found in digests(notes).items()},
        [float(words[1]) for words in said if words[0] == "loss"],
        next(int(words[1]) for words in said if words[0] == "grew"),
    )
