"""The report as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perdure.report.chart import duration
from perdure.report.model import Fault, Report


def render(report: Report) -> RenderableType:
    """A summary and one line a fault, for `rich.console.Console.print`."""
    parts: list[RenderableType] = [_summary(report)]
    parts.append(_faults(report.faults) if report.faults else Text("No faults."))
    parts += [Text(line, style="dim") for line in _messages(report.faults)]
    for note in report.notes:
        if note.label not in ("started", "ended"):
            parts.append(Text(f"{note.label}: {note.detail}", style="yellow"))
    if report.unread:
        parts.append(Text(f"{report.unread} lines of the logs could not be read", style="yellow"))
    return Group(*parts)


def outcome(report: Report) -> str:
    """How the run ended, in a word or two."""
    if report.exit_code is None:
        return "not ended"
    return "done" if report.exit_code == 0 else f"ended with exit code {report.exit_code}"


def _summary(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    step = "–" if report.step_s_median is None else duration(report.step_s_median)
    meaning = "of the workers' lifetime, from process start to end, went into committed steps"
    goodput = "–" if report.goodput is None else f"{report.goodput:.1%} {meaning}"
    recomputed = sum(fault.recomputed_micro_batches for fault in report.faults)
    table.add_row("run", outcome(report))
    table.add_row("committed steps", str(report.committed_steps))
    table.add_row("final digest", report.final_digest or "–")
    table.add_row("step (median)", step)
    table.add_row("goodput", goodput)
    again = f"{recomputed} micro-batch{'es' * (recomputed != 1)} computed again"
    table.add_row("faults", f"{len(report.faults)}, {again}")
    if report.steps_again:
        table.add_row("total losses", f"{report.steps_again} committed steps came again")
    if report.launchers_lost:
        table.add_row("launchers lost", f"{report.launchers_lost}; what that cost is in no fault")
    table.add_row("checkpoints", str(report.checkpoints))
    return table


def _faults(faults: tuple[Fault, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "kind", "worker", "known by", "after", "action", "stall", "again", "state from"):
        right = name in ("", "worker", "after", "stall", "again")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for number, fault in enumerate(faults, 1):
        table.add_row(
            str(number),
            fault.kind,
            where(fault),
            fault.detected_by,
            "–" if fault.detect_s is None else duration(fault.detect_s),
            " ".join(part for part in (fault.severity, fault.action) if part),
            "–" if fault.stall_s is None else duration(max(fault.stall_s, 0.0)),  # a quick step hid it
            str(fault.recomputed_micro_batches),
            fault.state_source,
        )
    return table


def _messages(faults: tuple[Fault, ...]) -> list[str]:
    """Each different message once, after the numbers of its faults."""
    numbers: dict[str, list[int]] = {}
    for number, fault in enumerate(faults, 1):
        if fault.message:
            numbers.setdefault(fault.message.splitlines()[0], []).append(number)
    return [f"{_ranges(found)}: {message}" for message, found in numbers.items()]


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 5 as `1–3, 5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in found)


def where(fault: Fault) -> str:
    """The worker, or the node when the whole node was lost."""
    return fault.node if fault.worker is None else str(fault.worker)
