"""What `perdure plan` and `perdure simulate` share: tables for 80 columns, absurd figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from perdure.schema.errors import UsageError

_KEY = re.compile(r"(cluster|job|policy|simulate)\.")


@contextmanager
def computing_with(path: str | Path) -> Iterator[None]:
    """Names the scenario's file in a `UsageError` about one of its keys, and makes one of an overflow.

    Every key has its bounds, but products of figures within their bounds can still leave those of floating
    point or of memory.
    """
    try:
        with np.errstate(over="raise"):
            yield
    except UsageError as error:
        if _KEY.match(str(error)):
            raise UsageError(f"{path}: {error}") from error
        raise
    except (ArithmeticError, MemoryError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{path}: its figures together are beyond what can be computed ({found}), expected sizes, speeds "
            "and times of real machines"
        ) from error


def narrow_table(title: str, first: str, others: Sequence[str]) -> Table:
    """An empty table whose first column is text and whose others are numbers, which are folded, never cut."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", overflow="fold")
    return table
