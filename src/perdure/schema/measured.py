"""Measured throughput: a CSV file, or the metrics of one of perdure's own runs, as one small table.

A CSV file has a header line and the columns `gpus` and one of

    flops_per_s         FLOP/s of the whole job
    tflops_per_gpu      TFLOP/s of each GPU
    samples_per_s       samples of the whole job per second
    step_s              seconds per optimizer step

A run (its directory, or its `metrics.jsonl`) gives `step_s` for each number of workers that it had.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from perdure.schema.errors import UsageError
from perdure.schema.text import csv_rows, quoted, read_plain, whole

Unit = Literal["flops_per_s", "tflops_per_gpu", "samples_per_s", "step_s"]

VALUE_MIN, VALUE_MAX = 1e-9, 1e30
"""Measurements beyond these are typing errors, and products and quotients of them would overflow."""
GPUS_MAX = 10**9


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`values[i]` in `unit` was measured on `gpus[i]` GPUs; `gpus` increases strictly."""

    unit: Unit
    gpus: tuple[int, ...]
    values: tuple[float, ...]


def load_measured(path: Path, where: str) -> Measured:
    """Read a CSV file, a run directory or a `metrics.jsonl`. Raises `UsageError` that starts with `where`."""
    if path.is_dir():
        path = path / "metrics.jsonl"
    try:
        text = read_plain(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: {path} cannot be read, expected a CSV file or a run directory") from error
    return parse_metrics(text, where) if path.suffix == ".jsonl" else parse_csv(text, where)


def parse_csv(text: str, where: str) -> Measured:
    """The table of a CSV file's text. Raises `UsageError`."""
    rows = csv_rows(text, where)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    units = [unit for unit in get_args(Unit) if unit in header]
    if "gpus" not in header or len(units) != 1:
        expected = "gpus and one of " + ", ".join(get_args(Unit))
        columns = quoted(", ".join(header)) if header else "none"
        raise UsageError(f"{where}: found the columns {columns}, expected {expected}")
    found: dict[int, float] = {}
    for number, row in rows:
        try:
            gpus = whole(row[header.index("gpus")]) or 0
            value = float(row[header.index(units[0])])
        except (ValueError, IndexError):
            gpus, value = 0, math.nan
        if not 1 <= gpus <= GPUS_MAX or not VALUE_MIN <= value <= VALUE_MAX or gpus in found:
            raise UsageError(
                f"{where}: line {number}: {quoted(','.join(row))}, expected a new gpus from 1 to "
                f"{GPUS_MAX:.0e} and {units[0]} from {VALUE_MIN:g} to {VALUE_MAX:g}"
            )
        found[gpus] = value
    return _table(units[0], found, where)


class _Line(msgspec.Struct):
    step: int
    time: float
    workers: Annotated[int, msgspec.Meta(ge=1, le=GPUS_MAX)]


def parse_metrics(text: str, where: str) -> Measured:
    """Median seconds per step for each number of workers of a run's `metrics.jsonl`. Raises `UsageError`."""
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            lines.append(msgspec.json.decode(line, type=_Line))
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageError(f"{where}: line {number}: {error}, expected step, time and workers") from error
    durations: dict[int, list[float]] = {}
    for before, after in itertools.pairwise(lines):
        # A step that followed another membership holds the change itself and says nothing of the speed.
        if after.step == before.step + 1 and after.workers == before.workers and after.time > before.time:
            durations.setdefault(after.workers, []).append(after.time - before.time)
    medians = {workers: statistics.median(times) for workers, times in durations.items()}
    for workers, median in medians.items():
        if not VALUE_MIN <= median <= VALUE_MAX:
            raise UsageError(f"{where}: {median:g} s a step on {workers} workers, expected times in seconds")
    return _table("step_s", medians, where)


def _table(unit: Unit, found: dict[int, float], where: str) -> Measured:
    if not found:
        raise UsageError(f"{where}: no measurement, expected at least one")
    gpus = sorted(found)
    return Measured(unit=unit, gpus=tuple(gpus), values=tuple(found[count] for count in gpus))
