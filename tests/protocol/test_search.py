"""The randomised search: the production state machines hold in every schedule that it tries."""

from __future__ import annotations

import pytest

from perdure.sim.protocol import faults
from perdure.sim.protocol.__main__ import EXIT_CODES, main
from perdure.sim.protocol.search import Config, Findings, run, search
from perdure.sim.protocol.simulation import Verdict
from perdure.sim.protocol.trace import Trace

RUNS = 2000
SOAK_S = 240.0
RARE = {"switched", "restored", "released", "ledger", "finish", "written", "evaluated", "control Release"}
"""Points that few runs come by at the drawn moment: not each search strikes there."""


def passed(findings: Findings) -> None:
    """Nothing was found; else how to see it again."""
    seeds = [outcome.seed for outcome in findings.found]
    assert not seeds, f"{findings}\nreplay: python -m perdure.sim.protocol --seeds {seeds[0]}"
    assert findings.commits > findings.runs, "a search in which nothing is trained shows nothing"


@pytest.fixture(scope="module")
def searched() -> Findings:
    return search(range(RUNS))


def test_no_schedule_breaks_the_protocol(searched: Findings) -> None:
    passed(searched)
    assert searched.runs == RUNS


def test_faults_of_every_kind_strike_everywhere(searched: Findings) -> None:
    assert {*faults.KINDS} <= set(searched.struck)
    assert {*faults.POINTS} - set(searched.struck) <= RARE


@pytest.mark.parametrize("kind", sorted({*faults.KINDS}))
def test_one_kind_of_fault_again_and_again(kind: str) -> None:
    findings = search(range(5_000, 5_040), Config(kinds=(kind,), faults_max=6))
    passed(findings)
    assert findings.struck[kind], "the fault never fired"


def test_a_run_is_replayed_from_its_seed() -> None:
    seeds = [seed for seed in range(40) if faults.draw(seed).faults][:5]
    for seed in seeds:
        first, second = run(seed, Config()), run(seed, Config(), Trace())
        assert first == second


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:20"]) == 0
    assert "20 runs" in capsys.readouterr().out
    assert main(["--seeds", "0:50", "--rule-off", "P18"]) == EXIT_CODES[Verdict.CORRECTNESS]
    out = capsys.readouterr().out
    assert "P18: line" in out
    assert "Seal" in out, "the first finding is shown as it happened"


@pytest.mark.slow
def test_soak() -> None:
    passed(search(range(1_000_000, 2_000_000), Config(seconds_max=SOAK_S)))
