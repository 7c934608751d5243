"""Text that somebody else wrote, read without trusting it: files, CSV, whole numbers, quotations in messages.

Every reader of traces, measurements and scenarios goes through here, so that each kind of bad input is one
line, whatever file it stands in.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from perdure.schema.errors import UsageError

DIGITS_MAX = 18
"""Whole numbers of more digits are no counts: they overflow 64 bits, and `int` refuses very long ones."""
QUOTE_MAX = 80


def read_plain(path: Path) -> str:
    """The file's text in UTF-8, without the mark that some editors put in front.

    Raises `OSError` or `UnicodeDecodeError`.
    """
    return path.read_text(encoding="utf-8-sig")


def whole(text: str) -> int | None:
    """The whole number ≥ 0 that `text` is in plain digits, or None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else None


def quoted(text: str) -> str:
    """`text` in quotes, on one line, cut where it is long."""
    return repr(text if len(text) <= QUOTE_MAX else f"{text[: QUOTE_MAX - 1]}…")


def csv_rows(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the number of its line. Raises `UsageError` if it is no CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        started = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UsageError(f"{where}: line {started}: {error}, expected CSV with closed quotes") from error
        if row:
            yield started, row
