"""A script without perdure, as the job's state machine sees it: two workers on one node, nobody joins."""

from __future__ import annotations

from typing import TypeVar

from perdure.core.actions import Action, End, Kill, Say, Start
from perdure.core.job import Job
from perdure.core.plain import SIGNAL_GRACE_S
from perdure.core.settings import Settings
from perdure.schema import messages as msg

Kind = TypeVar("Kind")


class Run:
    """A job with one node; remembers what it wanted last."""

    def __init__(self, max_failures: int = 1000) -> None:
        self.job = Job(Settings(job="job", incarnation=1, home_node="node", max_failures=max_failures))
        self.now = 0.0
        hello = msg.AgentHello("node", "host", workers=2, standby=1, script=("plain.py",), version="1")
        self.last = self.job.agent_joined(hello, self.now)

    def ends(self, worker: int, exit_code: int | None = 0, signal: int | None = None) -> list[Action]:
        self.now += 1.0
        exited = msg.WorkerExited(worker, exit_code, signal, 0.0, self.now)
        self.last = self.job.worker_exited(exited, self.now)
        return self.last

    def raises(self, worker: int, where: str = "plain.py:3") -> list[Action]:
        self.job.worker_said(worker, msg.Crashed("ValueError", where, "ValueError: no", 1), self.now)
        return self.ends(worker, 1)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [action for action in self.last if isinstance(action, kind)]


def started(run: Run) -> list[tuple[int, int, int]]:
    return [(start.worker, start.rank, start.attempt) for start in run.of(Start)]


def test_standbys_are_not_started_for_a_script_that_cannot_use_them() -> None:
    run = Run()
    assert started(run) == [(0, 0, 0), (1, 1, 0)]


def test_all_start_again_and_only_when_nobody_is_left() -> None:
    run = Run()
    run.ends(1, None, signal=9)
    assert run.of(Kill) == [Kill(0, 9)]
    assert not run.of(Start)
    run.ends(0, None, signal=9)
    assert started(run) == [(2, 0, 1), (3, 1, 1)]


def test_one_that_had_ended_well_starts_again_too() -> None:
    run = Run()
    run.ends(0)
    assert not run.of(Start)
    run.ends(1, 7)
    assert started(run) == [(2, 0, 1), (3, 1, 1)]
    run.ends(2)
    run.ends(3)
    assert run.of(End) == [End(0)]


def test_the_same_error_twice_is_the_scripts() -> None:
    run = Run()
    run.raises(0)
    run.ends(1, None, signal=9)
    run.raises(3)
    (end,) = run.of(End)
    assert end.exit_code == 1
    assert end.message.startswith("ValueError: no\n")


def test_the_budget_is_kept() -> None:
    run = Run(max_failures=1)
    run.ends(0, 7)
    run.ends(1, None, signal=9)
    run.ends(2, 8)
    assert [end.exit_code for end in run.of(End)] == [3]


def test_a_signal_is_passed_on_and_waited_for() -> None:
    run = Run()
    run.last = run.job.asked(15, run.now)
    assert run.of(Kill) == [Kill(0, 15), Kill(1, 15)]
    assert [say.text for say in run.of(Say)] == ["signal 15: passed on to the workers; again to end at once"]
    run.ends(0)
    assert not run.of(End)
    run.ends(1, None, signal=15)
    assert run.of(End) == [End(143)]


def test_a_script_that_ignores_the_signal_has_its_time() -> None:
    run = Run()
    run.job.asked(2, run.now)
    run.last = run.job.tick(SIGNAL_GRACE_S)
    assert not run.last
    run.last = run.job.tick(SIGNAL_GRACE_S + 1)
    assert run.of(Kill) == [Kill(0, 9), Kill(1, 9)]
    assert run.of(End) == [End(130)]


def test_a_second_signal_ends_it_at_once() -> None:
    run = Run()
    run.job.asked(2, run.now)
    run.last = run.job.asked(2, run.now)
    assert [end.exit_code for end in run.of(End)] == [130]
