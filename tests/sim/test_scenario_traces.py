"""What befalls the nodes of a scenario: drawn, recorded, and both at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import plain_job, run
from perdure.schema.cluster import Scenario, load_scenario
from perdure.schema.errors import UsageError
from perdure.sim.experiment import compare
from perdure.sim.happenings import Happening, Kind, Trace, together
from perdure.sim.scenario import loss_rate, prepare, trace_of

HOUR_S = 3600.0
TEXT = """
[cluster]
nodes = 10
gpus_per_node = 8
gpu = "H100-80GB"
trace = "trace.csv"
{more}
[simulate]
days = 3
[[job]]
name = "job"
gpus = {{ min = 16, max = 80, step = 16 }}
model = {{ layers = 24, hidden = 2048, heads = 16, sequence = 1024, vocabulary = 50000, global_batch = 256 }}
"""
PREEMPTION = "preemption = { mean_hours_per_node = 10, absent_hours = { mean = 1 } }"
DEGRADATION = "degradation = { mean_hours_per_node = 10, slowdown = 2 }"
LATE = "late = { nodes = 2, arrive_hours = 60 }"


def scenario(folder: Path, more: str = "", recorded: bool = True) -> Scenario:
    rows = [f"0,add,{name}" for name in "abcdefghij"] + ["7200000,remove,c", "36000000,add,c"]
    (folder / "trace.csv").write_text("\n".join(rows) + "\n")
    text = TEXT.format(more=more)
    if not recorded:
        text = text.replace('trace = "trace.csv"', "mtbf_hours_per_node = 1e6")
    (folder / "cluster.toml").write_text(text)
    return load_scenario(folder / "cluster.toml", {})


def backs(found: Scenario, seed: int = 0) -> list[dict[str, Any]]:
    case = prepare(found, ("unicron",))
    log = case.run("unicron", case.trace(seed), keep_log=True).log
    return [line for line in log if line["event"] == "node_back"]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_late_nodes_arrive_no_sooner_for_being_preempted(tmp_path: Path, recorded: bool, seed: int) -> None:
    found = scenario(tmp_path, f"{PREEMPTION}\n{LATE}", recorded)
    late = [line["time_s"] for line in backs(found, seed) if line["node"] in (8, 9)]
    assert late
    assert min(late) >= 60 * HOUR_S


@pytest.mark.parametrize("more", [PREEMPTION, DEGRADATION, LATE])
def test_what_is_drawn_comes_on_top_of_a_recorded_trace(tmp_path: Path, more: str) -> None:
    plain = trace_of(scenario(tmp_path), 0)
    both = trace_of(scenario(tmp_path, more), 0)
    assert set(plain.happenings) < set(both.happenings)
    assert len(both.happenings) > len(plain.happenings)
    times = [event.time_s for event in both.happenings]
    assert times == sorted(times)


def test_planners_believe_in_preemptions_beside_a_trace(tmp_path: Path) -> None:
    plain, both = loss_rate(scenario(tmp_path)), loss_rate(scenario(tmp_path, PREEMPTION))
    assert both - plain == pytest.approx(1 / (10 * HOUR_S))


def test_a_way_of_failing_beside_a_recorded_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cluster\.failures: cluster\.trace says already"):
        trace_of(scenario(tmp_path, 'failures = { kind = "bursts" }'), 0)


def test_a_node_is_back_when_the_last_cause_has_ended() -> None:
    """Absent at the start in both traces, later removed by one during its absence in the other."""
    one = Trace((Happening(1000.0, Kind.ADD, 1), Happening(5000.0, Kind.REMOVE, 1)), frozenset({1}))
    one = Trace((*one.happenings, Happening(7000.0, Kind.ADD, 1)), one.absent)
    other = Trace((Happening(3000.0, Kind.ADD, 1), Happening(6000.0, Kind.REMOVE, 1)), frozenset({1}))
    other = Trace((*other.happenings, Happening(6500.0, Kind.ADD, 1)), other.absent)
    both = together(one, other)
    result = run("megatron", [plain_job(1)], 2, list(both.happenings), 20_000.0, absent=both.absent)
    assert [line["time_s"] for line in result.log if line["event"] == "node_back"] == [3000.0, 7000.0]
    assert result.gpu_seconds["down"] == 3000 + 2000


def test_a_recorded_trace_is_run_once_and_has_no_interval(tmp_path: Path) -> None:
    found = compare(scenario(tmp_path), ("megatron", "unicron"), 3)
    assert found.seeds == (0,)
    assert found.as_json()["traces"] == {"count": 1, "recorded": True}
    assert found.waf("megatron").ci95 == 0
    assert found.ratio_ci95("unicron", "megatron") == 0


@pytest.mark.parametrize("more", [PREEMPTION, DEGRADATION])
def test_what_is_drawn_beside_a_trace_differs_from_seed_to_seed(tmp_path: Path, more: str) -> None:
    found = compare(scenario(tmp_path, more), ("unicron",), 3)
    assert found.as_json()["traces"] == {"count": 3, "recorded": False}
    assert found.waf("unicron").ci95 > 0


def test_counts_without_names_are_drawn(tmp_path: Path) -> None:
    plain = scenario(tmp_path)
    (tmp_path / "trace.csv").write_text("0,10\n7200,5\n36000,10\n50000,7\n")
    assert compare(plain, ("unicron",), 2).as_json()["traces"] == {"count": 2, "recorded": False}
