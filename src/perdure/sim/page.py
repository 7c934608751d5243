"""The page of `perdure simulate --html`: one file, no script, pictures as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup

from perdure.core.policies.base import CAUSES
from perdure.core.units import scaled
from perdure.sim.advice import Option
from perdure.sim.charts import Bar, Line, line_chart, stacked_bars
from perdure.sim.experiment import Comparison, Sweep
from perdure.sim.sensitivity import Curve, lost_gpu_hours

CAUSE_WORDS = {
    "useful": "steps done once, at the best speed known",
    "healthy_overhead": "what the policy costs while nothing is broken",
    "checkpoint": "stalls for checkpoints",
    "detection": "until a fault is known",
    "transition": "restart, reconfiguration, state on its way",
    "recomputed": "steps done again",
    "degraded": "slower than the GPUs at hand could be",
    "idle": "working nodes without work",
    "down": "nodes away or in repair",
}


@dataclass(frozen=True)
class Contents:
    """Everything that the page may show."""

    title: str
    comparison: Comparison
    sensitivities: tuple[Curve, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    advice: tuple[Option, ...] = ()


def render(contents: Contents) -> str:
    """The whole page."""
    comparison = contents.comparison
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        files("perdure.sim").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    cluster = comparison.scenario.cluster
    names = ranked(comparison)
    return template.render(
        title=contents.title,
        cluster=cluster,
        gpus=(cluster.nodes + cluster.spares) * cluster.gpus_per_node,
        days=comparison.scenario.simulate.days,
        jobs=comparison.scenario.job,
        seeds=len(comparison.seeds),
        traces=traces_in_words(comparison),
        notes=never_ran(comparison),
        rows=[_row(comparison, name, names[0]) for name in names],
        causes=CAUSE_WORDS,
        progress=Markup(_progress(comparison, names)),
        bars=Markup(_bars(comparison, names)),
        sensitivities=[_sensitivity(curve) for curve in contents.sensitivities],
        sweeps=[_sweep(found) for found in contents.sweeps],
        advice=contents.advice,
    )


def ranked(comparison: Comparison) -> list[str]:
    """The policies, the one that got most done first."""
    return sorted(comparison.runs, key=lambda name: -comparison.waf(name).mean)


def never_ran(comparison: Comparison) -> list[str]:
    """A line for every job that never ran under a policy, with the reason."""
    return [
        f"{name}: {job} never ran: {runs[0].jobs[job].note}"
        for name, runs in comparison.runs.items()
        for job in runs[0].jobs
        if all(run.jobs[job].note for run in runs)
    ]


def traces_in_words(comparison: Comparison) -> str:
    """How many traces were run, and whether it was a recorded one."""
    count = len(comparison.seeds)
    words = f"{count} trace{'' if count == 1 else 's'}"
    return f"{words}, recorded" if comparison.recorded else words


def _row(comparison: Comparison, name: str, best: str) -> dict[str, object]:
    price = comparison.scenario.cluster.price_per_gpu_hour
    lost = lost_gpu_hours(comparison, name)
    return {
        "name": name,
        "waf": comparison.waf(name),
        "of_best": comparison.ratio(name, best),
        "goodput": comparison.goodput(name),
        "lost_hours": lost,
        "lost_money": lost * price,
    }


def _progress(comparison: Comparison, names: Sequence[str]) -> str:
    lines = [
        Line(name, name, tuple((time / 86_400, waf) for time, waf in comparison.series(name)))
        for name in names
    ]
    most = max(line.points[-1][1] for line in lines)
    if most <= 0:
        return ""
    scale, unit = scaled(most, "FLOP")
    return line_chart(lines, "days", f"accumulated WAF, {unit}", y_scale=scale)


def _bars(comparison: Comparison, names: Sequence[str]) -> str:
    bars = []
    for name in names:
        hours = {cause: comparison.gpu_seconds(name, cause).mean / 3600 for cause in CAUSES}
        total = sum(hours.values())
        parts = tuple(
            (f"c-{cause}", f"{name}, {cause}: {value:,.0f} GPU-hours, {value / total:.1%}", value)
            for cause, value in hours.items()
        )
        bars.append(Bar(name, parts, f"{hours['useful'] / total:.1%} useful"))
    return stacked_bars(bars, "GPU-hours")


def _curves(points: Sequence[tuple[float, Comparison]], x_label: str) -> str:
    names = list(points[0][1].runs)
    lines = [
        Line(name, name, tuple((x, 100 * found.goodput(name).mean) for x, found in points)) for name in names
    ]
    positive = all(x > 0 for x, _ in points)
    return line_chart(lines, x_label, "goodput, %", 260.0, logarithmic=positive, y_top=100.0)


def _sensitivity(curve: Curve) -> dict[str, object]:
    label = f"{curve.title.lower()}, as a multiple of the scenario's"
    picture = Markup(_curves(curve.points, label)) if len(curve.points) > 1 else ""
    note = curve.note or ("" if len(curve.points) > 1 else "No other size fits these jobs.")
    seeds = len(curve.points[0][1].seeds) if curve.points else 0
    return {"title": curve.title, "picture": picture, "note": note, "seeds": seeds}


def _sweep(found: Sweep) -> dict[str, object]:
    numeric = [
        (float(value), comparison)
        for value, comparison in found.points
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    picture = ""
    if len(numeric) == len(found.points) and len(numeric) > 1:
        picture = Markup(_curves(sorted(numeric, key=lambda point: point[0]), found.key))
    rows = [
        {"value": value, "cells": [comparison.goodput(name).mean for name in comparison.runs]}
        for value, comparison in found.points
    ]
    names = list(found.points[0][1].runs) if found.points else []
    return {"key": found.key, "picture": picture, "names": names, "rows": rows}
