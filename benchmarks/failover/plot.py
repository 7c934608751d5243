"""The plot of failover.json: step ratios, the stall of one SIGKILL, recovery times, and the other ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, GREY, RED = "#2563a8", "#9aa3ad", "#c0392b"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw what was measured into a PNG."""
    panels = [
        (name, panel)
        for name, panel in (("overhead", steps), ("peers", stalls), ("recovery", times), ("memory", others))
        if name in results
    ]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 2.7 * len(panels)), squeeze=False)
    for (_, panel), axis in zip(panels, axes[:, 0], strict=True):
        panel(axis, results)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.3, linewidth=0.6)
        axis.set_axisbelow(True)
    figure.tight_layout(h_pad=2.0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def steps(axis: Axes, results: dict[str, Any]) -> None:
    """Every pair's ratio, the median with its interval, and the bound."""
    figures = results["overhead"]["figures"]
    for row, figure in enumerate(figures):
        ticks(axis, figure, row, GREY)
        median(axis, figure, row)
    axis.axvline(1.0, color="black", linewidth=0.8)
    rows(axis, [figure["name"].split(", ")[-1] for figure in figures])
    axis.set_xlabel("step time, perdure / DDP: pairs, median, interval")
    axis.set_title("Fault-free step", loc="left")


def stalls(axis: Axes, results: dict[str, Any]) -> None:
    """The stall of the same SIGKILL under each system, on a logarithmic scale."""
    figures = [figure for figure in results["peers"]["figures"] if figure["unit"] == "s"]
    for row, figure in enumerate(figures):
        ours = figure["name"].endswith("perdure")
        value = max(figure["value"], 0.01)
        axis.barh(row, value, color=BLUE if ours else GREY, height=0.6)
        ticks(axis, figure, row, "black", least=0.01)
        axis.annotate(f" {figure['value']:.2f} s", (max(value, *figure["samples"]), row), va="center")
    axis.set_xscale("log")
    axis.set_xlim(0.01, 200)
    rows(axis, [figure["name"].removeprefix("stall, ") for figure in figures])
    axis.set_xlabel("stall of a SIGKILL in mid-step, seconds")
    axis.set_title("What one lost worker costs", loc="left")


def times(axis: Axes, results: dict[str, Any]) -> None:
    """Every kill's times, with their bounds."""
    figures = [figure for figure in results["recovery"]["figures"] if figure["unit"] == "s"]
    for row, figure in enumerate(figures):
        ticks(axis, figure, row, GREY, least=1e-3)
        median(axis, figure, row, least=1e-3)
    axis.set_xscale("log")
    rows(axis, [figure["name"].replace("SIGKILL → ", "→ ").replace("killed → ", "→ ") for figure in figures])
    axis.set_xlabel("seconds; red: the bound")
    axis.set_title("From a SIGKILL at a random moment", loc="left")


def others(axis: Axes, results: dict[str, Any]) -> None:
    """Healing bandwidth and memory as ratios."""
    figures = [f for name in ("memory", "healing") for f in results.get(name, {"figures": []})["figures"]]
    for row, figure in enumerate(figures):
        axis.barh(row, figure["value"], color=BLUE, height=0.5)
        if figure["bound"] is not None:
            axis.plot([figure["bound"]] * 2, [row - 0.38, row + 0.38], color=RED, linewidth=2)
        axis.annotate(f" {figure['value']:.2f}", (figure["value"], row), va="center")
    axis.axvline(1.0, color="black", linewidth=0.8)
    rows(axis, [figure["name"] for figure in figures])
    axis.set_xlabel("ratio; red: the bound (memory: at most; bandwidth: at least)")
    axis.set_title("Memory, and healing against a bare transfer", loc="left")


def ticks(axis: Axes, figure: dict[str, Any], row: int, color: str, least: float = -1e9) -> None:
    """Every sample as a tick."""
    samples = [max(sample, least) for sample in figure["samples"]]
    axis.plot(samples, [row] * len(samples), "|", color=color, markersize=10)


def median(axis: Axes, figure: dict[str, Any], row: int, least: float = -1e9) -> None:
    """The median, its interval, and the bound."""
    low, high = figure["interval"] or (figure["value"], figure["value"])
    value = max(figure["value"], least)
    axis.plot([max(low, least), max(high, least)], [row, row], color=BLUE, linewidth=3, alpha=0.6)
    axis.plot(value, row, "o", color=BLUE)
    if figure["bound"] is not None:
        axis.plot([figure["bound"]] * 2, [row - 0.38, row + 0.38], color=RED, linewidth=2)
    axis.annotate(
        f"{figure['value']:.3g}", (value, row), textcoords="offset points", xytext=(0, 8), ha="center"
    )


def rows(axis: Axes, names: list[str]) -> None:
    """Name the rows, the first at the top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
