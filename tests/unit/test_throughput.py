"""The throughput model against Megatron's published rows, its mechanisms one by one, and measured curves."""

from __future__ import annotations

import functools
import itertools
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest

from perdure.core.calibration import STRONG, WEAK, Row, calibrate, errors, predicted_tflops
from perdure.core.curve import job_curve, state_bytes, step_flop
from perdure.core.gpus import KINDS, gpu_kind
from perdure.core.throughput import DEFAULT, Choice, Machine, best_layout, layer_times, step_seconds
from perdure.schema.cluster import Cluster, GpuRange, Job, Model, Scenario
from perdure.schema.errors import UsageError
from perdure.schema.measured import Measured, parse_csv, parse_metrics

GPT_7B = Model(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51_200, global_batch=512)
A100 = Machine(kind=KINDS["A100-80GB"], gpus_per_node=8)


calibrated = functools.cache(calibrate)


def predicting_the_mean(seen: tuple[Row, ...], judged: tuple[Row, ...]) -> float:
    mean = statistics.mean(row.tflops for row in seen)
    return statistics.mean(abs(mean / row.tflops - 1) for row in judged)


@pytest.mark.parametrize(("seen", "judged"), [(WEAK[0::2], WEAK[1::2]), (WEAK[1::2], WEAK[0::2])])
def test_rows_that_were_left_out_are_predicted_within_6_percent(
    seen: tuple[Row, ...], judged: tuple[Row, ...]
) -> None:
    found = [abs(error) for error in errors(judged, calibrated(seen))]
    assert max(found) <= 0.06
    assert statistics.mean(found) < min(predicting_the_mean(seen, judged), predicting_the_mean(WEAK, judged))


def test_the_constants_in_use_are_those_of_the_odd_rows() -> None:
    found = calibrated(WEAK[0::2])
    for field in DEFAULT.__struct_fields__:
        assert getattr(DEFAULT, field) == pytest.approx(getattr(found, field), rel=0.005)


def test_strong_scaling_is_predicted_unseen_and_falls_as_it_falls() -> None:
    for seen in (WEAK[0::2], WEAK[1::2]):
        efficiency = calibrated(seen)
        assert max(abs(error) for error in errors(STRONG, efficiency)) <= 0.08
        for rows in (STRONG[:3], STRONG[3:]):
            predicted = [predicted_tflops(row, efficiency) for row in rows]
            assert predicted == sorted(predicted, reverse=True)
            fall = predicted[-1] / predicted[0]
            assert fall == pytest.approx(rows[-1].tflops / rows[0].tflops, abs=0.03)


def test_the_documented_predictions_are_the_model_s() -> None:
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    for row in (*WEAK, *STRONG):
        cells = [f"{predicted_tflops(row, calibrated(WEAK[start::2])):.1f} (" for start in (0, 1)]
        assert any(
            f"| {row.gpus} | {row.tflops:g} |" in line and all(cell in line for cell in cells)
            for line in text.splitlines()
        ), row


def test_published_sizes_are_the_formula_s() -> None:
    for row in (*WEAK, *STRONG):
        assert row.model.parameters / 1e9 == pytest.approx(row.parameters_b, abs=0.051)


def test_the_search_finds_the_best_of_all_restricted_searches() -> None:
    for gpus in (1, 8, 24, 64):
        best = best_layout(GPT_7B, A100, gpus)
        tried = [
            best_layout(GPT_7B, A100, gpus, Choice(tensor=tensor, pipeline=pipeline, recompute=recompute))
            for tensor, pipeline, recompute in itertools.product(
                (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (True, False)
            )
        ]
        times = [layout.step_s for layout in tried if layout is not None]
        if best is None:
            assert not times
        else:
            assert best.step_s <= min(times) * (1 + 1e-12)
            assert best.tensor * best.pipeline * best.data <= gpus


def test_a_model_that_fits_no_gpu_has_no_layout() -> None:
    assert best_layout(GPT_7B, A100, 1) is None
    assert best_layout(GPT_7B, A100, 2) is not None
    assert np.isinf(step_seconds(GPT_7B, A100, np.array([0, 1]))).all()


@pytest.mark.parametrize(
    ("field", "factor"),
    [
        ("peak_tflops", 1.5),
        ("memory_gb", 2.0),
        ("memory_gb_s", 1.5),
        ("intra_gb_s", 2.0),
        ("inter_gb_s", 2.0),
        ("intra_us", 0.1),
        ("inter_us", 0.1),
    ],
)
def test_a_better_gpu_is_never_slower(field: str, factor: float) -> None:
    gpus = np.arange(2, 129)
    better = msgspec.structs.replace(A100.kind, **{field: getattr(A100.kind, field) * factor})
    before = step_seconds(GPT_7B, A100, gpus)
    after = step_seconds(GPT_7B, msgspec.structs.replace(A100, kind=better), gpus)
    assert (after <= before * (1 + 1e-12)).all()
    assert (after < before).any()


def test_the_pipeline_s_bubble_is_its_formula_s() -> None:
    choice = Choice(tensor=8, pipeline=8, interleave=False, recompute=True)
    long, short = (
        best_layout(msgspec.structs.replace(GPT_7B, global_batch=batch), A100, 64, choice)
        for batch in (160, 16)
    )
    assert long is not None
    assert short is not None
    # Per sample the shorter batch pays (p − 1) / m more: m differs, everything else is as good as equal.
    m_long, m_short = 160 / long.micro_batch, 16 / short.micro_batch
    expected = (1 + 7 / m_short) / (1 + 7 / m_long)
    if long.micro_batch == short.micro_batch:
        assert (short.step_s / 16) / (long.step_s / 160) == pytest.approx(expected, rel=0.08)
    interleaved = best_layout(
        msgspec.structs.replace(GPT_7B, global_batch=16),
        A100,
        64,
        msgspec.structs.replace(choice, interleave=True),
    )
    assert interleaved is not None
    assert interleaved.step_s < short.step_s


def test_layer_times_add_up_to_the_step() -> None:
    layout = best_layout(GPT_7B, A100, 4, Choice(tensor=4, pipeline=1, recompute=True))
    assert layout is not None
    times = layer_times(GPT_7B, A100, 4, layout.micro_batch)
    micro = (
        GPT_7B.layers * (2 * times.forward_s + times.backward_s)
        + times.head_forward_s
        + times.head_backward_s
    )
    optimizer = 28 * GPT_7B.parameters / 4 / 2039e9
    assert layout.step_s == pytest.approx(
        micro * GPT_7B.global_batch / layout.micro_batch + optimizer, rel=1e-3
    )


def cluster(nodes: int = 16) -> Cluster:
    return Cluster(nodes=nodes, gpus_per_node=8, gpu="A100-80GB", mtbf_hours_per_node=1000)


def test_a_curve_never_falls_and_uses_allowed_counts_only() -> None:
    job = Job(name="a", gpus=GpuRange(min=10, max=100, step=6), model=GPT_7B)
    curve = job_curve(job, cluster(), A100.kind)
    assert curve.nodes_max == 13
    assert (np.diff(curve.flops_per_s) >= 0).all()
    assert curve.flops_per_s[0] == curve.flops_per_s[1] == 0
    for nodes, gpus in enumerate(curve.gpus.tolist()):
        assert gpus == 0 or (gpus - 10) % 6 == 0
        assert gpus <= min(nodes * 8, 100)
        if gpus:
            layout = curve.layout(nodes)
            assert layout is not None
            assert curve.step_s(nodes) == pytest.approx(layout.step_s)
            assert curve.at(nodes) == pytest.approx(GPT_7B.step_flop / layout.step_s)
    assert curve.at(99) == curve.at(13)


def test_a_job_that_fits_no_memory_is_refused_with_its_name() -> None:
    huge = Model(layers=128, hidden=25_600, heads=160, sequence=2048, vocabulary=51_200, global_batch=8)
    with pytest.raises(
        UsageError, match=r"job\.big: no layout fits the memory of A100-80GB on 8 to 128 GPUs"
    ):
        job_curve(Job(name="big", gpus=GpuRange(min=8, max=512), model=huge), cluster(), A100.kind)


def measured_job(unit: str, values: tuple[float, ...], **more: object) -> Job:
    table = Measured(unit=unit, gpus=(8, 32), values=values)  # type: ignore[arg-type]
    fields = {"name": "m", "gpus": GpuRange(min=4, max=64, step=4), "throughput": "x.csv", "measured": table}
    return Job(**{**fields, **more})  # type: ignore[arg-type]


def test_measurements_are_interpolated_and_never_extrapolated_upwards() -> None:
    curve = job_curve(measured_job("flops_per_s", (8e15, 20e15)), cluster(), A100.kind)
    assert curve.at(1) == pytest.approx(8e15)
    assert curve.at(2) == pytest.approx(12e15)
    assert curve.at(4) == pytest.approx(20e15)
    assert curve.at(8) == pytest.approx(20e15)
    assert curve.gpus[8] == 64
    half = job_curve(
        measured_job("flops_per_s", (8e15, 20e15), gpus=GpuRange(min=4, max=4)), cluster(), A100.kind
    )
    assert half.at(1) == pytest.approx(4e15)


@pytest.mark.parametrize(
    ("unit", "values", "more"),
    [
        ("tflops_per_gpu", (1000.0, 625.0), {}),
        ("samples_per_s", (4.0, 10.0), {"flop_per_sample": 2e15}),
        ("step_s", (16.0, 6.4), {"flop_per_sample": 2e15, "global_batch": 64}),
    ],
)
def test_every_unit_becomes_flops(unit: str, values: tuple[float, ...], more: dict[str, object]) -> None:
    curve = job_curve(measured_job(unit, values, **more), cluster(), A100.kind)
    assert curve.at(1) == pytest.approx(8e15)
    assert curve.at(4) == pytest.approx(20e15)


def test_samples_without_their_flop_are_refused() -> None:
    with pytest.raises(UsageError, match=r"job\.m\.flop_per_sample: missing"):
        job_curve(measured_job("samples_per_s", (1.0, 2.0)), cluster(), A100.kind)
    with pytest.raises(UsageError, match=r"job\.m\.global_batch: missing"):
        job_curve(measured_job("step_s", (1.0, 2.0), flop_per_sample=1.0), cluster(), A100.kind)
    with pytest.raises(UsageError, match=r"job\.m\.state_gb: missing"):
        state_bytes(measured_job("step_s", (1.0, 2.0)))


def test_a_model_beside_measurements_gives_flop_and_state() -> None:
    job = measured_job("step_s", (2.0, 1.0), model=GPT_7B)
    assert step_flop(job) == GPT_7B.step_flop
    assert state_bytes(job) == pytest.approx(14 * GPT_7B.parameters)
    assert job_curve(job, cluster(), A100.kind).step_s(1) == pytest.approx(2.0)


def test_csv_and_metrics_are_read() -> None:
    assert parse_csv("gpus, samples_per_s\n16,3.5\n\n8,2\n", "x").values == (2.0, 3.5)
    lines = [
        '{"step":0,"time":0.0,"workers":4,"loss":1.0}',
        '{"step":1,"time":2.0,"workers":4,"loss":1.0}',
        '{"step":2,"time":4.2,"workers":4,"loss":1.0}',
        '{"step":3,"time":99.0,"workers":3,"loss":1.0}',
        '{"step":4,"time":102.0,"workers":3,"loss":1.0}',
    ]
    table = parse_metrics("\n".join(lines), "x")
    assert table.gpus == (3, 4)
    assert table.values == pytest.approx((3.0, 2.1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the columns none, expected gpus and one of"),
        ("gpus,speed\n1,2\n", "found the columns 'gpus, speed', expected gpus and one of"),
        ("gpus,step_s\n", "no measurement, expected at least one"),
        (
            "gpus,step_s\n8,-1\n",
            r"line 2: '8,-1', expected a new gpus from 1 to 1e\+09 and step_s from 1e-09 to 1e\+30",
        ),
        ("gpus,step_s\n8,1\n8,2\n", r"line 3: '8,2', expected a new gpus"),
        ("gpus,step_s\n8,inf\n", "line 2"),
        ("gpus,step_s\neight\n", "line 2"),
    ],
)
def test_bad_tables_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"table: {message}"):
        parse_csv(text, "table")


def test_an_unknown_gpu_kind_lists_the_known_and_suggests_one() -> None:
    job = Job(name="a", gpus=GpuRange(min=8, max=8), model=GPT_7B)
    scenario = Scenario(cluster=msgspec.structs.replace(cluster(), gpu="A100-80Gb"), job=(job,))
    with pytest.raises(UsageError, match=r"unknown GPU kind 'A100-80Gb' \(did you mean A100-80GB\?\)"):
        gpu_kind(scenario)
    own = msgspec.structs.replace(scenario, gpu={"A100-80Gb": A100.kind})
    assert gpu_kind(own) == A100.kind
