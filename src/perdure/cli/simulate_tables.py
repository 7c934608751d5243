"""What `perdure simulate` prints: tables that stand on 80 columns, figures never cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from perdure.cli.figures import narrow_table
from perdure.core.policies.base import CAUSES
from perdure.core.units import scaled
from perdure.sim.advice import Option, best
from perdure.sim.experiment import Comparison, Mean, Sweep
from perdure.sim.fit import Fit
from perdure.sim.page import never_ran, ranked, traces_in_words
from perdure.sim.sensitivity import lost_gpu_hours


def show(
    console: Console,
    comparison: Comparison,
    swept: Sequence[Sweep],
    options: Sequence[Option],
    fit: Fit | None,
) -> None:
    """Print everything as tables."""
    if fit is not None:
        low, high = fit.mtbf_range_hours
        found_in = f"{fit.faults} fault{'' if fit.faults == 1 else 's'} in {fit.node_hours:.3g} node-hours"
        mean = f"one in {fit.mtbf_hours_per_node:.3g} (95 %: {low:.3g} to {high:.3g})"
        console.print(f"fitted: {found_in}, {mean}", highlight=False)
    console.print(_policy_table(comparison))
    console.print(_cause_table(comparison))
    for note in never_ran(comparison):
        console.print(note, highlight=False)
    for found in swept:
        console.print(_sweep_table(found))
    if options:
        console.print(_advice_table(options))
        chosen = best(options)
        console.print(
            f"best: {chosen.change} ({chosen.net_money:+,.0f} over the simulated time)", highlight=False
        )


def _plus_minus(value: Mean, form: str, factor: float = 1.0) -> str:
    shown = format(value.mean * factor, form)
    return f"{shown} ± {format(value.ci95 * factor, '.2g')}" if value.ci95 else shown


def _amount(value: float) -> str:
    """Three digits of what is small, all before the point of what is not."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _policy_table(comparison: Comparison) -> Table:
    """What each policy got done, the best first."""
    cluster = comparison.scenario.cluster
    gpus = (cluster.nodes + cluster.spares) * cluster.gpus_per_node
    names = ranked(comparison)
    factor, unit = scaled(comparison.waf(names[0]).mean, "FLOP")
    table = narrow_table(
        f"{gpus:,} GPUs, {comparison.scenario.simulate.days:g} days, {traces_in_words(comparison)}",
        "policy",
        (f"WAF, {unit}", "of best", "goodput %", "lost GPU-h", "their price"),
    )
    for name in names:
        lost = lost_gpu_hours(comparison, name)
        ratio = comparison.ratio(name, names[0])
        table.add_row(
            name,
            _plus_minus(comparison.waf(name), ".4g", 1 / factor),
            "–" if ratio is None else f"{ratio:.3f}",
            _plus_minus(comparison.goodput(name), ".2f", 100.0),
            _amount(lost),
            _amount(lost * cluster.price_per_gpu_hour),
        )
    return table


def _cause_table(comparison: Comparison) -> Table:
    """Where the GPU-time went, in %, without causes that took less than a ten-thousandth everywhere."""
    cluster = comparison.scenario.cluster
    gpus = (cluster.nodes + cluster.spares) * cluster.gpus_per_node
    total = comparison.scenario.simulate.days * 86_400 * gpus
    names = ranked(comparison)
    table = narrow_table("GPU-time by cause, %", "cause", names)
    for cause in CAUSES:
        shares = [100 * comparison.gpu_seconds(name, cause).mean / total for name in names]
        if any(share >= 0.005 for share in shares):
            table.add_row(cause.replace("_", " "), *(f"{round(share, 2) + 0.0:.2f}" for share in shares))
    return table


def _sweep_table(found: Sweep) -> Table:
    names = list(found.points[0][1].runs) if found.points else []
    table = narrow_table(f"goodput % by {found.key}", "value", names)
    for value, comparison in found.points:
        table.add_row(str(value), *(f"{100 * comparison.goodput(name).mean:.2f}" for name in names))
    return table


def _advice_table(options: Sequence[Option]) -> Table:
    table = narrow_table(
        "what to buy or change", "change", ("WAF", "GPU-h gained", "bought", "goodput %", "net")
    )
    for option in options:
        table.add_row(
            option.change,
            "–" if option.waf_gain is None else f"{100 * option.waf_gain:+.2f} %",
            f"{option.gained_gpu_hours:+,.0f}",
            f"{option.bought_gpu_hours:+,.0f}",
            f"{100 * option.goodput:.2f}",
            f"{option.net_money:+,.0f}",
        )
    return table
