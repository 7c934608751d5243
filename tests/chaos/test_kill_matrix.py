"""A worker dies at a named moment, in every manner: the training goes on, and ends with the same bits.

`matrix` says which run hits which cell, `traps` how. Every run is judged by what docs/guarantees.md
promises; every cell asserts that its own fault struck, where it was to strike, and was seen for what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import matrix
from jobs import Running, launch, undisturbed
from perdure.chaos.faults import DEATHS, Manner, Moment
from perdure.chaos.verdict import Outcome, Verdict, judge
from perdure.report import Report, build_report
from scenario import Strike

CELLS = [(moment, manner) for moment in Moment for manner in DEATHS]


@dataclass(frozen=True)
class Done:
    """A run that has ended, and what was found."""

    verdict: Verdict
    strikes: dict[str, Strike]
    events: list[dict[str, Any]]
    leftovers: list[str]
    report: Report
    story: str


CELL_RUNS = {(moment, manner): matrix.cell(moment, manner) for moment, manner in CELLS}


def carry_out(run: matrix.Run, directory: Path) -> Running:
    running = launch(
        directory, run.task, run.steps, run.scenario, run.options, ("--compute-ms", str(run.compute_ms))
    )
    try:
        running.wait()
    finally:
        running.end()
    return running


def find(running: Running, run: matrix.Run) -> Done:
    names = [fault.name for fault in run.scenario.faults]
    return Done(
        verdict=judge(running.evidence(), undisturbed(run.task, run.steps, names)),
        strikes=running.strikes(),
        events=running.events(),
        leftovers=running.leftovers(),
        report=build_report(running.run_dir),
        story=running.story(),
    )


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[matrix.Run], Done]]:
    """What came of a run. Those of the selected tests are carried out in their order, two at a time."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    runs = [spec.params["run"] for spec in selected if spec is not None and "run" in spec.params]
    known: dict[str, Done] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {
            name: pool.submit(carry_out, run, tmp_path_factory.mktemp(name))
            for name, run in {run.name: run for run in runs if isinstance(run, matrix.Run)}.items()
        }

        def result(run: matrix.Run) -> Done:
            if run.name not in known:  # judged here: the undisturbed run draws from this process's generators
                known[run.name] = find(futures[run.name].result(), run)
            return known[run.name]

        yield result
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("moment", "manner", "run"),
    [pytest.param(*cell, run, id=f"{cell[0].value}, {cell[1].value}") for cell, run in CELL_RUNS.items()],
)
def test_a_loss(moment: Moment, manner: Manner, run: matrix.Run, done: Callable[[matrix.Run], Done]) -> None:
    """One cell: its fault struck where it was meant to, and the whole run is as if nothing had happened."""
    result = done(run)
    strike = result.strikes.get(manner.value)
    assert strike is not None, f"the fault never struck\n{result.verdict}\n{result.story}"
    assert_untouched(result)
    assert ("perdure" in strike.thread) == (moment in ON_RUNTIME_THREADS), strike
    seen = [
        (event["kind"], event.get("signal"), event.get("exit_code"))
        for event in result.events
        if event["event"] == "fault_detected" and event["worker"] == strike.worker
    ]
    assert seen == [expected_fault(strike, moment)]


@pytest.mark.parametrize("run", [CELL_RUNS[Moment.FORWARD, Manner.KILL]])
def test_the_report_says_what_a_kill_cost(run: matrix.Run, done: Callable[[matrix.Run], Done]) -> None:
    """Who is killed in a forward pass has its micro-batch computed again, and is replaced."""
    result = done(run)
    killed = result.strikes[Manner.KILL].worker
    (fault,) = [fault for fault in result.report.faults if fault.worker == killed]
    assert 1 <= fault.recomputed_micro_batches <= 8 // matrix.MEMBERS
    assert fault.state_source == "replica"
    assert fault.healed_bytes > 10_000


@pytest.mark.parametrize("run", list(matrix.at_once()), ids=lambda run: run.name)
def test_losses_at_once(run: matrix.Run, done: Callable[[matrix.Run], Done]) -> None:
    """Two workers in one instant, and all but one."""
    result = done(run)
    assert_untouched(result)
    assert_all_struck(run, result)


@pytest.mark.parametrize("run", list(matrix.tight_corners()), ids=lambda run: run.name)
def test_tight_corners(run: matrix.Run, done: Callable[[matrix.Run], Done]) -> None:
    """Where two special moments meet, and further places within one."""
    result = done(run)
    assert_untouched(result)
    assert_all_struck(run, result)


@pytest.mark.slow
@pytest.mark.parametrize("run", list(matrix.with_late_threads()), ids=lambda run: run.name)
def test_late_threads(run: matrix.Run, done: Callable[[matrix.Run], Done]) -> None:
    """No thread's delay makes a survivor be lost, or wait for ever."""
    result = done(run)
    assert_untouched(result)
    assert_all_struck(run, result)


ON_RUNTIME_THREADS = (
    Moment.FIRST_GROUP, Moment.REDUCE, Moment.FOLD, Moment.GATHER, Moment.LEAVING, Moment.DONOR,
    Moment.JOINER, Moment.RECOVERY, Moment.CHECKPOINT,
)  # fmt: skip
"""There an exception reaches no user code: the worker has to end by itself, and is replaced."""


def expected_fault(strike: Strike, moment: Moment) -> tuple[str, int | None, int | None]:
    """(kind, signal, exit code) of the event that tells of it."""
    match strike.manner:
        case Manner.KILL:
            return ("signal", 9, None)
        case Manner.EXIT:
            return ("exit", None, 3)
        case Manner.RAISE:
            return ("exception", None, 87 if moment in ON_RUNTIME_THREADS else 1)
        case Manner.SEGV:
            return ("signal", 11, None)
        case Manner.TERM if moment is Moment.START_UP:
            return ("signal", 15, None)
        case _:
            return ("leave", None, None)


def assert_all_struck(run: matrix.Run, result: Done) -> None:
    """Every fault struck as many processes as it was to."""
    wanted = sum(1 + fault.also for fault in run.scenario.faults)
    assert len({strike.pid for strike in result.strikes.values()}) == wanted, result.strikes


def assert_untouched(result: Done) -> None:
    """The guarantees hold, and nothing is left."""
    assert result.verdict.outcome is Outcome.PASS, f"{result.verdict}\n{result.story}"
    assert result.leftovers == []
    assert not any(event["event"] == "refused_step" for event in result.events), "nothing was void"
