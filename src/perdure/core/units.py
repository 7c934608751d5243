"""Figures with a prefix of the right size, for people to read."""

from __future__ import annotations

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")


def scaled(largest: float, unit: str) -> tuple[float, str]:
    """The greatest power of a thousand up to `largest`, and the unit with its prefix: (1e12, 'TFLOP')."""
    power = 0
    while power + 1 < len(PREFIXES) and largest >= 1000.0 ** (power + 1):
        power += 1
    return 1000.0**power, f"{PREFIXES[power]}{unit}"
