"""Faults are data, strikes are real, and the verdict sees what is wrong."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from perdure.chaos.campaign import Campaign
from perdure.chaos.faults import DEATHS, SIGNALS, Manner, Target
from perdure.chaos.injector import Injector
from perdure.chaos.verdict import Commit, Evidence, Expected, Outcome, Start, endured, judge
from perdure.schema.messages import PsRow

# Two steps of two micro-batches by two processes. Process 8 dies in step 1 with micro-batch 1 in hand.
GOOD = Evidence(
    exit_code=0,
    steps=[0, 1],
    samples=[(step, micro_batch, (step, micro_batch)) for step in (0, 1) for micro_batch in (0, 1)],
    commits=[Commit(7, 0, "a"), Commit(8, 0, "a"), Commit(7, 1, "b")],
    starts=[Start(1, 7, 0, 0), Start(2, 8, 0, 1), Start(3, 7, 1, 0), Start(4, 8, 1, 1), Start(5, 7, 1, 1)],
    fired=frozenset({"kill"}),
    struck=frozenset({8}),
)
EXPECTED = Expected(
    digests=["a", "b"],
    per_step=2,
    ids=lambda step, micro_batch: [step, micro_batch],
    faults=frozenset({"kill"}),
)


def test_a_run_that_stood_its_fault_passes() -> None:
    verdict = judge(GOOD, EXPECTED)
    assert verdict.outcome is Outcome.PASS
    assert str(verdict) == "pass"


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"exit_code": 3}, "exit code is 3"),
        ({"commits": [*GOOD.commits, Commit(9, 1, "x")]}, "after step 1 process 9 has another state"),
        ({"commits": [*GOOD.commits, Commit(9, 2, "c")]}, "process 9 committed step 2 of 2"),
        ({"commits": GOOD.commits[:2]}, "nobody noted its state after step 1"),
        ({"steps": [0, 0, 1]}, "steps [0] more than once"),
        ({"steps": [1, 0]}, "out of order"),
        ({"steps": [0]}, "[1] missing"),
        ({"samples": GOOD.samples[:-1]}, "micro-batch 1 of step 1 is missing"),
        ({"samples": [*GOOD.samples, GOOD.samples[0]]}, "micro-batch 0 of step 0 is there more than once"),
        ({"samples": [*GOOD.samples[:-1], (1, 1, (9, 9))]}, "micro-batch 1 of step 1 was of other samples"),
        ({"starts": [*GOOD.starts, Start(6, 7, 1, 1)]}, "one process computed micro-batch 1 of step 1 twice"),
        ({"starts": [*GOOD.starts, Start(6, 9, 1, 0)]}, "process 9 computed micro-batch 0 of step 1 after"),
        ({"struck": frozenset()}, "process 8 was lost, though nothing struck it"),
    ],
)  # fmt: skip
def test_the_verdict_says_what_is_wrong(changes: dict[str, Any], finding: str) -> None:
    verdict = judge(dataclasses.replace(GOOD, **changes), EXPECTED)
    assert verdict.outcome is Outcome.FAIL
    assert any(finding in line for line in verdict.findings), verdict


def test_what_a_leaver_had_in_hand_may_be_computed_again() -> None:
    again = dataclasses.replace(
        GOOD,
        starts=[*GOOD.starts, Start(6, 9, 1, 1)],
        commits=[*GOOD.commits, Commit(9, 1, "b")],
        struck=frozenset({7, 8}),
    )
    assert judge(again, EXPECTED).outcome is Outcome.FAIL
    left = dataclasses.replace(again, leavers=frozenset({7}))
    assert judge(left, EXPECTED).outcome is Outcome.PASS


def test_what_was_void_may_be_computed_again() -> None:
    starts = [*GOOD.starts, Start(6, 7, 1, 1)]
    assert judge(dataclasses.replace(GOOD, starts=starts), EXPECTED).outcome is Outcome.FAIL
    void = dataclasses.replace(GOOD, starts=starts, refused=frozenset({1}))
    assert judge(void, EXPECTED).outcome is Outcome.PASS


def test_a_fault_that_never_struck_leaves_the_verdict_open() -> None:
    verdict = judge(dataclasses.replace(GOOD, fired=frozenset()), EXPECTED)
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.findings == ("fault 'kill' never struck",)


@pytest.mark.parametrize(
    ("struck", "after", "exit_code", "outcome"),
    [
        (3, 9, None, Outcome.PASS),
        (3, 5, 0, Outcome.PASS),
        (3, 5, None, Outcome.FAIL),
        (3, 9, 1, Outcome.FAIL),
        (2, 9, 0, Outcome.UNKNOWN),
    ],
)
def test_what_a_run_endured(struck: int, after: int, exit_code: int | None, outcome: Outcome) -> None:
    assert endured(3, struck, 5, after, exit_code).outcome is outcome


def test_a_target_fits_whom_it_names() -> None:
    assert Target().fits(None, None, 5)
    assert Target(since=3, rank=1).fits(4, 1, 5)
    assert not Target(since=3).fits(2, 1, 5)
    assert not Target(since=3).fits(None, None, 5)
    assert not Target(rank=1).fits(3, 2, 5)
    assert not Target(worker=4).fits(3, 1, 5)


# ── the campaign ────────────────────────────────────────────────────────────────────────────────────


def row(worker: int, state: str, pid: int | None = 1) -> PsRow:
    return PsRow(
        id=worker, node="n", pid=pid, state=state, generation="1.1", step=0, phase="data", micro_batch=0
    )


def test_a_campaign_is_its_seed_and_spares_the_last_active_worker() -> None:
    rows = [row(0, "active"), row(1, "active"), row(2, "standby"), row(3, "starting", pid=None)]

    def choices(seed: int) -> list[int | None]:
        campaign = Campaign(seed, every_s=2.0)
        assert all(0 <= campaign.pause_s() <= 4.0 for _ in range(50))
        return [chosen.id if (chosen := campaign.choose(rows)) else None for _ in range(4)]

    assert choices(1) == choices(1)
    for seed in range(20):
        found = choices(seed)
        assert found[2:] == [None, None], "one active worker is left, and one that has no process yet"
        assert len(set(found[:2])) == 2


def test_nobody_is_chosen_while_nobody_is_active() -> None:
    assert Campaign(0, 1.0).choose([row(0, "starting"), row(1, "standby")]) is None


def test_who_was_only_stopped_may_be_struck_again() -> None:
    rows = [row(0, "active"), row(1, "active")]
    campaign = Campaign(0, 1.0, lasting=False)
    assert all(campaign.choose(rows) is not None for _ in range(5))
    assert campaign.choose(rows[:1]) is None


# ── the injector ────────────────────────────────────────────────────────────────────────────────────


def sleeper() -> subprocess.Popen[bytes]:
    code = "import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it is up
    return process


@pytest.mark.parametrize(
    ("manner", "signum"),
    [(Manner.KILL, signal.SIGKILL), (Manner.TERM, signal.SIGTERM), (Manner.SEGV, signal.SIGSEGV)],
)
def test_strikes_are_real(manner: Manner, signum: int) -> None:
    with sleeper() as process, Injector() as injector:
        assert injector.strike(process.pid, manner)
        assert process.wait(10) == -signum
        assert not injector.strike(process.pid, manner), "it is gone"


def test_what_is_stopped_goes_on_at_the_end() -> None:
    with sleeper() as process:
        with Injector() as injector:
            assert injector.strike(process.pid, Manner.STOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def test_the_matrix_has_its_manners() -> None:
    assert {Manner.KILL, Manner.EXIT, Manner.RAISE, Manner.SEGV, Manner.TERM} == set(DEATHS)
    assert Manner.RAISE not in SIGNALS
