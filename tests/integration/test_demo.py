"""The demo in small: it kills three workers, tells what happened, and would say if a bit had changed."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from launched import lines
from perdure.cli import demo
from perdure.cli.main import main
from perdure.report import build_report

STEPS = 12
SMALL = ("--steps", str(STEPS), "--layers", "2", "--width", "64", "--context", "64")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Exit code, what was printed without a terminal, and where the runs are."""
    run_dir = tmp_path_factory.mktemp("demo")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["demo", "--run-dir", str(run_dir), *SMALL])
    return code, printed.getvalue(), run_dir


def test_three_workers_are_killed_and_not_a_bit_changes(shown: tuple[int, str, Path]) -> None:
    code, printed, run_dir = shown
    assert code == 0, printed
    assert f"The digests of all {STEPS} steps are equal" in printed
    plain, killed = (
        {line["step"]: line["digest"] for line in lines(run_dir / part / "metrics.jsonl")}
        for part in (demo.PLAIN, demo.KILLED)
    )
    assert plain == killed
    assert list(plain) == list(range(STEPS))


def test_the_kills_hit_three_of_the_first_four_workers(shown: tuple[int, str, Path]) -> None:
    _, printed, run_dir = shown
    kills = re.findall(r"✗ kill (\d): SIGKILL to worker (\d) .*, in step (\d+)", printed)
    assert [number for number, _, _ in kills] == ["1", "2", "3"]
    workers = {int(worker) for _, worker, _ in kills}
    assert len(workers) == 3
    assert workers < set(range(demo.WORKERS))
    faults = build_report(run_dir / demo.KILLED).faults
    assert sorted(fault.worker for fault in faults if fault.kind == "signal") == sorted(workers)
    assert int(kills[2][2]) > int(kills[0][2])


def test_what_happens_is_told_while_it_happens(shown: tuple[int, str, Path]) -> None:
    _, printed, _ = shown
    part = printed[printed.index("2  The same") :]
    for told in ("known after", "generation 1.", "all survivors in the new generation after", "in its place"):
        assert told in part
    assert re.search(r"worker [4-9] computes with the others, \d+\.\d s after the kill", part)
    assert re.search(rf"step {STEPS} of {STEPS}   loss \d\.\d+   workers \d", part)
    assert re.search(r"committed steps lost +0 +0", part)
    assert re.search(rf"micro-batches recomputed +0 +\d+ of {STEPS * demo.PER_STEP}", part)


def test_a_bit_that_changed_is_said_and_ends_with_1(
    shown: tuple[int, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, run_dir = shown
    metrics = run_dir / demo.KILLED / "metrics.jsonl"
    found = lines(metrics)
    found[5]["digest"] = "0" * 32
    metrics.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert demo.compare(Console(width=120), run_dir, struck=3, steps=STEPS) == 1
    assert "the digests of 1 steps differ, first of step 5" in capsys.readouterr().out


def test_a_run_directory_that_was_used_is_refused(
    shown: tuple[int, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--run-dir", str(shown[2])]) == 4
    assert "is there already; give another --run-dir" in capsys.readouterr().err
