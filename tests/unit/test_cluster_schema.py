"""Scenario files: what they mean, and that every mistake is one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.schema.cluster import Hours, load_jobs, load_scenario
from perdure.schema.errors import UsageError

MODEL = "model = {layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51200, global_batch=512}"
JOB = f"""
[[job]]
name = "a"
weight = 1.5
gpus = {{min=8, max=64, step=8}}
{MODEL}
"""
GOOD = f"""
[cluster]
nodes = 16
gpus_per_node = 8
gpu = "A100-80GB"
mtbf_hours_per_node = 500
repair_hours = {{min=24, max=168}}
{JOB}
[simulate]
days = 56
seed = 3
[policy.megatron]
timeout_s = 1800
"""


def write(folder: Path, text: str, name: str = "cluster.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_file(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD))
    assert scenario.cluster.gpus == 128
    assert scenario.cluster.repair_hours.mean_hours == 96
    assert scenario.cluster.severity.shares == pytest.approx((0.281, 0.233, 0.486))
    assert scenario.job[0].weight == 1.5
    assert scenario.simulate.days == 56
    assert scenario.policy == {"megatron": {"timeout_s": 1800}}


@pytest.mark.parametrize(
    ("text", "kind", "mean"),
    [
        ("24", "fixed", 24.0),
        ("1.5", "fixed", 1.5),
        ("{min=2, max=4}", "uniform", 3.0),
        ("{mean=20.4}", "exponential", 20.4),
        ("{median=20, sigma=0}", "lognormal", 20.0),
    ],
)
def test_hours(tmp_path: Path, text: str, kind: str, mean: float) -> None:
    scenario = load_scenario(write(tmp_path, GOOD.replace("{min=24, max=168}", text)))
    assert scenario.cluster.repair_hours.kind == kind
    assert scenario.cluster.repair_hours.mean_hours == pytest.approx(mean)


def test_everything_else_a_cluster_can_say(tmp_path: Path) -> None:
    more = """severity = {sev1=10, sev2=13, sev3=20}
failures = {kind="weibull", shape=0.6}
preemption = {mean_hours_per_node=12, notice_s=120, absent_hours={mean=2}}
degradation = {mean_hours_per_node=200, slowdown=1.4, lasts_hours=3}
late = {nodes=4, arrive_hours={min=0, max=24}}
[[job]]"""
    scenario = load_scenario(write(tmp_path, GOOD.replace("[[job]]", more, 1)))
    cluster = scenario.cluster
    assert cluster.severity.shares == pytest.approx((10 / 43, 13 / 43, 20 / 43))
    assert cluster.failures.kind == "weibull"
    assert cluster.preemption is not None
    assert cluster.preemption.absent_hours == Hours(mean=2)
    assert cluster.degradation is not None
    assert cluster.degradation.lasts_hours == Hours(fixed=3)
    assert cluster.late is not None
    assert cluster.late.arrive_hours.kind == "uniform"


def test_overrides_by_dotted_key(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    overrides = {
        "cluster.repair_hours": 2,
        "job.a.weight": 9,
        "policy.unicron.setup_s": 1,
        "simulate.seed": 7,
    }
    scenario = load_scenario(path, overrides)
    assert scenario.cluster.repair_hours == Hours(fixed=2)
    assert scenario.job[0].weight == 9
    assert scenario.policy["unicron"] == {"setup_s": 1}
    assert scenario.simulate.seed == 7
    with pytest.raises(UsageError, match=r"job\.b\.weight: no such table"):
        load_scenario(path, {"job.b.weight": 1})
    with pytest.raises(UsageError, match=r"nodes: no such table"):
        load_scenario(path, {"nodes": 1})
    with pytest.raises(UsageError, match=r"cluster\.nodez: unknown key"):
        load_scenario(path, {"cluster.nodez": 1})


def test_files_are_found_beside_the_scenario(tmp_path: Path) -> None:
    write(tmp_path, "gpus,step_s\n8,2.0\n16,1.1\n", "speed.csv")
    text = GOOD.replace(MODEL, 'throughput = "speed.csv"\nglobal_batch = 64\nflop_per_sample = 1e12')
    text = text.replace("mtbf_hours_per_node = 500", 'trace = "trace.csv"')
    scenario = load_scenario(write(tmp_path, text))
    assert scenario.cluster.trace == str(tmp_path / "trace.csv")
    assert scenario.job[0].measured is not None
    assert scenario.job[0].measured.values == (2.0, 1.1)
    (tmp_path / "speed.csv").unlink()
    with pytest.raises(UsageError, match=r"job\.a\.throughput: .*speed\.csv cannot be read"):
        load_scenario(tmp_path / "cluster.toml")


def test_a_run_of_perdure_is_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = "".join(f'{{"step":{n},"time":{2.0 * n},"workers":4,"loss":1}}\n' for n in range(4))
    write(tmp_path / "run", lines, "metrics.jsonl")
    scenario = load_scenario(write(tmp_path, GOOD.replace(MODEL, f'throughput = "run"\n{MODEL}')))
    assert scenario.job[0].measured is not None
    assert scenario.job[0].measured.gpus == (4,)
    assert scenario.job[0].measured.values == (2.0,)


BAD = [
    (
        "repair_hours = {min=24, max=168}",
        "repair_hours = -1",
        "cluster.repair_hours: found -1, expected float ≥ 0",
    ),
    ("nodes = 16", "nodes = -1", "cluster.nodes: found -1, expected int ≥ 1"),
    ("nodes = 16", "nodes = 0", "cluster.nodes: found 0, expected int ≥ 1"),
    ("nodes = 16", "nodes = 1.5", "cluster.nodes: found 1.5, expected int"),
    ("nodes = 16", "nodes = 'x'", "cluster.nodes: found 'x', expected int"),
    ("nodes = 16\n", "", "cluster.nodes: missing, expected a value"),
    ("nodes = 16", "nodez = 16", "cluster.nodez: unknown key, expected one of nodes, gpus_per_node, gpu"),
    ("nodes = 16", "nodes = 16\nnodes = 17", "not TOML"),
    ("weight = 1.5", "weight = nan", "job.a.weight: nan is not a finite number"),
    ("weight = 1.5", "weight = 0", "job.a.weight: found 0, expected float > 0"),
    (
        "mtbf_hours_per_node = 500",
        "mtbf_hours_per_node = inf",
        "cluster.mtbf_hours_per_node: inf is not a finite",
    ),
    ("mtbf_hours_per_node = 500", "", "cluster.mtbf_hours_per_node or trace: neither is given"),
    ("min=24, max=168", "min=240, max=168", "cluster.repair_hours.min: 240.0 is above max"),
    (
        "min=24, max=168",
        "max=168",
        "cluster.repair_hours.max: not a distribution, expected a number of hours",
    ),
    (
        "min=24, max=168",
        "minimum=168",
        "cluster.repair_hours.minimum: unknown key, expected one of fixed, min",
    ),
    ("min=8, max=64", "min=80, max=64", "job.a.gpus.min: 80 is above max = 64"),
    (
        "min=8, max=64",
        "min=800, max=6400",
        "job.a.gpus.min: 800 GPUs fit nowhere, the cluster has 16 nodes × 8",
    ),
    ("step=8", "step=0", "job.a.gpus.step: found 0, expected int ≥ 1"),
    ("heads=32", "heads=33", "job.a.model.heads: 33 does not divide hidden = 4096"),
    ("layers=32, ", "", "job.a.model.layers: missing, expected a value"),
    ("global_batch=512", "global_batch=512, batch=1", "job.a.model.batch: unknown key"),
    (MODEL, "", "job.a.model or throughput: neither is given"),
    (MODEL, f"{MODEL}\nglobal_batch = 3", "job.a.global_batch: 3 is not model.global_batch = 512"),
    (MODEL, f"{MODEL}\nmeasured = 3", "job.a.measured: unknown key"),
    (JOB, JOB + JOB, "job: the name a is used twice"),
    ('name = "a"', 'name = "a b"', "job.a b.name: found 'a b', expected str matching regex"),
    ("[[job]]", "[job]", "job: expected"),
    ("[[job]]", "[[jobs]]", "jobs: unknown key, expected one of cluster, job, plan, simulate, policy, gpu"),
    ('gpu = "A100-80GB"', 'gpu = ["A100-80GB", "V100-16GB"]', "cluster.gpu: several kinds in one cluster"),
    ("days = 56", "days = -1", "simulate.days: found -1, expected float > 0"),
    ("seed = 3", "seed = -3", "simulate.seed: found -3, expected int ≥ 0"),
    ("timeout_s = 1800", "timeout_s = inf", "policy.megatron.timeout_s: inf is not a finite number"),
    ("[policy.megatron]\n", "[policy]\n", "expected table"),
    (
        "[simulate]",
        "[cluster.severity]\nsev1=0\nsev2=0\nsev3=0\n[simulate]",
        "cluster.severity.sev1, sev2, sev3",
    ),
    (
        "[simulate]",
        "[cluster.late]\nnodes=17\narrive_hours=1\n[simulate]",
        "cluster.late.nodes: 17 of 16 nodes",
    ),
    ("[simulate]", "[gpu.X]\npeak_tflops=-1\n[simulate]", "gpu.X.peak_tflops: found -1, expected"),
    ("seed = 3", f"seed = {'9' * 5000}", "an integer is too long, expected at most 18 digits"),
    ("seed = 3", f"seed = {'9' * 400}", "simulate.seed: an integer of more than 18 digits"),
    ("seed = 3", f"seed = {'[' * 3000}", "too many brackets within brackets"),
    (
        "timeout_s = 1800",
        f"timeout_s = {'9' * 400}",
        "policy.megatron.timeout_s: an integer of more than 18 digits",
    ),
    ("nodes = 16", "nodes = 16\n'a\\nb' = 1", "cluster."),
    ("nodes = 16", f"nodes = 16\n{'x' * 100_000} = 1", "xxx"),
    ('name = "a"', f"name = '{'x' * 100_000}'", "found 'xxx"),
    ("nodes = 16", "nodes = 1000000", "cluster.nodes: found 1000000, expected int ≤ 100000"),
    (
        "nodes = 16",
        "nodes = 16\nspares = 1000000000",
        "cluster.spares: found 1000000000, expected int ≤ 100000",
    ),
    ("days = 56", "days = 1e6", "simulate.days: found 1000000.0, expected float ≤ 3650"),
    (
        "min=24, max=168",
        "median=1, sigma=1e30",
        "cluster.repair_hours.sigma: found 1e+30, expected float ≤ 10",
    ),
    (
        "nodes = 16",
        'nodes = 16\nfailures = {kind="weibull", shape=0.001}',
        "cluster.failures.shape: found 0.001, expected float ≥ 0.05",
    ),
    (
        "nodes = 16",
        'nodes = 16\nfailures = {kind="infant", decay_hours=1e30, factor=1e300}',
        "cluster.failures.",
    ),
    (
        "nodes = 16",
        "nodes = 16\ndegradation = {mean_hours_per_node=10, slowdown=1e308}",
        "cluster.degradation.slowdown: found 1e+308, expected float ≤ 1000000",
    ),
]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "gpus,step_s\n8,1e-300\n",
            "line 2: '8,1e-300', expected a new gpus from 1 to 1e+09 and step_s from 1e-09",
        ),
        (f"gpus,step_s\n{'9' * 400},1\n", "line 2: '999"),
        ("gpus,step_s\n²,1\n", "line 2: '²,1'"),
        ("gpus,step_s\n8,inf\n", "line 2: '8,inf'"),
        (f"gpus,step_s\n8,1{'x' * 140_000}\n", "line 2: field larger than field limit"),
        ('gpus,step_s\n8,"1\n', "line 2: unexpected end of data"),
        (f"{'x' * 1000},step_s\n", "found the columns 'xxx"),
        ("", "found the columns none, expected gpus and one of"),
        ("gpus,step_s\n", "no measurement, expected at least one"),
    ],
)
def test_a_bad_table_of_speeds_is_one_line_that_names_it(tmp_path: Path, table: str, message: str) -> None:
    write(tmp_path, table, "speed.csv")
    path = write(tmp_path, GOOD.replace(MODEL, f'throughput = "speed.csv"\n{MODEL}'))
    with pytest.raises(UsageError) as caught:
        load_scenario(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: job.a.throughput: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 500


def test_the_mark_that_some_editors_put_in_front_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "speed.csv").write_text("gpus,step_s\n8,2.0\n", encoding="utf-8-sig")
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(MODEL, f'throughput = "speed.csv"\n{MODEL}'), encoding="utf-8-sig")
    measured = load_scenario(path).job[0].measured
    assert measured is not None
    assert measured.gpus == (8,)


@pytest.mark.parametrize(("old", "new", "message"), BAD)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_scenario(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 700


@pytest.mark.parametrize(
    "text", ["", "[cluster]\n", "job = []\n[cluster]\nnodes=1\ngpus_per_node=1\ngpu='x'\n", "x=1"]
)
def test_a_file_with_less_than_a_cluster_and_a_job(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        load_scenario(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        load_scenario(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_scenario(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not TOML"):
        load_scenario(tmp_path / "binary.toml")


def test_submitted_jobs(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD))
    (new,) = load_jobs(write(tmp_path, JOB.replace('"a"', '"b"'), "new.toml"), scenario)
    assert new.name == "b"
    for text, message in (
        (JOB, "the name a is used already"),
        (
            JOB.replace('"a"', '"b"').replace("min=8, max=64", "min=800, max=800"),
            r"job\.b\.gpus\.min: 800 GPUs fit",
        ),
        (GOOD, "cluster: unknown key, expected one of job"),
        ("job = []", "there is none"),
        ("", "job: missing"),
    ):
        with pytest.raises(UsageError, match=message):
            load_jobs(write(tmp_path, text, "bad.toml"), scenario)
