"""`perdure report RUN_DIR`: faults, recoveries and goodput of a run, live or over."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from perdure.report import build_report, render, render_page
from perdure.schema.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `perdure report`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run")
    parser.add_argument("--json", action="store_true", help="print the content of report.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints the report; with `--html` writes the page as well.

    Raises UsageError when RUN_DIR is not the directory of a run, or when FILE cannot be written.
    """
    run_dir: Path = args.run_dir
    if not run_dir.is_dir():
        raise UsageError(f"report: {run_dir} is not a directory; give the RUN_DIR of a `perdure run`")
    if not any((run_dir / name).exists() for name in ("events.jsonl", "metrics.jsonl")):
        raise UsageError(
            f"report: {run_dir} holds no events.jsonl and no metrics.jsonl; give a run's RUN_DIR"
        )
    report = build_report(run_dir)
    if args.html is not None:
        try:
            args.html.write_text(render_page(report, run_dir.resolve().name), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"report: cannot write --html {args.html}: {error.strerror}") from error
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2).decode())
    else:
        Console().print(render(report))
        if args.html is not None:
            print(f"wrote {args.html}", file=sys.stderr)
    return 0
