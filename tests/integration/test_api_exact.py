"""What a script may do in a step, under the launcher, with a worker killed on the way: the judge's bits."""

from __future__ import annotations

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


@pytest.mark.parametrize("task", ["tied", "several_losses", "compiled"])
def test_bits_with_three_workers_and_a_kill(task: str, tmp_path: Path) -> None:
    launched = run(
        tmp_path, SCRIPT, task, "--notes", tmp_path, "--blocks", 4, "--kill", "2:3", "--steps", STEPS,
        options=["--nproc-per-node", 3],
    )  # fmt: skip
    assert (tmp_path / "backward.struck").exists()
    assert launched.steps() == list(range(STEPS))
    expect(tmp_path, judged(task))


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


def test_without_exactness_replicas_agree_and_losses_are_close(tmp_path: Path) -> None:
    launched = run(
        tmp_path, SCRIPT, "gpt", "--notes", tmp_path, "--blocks", 4, "--steps", STEPS, "--no-exact",
        "--kill", "2:3", options=["--nproc-per-node", 3],
    )  # fmt: skip
    assert launched.steps() == list(range(STEPS))
    assert all(len(found) == 1 for found in digests(tmp_path).values())
