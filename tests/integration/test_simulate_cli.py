"""`perdure simulate` from the outside: figures, page, sweep, fit, advice, and every kind of bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import main
from perdure.core.policies import POLICIES
from perdure.core.policies.base import CAUSES

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "examples" / "scenarios"
TRACES = ROOT.parent / "shared" / "traces"

SMALL = """
[cluster]
nodes = 4
gpus_per_node = 8
gpu = "A100-80GB"
mtbf_hours_per_node = 40
repair_hours = 6
storage_gb_s = 5
price_per_gpu_hour = 2

[simulate]
days = 3
seed = 1

[[job]]
name = "heavy"
weight = 2
gpus = { min = 8, max = 16, step = 8 }
model = { layers = 12, hidden = 1024, heads = 16, sequence = 1024, vocabulary = 50304, global_batch = 128 }

[[job]]
name = "light"
gpus = { min = 8, max = 16, step = 8 }
model = { layers = 12, hidden = 1024, heads = 16, sequence = 1024, vocabulary = 50304, global_batch = 128 }
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def figures(scenario: Path, *arguments: str) -> dict[str, Any]:
    out = scenario.parent / "figures.json"
    assert main(["simulate", str(scenario), "--json", str(out), *arguments]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_figures_have_their_shape(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(scenario, "--seeds", "3")
    assert set(found["policies"]) == set(POLICIES)
    for policy in found["policies"].values():
        assert set(policy["accumulated_waf"]) == {"mean", "ci95"}
        assert set(policy["goodput"]) == {"mean", "ci95"}
        assert set(policy["gpu_seconds"]) == set(CAUSES)
        total = sum(cause["mean"] for cause in policy["gpu_seconds"].values())
        assert total == pytest.approx(3 * 86_400 * 32)
        assert policy["goodput"]["mean"] == pytest.approx(policy["gpu_seconds"]["useful"]["mean"] / total)
        assert all(cause["ci95"] >= 0 for cause in policy["gpu_seconds"].values())
    for one, others in found["ratios"].items():
        for other, ratio in others.items():
            waf = [found["policies"][name]["accumulated_waf"]["mean"] for name in (one, other)]
            assert ratio == pytest.approx(waf[0] / waf[1])
    shown = capsys.readouterr().out
    assert "3 traces" in shown
    assert "GPU-time by cause" in shown


def test_one_seed_gives_the_same_figures_again(scenario: Path) -> None:
    first, again = (figures(scenario, "--seeds", "2", "--policies", "megatron,perdure") for _ in range(2))
    first.pop("elapsed_s")
    again.pop("elapsed_s")
    assert first == again


def test_more_seeds_keep_the_first_and_narrow_the_interval(scenario: Path) -> None:
    few, many = (figures(scenario, "--seeds", seeds, "--policies", "megatron") for seeds in ("4", "16"))
    assert few["seeds"] == [1, 2, 3, 4]
    assert many["seeds"][:4] == few["seeds"]
    goodput = [found["policies"]["megatron"]["goodput"]["ci95"] for found in (few, many)]
    assert 0 < goodput[1] < goodput[0]


def test_the_page_shows_progress_causes_and_sensitivity(scenario: Path) -> None:
    page = scenario.parent / "page.html"
    arguments = ["--seeds", "2", "--policies", "megatron,unicron", "--html", str(page)]
    assert main(["simulate", str(scenario), *arguments, "--sweep", "cluster.spares=0,1"]) == 0
    text = page.read_text()
    for heading in ("Accumulated WAF over time", "Where the GPU-hours went", "failure rate", "cluster size"):
        assert heading in text
    assert text.count("<svg") == text.count("</svg>")
    assert len(re.findall(r"<polyline", text)) == 2 * 4  # two policies in each of four pictures
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_a_sweep_runs_at_every_value(scenario: Path) -> None:
    found = figures(
        scenario, "--seeds", "2", "--policies", "megatron", "--sweep", "cluster.repair_hours=1,24"
    )
    (sweep,) = found["sweeps"]
    assert sweep["key"] == "cluster.repair_hours"
    assert [point["value"] for point in sweep["values"]] == [1, 24]
    goodput = [point["policies"]["megatron"]["goodput"]["mean"] for point in sweep["values"]]
    assert goodput[0] > goodput[1]


def test_advice_compares_spares_intervals_and_policies(scenario: Path) -> None:
    found = figures(scenario, "--seeds", "2", "--policies", "megatron,perdure", "--advise")
    options = found["advice"]
    assert options[0]["kind"] == "now"
    assert options[0]["gained_gpu_hours"] == 0
    assert {option["kind"] for option in options} == {"now", "spares", "interval", "policy"}
    one_spare = next(option for option in options if option["change"] == "1 more spare node")
    assert one_spare["bought_gpu_hours"] == pytest.approx(3 * 24 * 8)
    assert one_spare["gained_gpu_hours"] > 0
    for option in options:
        worth = option["gained_gpu_hours"] - option["bought_gpu_hours"]
        assert option["net_money"] == pytest.approx(2 * worth)


def events(path: Path) -> Path:
    """A run of ten hours on two nodes with three faults: two processes, one node."""
    lines: list[dict[str, Any]] = [{"event": "run_started", "wall_s": 0.0}]
    lines += [{"event": "worker_started", "wall_s": 1.0, "worker": w, "node": f"node-{w}"} for w in (0, 1)]
    for number, (kind, detected_by, severity) in enumerate(
        [("exit", "pidfd", "SEV2"), ("exception", "exception", "SEV2"), ("node", "lease", "SEV1")], start=1
    ):
        at = 9000.0 * number
        fault = {
            "event": "fault_detected",
            "wall_s": at,
            "worker": 1,
            "kind": kind,
            "detected_by": detected_by,
        }
        lines.append({**fault, "detect_s": 0.02 * number})
        lines.append({"event": "fault_decided", "wall_s": at, "worker": 1, "severity": severity})
        lines.append({"event": "generation_opened", "wall_s": at, "generation": f"1.{number}"})
        lines.append({"event": "generation_computing", "wall_s": at + 0.25, "generation": f"1.{number}"})
        lines.append({"event": "worker_started", "wall_s": at + 1, "worker": 1, "node": "node-1"})
    lines.append({"event": "fault_detected", "wall_s": 35_000.0, "worker": 0, "kind": "leave"})
    lines.append({"event": "run_ended", "wall_s": 36_000.0, "exit_code": 0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "torn')
    return path


def test_a_fit_takes_the_rates_of_a_run(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = events(scenario.parent / "events.jsonl")
    found = figures(scenario, "--seeds", "1", "--policies", "perdure", "--fit", str(log))["fit"]
    assert found["node_hours"] == pytest.approx(20)
    assert found["faults"] == 3
    assert found["mtbf_hours_per_node"] == pytest.approx(20 / 3)
    assert found["severities"] == {"sev1": 1, "sev2": 2, "sev3": 0}
    low, high = found["mtbf_range_hours"]
    assert low < 20 / 3 < high
    assert found["perdure"]["process_s"] == pytest.approx(0.02)
    assert found["perdure"]["exception_s"] == pytest.approx(0.04)
    assert found["perdure"]["node_s"] == pytest.approx(0.06)
    assert found["perdure"]["regroup_s"] == pytest.approx(0.25)
    assert "fitted: 3 faults in 20 node-hours" in capsys.readouterr().out


def test_the_event_log_can_be_kept(scenario: Path) -> None:
    log = scenario.parent / "log.jsonl"
    assert main(["simulate", str(scenario), "--seeds", "1", "--policies", "unicron", "--log", str(log)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["policy"] for line in lines} == {"unicron"}
    assert {"job_state", "pool_state", "fault", "decision", "node_lost"} <= {line["event"] for line in lines}


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_runs(path: Path, tmp_path: Path) -> None:
    if "trace = " in path.read_text() and not TRACES.is_dir():
        pytest.skip("the public traces are not beside the checkout")
    out = tmp_path / "figures.json"
    arguments = ["--policies", "megatron,unicron,perdure", "--seeds", "1", "--json", str(out)]
    assert main(["simulate", str(path), *arguments]) == 0
    found = json.loads(out.read_text())
    assert found["policies"]["perdure"]["goodput"]["mean"] > 0.5


RATE = "mtbf_hours_per_node = 40"
GONE = 'trace = "gone.csv"\ntrace_source = "example.org"'
MEGATRON = "[policy.megatron]\n{}\n[simulate]"

BAD = [
    (("nodes = 4", "nodes = -4"), [], "cluster.nodes: found -4"),
    (("nodes = 4", "nodes = 4\nfruit = 1"), [], "cluster.fruit: unknown key"),
    (("A100-80GB", "A1000"), [], "unknown GPU kind 'A1000'"),
    ((RATE, "mtbf_hours_per_node = 1e-6"), [], "cluster.mtbf_hours_per_node: 1e-06 h make 2.9e+08 events"),
    ((RATE, "mtbf_hours_per_node = inf"), [], "not a finite number"),
    (("min = 8, max = 16, step = 8", "min = 800, max = 1600, step = 8"), [], "fit nowhere"),
    (("hidden = 1024, heads = 16", "hidden = 65536, heads = 16"), [], "no layout fits the memory"),
    (
        ("mtbf_hours_per_node = 40", 'trace = "gone.csv"\ntrace_source = "example.org"'),
        [],
        "get it from example.org",
    ),
    (
        ("[simulate]", "[policy.megatron]\ntimeout_s = -1\n[simulate]"),
        [],
        "policy.megatron: timeout_s: found -1",
    ),
    (
        ("[simulate]", "[policy.megatron]\npatience = 1\n[simulate]"),
        [],
        "policy.megatron: patience: unknown key",
    ),
    (
        ("[simulate]", MEGATRON.format("measured.x = [[1, 2.0]]")),
        [],
        "policy.megatron.measured.x: no such job",
    ),
    (("[simulate]", "[policy.zeus]\nx = 1\n[simulate]"), [], "policy.zeus: unknown policy"),
    (None, ["--policies", "zeus"], "unknown policy 'zeus'"),
    (None, ["--policies", ","], "none given"),
    (None, ["--seeds", "0"], "--seeds: 0"),
    (None, ["--seeds", "x"], "invalid int value"),
    (None, ["--sweep", "nonsense"], "--sweep: 'nonsense'"),
    (None, ["--sweep", "cluster.fruit=1,2"], "cluster.fruit: unknown key"),
    (None, ["--sweep", "cluster.nodes=4,-1"], "cluster.nodes: found -1"),
    (None, ["--fit", "no-such-file"], "--fit no-such-file: cannot be read"),
    (None, ["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: cannot be written"),
]


@pytest.mark.parametrize(("change", "arguments", "expected"), BAD, ids=[case[2] for case in BAD])
def test_bad_input_is_one_clear_line_and_exit_4(
    scenario: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str] | None,
    arguments: list[str],
    expected: str,
) -> None:
    if change is not None:
        scenario.write_text(SMALL.replace(change[0], change[1], 1))
    quick = ["--policies", "megatron", "--seeds", "1"]
    assert main(["simulate", str(scenario), *quick, *arguments]) == 4
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no fault in 0 node-hours"),
        (
            '{"event": "run_started", "wall_s": 1}\n{"event": "run_ended", "wall_s": 7201}\n',
            "no fault in 2 node",
        ),
        ('{"event": 5}\n{"event": "run_started", "wall_s": 1}\n', "line 1:"),
    ],
)
def test_a_log_that_cannot_be_fitted(
    scenario: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    log = scenario.parent / "events.jsonl"
    log.write_text(text)
    assert main(["simulate", str(scenario), "--fit", str(log), "--policies", "megatron"]) == 4
    assert expected in capsys.readouterr().err


def test_the_command_is_installed(scenario: Path) -> None:
    command = [sys.executable, "-m", "perdure.cli.main", "simulate", str(scenario), "--seeds", "1"]
    ended = subprocess.run([*command, "--policies", "perdure"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "perdure" in ended.stdout
    assert ended.stderr == ""
