"""The page that is written, and the summary of what was to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "examples" / "scenarios"
TRACES = ROOT.parent / "shared" / "traces"


@dataclass
class Page:
    """The page as it grows, and the summary of what was to be reached."""

    lines: list[str] = field(default_factory=list)
    bounds: list[tuple[str, str, str, bool | None]] = field(default_factory=list)

    def section(self, title: str, text: str) -> None:
        self.lines += ["", f"## {title}", "", text.strip()]

    def say(self, text: str) -> None:
        self.lines += ["", text.strip()]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        self.lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]

    def bound(self, figure: str, bound: str, ours: str, reached: bool | None) -> None:
        """A figure that was to be reached; None: it could not be tried here."""
        self.bounds.append((figure, bound, ours, reached))
