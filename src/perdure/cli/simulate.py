"""`perdure simulate`: what a cluster loses under each recovery policy, and what to buy or change."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from perdure.cli.figures import computing_with
from perdure.cli.simulate_tables import show
from perdure.core.policies import POLICIES
from perdure.core.scenario_checks import check_policies
from perdure.schema.cluster import load_scenario
from perdure.schema.errors import UsageError
from perdure.schema.text import quoted
from perdure.sim.advice import Option, advise, variants
from perdure.sim.experiment import Comparison, Sweep, Tick, compare_case, is_recorded, sweep
from perdure.sim.fit import Fit, fit_events
from perdure.sim.page import Contents, render
from perdure.sim.scenario import Case, prepare
from perdure.sim.sensitivity import RATES, SIZES, by_rate, by_size

SENSITIVITY_SEEDS = 3
ADVICE_SEEDS = 5
"""At most so many traces for the page's sensitivities and for advice."""
SEEDS_MAX = 10_000


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
    """Simulate, print tables, write what was asked for."""
    names = _policies(args.policies)
    if not 1 <= args.seeds <= SEEDS_MAX:
        raise UsageError(f"--seeds: {args.seeds}, expected 1 to {SEEDS_MAX:,}")
    sweeps = [_sweep_of(text) for text in args.sweep]
    for option, path in (("--json", args.json), ("--html", args.html), ("--log", args.log)):
        _check_writable(path, option)
    with computing_with(args.scenario):
        return _run(args, names, sweeps)


def _run(args: argparse.Namespace, names: tuple[str, ...], sweeps: Sequence[tuple[str, list[Any]]]) -> int:
    fit = fit_events(args.fit) if args.fit else None
    overrides = fit.overrides() if fit else {}
    scenario = load_scenario(args.scenario, overrides)
    case = prepare(scenario, names)
    for key, values in sweeps:  # what is wrong with a value is said before anything runs
        for value in values:
            check_policies(load_scenario(args.scenario, {**overrides, key: value}))
    with _Meter(_runs(args, case, names, sweeps)) as meter:
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
        _write(args.json, "--json", json.dumps(figures, indent=2))
    if args.html:
        contents = Contents(args.scenario.stem, comparison, curves, tuple(swept), tuple(options))
        _write(args.html, "--html", render(contents))
    if args.log:
        _write(args.log, "--log", _log(case, names))
    show(Console(), comparison, swept, options, fit)
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
    except (ValueError, RecursionError) as error:  # thousands of digits or of brackets
        raise UsageError(
            f"--sweep: {quoted(text)}: too long or too deep, expected numbers or words"
        ) from error
    if not equals or not key or not found:
        raise UsageError(f"--sweep: {quoted(text)}, expected KEY=A,B,C such as cluster.repair_hours=1,6,24")
    return key, found


def _runs(
    args: argparse.Namespace,
    case: Case,
    names: Sequence[str],
    sweeps: Sequence[tuple[str, list[Any]]],
) -> int:
    """How many runs there will be, for the progress bar."""
    scenario, seeds = case.scenario, 1 if is_recorded(case) else int(args.seeds)
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


def _check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written before anything runs. Raises `UsageError`."""
    if path is None:
        return
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = f"{path.parent} is no directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise UsageError(f"{option} {path}: cannot be written ({reason}), expected a writable file")


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
