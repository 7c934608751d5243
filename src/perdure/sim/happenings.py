"""What befalls nodes, whoever runs on them: the same happenings for every policy that is compared.

A `Trace` is drawn or read before a run and never looks at what a policy does with the nodes: with the same
trace, differences between policies are theirs and not chance (common random numbers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from perdure.core.policies.base import Method


class Kind(Enum):
    """What happens to a node."""

    FAULT = "fault"
    NOTICE = "notice"
    REMOVE = "remove"
    ADD = "add"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of one node.

    FAULT: an error of `severity` that shows by `method`; at severity 1 the node is away for `lasts_s` (its
    repair). NOTICE: it will be removed in `lasts_s`. REMOVE: it is taken away without a word, until its ADD.
    SLOW: for `lasts_s` it takes `factor` times as long for its part of a step.
    """

    time_s: float
    kind: Kind
    node: int
    severity: Literal[1, 2, 3] = 1
    method: Method = Method.NODE
    lasts_s: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """All happenings in order of time; nodes of `absent` are not there at the start.

    A node that several REMOVEs took away is back at the last of as many ADDs.
    """

    happenings: tuple[Happening, ...]
    absent: frozenset[int] = frozenset()

    @property
    def losses(self) -> int:
        """How many times a node is lost: faults of severity 1 and removals."""
        return self.losses_until(math.inf)

    def losses_until(self, time_s: float) -> int:
        """The losses until then."""
        return sum(
            event.kind is Kind.REMOVE or (event.kind is Kind.FAULT and event.severity == 1)
            for event in self.happenings
            if event.time_s <= time_s
        )


def together(one: Trace, other: Trace) -> Trace:
    """Both traces at once, on the same nodes."""
    # One that is absent in both has to be added twice.
    doubly = [Happening(0.0, Kind.REMOVE, node) for node in sorted(one.absent & other.absent)]
    happenings = sorted((*doubly, *one.happenings, *other.happenings), key=lambda event: event.time_s)
    return Trace(tuple(happenings), one.absent | other.absent)


METHODS: dict[int, tuple[tuple[Method, float], ...]] = {
    1: ((Method.EXCEPTION, 12.2),),
    2: ((Method.EXCEPTION, 3.7), (Method.STATISTICAL, 3.1), (Method.PROCESS, 3.3)),
    3: ((Method.STATISTICAL, 14.0), (Method.EXCEPTION, 7.1)),
}
"""How errors of each severity show, in weights: the shares of Unicron's table of errors (arXiv 2401.00134,
table 1), 'others' counted as processes that exited. Errors for which the table gives no share (a lost
connection among them) are left out; nodes that a trace removes show as a lost connection."""
