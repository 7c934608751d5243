"""Between a step's loop and the next turn: evaluation, saving, logging, an error, the way out by `break`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launched import digests, expect, run
from perdure.state.shelf import verify
from test_api_exact import SCRIPT, judged

STEPS = 4


def test_evaluation_and_saving_survive_the_workers_that_did_them(tmp_path: Path) -> None:
    """The same values from one process alone and from four, of which two die: evaluating, and writing."""
    words = ["averaged", "--blocks", 4, "--evaluate", "--steps", STEPS]
    alone, four = tmp_path / "alone", tmp_path / "four"
    for directory in (alone, four):
        directory.mkdir()
    command = [sys.executable, SCRIPT, *words, "--notes", alone, "--print-values"]
    printed = subprocess.run(
        list(map(str, command)), env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=True, timeout=60,
    ).stdout  # fmt: skip
    saved = four / "new" / "state"
    launched = run(
        four, SCRIPT, *words, "--notes", four, "--kill-evaluation", 17, "--save", saved, "--kill-save", 2,
        options=["--nproc-per-node", 4, "--checkpoint-every", 0],
    )  # fmt: skip
    assert (four / "evaluation.struck").exists()
    assert (four / "save.struck").exists()
    values = [(line["error"], line["drawn"]) for line in launched.metrics()]
    assert [f"values {error!r} {drawn!r}" for error, drawn in values] == [
        line for line in printed.splitlines() if line.startswith("values")
    ]
    assert verify(saved) is None
    assert [path.name for path in saved.parent.iterdir()] == ["state"]
    for notes in (alone, four):
        expect(notes, judged("averaged", steps=STEPS))


def test_what_is_logged_is_written_once_whoever_dies(tmp_path: Path) -> None:
    """An error in the commit voids that worker's state; its line comes from another."""
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 4, "--steps", STEPS, "--raise", 2,
        options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.steps() == list(range(STEPS))
    assert {line["rate"] for line in launched.metrics()} == {0.5}
    fault = launched.events("fault_detected")[0]
    assert (fault["kind"], fault["detected_by"]) == ("exception", "exception")
    assert fault["traceback"].endswith("ValueError: once, in the commit\n")
    expect(tmp_path, judged("mlp", steps=STEPS))


def test_break_is_a_clean_end(tmp_path: Path) -> None:
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 4, "--steps", 9, "--break", 3,
        "--tail", "leave", options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.steps() == [0, 1, 2, 3]
    assert launched.printed.count("tail of") == 2
    assert not launched.events("fault_detected")
    assert launched.events("checkpoint_written")[-1]["step"] == 3
    assert sorted(digests(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("hold", ["name", "around"])
def test_exit_after_break_is_a_clean_end(tmp_path: Path, hold: str) -> None:
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 4, "--steps", 9, "--break", 3,
        "--hold", hold, "--tail", "leave", options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.steps() == [0, 1, 2, 3]
    assert not launched.events("fault_detected")
    assert launched.printed.count("tail of") == 2
    assert sorted(digests(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("hold", ["name", "around"])
def test_break_is_a_clean_end_also_if_the_script_keeps_the_iterator(tmp_path: Path, hold: str) -> None:
    """As a progress bar does. If that is a generator the loop ends with the script, and a line says so.

    One dies on the way there.
    """
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 4, "--steps", 9, "--break", 3,
        "--hold", hold, "--tail", "kill", options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.steps() == [0, 1, 2, 3]
    assert [event["signal"] for event in launched.events("fault_detected")] == [9]
    assert launched.events("checkpoint_written")[-1]["step"] == 3
    assert sorted(digests(tmp_path)) == [0, 1, 2, 3]
    assert launched.printed.count("tail of") == (3 if hold == "name" else 2)
    assert ("something still has a name for its iterator" in launched.printed) is (hold == "around")


def test_a_tail_that_is_run_again_after_a_break_does_not_train_on(tmp_path: Path) -> None:
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 4, "--steps", 9, "--break", 3,
        "--tail", "kill", options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.steps() == [0, 1, 2, 3]
    assert launched.printed.count("tail of") == 3
    assert [event["signal"] for event in launched.events("fault_detected")] == [9]
    assert sorted(digests(tmp_path)) == [0, 1, 2, 3]
