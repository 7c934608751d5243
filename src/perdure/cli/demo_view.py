"""What a person sees of the demo: a line for everything that happens, and on a terminal the workers, live."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.cli.demo_kills import Struck
from perdure.schema.ids import WorkerId
from perdure.schema.messages import PsRow
from perdure.schema.progress import Phase, Snapshot

PLAIN_EVERY_S = 2.0
"""Without a live view, progress is a line at most this often."""

STYLES = {"active": "green", "joining": "yellow", "starting": "yellow", "standby": "cyan", "dead": "red"}


class View:
    """One part of the demo, on `console`."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._started = time.monotonic()
        self._rows: Sequence[PsRow] = ()
        self._step: Mapping[str, Any] = {"step": -1}
        self._said_at = 0.0
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._console.print(self._title, style="bold")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def line(self, text: str, style: str = "") -> None:
        """One line, with the time since the part began."""
        clock = f"{time.monotonic() - self._started:6.1f} s  "
        self._console.print(Text(clock, "dim") + Text(text, style), soft_wrap=not self._console.is_terminal)

    def workers(self, rows: Sequence[PsRow]) -> None:
        """What the workers are doing now."""
        self._rows = rows

    def committed(self, line: Mapping[str, Any]) -> None:
        """A step's line of metrics.jsonl."""
        self._step = line
        now, last = time.monotonic(), line["step"] == self._steps - 1
        if not self._console.is_terminal and (last or now - self._said_at >= PLAIN_EVERY_S):
            self._said_at = now
            self.line(self._progress())

    def _progress(self) -> str:
        step = self._step
        if step["step"] < 0:
            return "starting: the first worker has to import torch"
        return (
            f"step {step['step'] + 1} of {self._steps}   loss {step['loss']:.3f}   workers {step['workers']}"
        )

    def _render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for column in ("worker", "process", "state", "step", "doing"):
            table.add_column(column, justify="right" if column in ("worker", "process", "step") else "left")
        for row in self._rows:
            doing = row.phase if row.micro_batch < 0 else f"{row.phase} micro-batch {row.micro_batch}"
            state = Text(row.state, STYLES.get(row.state, ""))
            step = str(row.step) if row.step >= 0 else ""
            table.add_row(str(row.id), str(row.pid or ""), state, step, doing)
        done = self._step["step"] + 1
        progress = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._steps, completed=done, width=40)
        progress.add_row("", bar, Text(self._progress(), "bold"))
        return Group("", table, "", progress)


def doing(snapshot: Snapshot) -> str:
    """A progress page in words."""
    number = snapshot.micro_batch
    return {
        Phase.SCRIPT: "while its script started",
        Phase.DATA: f"while it loaded micro-batch {number}",
        Phase.COMPUTE: f"while it computed micro-batch {number}",
        Phase.REDUCE: "while it summed gradients with the others",
        Phase.COMMIT: "in the middle of its optimizer step",
        Phase.HEAL: "while it took its state",
        Phase.WAIT: "while it waited",
    }[snapshot.phase]


class Narrator:
    """Tells what events.jsonl says about the kills, in words and milliseconds after the kill."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._struck: Struck | None = None
        self._answer = ""
        self._newcomers: dict[WorkerId, float] = {}

    def struck(self, struck: Struck, number: int) -> None:
        """The demo has just killed a worker."""
        self._struck, self._answer = struck, ""
        step, newcomer = struck.doing.step, struck.newcomer
        text = f"✗ kill {number}: SIGKILL to worker {struck.worker} {doing(struck.doing)}, in step {step}"
        if newcomer is not None and newcomer[1] is Phase.HEAL:
            text += f", and while worker {newcomer[0]} still took its state"
        self._view.line(text, "bold red")

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""
        if self._struck is None:
            return
        worker, late = event["worker"], self._late(event["wall_s"])
        match event["event"]:
            case "worker_ending" if worker == self._struck.worker:
                self._view.line(f"  known after {late}")
            case "fault_detected" if worker == self._struck.worker:
                self._view.line(f"  its process is gone after {late}")
            case "generation_opened" if self._struck.worker in event["lost"]:
                self._answer = event["generation"]
                self._opened(event, late)
            case "generation_computing" if event["generation"] == self._answer:
                self._answer = ""
                self._view.line(f"  all survivors in the new generation after {late}", "green")
            case "worker_started" if self._struck.worker < worker:
                self._newcomers[worker] = self._struck.time
                self._view.line(f"  worker {worker} started in its place after {late}")
            case "healed" if event["bytes"]:
                size, seconds = event["bytes"] / 1e6, event["seconds"]
                self._view.line(
                    f"  worker {worker} has the state: {size:.0f} MB in {seconds * 1000:.0f} ms, "
                    "while the others computed",
                    "green",
                )
            case "first_micro_batch" if worker in self._newcomers:
                since = event["wall_s"] - self._newcomers.pop(worker)
                self._view.line(
                    f"  worker {worker} computes with the others, {since:.1f} s after the kill", "green"
                )

    def _opened(self, event: Mapping[str, Any], late: str) -> None:
        members = ", ".join(str(w) for w in event["members"])
        dealt = event["dealt"]
        what = f"{dealt} micro-batch{'es' * (dealt != 1)} to be computed again"
        if event["gather"]:
            what = "they hold the whole gradient already"
        self._view.line(f"  generation {event['generation']} after {late}: workers {members}; {what}")

    def _late(self, wall_s: float) -> str:
        assert self._struck is not None
        return f"{max(0.0, wall_s - self._struck.time) * 1000:.0f} ms"
