"""Folds a run's events and metrics into `report.json`, a terminal table and an HTML page.

`build_report` reads, `Report.as_json` is the stable content, `render` and `render_page` show it. It reads
files alone and runs beside a live job as well as after a dead one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from perdure.report.fold import fold
from perdure.report.model import Fault, Report
from perdure.report.page import render_page
from perdure.report.records import read_records
from perdure.report.terminal import render

__all__ = ["Fault", "Report", "build_report", "render", "render_page", "write_report"]


def build_report(run_dir: Path) -> Report:
    """The report of a run directory, from its `events.jsonl` and `metrics.jsonl`; a missing file is empty."""
    return fold(read_records(run_dir))


def write_report(run_dir: Path) -> Report:
    """Write `report.json` into `run_dir`, whole or not at all, and return the report."""
    report = build_report(run_dir)
    aside = run_dir / "report.json.partial"
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2) + b"\n")
    aside.replace(run_dir / "report.json")
    return report
