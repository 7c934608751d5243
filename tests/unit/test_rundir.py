"""The coordinator's files: what was written is whole, and a full disk costs nothing but the waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from limits import no_file_longer_than
from perdure.coordinator.journal import Journal
from perdure.coordinator.rundir import RunDir
from perdure.schema.plan import Record

Say = Callable[[str], None]


def record(step: int) -> Record:
    return Record(step, 1.0, f"digest {step}", 0.5 * step, 2, samples=((0, 1, (step, step + 1)),))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("room", [0, 1, 40, 300])
def test_what_a_full_disk_refuses_comes_in_its_turn(tmp_path: Path, room: int) -> None:
    said: list[str] = []
    files = RunDir(tmp_path, "job", said.append)
    files.begin(("train.py",))
    files.record(record(0))
    known = files.job
    with no_file_longer_than((tmp_path / "metrics.jsonl").stat().st_size + room):
        for step in range(1, 8):
            files.record(record(step))
        files.keep(msgspec.structs.replace(known, next_worker=7))
    assert [text.split(" (")[0] for text in said] == [f"{tmp_path} cannot be written"]
    files.record(record(8))
    assert said[1:] == [f"{tmp_path} can be written again; nothing was lost"]
    files.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(9))
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == list(range(9))
    assert RunDir(tmp_path, "job", said.append).job.next_worker == 7
    assert len(said) == 2


def test_a_step_has_no_line_before_its_samples_have(tmp_path: Path) -> None:
    files = RunDir(tmp_path, "job", lambda _: None)
    for step in range(3):
        files.record(record(step))
    size = (tmp_path / "samples.jsonl").stat().st_size
    assert size < (tmp_path / "metrics.jsonl").stat().st_size
    with no_file_longer_than(size + 10):
        files.record(record(3))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    again = RunDir(tmp_path, "job", lambda _: None)
    assert again.last_step == 2
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [0, 1, 2]


def test_a_damaged_line_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    files = RunDir(tmp_path, "job", lambda _: None)
    for step in range(3):
        files.record(record(step))
    files.close()
    samples = tmp_path / "samples.jsonl"
    damaged = samples.read_text().splitlines(keepends=True)
    damaged[1] = "\x00" + damaged[1][1:]
    later = json.dumps({"step": 9, "micro_batch": 0, "worker": 0, "ids": [1]}) + "\n"
    samples.write_text("".join(damaged) + later)
    assert RunDir(tmp_path, "job", lambda _: None).last_step == 2
    assert samples.read_text() == "".join(damaged)


def test_what_is_lost_in_the_end_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    files = RunDir(tmp_path, "job", said.append)
    files.record(record(0))
    with no_file_longer_than(10):
        files.record(record(1))
        files.close()
    assert any("metrics.jsonl could not be written and are lost" in text for text in said)


def test_a_run_directory_that_was_removed_is_missed(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "run"
    files = RunDir(path, "job", said.append)
    files.begin(())
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    files.record(record(0))
    (path / "checkpoints").mkdir(parents=True)  # as a writer of checkpoints does
    files.keep(files.job)
    files.close()
    assert files.gone
    assert [text.partition(",")[0] for text in said] == [f"the run directory {path} was removed"]
    assert [file.name for file in path.iterdir()] == ["checkpoints"]


def test_a_journal_says_what_it_lacks() -> None:
    journal = Journal(Path("/dev/full"))
    journal.add({"a": 1})
    with pytest.raises(OSError, match="No space left"):
        journal.write()
    assert journal.lacks == len('{"a":1}\n')
    journal.close()
    journal.close()


def test_a_run_that_did_not_end_in_order_is_known_by_the_next(tmp_path: Path) -> None:
    for ends in (False, True):
        files = RunDir(tmp_path, "run", print)
        files.event("run_started", {})
        if ends:
            files.event("run_ended", {"exit_code": 0, "message": ""})
        files.close()
        again = RunDir(tmp_path, "run", print)
        assert again.cut_off is not ends
        again.close()


def test_a_job_keeps_its_key_and_another_has_another(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "a", "run", print)
    key = first.begin(()).key
    first.close()
    again, other = RunDir(tmp_path / "a", "run", print), RunDir(tmp_path / "b", "run", print)
    assert again.begin(()).key == key != other.begin(()).key
    again.close()
    other.close()
