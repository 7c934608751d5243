"""`perdure run` from outside: what a wrong command line says, how runs end, scripts without perdure."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launched import DEADLINE_S, PERDURE, Launched
from limits import no_file_longer_than
from perdure.cli.main import main

HERE = Path(__file__).parent
PLAIN, MISBEHAVING = HERE / "plain_script.py", HERE / "misbehaving.py"


class Launcher:
    """Starts runs and ends them all with the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.started: list[Launched] = []

    def __call__(
        self, script: Path, mode: str, *options: object, workers: int = 2, name: str = ""
    ) -> Launched:
        notes = self._directory / f"{name or mode} notes"
        notes.mkdir(exist_ok=True)
        options = ("--nproc-per-node", workers, *options)
        run = Launched(self._directory, (script, mode, notes), options, name or mode)
        self.started.append(run)
        return run

    def notes(self, name: str) -> Path:
        """Where a run's script leaves its notes."""
        return self._directory / f"{name} notes"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for run in launcher.started:
        run.end()


# ── the command line ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "required: SCRIPT; see perdure run --help"),
        (["--no-such-option"], "required: COMMAND; see perdure --help"),
        (["ps", "--no-such-option", "."], "ps: unknown --no-such-option; see perdure ps --help"),
        (["run", "no-such-script.py"], "no-such-script.py is not a file"),
        (["run", "no-such-script.py", "--n", "2", "--s", "1"], "no-such-script.py is not a file"),
        (["run", ""], "an empty name is not a file"),
        (["run", "--run-dir", "", __file__], "--run-dir is empty: expected the name of a directory"),
        (["run", "."], ". is a directory without a __main__.py"),
        (["run", "-m", "no_such_module"], "there is no module no_such_module in"),
        (["run", "-m", "json.no_such_module.x"], "there is no module json.no_such_module in"),
        (["run", "-m", "json"], "there is no module json.__main__ in"),
        (["run", "-m", "json.tool.x"], "there is no module json.tool.x in"),
        (["run", "-m", "json..tool"], "there is no module 'json..tool' in"),
        (["run", "--run-dir", "/proc/x", __file__], "directory /proc/x cannot be used: No such file"),
        (["run", "--run-dir", "/proc", __file__], "directory /proc cannot be used: No such file"),
        (["run", "--run-dir", __file__, __file__], "cannot be used: File exists"),
        (["run", "--nproc-per-node", "0", __file__], "--nproc-per-node '0'"),
        (["run", "--standby", "some", __file__], "--standby 'some'"),
        (["run", "--no-such-option", __file__], "--no-such-option"),
        (["run", "--nnodes", "2", __file__], "--coordinator"),
        (["run", "--nnodes", "2:1", __file__], "1 ≤ MIN ≤ MAX"),
        (["run", "--coordinator", "here:1", __file__], "--secret"),
        (["run", "--coordinator", "here", "--secret", "s", __file__], "HOST:PORT"),
        (["run", "--policy", "hope", __file__], "hope"),
        (["no-such-command"], "no-such-command"),
        ([], "COMMAND"),
        (["ps", "no-such-directory"], "no-such-directory is not a directory"),
        (["chaos", "no-such-directory"], "chaos: no-such-directory is not a directory"),
        (["report", "no-such-directory"], "no-such-directory is not a directory"),
        (["demo", "--steps", "2"], "at least 8"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_4(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("perdure: ")
    assert "perdure: perdure" not in err
    assert err.count("\n") == 1
    assert says in err
    assert not [path.name for path in tmp_path.iterdir() if path.name != "s"]


def test_ps_and_report_say_what_is_missing_in_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", str(tmp_path)]) == 4
    assert "no run is going on in" in capsys.readouterr().err
    (tmp_path / "logs").mkdir()  # all that a launcher writes that has connected to another
    assert main(["ps", str(tmp_path)]) == 4
    assert "ask in the RUN_DIR of the launcher that others connect to" in capsys.readouterr().err
    (tmp_path / "coordinator.json").write_text("{")
    assert main(["ps", str(tmp_path)]) == 4
    assert "does not answer" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 4
    assert "no events.jsonl and no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "run", "demo", "ps", "report", "plan"])
def test_help_is_readable(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: perdure {command}".rstrip())
    undocumented = re.findall(r"^  (--[a-z-]+)(?: [A-Z_:\[\]]+)?$(?!\n {10,}\S)", out, re.MULTILINE)
    assert not undocumented, f"options without a word of help: {undocumented}"


# ── scripts that do not use perdure ─────────────────────────────────────────────────────────────────


def test_a_plain_script_starts_again_whole_in_torchruns_environment(launcher: Launcher) -> None:
    run = launcher(PLAIN, "kill")
    assert run.wait() == 0, run.story()
    notes = {path.name: json.loads(path.read_text()) for path in launcher.notes("kill").iterdir()}
    assert sorted(notes) == ["0.0", "0.1", "1.0", "1.1"]
    for name, env in notes.items():
        assert env["RANK"] == env["LOCAL_RANK"] == name[0]
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
    assert notes["0.1"]["MASTER_PORT"] == notes["1.1"]["MASTER_PORT"]
    # Both workers' lines are shown with whose they are, and kept in the log of the worker that printed.
    shown = re.findall(r"^\[worker (\d+)\] rank (\d) has 3$", run.printed, re.MULTILINE)
    assert sorted(rank for _, rank in shown) == ["0", "1"], run.printed
    for worker, rank in shown:
        log = run.run_dir / "logs" / f"worker-{worker}.out"
        assert log.read_text() == f"rank {rank} has 3\n"
    (fault,) = run.events("fault_detected")
    assert (fault["kind"], fault["signal"]) == ("signal", signal.SIGKILL)


def test_a_plain_script_with_an_error_of_its_own_ends_with_its_traceback(launcher: Launcher) -> None:
    run = launcher(PLAIN, "raise")
    assert run.wait() == 1, run.story()
    assert re.search(r"raise ValueError.*\n.*ValueError: attempt 1\n", run.printed)
    assert run.printed.count("an error of the script") == 1


def test_a_plain_script_is_passed_a_signal_to_the_launcher(launcher: Launcher) -> None:
    run = launcher(PLAIN, "wait")
    run.until(lambda: len(list(launcher.notes("wait").glob("*.waiting"))) == 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.story()
    assert "perdure: signal 15: passed on to the workers; again to end at once" in run.printed
    assert "worker 0 saved something" in run.printed
    assert "worker 1 saved something" in run.printed


def test_nothing_is_left_of_a_launcher_that_is_killed_while_a_new_zygote_starts(tmp_path: Path) -> None:
    """What the script started in sessions of its own is cleared away by a zygote without its imports yet."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '777'], start_new_session=True)\n"
        "print('it sleeps', flush=True)\n"
        "time.sleep(777)\n"
    )
    run = Launched(tmp_path, [script], ["--nproc-per-node", 2])
    launcher = psutil.Process(run.process.pid)
    try:
        run.until(lambda: run.printed.count("it sleeps") == 2)
        below = launcher.children(recursive=True)
        zygote = next(child for child in below if "perdure.worker.zygote" in " ".join(child.cmdline()))
        assert [child.name() for child in below].count("sleep") == 2
        zygote.kill()
        run.until(lambda: [c for c in launcher.children() if c not in below])  # the new one
    finally:
        below = [*below, *launcher.children(recursive=True)]
        run.end()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive


# ── how a run with perdure ends ─────────────────────────────────────────────────────────────────────


def test_leaving_with_exit_code_0_before_the_end_is_a_fault_and_is_mended(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "exit 0")
    assert run.wait() == 0, run.story()
    assert run.steps() == list(range(6))
    report = json.loads((run.run_dir / "report.json").read_text())
    (fault,) = report["faults"]
    assert (fault["kind"], fault["action"]) == ("exception", "replace")
    assert "SystemExit: 0" in fault["message"]
    assert re.search(
        r"^\[worker \d+\] half a line and the rest, from misbehaving.py$", run.printed, re.MULTILINE
    )


def test_leaving_with_exit_code_0_again_and_again_is_an_error_at_its_line(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "always exit 0")
    assert run.wait() == 1, run.story()
    assert re.search(r"SystemExit at \S+misbehaving\.py:\d+ again without progress", run.printed)


def test_what_a_script_forks_can_be_ended_and_is_no_worker(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "fork")
    assert run.wait() == 0, run.story()
    assert run.printed.count("a child ended by SIGTERM: True") == 4
    assert "a child ended by SIGTERM: False" not in run.printed
    assert run.events("fault_detected") == []


def test_the_same_error_again_is_the_scripts_and_ends_the_run_with_its_traceback(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "error")
    assert run.wait() == 1, run.story()
    assert run.steps() == [0, 1, 2]
    last = run.printed.rstrip().splitlines()[-3:]
    assert any("ValueError: no such luck" in line for line in last), run.printed
    assert re.search(
        r"^perdure: ValueError.* at \S+misbehaving\.py:\d+ again .*: an error of the script$",
        run.printed,
        re.M,
    )
    assert "misbehaving.py:" in run.printed
    assert len(run.events("fault_detected")) <= 2 + 1  # at most every worker's first error and one more


def test_a_run_whose_readers_are_gone_goes_on_without_them(tmp_path: Path) -> None:
    """As under `| head -1`: a fault is mended, the last step is reached, and nothing is said of the pipe."""
    command = [PERDURE, "run", "--nproc-per-node", "2", "--run-dir", tmp_path / "run", MISBEHAVING, "exit 0"]
    with subprocess.Popen(
        [*command, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"perdure: run directory")
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["committed_steps"], len(report["faults"])) == (6, 1)


def test_a_run_without_standard_streams(tmp_path: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    command = [*closed, PERDURE, "run", "--run-dir", tmp_path / "run", MISBEHAVING, "nothing", tmp_path]
    assert (
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=DEADLINE_S).returncode
        == 0
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_full_disk_stops_nobody_and_nothing_is_lost(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "endless", workers=1)
    run.until(lambda: len(run.steps()) > 10)
    before = run.steps()
    with no_file_longer_than((run.run_dir / "metrics.jsonl").stat().st_size, run.process.pid):
        run.until(lambda: "cannot be written (File too large); training goes on" in run.printed)
    run.until(lambda: "can be written again; nothing was lost" in run.printed)
    run.until(lambda: len(run.steps()) > len(before) + 10)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.story()
    assert run.steps() == list(range(len(run.steps())))


def test_more_failures_than_allowed_end_the_run_with_3(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "give up", "--max-failures", 2)
    assert run.wait() == 3, run.story()
    assert "\nperdure: 3 failures, more than --max-failures 2" in run.printed
    assert len(run.events("given_up")) == 1
    assert len(run.events("fault_detected", kind="exit", exit_code=7)) == 3


def test_wrong_use_of_perdure_is_told_at_once_with_4(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "misuse")
    assert run.wait() == 4, run.story()
    assert "call step.backward(loss) instead" in run.printed
    assert len(run.events("fault_decided", action="stop")) == 1


def test_a_save_that_fails_ends_the_run_with_the_reason_whoever_wrote(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "save nowhere")
    assert run.wait() == 4, run.story()
    said = [line for line in run.printed.splitlines() if "job.save: " in line]
    reason = "job.save: /proc/nowhere/x could not be written: No such file or directory: /proc/nowhere"
    assert any(line.startswith("perdure: ") for line in said), run.story()
    assert all(line.endswith(reason) for line in said)


def test_ctrl_c_saves_the_state_and_the_run_goes_on_from_it(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher(MISBEHAVING, "endless")
    run.until(lambda: len(run.metrics()) > 3)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.story()
    last = run.steps()[-1]
    assert f"{last + 1} steps committed" in run.printed
    again = launcher(MISBEHAVING, "endless", name="endless")
    again.until(lambda: again.steps()[-1] > last + 2)
    assert f"step {last} is the last committed one" in again.printed
    assert again.steps() == list(range(again.steps()[-1] + 1))
    again.signal(signal.SIGTERM)
    again.until(lambda: "again to end at once" in again.printed)
    assert again.wait() == 143, again.story()


def test_a_run_whose_terminal_is_gone_is_saved(tmp_path: Path) -> None:
    """Its window is closed: SIGHUP, and nowhere to print to."""
    ours, theirs = pty.openpty()
    command = [PERDURE, "run", "--run-dir", tmp_path / "run", MISBEHAVING, "endless", tmp_path]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        os.close(theirs)
        shown = b""
        while b"samples/s" not in shown:  # the live line
            try:
                shown += os.read(ours, 65536)
            except OSError:
                raise AssertionError(f"the run has ended: {shown.decode()}") from None
        os.close(ours)
        assert process.wait(DEADLINE_S) == 129
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:09d}").is_dir()


def test_a_run_directory_belongs_to_one_run(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    run = launcher(MISBEHAVING, "endless", workers=1)
    run.until(lambda: run.metrics())
    for option in ("--fresh", "--log-samples"):
        assert main(["run", "--run-dir", str(run.run_dir), option, str(MISBEHAVING), "endless", "x"]) == 4
        said = capsys.readouterr().err
        assert f"a run is going on in {run.run_dir} (launcher {run.process.pid}): end it first" in said
        assert said.count("\n") == 1
    before = len(run.steps())
    run.until(lambda: len(run.steps()) > before)
    steps = run.steps()
    assert steps == list(range(len(steps)))


def test_steps_without_a_checkpoint_are_told_of_and_faults_are_counted_by_run(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "exit 0", "--checkpoint-every", 0)
    assert run.wait() == 0, run.story()
    assert "perdure: 6 steps committed, 1 fault; see: perdure report" in run.printed
    kept, said = run.metrics(), len(run.printed)
    again = launcher(MISBEHAVING, "exit 0", "--checkpoint-every", 0)
    assert again.wait() == 0, again.story()
    new = again.printed[said:]
    text = "metrics.jsonl has 6 steps of an earlier run, but there is no checkpoint: training begins anew;"
    assert text in new
    assert new.endswith("perdure: 6 steps committed\n")
    assert again.metrics() == kept


def test_a_damaged_checkpoint_is_named_whether_or_not_an_older_one_is_left(launcher: Launcher) -> None:
    run = launcher(MISBEHAVING, "nothing", workers=1)
    assert run.wait() == 0, run.story()
    [good] = (run.run_dir / "checkpoints").iterdir()
    bad = good.with_name("step-000000009")
    shutil.copytree(good, bad)
    (bad / "manifest.json").write_text("{")
    again = launcher(MISBEHAVING, "nothing", workers=1)
    assert again.wait() == 0, again.story()
    assert f"perdure: checkpoint {bad} was not used: manifest.json is damaged: " in again.printed
    assert f"perdure: going on from {good}: step 5 is the last committed one" in again.printed
    (good / "rest.json").unlink()
    last = launcher(MISBEHAVING, "nothing", workers=1)
    assert last.wait() == 5, last.story()
    assert f"perdure: checkpoint {good} was not used: rest.json is missing\n" in last.printed
    assert "\nperdure: no checkpoint could be restored; see above, or start anew with --fresh" in last.printed


def test_a_module_is_run_like_a_script(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(MISBEHAVING.read_text())
    options = ("--nproc-per-node", 1, "-m")
    run = Launched(tmp_path, ("trainer", "nothing", tmp_path), options, "module")
    launcher.started.append(run)
    assert run.wait() == 0, run.story()
    assert run.steps() == list(range(6))
    assert "[worker 0] half a line and the rest, from trainer.py" in run.printed
