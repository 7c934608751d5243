"""The report of hand-written logs whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import main
from perdure.report import Report, build_report, render_page, write_report
from perdure.report.chart import duration, nice_step


class Log:
    """Writes the files of a run, as its coordinator does."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def event(self, event: str, wall_s: float, **fields: Any) -> None:
        line = {"event": event, "wall_s": wall_s, "mono_s": wall_s - 90, "job": "j", "generation": "1.1"}
        line |= {"step": None, "worker": None, "node": "node-0"} | fields
        self.write("events.jsonl", json.dumps(line) + "\n")

    def commit(self, step: int, time: float, workers: int = 4, **fields: Any) -> None:
        line = {"step": step, "loss": 5.0 - step, "digest": f"d{step}", "time": time, "workers": workers}
        self.write("metrics.jsonl", json.dumps(line | fields) + "\n")

    def write(self, name: str, text: str) -> None:
        with (self.run_dir / name).open("a") as file:
            file.write(text)

    def start(self, wall_s: float, workers: range) -> None:
        """A start of the run whose first generation computes after 2 s."""
        self.event("run_started", wall_s)
        for worker in workers:
            self.event("worker_started", wall_s, worker=worker)
        self.event("generation_opened", wall_s + 1.5, members=[*workers], dealt=0, reason="start", lost=[])
        self.event("generation_computing", wall_s + 2, members=[*workers], open_s=0.1)

    def loss(
        self, wall_s: float, worker: int, *, dealt: int, members: list[int], detect_s: float = 0.01
    ) -> None:
        """A SIGKILL and the generation that answers it."""
        killed: dict[str, Any] = {"worker": worker, "kind": "signal", "detected_by": "pidfd", "signal": 9}
        self.event("fault_detected", wall_s, **killed, detect_s=0.01, message="killed by SIGKILL", step=3)
        self.event("fault_decided", wall_s, worker=worker, severity="SEV2", action="replace")
        self.event("generation_opened", wall_s, members=members, dealt=dealt, reason="loss", lost=[worker])
        self.event("generation_computing", wall_s + 0.02, members=members, open_s=0.02)

    def heal(self, wall_s: float, worker: int, source: str = "replica") -> None:
        self.event("heal_started", wall_s, worker=worker, donors=[0, 1], bytes=4096)
        self.event("healed", wall_s + 0.25, worker=worker, bytes=4096, seconds=0.25, source=source)
        self.event("joined", wall_s + 0.3, worker=worker)

    def end(self, wall_s: float) -> None:
        self.event("run_ended", wall_s, exit_code=0, message="")

    def report(self) -> Report:
        return build_report(self.run_dir)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def one_kill(log: Log) -> None:
    """Four workers, one-second steps from 103; worker 2 is killed at 105.4 and replaced by worker 4."""
    log.start(100, range(4))
    for step, time in enumerate((103.0, 104.0, 105.0)):
        log.commit(step, time)
    log.loss(105.41, 2, dealt=3, members=[0, 1, 3])
    log.event("worker_started", 105.5, worker=4)
    log.commit(3, 106.3, workers=3)
    log.heal(106.5, 4)
    for step, time in enumerate((107.3, 108.3, 109.3), 4):
        log.commit(step, time)
    log.event("run_ended", 110, exit_code=0)


def test_one_kill(log: Log) -> None:
    one_kill(log)
    report = log.report()
    assert report.as_json().keys() == {
        "committed_steps", "final_digest", "step_s_median", "goodput", "faults"
    }  # fmt: skip
    assert report.committed_steps == 7
    assert report.final_digest == "d6"
    assert report.step_s_median == pytest.approx(1.0)
    (fault,) = report.as_json()["faults"]
    assert fault.pop("stall_s") == pytest.approx(0.3)  # 106.3 − 105.0 − 1.0
    assert fault == {
        "kind": "signal", "worker": 2, "node": "node-0", "detected_by": "pidfd", "severity": "SEV2",
        "action": "replace", "detect_s": 0.01, "recomputed_micro_batches": 3, "state_source": "replica",
        "healed_bytes": 4096, "message": "killed by SIGKILL",
    }  # fmt: skip


def test_a_fault_begins_when_its_worker_begins_to_end(log: Log) -> None:
    """The others' answer, and even their commit, comes before it is known how the worker ended."""
    log.start(100, range(4))
    log.commit(0, 103)
    log.commit(1, 104)
    log.event("worker_ending", 104.5, worker=2, noticed_s=104.49)
    log.event("generation_opened", 104.51, members=[0, 1, 3], dealt=2, reason="loss", lost=[2])
    log.event("generation_computing", 104.53, members=[0, 1, 3], open_s=0.02)
    log.commit(2, 105.2, workers=3)
    killed: dict[str, Any] = {"worker": 2, "kind": "signal", "detected_by": "pidfd", "signal": 9}
    log.event("fault_detected", 105.3, **killed, detect_s=0.0002, message="killed by SIGKILL")
    log.event("fault_decided", 105.3, worker=2, severity="SEV2", action="replace")
    log.commit(3, 106.2, workers=3)
    (fault,) = log.report().faults
    assert fault.recomputed_micro_batches == 2
    assert fault.detect_s == pytest.approx(0.01)
    assert fault.stall_s == pytest.approx(0.2)  # 105.2 − 104 − 1
    assert log.report().fault_times[0].time == pytest.approx(104.49)


def test_goodput_counts_every_worker_second(log: Log) -> None:
    one_kill(log)
    existed = 3 * 10 + 5.41 + 4.5  # workers 0, 1, 3; worker 2 until its loss was known; worker 4
    useful = 3 * 4 * 1.0 + 3 * 1.0 + 3 * 4 * 1.0  # steps 0–2, the disturbed step without its stall, steps 4–6
    assert log.report().goodput == pytest.approx(useful / existed)


def test_lives(log: Log) -> None:
    one_kill(log)
    lives = {life.worker: life for life in log.report().lives}
    assert [(s.state, s.start, s.end) for s in lives[4].spans] == [
        ("starting", 105.5, 106.5), ("healing", 106.5, 106.75), ("active", 106.75, 110)
    ]  # fmt: skip
    assert [(s.state, s.end) for s in lives[2].spans] == [("starting", 102), ("active", 105.41)]
    assert {worker: life.ended for worker, life in lives.items()} == {0: "", 1: "", 2: "signal", 3: "", 4: ""}


def test_two_losses_answered_by_one_generation_share_what_it_dealt(log: Log) -> None:
    log.start(100, range(4))
    log.commit(0, 103)
    for worker in (1, 3):
        log.event(
            "fault_detected", 103.5, worker=worker, kind="exit", detected_by="pidfd", message="exit code 7"
        )
        log.event("fault_decided", 103.5, worker=worker, severity="SEV2", action="replace")
    log.event("generation_opened", 103.5, members=[0, 2], dealt=5, reason="loss", lost=[1, 3])
    log.commit(1, 105, workers=2)
    log.heal(105.1, 5, source="host")
    log.heal(105.2, 6, source="replica")
    log.commit(2, 106)
    log.commit(3, 107)
    first, second = log.report().faults
    assert (first.recomputed_micro_batches, second.recomputed_micro_batches) == (3, 2)
    assert (first.state_source, second.state_source) == ("host", "replica")
    assert first.stall_s == second.stall_s == pytest.approx(1.0)
    assert first.detect_s is None


def test_loss_during_the_recovery_from_another(log: Log) -> None:
    """The second generation names both workers; each fault counts the generation that answered it first."""
    log.start(100, range(4))
    log.commit(0, 103)
    log.commit(1, 104)
    log.loss(104.50, 1, dealt=4, members=[0, 2, 3])
    log.event("fault_detected", 104.51, worker=2, kind="signal", detected_by="pidfd", detect_s=0.001)
    log.event("fault_decided", 104.51, worker=2, severity="SEV2", action="replace")
    log.event("generation_opened", 104.51, members=[0, 3], dealt=4, reason="loss", lost=[1, 2])
    log.commit(2, 106, workers=2)
    assert [f.recomputed_micro_batches for f in log.report().faults] == [4, 4]


def test_a_later_notice_of_a_dead_worker_is_the_same_fault(log: Log) -> None:
    """A hung worker is noticed by its progress, then killed, then seen to exit."""
    log.start(100, range(2))
    log.event("fault_detected", 104, worker=1, kind="hang", detected_by="progress", detect_s=3.0)
    log.event("fault_decided", 104, worker=1, severity="SEV2", action="replace")
    log.event("fault_detected", 104.1, worker=1, kind="signal", detected_by="pidfd")
    (fault,) = log.report().faults
    assert (fault.kind, fault.detected_by) == ("hang", "progress")


def test_faults_that_a_worker_survives_count_each(log: Log) -> None:
    log.start(100, range(2))
    for time in (103, 104):
        log.event("fault_detected", time, worker=1, kind="corrupt", detected_by="digest")
        log.event("fault_decided", time, worker=1, severity="SEV3", action="retry")
        log.heal(time + 0.1, 1)
    assert [(f.kind, f.state_source) for f in log.report().faults] == [("corrupt", "replica")] * 2
    assert all(life.ended == "" for life in log.report().lives)


def test_leaver_works_until_it_has_handed_over(log: Log) -> None:
    log.start(100, range(2))
    log.event("fault_detected", 103, worker=1, kind="leave", detected_by="pidfd")
    log.event("fault_decided", 103, worker=1, severity="SEV2", action="leave")
    log.heal(103.5, 2)
    log.event("left", 105, worker=1)
    report = log.report()
    (life,) = [life for life in report.lives if life.worker == 1]
    assert (life.ended, life.spans[-1].end) == ("left", 105)
    assert (report.faults[0].action, report.faults[0].state_source) == ("leave", "replica")


@pytest.mark.parametrize(("exit_code", "stall"), [(0, 0.0), (3, None), (None, None)])
def test_fault_after_the_last_commit(log: Log, exit_code: int | None, stall: float | None) -> None:
    log.start(100, range(2))
    log.commit(0, 103)
    log.commit(1, 104)
    log.loss(104.5, 1, dealt=0, members=[0])
    if exit_code is not None:
        log.event("run_ended", 105, exit_code=exit_code)
    assert log.report().faults[0].stall_s == stall


def test_fault_before_the_first_commit_counts_from_where_computing_began(log: Log) -> None:
    log.start(100, range(2))
    log.loss(102.5, 1, dealt=2, members=[0])
    for step, time in enumerate((104.0, 105.0, 106.0)):
        log.commit(step, time, workers=1)
    assert log.report().faults[0].stall_s == pytest.approx(104 - 102 - 1)


def test_stalls_while_steps_come_again(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    """A total loss costs all that comes again; a fault within that only its own."""
    log.start(100, range(2))
    for step in range(4):
        log.commit(step, 103.0 + step)
    log.loss(106.2, 0, dealt=0, members=[1])
    log.loss(106.2, 1, dealt=0, members=[])
    for step, time in enumerate((108.0, 109.0, 110.4, 111.4)):
        log.event("step_again", time + 1, step=step, time=time)
        if step == 1:
            log.loss(109.3, 2, dealt=1, members=[3])
    log.commit(4, 112.4)
    log.commit(5, 113.4)
    total, same, within = (fault.stall_s for fault in log.report().faults)
    assert total == same == pytest.approx(112.4 - 106 - 1)
    assert within == pytest.approx(110.4 - 109 - 1)
    assert log.report().steps_again == 4
    assert main(["report", str(log.run_dir)]) == 0
    assert "4 committed steps came again" in capsys.readouterr().out
    assert "steps came again" in render_page(log.report(), "a run")


def test_two_starts_of_one_run(log: Log) -> None:
    """The night between a kill of the launcher and the next start is no step and no worker-second."""
    log.start(100, range(2))
    log.commit(0, 103, workers=2)
    log.commit(1, 104, workers=2)
    log.start(50_000, range(2, 4))
    log.loss(50_002.5, 3, dealt=1, members=[2])
    log.commit(2, 50_003.5, workers=1)
    log.commit(3, 50_004.5, workers=1)
    log.event("run_ended", 50_005, exit_code=0)
    report = log.report()
    assert report.step_s_median == pytest.approx(1.0)
    assert report.faults[0].stall_s == pytest.approx(50_003.5 - 50_002 - 1)
    assert sum(life.seconds for life in report.lives) == pytest.approx(2 * 4 + 5 + 2.5)
    assert report.exit_code == 0


def test_torn_and_foreign_lines_are_left_out_and_counted(log: Log) -> None:
    one_kill(log)
    whole = log.report()
    log.write(
        "events.jsonl", '[1]\n{"other": 1}\n{"event": "fault_detected", "wall_s": "soon"}\n{"event": "fau'
    )
    log.commit(3, 999.0, digest="later")  # a step that is there already: its first line stays
    log.write("metrics.jsonl", "\x00\x01\n\n{}\n" + '{"step": 7, "lo')
    report = log.report()
    assert report.as_json() == whole.as_json()
    assert report.unread == 4 + 3


def test_nothing_yet(log: Log) -> None:
    report = log.report()
    assert report.as_json() == {
        "committed_steps": 0, "final_digest": None, "step_s_median": None, "goodput": None, "faults": []
    }  # fmt: skip
    assert "None." in render_page(report, "empty")


def test_written_report_is_what_the_command_prints(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    one_kill(log)
    write_report(log.run_dir)
    assert main(["report", str(log.run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((log.run_dir / "report.json").read_text())


def test_terminal_and_page(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_kill(log)
    log.event("fault_detected", 111, worker=0, kind="exception", message="<b>ValueError</b>\nmore", step=7)
    log.event("checkpoint_refused", 112, path="checkpoints/3", message="checksum differs")
    page = tmp_path / "page.html"
    assert main(["report", str(log.run_dir), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "committed steps" in shown
    assert "checksum differs" in shown
    html = page.read_text()
    assert "&lt;b&gt;ValueError" in html
    assert "<script" not in html
    assert html.count('class="badge"') == 2 * 2  # each fault in both pictures


def test_a_message_is_shown_once(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.event("run_started", 100)
    for worker, message in enumerate(
        ["ended by signal 9", "ended by signal 9", "it broke", "ended by signal 9"]
    ):
        log.event("fault_detected", 111 + worker, worker=worker, kind="signal", message=message)
    assert main(["report", str(log.run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "1–2, 4: ended by signal 9" in shown
    assert "3: it broke" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nowhere"], "is not a directory"), (["."], "no events.jsonl"), ([], "RUN_DIR")],
)
def test_wrong_usage(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 4
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_unwritable_page(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    one_kill(log)
    assert main(["report", str(log.run_dir), "--html", str(log.run_dir / "no" / "page.html")]) == 4
    assert "cannot write --html" in capsys.readouterr().err


def test_durations_and_ticks() -> None:
    seconds = (0.0004, 0.25, 3, 45.2, 125, 3725, 7200, 59.9996 * 60, -0.02)
    shown = ["0.4 ms", "0.25 s", "3 s", "45 s", "2 m 05 s", "1 h 02 m", "2 h", "60 m", "−20 ms"]
    assert [duration(s) for s in seconds] == shown
    wanted = (0.03, 0.2, 0.7, 3, 12, 25, 45, 1000, 20_000, 100_000)
    assert [nice_step(s) for s in wanted] == [0.05, 0.2, 1, 5, 20, 60, 60, 1800, 21_600, 172_800]


def test_launchers_that_were_lost_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path)
    log.start(100.0, range(2))
    log.commit(0, 103.0)
    log.start(120.0, range(2, 4))
    log.commit(1, 123.0)
    log.end(124.0)
    log.start(130.0, range(4, 6))
    log.end(131.0)
    assert log.report().launchers_lost == 1
    assert main(["report", str(tmp_path)]) == 0
    assert "launchers lost   1; what that cost is in no fault" in capsys.readouterr().out
    assert "launchers lost" in render_page(log.report(), "a run")
