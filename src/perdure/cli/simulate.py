"""`perdure simulate`: what a cluster loses under each recovery policy, and what to buy or change."""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from perdure.core.policies import POLICIES
from perdure.core.policies.base import CAUSES
from perdure.schema.cluster import Scenario, load_scenario
from perdure.schema.errors import UsageError
from perdure.sim.advice import Option, advise, best, variants
from perdure.sim.experiment import Comparison, Mean, Sweep, Tick, compare_case, sweep
from perdure.sim.fit import Fit, fit_events
from perdure.sim.page import Contents, render
from perdure.sim.scenario import Case, prepare
from perdure.sim.sensitivity import RATES, SIZES, by_rate, by_size, lost_gpu_hours

SHORT = {
    "healthy_overhead": "over-head",
    "checkpoint": "check-point",
    "detection": "detect",
    "transition": "transit",
    "recomputed": "redone",
    "degraded": "degr.",
}
"""Causes that have to be short to stand side by side on 80 columns."""
SENSITIVITY_SEEDS = 3
ADVICE_SEEDS = 5
"""At most so many traces for the page's sensitivities and for advice."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "scenario", metavar="SCENARIO.toml", type=Path, help="the cluster, its jobs and how it fails"
    )
    parser.add_argument(
        "--policies", default="all", metavar="all|A,B", help=f"which of {', '.join(POLICIES)} (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how many traces (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures to FILE")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the first trace's event log to FILE")
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B,C",
        action="append",
        default=[],
        help="run at each value of a key such as cluster.repair_hours or policy.megatron.save_every_s; "
        "may be given several times",
    )
    parser.add_argument(
        "--fit", type=Path, metavar="EVENTS.jsonl", help="take failure rates and recovery times from a run"
    )
    parser.add_argument(
        "--advise",
        action="store_true",
        help="compare spares, checkpoint intervals and policies with the first policy as it is",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, print a table, write what was asked for."""
    started = time.perf_counter()
    names = _policies(args.policies)
    if args.seeds < 1:
        raise UsageError(f"--seeds: {args.seeds}, expected 1 or more")
    sweeps = [_sweep_of(text) for text in args.sweep]
    fit = fit_events(args.fit) if args.fit else None
    overrides = fit.overrides() if fit else {}
    scenario = load_scenario(args.scenario, overrides)
    case = prepare(scenario, names)
    with _Meter(_runs(args, scenario, names, sweeps)) as meter:
        comparison = compare_case(case, args.seeds, meter.tick)
        swept = [
            sweep(args.scenario, overrides, key, values, names, args.seeds, meter.tick)
            for key, values in sweeps
        ]
        few = min(args.seeds, SENSITIVITY_SEEDS)
        curves = (
            (by_rate(scenario, names, few, meter.tick), by_size(scenario, names, few, meter.tick))
            if args.html
            else ()
        )
        seeds = min(args.seeds, ADVICE_SEEDS)
        options = advise(scenario, names[0], names, seeds, meter.tick) if args.advise else []
    if args.json:
        figures = _figures(args.scenario, comparison, swept, options, fit)
        _write(
            args.json, "--json", json.dumps({**figures, "elapsed_s": time.perf_counter() - started}, indent=2)
        )
    if args.html:
        contents = Contents(args.scenario.stem, comparison, curves, tuple(swept), tuple(options))
        _write(args.html, "--html", render(contents))
    if args.log:
        _write(args.log, "--log", _log(case, names))
    _show(Console(), comparison, swept, options, fit)
    return 0


def _policies(text: str) -> tuple[str, ...]:
    """The policies of `--policies`, in the order given."""
    if text == "all":
        return tuple(POLICIES)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in POLICIES:
            raise UsageError(
                f"--policies: unknown policy {name!r}, expected all or some of {', '.join(POLICIES)}"
            )
    if not names:
        raise UsageError(f"--policies: none given, expected all or some of {', '.join(POLICIES)}")
    return names


def _sweep_of(text: str) -> tuple[str, list[Any]]:
    """`key=a,b,c` as the key and its values, which are written as in TOML."""
    key, equals, values = text.partition("=")
    key = key.strip()
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        found = [value.strip() for value in values.split(",")]
    if not equals or not key or not found:
        raise UsageError(f"--sweep: {text!r}, expected KEY=A,B,C such as cluster.repair_hours=1,6,24")
    return key, found


def _runs(
    args: argparse.Namespace,
    scenario: Scenario,
    names: Sequence[str],
    sweeps: Sequence[tuple[str, list[Any]]],
) -> int:
    """How many runs there will be, for the progress bar."""
    seeds: int = args.seeds
    total = seeds * len(names) * (1 + sum(len(values) for _, values in sweeps))
    if args.html and scenario.cluster.trace is None:
        total += min(seeds, SENSITIVITY_SEEDS) * len(names) * (len(RATES) + len(SIZES))
    if args.advise:
        total += min(seeds, ADVICE_SEEDS) * sum(1 for _ in variants(scenario, names[0], names))
    return total


class _Meter:
    """A progress bar on stderr, where that is a terminal."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("simulating", total=total)

    def __enter__(self) -> _Meter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def tick(self) -> Tick:
        """To be called after each run."""

        def advance(what: str) -> None:
            self._progress.update(self._task, advance=1, description=what)

        return advance


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text + ("" if text.endswith("\n") else "\n"), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot be written ({error.strerror}), expected a writable file"
        ) from error


def _log(case: Case, names: Sequence[str]) -> str:
    """The event log of each policy's run over the first trace, as JSON lines."""
    trace = case.trace(case.scenario.simulate.seed)
    lines = [
        json.dumps({"policy": name, **line})
        for name in names
        for line in case.run(name, trace, keep_log=True).log
    ]
    return "\n".join(lines)


def _figures(
    path: Path, comparison: Comparison, swept: Sequence[Sweep], options: Sequence[Option], fit: Fit | None
) -> dict[str, Any]:
    """What `--json` writes; `policies` and `ratios` keep their shape from version to version."""
    cluster = comparison.scenario.cluster
    figures: dict[str, Any] = {
        "scenario": path.stem,
        "days": comparison.scenario.simulate.days,
        "seeds": list(comparison.seeds),
        "gpus": (cluster.nodes + cluster.spares) * cluster.gpus_per_node,
        **comparison.as_json(),
    }
    if swept:
        figures["sweeps"] = [found.as_json() for found in swept]
    if options:
        figures["advice"] = [option.as_json() for option in options]
    if fit is not None:
        figures["fit"] = fit.as_json()
    return figures


def _show(
    console: Console,
    comparison: Comparison,
    swept: Sequence[Sweep],
    options: Sequence[Option],
    fit: Fit | None,
) -> None:
    """Print everything as tables."""
    if fit is not None:
        low, high = fit.mtbf_range_hours
        found_in = f"{fit.faults} faults in {fit.node_hours:.3g} node-hours"
        mean = f"one in {fit.mtbf_hours_per_node:.3g} (95 %: {low:.3g} to {high:.3g})"
        console.print(f"fitted: {found_in}, {mean}")
    console.print(_policy_table(comparison))
    console.print(_cause_table(comparison))
    for name, runs in comparison.runs.items():
        for job in runs[0].jobs:
            if all(run.jobs[job].note for run in runs):
                console.print(f"{name}: {job} never ran: {runs[0].jobs[job].note}")
    for found in swept:
        console.print(_sweep_table(found))
    if options:
        console.print(_advice_table(options))
        chosen = best(options)
        console.print(f"best: {chosen.change} ({chosen.net_money:+,.0f} over the simulated time)")


def _plus_minus(value: Mean, form: str, factor: float = 1.0) -> str:
    shown = format(value.mean * factor, form)
    return f"{shown} ± {format(value.ci95 * factor, '.2g')}" if value.ci95 else shown


def _policy_table(comparison: Comparison) -> Table:
    """What each policy got done, the best first."""
    cluster = comparison.scenario.cluster
    gpus = (cluster.nodes + cluster.spares) * cluster.gpus_per_node
    seeds = len(comparison.seeds)
    traces = f"{seeds} trace{'s' if seeds > 1 else ''}"
    table = Table(title=f"{gpus:,} GPUs, {comparison.scenario.simulate.days:g} days, {traces}")
    table.add_column("policy")
    for name in ("accumulated WAF", "of best", "goodput %", "lost GPU-h", "their price"):
        table.add_column(name, justify="right")
    ranked = _ranked(comparison)
    for name in ranked:
        lost = lost_gpu_hours(comparison, name)
        ratio = comparison.ratio(name, ranked[0])
        table.add_row(
            name,
            _plus_minus(comparison.waf(name), ".4g"),
            "–" if ratio is None else f"{ratio:.3f}",
            _plus_minus(comparison.goodput(name), ".2f", 100.0),
            f"{lost:,.0f}",
            f"{lost * cluster.price_per_gpu_hour:,.0f}",
        )
    return table


def _cause_table(comparison: Comparison) -> Table:
    """Where the GPU-time went, in %, without causes that took less than a ten-thousandth everywhere."""
    cluster = comparison.scenario.cluster
    gpus = (cluster.nodes + cluster.spares) * cluster.gpus_per_node
    total = comparison.scenario.simulate.days * 86_400 * gpus
    shares = {
        name: {cause: 100 * comparison.gpu_seconds(name, cause).mean / total for cause in CAUSES}
        for name in _ranked(comparison)
    }
    shown = [cause for cause in CAUSES if any(found[cause] >= 0.005 for found in shares.values())]
    table = Table(title="GPU-time by cause, %")
    table.add_column("policy")
    for cause in shown:
        table.add_column(SHORT.get(cause, cause), justify="right")
    for name, found in shares.items():
        table.add_row(name, *(f"{found[cause]:.2f}" for cause in shown))
    return table


def _ranked(comparison: Comparison) -> list[str]:
    """The policies, the one that got most done first."""
    return sorted(comparison.runs, key=lambda name: -comparison.waf(name).mean)


def _sweep_table(found: Sweep) -> Table:
    table = Table(title=f"goodput % by {found.key}")
    table.add_column("value")
    names = list(found.points[0][1].runs) if found.points else []
    for name in names:
        table.add_column(name, justify="right")
    for value, comparison in found.points:
        table.add_row(str(value), *(f"{100 * comparison.goodput(name).mean:.2f}" for name in names))
    return table


def _advice_table(options: Sequence[Option]) -> Table:
    table = Table(title="what to buy or change")
    table.add_column("change")
    for name in ("useful GPU-h", "gained", "bought", "goodput %", "net"):
        table.add_column(name, justify="right")
    for option in options:
        table.add_row(
            option.change,
            f"{option.useful_gpu_hours:,.0f}",
            f"{option.gained_gpu_hours:+,.0f}",
            f"{option.bought_gpu_hours:+,.0f}",
            f"{100 * option.goodput:.2f}",
            f"{option.net_money:+,.0f}",
        )
    return table
