"""`perdure simulate` from the outside: figures, page, sweep, fit, advice, and every kind of bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.cli.figures import computing_with
from perdure.cli.main import main
from perdure.core.policies import POLICIES
from perdure.core.policies.base import CAUSES
from perdure.schema.errors import UsageError
from perdure.sim import generators, queue

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
    arguments = (
        "--seeds",
        "2",
        "--policies",
        "megatron,perdure",
        "--sweep",
        "cluster.spares=0,1",
        "--advise",
    )
    texts = []
    for _ in range(2):
        figures(scenario, *arguments)
        texts.append((scenario.parent / "figures.json").read_bytes())
    assert texts[0] == texts[1]


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
        worth = option["waf_gain"] * options[0]["useful_gpu_hours"]
        assert option["worth_gpu_hours"] == pytest.approx(worth)
        assert option["net_money"] == pytest.approx(2 * (worth - option["bought_gpu_hours"]))
    by_policy = found["policies"]
    gain = by_policy["perdure"]["accumulated_waf"]["mean"] / by_policy["megatron"]["accumulated_waf"]["mean"]
    perdure = next(option for option in options if option["kind"] == "policy")
    assert perdure["waf_gain"] == pytest.approx(gain - 1)


def test_advice_knows_the_weights_of_jobs(scenario: Path) -> None:
    """Oobleck's many GPU-hours of the light job are worth less than Megatron's fewer of the heavy one."""
    measured = "[policy.{}]\nmeasured.heavy = [[1, {}]]\nmeasured.light = [[1, {}]]\n"
    text = SMALL.replace("weight = 2", "weight = 50").replace(
        "mtbf_hours_per_node = 40", "mtbf_hours_per_node = 1e6"
    )
    text += measured.format("megatron", 10, 1) + measured.format("recycle", 5, 6)
    path = scenario.parent / "weights.toml"
    path.write_text(text)
    options = figures(path, "--seeds", "1", "--policies", "megatron,recycle", "--advise")["advice"]
    recycle = next(option for option in options if option["kind"] == "policy")
    assert recycle["waf_gain"] == pytest.approx((50 * 5 + 6) / (50 * 10 + 1) - 1, rel=1e-3)
    assert recycle["net_money"] < 0


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


TRACE = "mtbf_hours_per_node = 40\ntrace = 'trace.csv'"
ADDED = "".join(f"0,add,n{node}\n" for node in range(4)) + "90000000,remove,n1\n"


def test_a_recorded_trace_is_run_once_and_has_no_interval(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scenario.parent / "trace.csv").write_text(ADDED)
    scenario.write_text(SMALL.replace("mtbf_hours_per_node = 40", TRACE))
    page = scenario.parent / "page.html"
    found = figures(scenario, "--seeds", "3", "--policies", "perdure", "--html", str(page))
    assert found["seeds"] == [1]
    assert found["policies"]["perdure"]["goodput"]["ci95"] == 0
    shown = capsys.readouterr().out
    for text in (shown, page.read_text()):
        assert "1 trace, recorded" in text
        assert "±" not in text
        assert "95 %" not in text


@pytest.mark.parametrize("name", ["large", "small"])
def test_the_tables_fit_80_columns_and_no_figure_is_cut(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = SMALL.replace("mtbf_hours_per_node = 40", "mtbf_hours_per_node = 4")
    if name == "large":  # figures with as many digits as they can have
        text = text.replace("nodes = 4", "nodes = 400").replace(
            "price_per_gpu_hour = 2", "price_per_gpu_hour = 999"
        )
        text = text.replace("seed = 1", "seed = 1\n[policy.oobleck]\nconnection_s = 100\n")
    scenario.write_text(text)
    sweep = ["--sweep", "cluster.repair_hours=0.123456789,{median=1.234567,sigma=1.2345678}"]
    assert main(["simulate", str(scenario), "--seeds", "2", *sweep]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    headings = [line.split() for line in shown.splitlines() if line.split()[:1] in (["cause"], ["value"])]
    assert [set(heading[1:]) for heading in headings] == [set(POLICIES)] * 2


def test_a_job_that_never_runs_is_named_on_the_page(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = scenario.parent / "page.html"
    (scenario.parent / "trace.csv").write_text("0,add,n0\n1000,remove,n0\n")
    scenario.write_text(SMALL.replace("mtbf_hours_per_node = 40", TRACE).replace("min = 8", "min = 16"))
    assert main(["simulate", str(scenario), "--policies", "megatron", "--html", str(page)]) == 0
    shown, text = capsys.readouterr().out, page.read_text()
    assert "megatron: heavy never ran: " in shown
    assert "megatron: heavy never ran: " in text
    assert "No policy got anything done." in text
    assert "e-1" not in text


def test_a_job_s_name_may_have_dots(scenario: Path) -> None:
    scenario.write_text(SMALL.replace('"light"', '"gpt-3.5"'))
    found = figures(scenario, "--seeds", "1", "--policies", "perdure", "--sweep", "job.gpt-3.5.gpus.max=8,16")
    (sweep,) = found["sweeps"]
    assert [point["value"] for point in sweep["values"]] == [8, 16]


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
    (("[simulate]", "[policy.varuna]\nbogus = 1\n[simulate]"), [], "policy.varuna: bogus: unknown key"),
    (
        None,
        ["--policies", "unicron", "--sweep", "policy.varuna.bogus=1"],
        "policy.varuna: bogus: unknown key",
    ),
    (
        ("max = 16, step = 8", "max = 16, step = 8, now = 999"),
        [],
        "job.heavy.gpus.now: 999 is above max = 16",
    ),
    (
        ("weight = 2", "weight = 2\nflop_per_sample = 1e-12"),
        [],
        "job.heavy: 7.32e-26 s a step at its fastest, expected at least 0.0001 s",
    ),
    (
        ("[simulate]", MEGATRON.format("measured.heavy = [[1, 1e300]]")),
        [],
        "policy.megatron.measured.heavy: 1e+300 samples per second are a step of 1.28e-298 s",
    ),
    (("days = 3", "days = 1e30"), [], "simulate.days: found 1e+30, expected float ≤ 3650"),
    (
        ("[simulate]", "[policy.megatron]\nsave_every_s = 1e-9\nwrite_s = 0\n[simulate]"),
        [],
        "policy.megatron.save_every_s: 1e-09 s in 3 days of 2 jobs, expected at least 0.518 s",
    ),
    (
        ("[simulate]", "[policy.perdure]\nsave_every_s = 1e-9\nsnapshot_s = 0\n[simulate]"),
        ["--policies", "perdure"],
        "policy.perdure.save_every_s: 1e-09 s",
    ),
    (None, ["--sweep", f"simulate.seed={'9' * 5000}"], "--sweep: 'simulate.seed=999"),
    (None, ["--sweep", f"simulate.seed={'[' * 3000}"], "--sweep: 'simulate.seed=[[["),
    (None, ["--sweep", f"simulate.seed={'9' * 400}"], "simulate.seed: an integer of more than 18 digits"),
    (None, ["--seeds", "0"], "--seeds: 0"),
    (None, ["--seeds", "1000000000"], "--seeds: 1000000000, expected 1 to 10,000"),
    (None, ["--html", "/no/such/folder/x.html"], "--html /no/such/folder/x.html: cannot be written"),
    (None, ["--log", "/"], "--log /: cannot be written (it is a directory)"),
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
    assert change is None or error.startswith(f"perdure: {scenario}: ")


def test_a_run_that_would_not_end_is_given_up(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "TIMERS_MAX", 10_000)
    steps = "save_every_steps = 1\nsave_s = 0\nmeasured.heavy = [[1, 1e6]]\nmeasured.light = [[1, 1e6]]\n"
    scenario.write_text(SMALL + "[policy.varuna]\n" + steps)
    assert main(["simulate", str(scenario), "--policies", "varuna", "--seeds", "1"]) == 4
    error = capsys.readouterr().err
    assert "simulate.days: more than 10,000 happenings" in error
    assert error.count("\n") == 1


def test_faults_that_breed_faults_are_given_up(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "ROUNDS_MAX", 1000)
    process = "failures = {kind='infant', factor=1e6, decay_hours=0.001}"
    scenario.write_text(
        SMALL.replace(f"{RATE}\nrepair_hours = 6", f"mtbf_hours_per_node = 1\nrepair_hours = 0\n{process}")
    )
    assert main(["simulate", str(scenario), "--policies", "perdure", "--seeds", "1"]) == 4
    error = capsys.readouterr().err
    assert "cluster.failures: more than" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("absurd", [lambda: np.float64(1e300) ** 2, lambda: 1.0 / 0.0, lambda: 10.0**400])
def test_figures_whose_product_overflows_are_one_line(absurd: Callable[[], object]) -> None:
    with (
        pytest.raises(UsageError, match=r"x\.toml: its figures together are beyond") as raised,
        computing_with("x.toml"),
    ):
        absurd()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no fault in 0 node-hours"),
        ("[" * 100_000 + "\n{}\n", "line 1:"),
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
