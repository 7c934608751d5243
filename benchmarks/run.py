"""Measures the failover core against DDP, torchrun's restarts and torchft; prints every command and setting.

    python benchmarks/run.py [overhead recovery healing memory peers] [--scale 1.0] [--out benchmarks/results]

Writes failover.json, failover.md (a table) and failover.png to --out. What is not measured in this run keeps
the figures that failover.json has. Needs a machine that does nothing else: its load is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "failover"))

import healing  # noqa: E402
import memory  # noqa: E402
import overhead  # noqa: E402
import peers  # noqa: E402
import plot  # noqa: E402
import recovery  # noqa: E402
import settings  # noqa: E402
from figures import Figure, table  # noqa: E402

import jobs  # noqa: E402

MEASURES: dict[str, Callable[[float], list[Figure]]] = {
    "overhead": overhead.measure,
    "recovery": recovery.measure,
    "healing": healing.measure,
    "memory": memory.measure,
    "peers": peers.measure,
}


def main() -> None:
    """Measure what is asked for and write the results."""
    parser = argparse.ArgumentParser(description="measure perdure's failover core against its peers")
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {' '.join(MEASURES)}; all")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if unknown := set(args.measures) - set(MEASURES):
        parser.error(f"unknown: {' '.join(sorted(unknown))}; known are {' '.join(MEASURES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "failover.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.measures or MEASURES:
        print(f"== {name}", flush=True)
        results[name] = measure(name, args.scale)
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(table(results[name]["figures"]), flush=True)
    (args.out / "failover.md").write_text(page(results))
    plot.draw(results, args.out / "failover.png")


def measure(name: str, scale: float) -> dict[str, Any]:
    """One measure's figures, with what they depend on."""
    jobs.commands.clear()
    before, started = os.getloadavg(), time.time()
    figures = MEASURES[name](scale)
    return {
        "figures": [{**dataclasses.asdict(figure), "kept": figure.kept} for figure in figures],
        "commands": sorted(set(jobs.commands)),
        "scale": scale,
        "machine": machine(),
        "load_before": before,
        "load_after": os.getloadavg(),
        "wall_s": round(time.time() - started, 1),
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime(started)),
    }


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    info = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line), "?")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def page(results: dict[str, Any]) -> str:
    """The table, and how it came about."""
    some = next(iter(results.values()))
    known = some["machine"]
    lines = [
        "# perdure against its peers",
        "",
        "Written by `make bench` (`benchmarks/run.py`).",
        "",
        f"{known['processor']}, {known['cores']} cores, Linux {known['kernel']}, Python {known['python']},"
        f" torch {known['torch']}; {settings.WORKERS} workers, one thread each, gloo for the peers.",
        "A figure's interval is a 95 % bootstrap interval of the median.",
        "",
        table([figure for result in results.values() for figure in result["figures"]]),
    ]
    for name, result in results.items():
        loads = f"{result['load_before'][0]:.1f} → {result['load_after'][0]:.1f}"
        lines += ["", f"## {name}", "", f"{result['at']}, {result['wall_s']:.0f} s, load {loads}."]
        lines += ["", "```", *result["commands"], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
