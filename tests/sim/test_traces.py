"""The public traces as they are, and every way in which a trace can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.core.policies.base import Method
from perdure.schema.cluster import Cluster
from perdure.schema.errors import UsageError
from perdure.sim.happenings import Kind, Trace
from perdure.sim.studies import STUDIES, rates_of_table
from perdure.sim.traces import read_trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"
public = pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside the checkout")


def cluster(trace: Path | str, nodes: int = 32, **more: Any) -> Cluster:
    return Cluster(nodes=nodes, gpus_per_node=1, gpu="V100-p3", trace=str(trace), **more)


def largest(trace: Trace, nodes: int) -> int:
    """The most nodes that were ever present."""
    present = set(range(nodes)) - trace.absent
    most = len(present)
    for event in trace.happenings:
        if event.kind is Kind.ADD:
            assert event.node not in present
            present.add(event.node)
        elif event.kind is Kind.REMOVE:
            present.remove(event.node)
        most = max(most, len(present))
    return most


@public
def test_bamboo_spot_trace() -> None:
    trace = read_trace(cluster(SHARED / "bamboo" / "p3-trace.csv"))
    assert len(trace.happenings) + 32 - len(trace.absent) == 344
    assert trace.happenings[-1].time_s == pytest.approx(11.366666 * 3600, rel=1e-4)
    assert largest(trace, 32) == 32


@public
@pytest.mark.parametrize(
    ("name", "gap_s"), [("5m", 298.8), ("10m", 601.2), ("30m", 1800), ("1h", 3600), ("6h", 21_600)]
)
def test_oobleck_synthetic_traces(name: str, gap_s: float) -> None:
    trace = read_trace(cluster(SHARED / "oobleck-sim" / f"{name}.csv", nodes=30))
    assert not trace.absent
    assert [event.kind for event in trace.happenings] == [Kind.REMOVE] * 15
    assert trace.happenings[0].time_s == pytest.approx(gap_s)
    assert trace.losses == 15


@public
def test_a_trace_that_starts_empty() -> None:
    trace = read_trace(cluster(SHARED / "oobleck-sim" / "scaled" / "scale_gcp-trace.csv", nodes=30))
    assert len(trace.absent) == 30
    assert trace.happenings[0].time_s == 480
    assert largest(trace, 30) == 30


@public
@pytest.mark.parametrize(
    ("pattern", "most", "hours"),
    [("g4dn*1c*", 12, 24.5), ("g4dn*1d*", 12, 12.7), ("p2-xlarge-2020*", 16, 88.7), ("p2*1e*", 10, 19.0)],
)
def test_step_curves_in_seconds_and_in_hours(pattern: str, most: int, hours: float) -> None:
    (path,) = (SHARED / "bamboo" / "aws-2020").glob(f"aws-spot-instances-{pattern}")
    trace = read_trace(cluster(path, nodes=16))
    assert largest(trace, 16) == most
    assert trace.happenings[-1].time_s <= hours * 3600


@public
def test_the_fault_trace_of_400_servers() -> None:
    trace = read_trace(cluster(SHARED / "infinitehbd" / "fault_trace.json", nodes=400))
    assert len(trace.happenings) == 584
    assert len({event.node for event in trace.happenings}) == 231
    assert all(event.kind is Kind.FAULT and event.method is Method.NODE for event in trace.happenings)
    repairs = sorted(event.lasts_s / 3600 for event in trace.happenings)
    assert repairs[292] == pytest.approx(20.4, abs=0.2)


@public
def test_the_table_of_llama_3_is_a_rate() -> None:
    path = SHARED / "llama3-table" / "llama3_405b_interruptions.csv"
    rates = rates_of_table(Cluster(nodes=2048, gpus_per_node=8, gpu="H100-80GB", trace=str(path)))
    assert rates is not None
    # 419 in 54 days on 2048 nodes: one in 3.1 hours.
    assert rates.mtbf_hours_per_node is not None
    assert rates.mtbf_hours_per_node / 2048 == pytest.approx(54 * 24 / 419)
    assert rates.severity.shares == pytest.approx((321 / 419, 63 / 419, 35 / 419))
    assert rates.severity.shares == pytest.approx(STUDIES["llama3"].severity.shares)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("0,add,a\n0,grow,b\n", "line 2: '0,grow,b', expected time_ms,add|remove,node"),
        ("0,add,a\n-5,remove,a\n", "line 2: time '-5'"),
        ("5000,add,a\n1000,remove,a\n", "line 2: time 1000 is before the line above"),
        ("0,add,a\nnan,remove,a\n", "line 2: time 'nan'"),
        ("0,add,a\n5,add,a\n", "line 2: 'a' is added but present"),
        ("0,remove,a\n", "line 1: 'a' is removed but absent"),
        ("0,add,a\n0,add,b\n0,add,c\n", "line 3: more than 2 nodes at once"),
        ("0,1\n5,x\n", "line 2: '5,x', expected time,count"),
        ("0,1\n5,9\n", "line 2: 9 nodes, expected at most cluster.nodes = 2"),
        ("[{]", "not JSON"),
        ("[]", "no fault"),
        ('[{"node_id": "a", "event_time": 1, "event_type": "fault_end"}]', "ends before it starts"),
        ('[{"node_id": "a", "event_time": "x", "event_type": "fault_end"}]', "event 1: expected node_id"),
        ("component,category,count\nx,Moon,3\n", "line 2: 'Moon', '3'"),
        ("component,category,count\nx,GPU,²\n", "line 2: 'GPU', '²', expected a count"),
        (f"component,category,count\nx,GPU,{'9' * 5000}\n", "line 2: 'GPU', '999"),
        ("component,category,count\nx,GPU\n", "line 2: '', ''"),
        ("component,category,count\n", "no interruption, expected at least one count above 0"),
        ("component,category,count\nx,GPU,0\n", "no interruption"),
        ("0,1\n5,²\n", "line 2: '5,²', expected time,count"),
        (f"0,1\n5,{'9' * 5000}\n", "line 2: '5,999"),
        ("[" * 100_000, "too many brackets within brackets"),
        (f'[{{"node_id": "a", "event_time": {"9" * 5000}, "event_type": "fault_start"}}]', "not JSON"),
        (f'[{{"node_id": "a", "event_time": {"9" * 400}, "event_type": "fault_start"}}]', "a finite number"),
        (f"0,add,a\n0,add,{'x' * 140_000}\n", "line 2: field larger than field limit"),
        ('0,add,a\n0,add,"b\n1,add,c\n', "line 2: unexpected end of data, expected CSV with closed quotes"),
        (f"{'9' * 400},add,a\n", "line 1: time '999"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    reader = rates_of_table if text.startswith("component") else read_trace
    with pytest.raises(UsageError) as raised:
        reader(cluster(path, nodes=2))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("cluster.trace: ")
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("text", ["0,add,a\n5,remove,a\n", "0,2\n5,1\n"])
def test_the_mark_that_some_editors_put_in_front_is_no_part_of_the_trace(tmp_path: Path, text: str) -> None:
    plain, marked = tmp_path / "plain.csv", tmp_path / "marked.csv"
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    assert read_trace(cluster(plain, nodes=2)) == read_trace(cluster(marked, nodes=2))


def test_a_missing_trace_says_where_to_get_it() -> None:
    expected = r"no-such-file.csv cannot be read .* get it from example.org/traces"
    with pytest.raises(UsageError, match=expected):
        read_trace(cluster("no-such-file.csv", trace_source="example.org/traces"))
