"""`perdure plan` as people and programs use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import main
from perdure.schema.cluster import load_scenario
from perdure.sim.scenario import loss_rate

CLUSTER = """
[cluster]
nodes = 16
gpus_per_node = 8
gpu = "A800-80GB"
mtbf_hours_per_node = 500
"""


def job(name: str, weight: float, layers: int, hidden: int, gpus: str, more: str = "") -> str:
    return f"""
[[job]]
name = "{name}"
weight = {weight}
gpus = {gpus}
model = {{layers={layers}, hidden={hidden}, heads=32, sequence=2048, vocabulary=51200, global_batch=512}}
{more}"""


SIX = (
    CLUSTER
    + job("large", 2.0, 40, 5120, "{min=16, max=64, step=8}")
    + job("medium", 1.7, 32, 4096, "{min=8, max=64, step=8}")
    + job("small", 0.5, 24, 2048, "{min=8, max=64}")
)
NEW = job("new", 3.0, 24, 2048, "{min=8, max=16}")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(SIX, encoding="utf-8")
    return path


def plan(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert main(["plan", *map(str, args), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_plan_as_json(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, cluster)
    assert list(found["jobs"]) == ["large", "medium", "small"]
    assert (
        sum(entry["nodes"] for entry in found["jobs"].values()) + found["idle_nodes"] == found["nodes"] == 16
    )
    for entry in found["jobs"].values():
        assert entry["gpus"] <= entry["nodes"] * 8
        assert entry["why"]
        assert len(entry["node_names"]) == entry["nodes"]
    assert found["waf"] == pytest.approx(sum(entry["waf"] for entry in found["jobs"].values()))
    assert 0 < found["plan_s"] < 60
    assert 0 < found["event_ms_max"] < 1000


def test_losing_a_node_costs_a_node_and_returning_it_gives_it_back(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = plan(capsys, cluster)
    lost = plan(capsys, cluster, "--what-if", "lose node-3")
    assert lost["nodes"] == 15
    assert all("node-3" not in entry["node_names"] for entry in lost["jobs"].values())
    assert lost["waf"] < calm["waf"]
    assert {name: entry["nodes"] for name, entry in lost["before"]["jobs"].items()} == {
        name: entry["nodes"] for name, entry in calm["jobs"].items()
    }
    both = plan(capsys, cluster, "--what-if", "lose node-3", "--what-if", "return node-3")
    assert both["nodes"] == 16
    assert both["waf"] >= lost["waf"]
    assert [event["event"] for event in both["events"]] == ["lose node-3", "return node-3"]
    returned = plan(capsys, cluster, "--what-if", "return node-3")
    assert returned["nodes"] == 16
    extra = plan(capsys, cluster, "--what-if", "return node-16")
    assert extra["nodes"] == 17


def test_a_node_beyond_the_cluster_s_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.replace("nodes = 16", "nodes = 4") + job("a", 1, 24, 2048, "{min=8, max=512}"))
    calm = plan(capsys, path)
    assert calm["jobs"]["a"]["why"].startswith("has 4 nodes, all that are alive")
    found = plan(capsys, path, "--what-if", "return node-4", "--what-if", "return node-9")
    assert [event["changed"]["a"] for event in found["events"]] == [[4, 5], [5, 6]]
    assert found["idle_nodes"] == 0
    assert found["jobs"]["a"]["node_names"][-1] == "node-9"
    assert found["before"]["jobs"]["a"]["waf"] == calm["jobs"]["a"]["waf"]


def test_a_finished_job_s_nodes_go_to_the_others(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calm = plan(capsys, cluster)
    found = plan(capsys, cluster, "--what-if", "finish large")
    assert list(found["jobs"]) == ["medium", "small"]
    assert all(found["jobs"][name]["nodes"] >= calm["jobs"][name]["nodes"] for name in found["jobs"])


def test_a_submitted_job_is_planned(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.toml"
    new.write_text(NEW, encoding="utf-8")
    found = plan(capsys, cluster, "--what-if", f"submit {new}")
    assert found["jobs"]["new"]["nodes"] == 2
    assert found["events"][0]["changed"]["new"] == [0, 2]
    again = plan(capsys, cluster, "--what-if", f"submit {new}", "--what-if", "finish new")
    assert "new" not in again["jobs"]


def test_what_a_job_holds_already_is_kept_where_a_move_would_not_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "held.toml"
    held = SIX.replace("max=64, step=8}", "max=64, step=8, now=64}").replace(
        "hours_per_node = 500", "hours_per_node = 1"
    )
    path.write_text(held + "\n[plan]\ntransition_s = 100000\n", encoding="utf-8")
    found = plan(capsys, path)
    assert [entry["nodes"] for entry in found["jobs"].values()] == [8, 8, 0]


def test_people_see_a_table_and_the_reasons(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(cluster), "--what-if", "lose node-0"]) == 0
    out = capsys.readouterr().out
    assert "15 nodes × 8 GPUs" in out
    assert "lose node-0:" in out
    for name in ("large", "medium", "small"):
        assert f"\n{name} " in out


def test_measurements_and_own_gpu_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "speed.csv").write_text("gpus,samples_per_s\n1,10\n4,36\n", encoding="utf-8")
    text = CLUSTER.replace("A800-80GB", "MINE").replace("gpus_per_node = 8", "gpus_per_node = 1")
    text += '[[job]]\nname = "a"\ngpus = {min=1, max=8}\nthroughput = "speed.csv"\nflop_per_sample = 1e9\n'
    text += "[gpu.MINE]\npeak_tflops=10\nmemory_gb=8\nmemory_gb_s=100\nintra_gb_s=10\ninter_gb_s=1\n"
    (tmp_path / "c.toml").write_text(text, encoding="utf-8")
    found = plan(capsys, tmp_path / "c.toml")
    # More than was measured is not promised to be faster, so four nodes it is.
    assert found["jobs"]["a"]["nodes"] == found["jobs"]["a"]["gpus"] == 4
    assert found["jobs"]["a"]["waf"] == pytest.approx(36e9)


def test_where_there_is_only_a_trace_the_rate_is_the_trace_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"0,add,n{node}" for node in range(16)] + ["3600000,remove,n3", "7200000,remove,n5"]
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "c.toml").write_text(
        SIX.replace("mtbf_hours_per_node = 500", 'trace = "trace.csv"'), encoding="utf-8"
    )
    # Two losses in two hours on 16 nodes: one an hour.
    assert plan(capsys, tmp_path / "c.toml")["expected_running_s"] == pytest.approx(3600)
    short = (tmp_path / "c.toml").read_text() + "[simulate]\ndays = 0.0625\n"  # an hour and a half
    (tmp_path / "short.toml").write_text(short)
    scenario = load_scenario(tmp_path / "short.toml")
    found = plan(capsys, tmp_path / "short.toml")["expected_running_s"]
    assert found == pytest.approx(5400) == pytest.approx(1 / (16 * loss_rate(scenario)))


def test_a_table_of_interruptions_is_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_text("component,category,count\nGPU,GPU,300\nUnknown,Unknown,100\n")
    path = tmp_path / "c.toml"
    path.write_text(SIX.replace("mtbf_hours_per_node = 500", 'trace = "table.csv"'))
    # 300 of 400 are losses of a node: in 54 days, on 2,048 nodes of 8 GPUs.
    expected = 54 * 86_400 * 2048 / 300 / 16
    assert plan(capsys, path)["expected_running_s"] == pytest.approx(expected)


@pytest.mark.parametrize("layers", [2, 40])
def test_the_table_fits_80_columns_and_its_unit_fits_the_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "cluster.toml"
    name = "a-job-with-a-name-of-sixty-four-letters-which-is-the-longest-one"
    path.write_text(
        CLUSTER.replace("nodes = 16", "nodes = 1")
        + job(name, 1.25, layers, 32 if layers == 2 else 5120, "{min=8, max=8}")
    )
    assert main(["plan", str(path), "--what-if", "lose node-0", "--what-if", "return node-0"]) == 0
    out = capsys.readouterr().out
    assert "1 node × 8 GPUs" in out
    assert "0 nodes idle" in out
    assert "…" not in out
    assert " 0.000" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        (SIX.replace("nodes = 16", "nodes = -4"), [], "cluster.nodes: found -4, expected int ≥ 1"),
        (SIX.replace("A800-80GB", "A900"), [], "cluster.gpu: unknown GPU kind 'A900'"),
        (SIX.replace("min=16", "min=160"), [], "job.large.gpus.min: 160 is above max = 64"),
        (SIX.replace("weight = 2.0", "weight = inf"), [], "job.large.weight: inf is not a finite number"),
        (
            SIX.replace("max=64}", "max=64, now=640}"),
            [],
            "job.small.gpus.now: 640 is above max = 64, expected now ≤ max",
        ),
        (
            SIX.replace("max=64", "max=640").replace("max=640}", "max=640, now=640}"),
            [],
            "job.gpus.now: the jobs hold 80 nodes, expected at most 16",
        ),
        (
            SIX.replace("nodes = 16", "nodes = 90000").replace("max=64}", "max=8000000}"),
            [],
            "job.gpus.max: the jobs can have 90,016 different numbers of nodes on 90,000 nodes and spares",
        ),
        (SIX + "[policy.bogus]\nx = 1\n", [], "policy.bogus: unknown policy, expected one of megatron"),
        (SIX + "[policy.varuna]\nx = 1\n", [], "policy.varuna: x: unknown key"),
        (
            SIX.replace("weight = 0.5", "weight = 1e9").replace(
                "mtbf_hours_per_node = 500", "mtbf_hours_per_node = 5"
            )
            + "[plan]\ntransition_s = 1e300\n",
            [],
            "plan.transition_s: found 1e+300, expected float ≤ 1e+30",
        ),
        (SIX.replace("hidden=5120", "hidden=51200"), [], "job.large: no layout fits the memory of A800-80GB"),
        (SIX.replace("mtbf_hours_per_node = 500", 'trace = "none.csv"'), [], "none.csv cannot be read"),
        (SIX, ["--what-if", "eat node-3"], "--what-if 'eat node-3': not an event, expected 'lose node-N'"),
        (SIX, ["--what-if", "lose node-x"], "not an event"),
        (SIX, ["--what-if", "lose node-99"], "node-99 is not there"),
        (SIX, ["--what-if", "lose node-1", "--what-if", "lose node-1"], "node-1 is not there"),
        (SIX, ["--what-if", "return node-99", "--what-if", "return node-99"], "node-99 is there already"),
        (SIX, ["--what-if", "finish nobody"], "no such job, expected one of large, medium, small"),
        (SIX, ["--what-if", "submit none.toml"], "none.toml: cannot be read"),
        (SIX, ["--bogus"], "--bogus"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, args: list[str], message: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    assert main(["plan", str(path), *args]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
