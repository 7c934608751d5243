"""The randomised search: the production state machines hold in every schedule that it tries."""

from __future__ import annotations

from collections import Counter

import pytest

from perdure.sim.protocol import faults
from perdure.sim.protocol.__main__ import EXIT_CODES, main
from perdure.sim.protocol.search import Config, Findings, run, search
from perdure.sim.protocol.simulation import Verdict
from perdure.sim.protocol.trace import Trace

RUNS = 500
SOAK_S = 240.0


def passed(findings: Findings) -> None:
    assert not findings.found, (
        f"{findings}\nreplay: python -m perdure.sim.protocol --seeds {findings.found[0].seed}"
    )
    assert findings.commits > findings.runs, "a search in which nothing is trained shows nothing"


@pytest.mark.parametrize("part", range(4))
def test_no_schedule_breaks_the_protocol(part: int) -> None:
    passed(search(range(part * RUNS, (part + 1) * RUNS)))


@pytest.mark.parametrize("kind", sorted({*faults.KINDS}))
def test_one_kind_of_fault_again_and_again(kind: str) -> None:
    config = Config(kinds=(kind,), faults_max=6)
    passed(search(range(5_000, 5_040), config))
    fired = [fault for seed in range(5_000, 5_040) for fault in run(seed, config).fired]
    assert fired, "the fault never fired"


def test_faults_strike_everywhere() -> None:
    struck: Counter[str] = Counter()
    for seed in range(9_000, 10_500):
        schedule = faults.draw(seed)
        fired = set(run(seed, Config()).fired)
        struck.update(fault.point for fault in schedule.faults if str(fault) in fired)
    rare = {point for point in faults.POINTS if not struck[point]}
    assert rare <= {"switched", "restored", "released", "ledger", "finish", "written", "evaluated"}


def test_a_run_is_replayed_from_its_seed() -> None:
    seeds = [seed for seed in range(40) if faults.draw(seed).faults][:5]
    for seed in seeds:
        first, second = run(seed, Config()), run(seed, Config(), Trace())
        assert first == second


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:20"]) == 0
    assert "20 runs" in capsys.readouterr().out
    assert main(["--seeds", "0:200", "--rule-off", "P4"]) == EXIT_CODES[Verdict.CORRECTNESS]
    out = capsys.readouterr().out
    assert "G2" in out
    assert "Seal" in out, "the first finding is shown as it happened"


@pytest.mark.slow
def test_soak() -> None:
    passed(search(range(1_000_000, 2_000_000), Config(seconds_max=SOAK_S)))
