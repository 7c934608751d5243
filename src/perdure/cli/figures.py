"""What `perdure plan` and `perdure simulate` share: tables for 80 columns, units, absurd figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from perdure.schema.errors import UsageError

WIDTH = 80


@contextmanager
def finite_figures(path: str | Path) -> Iterator[None]:
    """Turns what computing with a scenario's figures can overflow into a `UsageError`.

    Every key has its bounds, but products of figures within their bounds can still leave those of floating
    point or of memory.
    """
    try:
        with np.errstate(over="raise"):
            yield
    except (ArithmeticError, MemoryError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{path}: its figures together are beyond what can be computed ({found}), expected sizes, speeds "
            "and times of real machines"
        ) from error


def narrow_table(title: str, first: str, others: Sequence[str]) -> Table:
    """An empty table whose first column is text and whose others are numbers, which are folded, never cut."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def scaled(largest: float, unit: str) -> tuple[float, str]:
    """A power of a thousand at most `largest`, and the unit with its prefix: (1e12, 'TFLOP')."""
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
    power = 0
    while power + 1 < len(prefixes) and largest >= 1000.0 ** (power + 1):
        power += 1
    return 1000.0**power, f"{prefixes[power]}{unit}"
