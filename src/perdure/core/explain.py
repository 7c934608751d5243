"""Why each job got what it got, and what it would take to change that, in words.

For every number of nodes k that job i could have, the kept tables say what the best plan with exactly that
would be worth. The difference to the plan that was made is what k would cost everybody; the weight at which
the difference vanishes is what it would take.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from perdure.core.allocation import Outlook
from perdure.core.units import scaled


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """What-ifs of one job: `others[k]` is the best gain of all other jobs if it had `nodes[k]` (ascending).

    `own[k]` is the job's own gain there, transition cost taken off. The sum is greatest at the plan's choice.
    """

    name: str
    nodes: NDArray[np.int64]
    others: NDArray[np.float64]
    own: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        """The worth of the best plan with each number of nodes."""
        return self.others + self.own


def alternatives(outlook: Outlook, job: int) -> Alternatives:
    """The alternatives of the job at position `job`. O(options · nodes)."""
    options = outlook.allocator.options(job, outlook.nodes)
    fits = options.nodes <= outlook.nodes
    nodes, own = options.nodes[fits], options.gains[fits]
    left = outlook.left.value(job)
    right = outlook.right.value(len(outlook.demands) - 1 - job)
    others = [float((left[: rest + 1] + right[rest::-1]).max()) for rest in (outlook.nodes - nodes).tolist()]
    order = np.argsort(nodes)
    name = outlook.demands[job].name
    return Alternatives(name, nodes[order], np.array(others)[order], own[order])


def explain(outlook: Outlook, job: int) -> str:
    """A sentence or two about the job at position `job` and the nodes that it holds.

    Figures are in weighted FLOP/s, averaged over the time until the next change is expected, and contain what
    the change itself would cost.
    """
    demand = outlook.demands[job]
    found = alternatives(outlook, job)
    here = int(np.searchsorted(found.nodes, outlook.stay().nodes[demand.name]))
    parts = [_holding(outlook, found, here, job)]
    if here + 1 < found.nodes.size:
        parts.append(_more(outlook, found, here))
    if here > 0:
        parts.append(_fewer(found, here))
    return "; ".join(parts)


def _holding(outlook: Outlook, found: Alternatives, here: int, job: int) -> str:
    given, demand = int(found.nodes[here]), outlook.demands[job]
    if given == 0:
        usable = np.flatnonzero(demand.waf > 0)
        if not usable.size or usable[0] > outlook.nodes:
            return f"waits: it cannot run on the {_nodes(outlook.nodes)} that are alive"
        return f"waits: it needs at least {_nodes(int(usable[0]))}, worth more to the others"
    if given == outlook.nodes:
        return f"has {_nodes(given)}, all that are alive"
    if here == found.nodes.size - 1:
        further = outlook.allocator.options(job, outlook.nodes).nodes.max() > given
        limit = f" of the {_nodes(outlook.nodes)} that are alive" if further else ""
        return f"has {_nodes(given)}, the most it can use{limit}"
    running_s = outlook.allocator.running_s(outlook.nodes)
    free_to_move = found.others + demand.waf[np.minimum(found.nodes, demand.waf.size - 1)] * running_s
    best = int(np.argmax(free_to_move))
    if given != demand.current or best == here:
        return f"has {_nodes(given)}"
    return (
        f"keeps its {_nodes(given)}: {int(found.nodes[best])} would be better, but not by the "
        f"{demand.transition_s:.0f} s that a change costs, as the next is expected in {_duration(running_s)}"
    )


def weight_for_more(found: Alternatives, here: int) -> tuple[float, int] | None:
    """The least factor on the job's weight at which it gets more nodes than now, and how many; or None.

    With the weight times f the job's own gains are times f, so k wins over the present choice h from
    f = (others[h] − others[k]) / (own[k] − own[h]) on.
    """
    rise = found.own - found.own[here]
    better = (np.arange(rise.size) > here) & (rise > 0)
    if not better.any():
        return None
    factors = np.where(better, (found.others[here] - found.others) / np.where(better, rise, 1.0), np.inf)
    best = int(np.argmin(factors))
    return float(factors[best]), int(found.nodes[best])


def weight_for_fewer(found: Alternatives, here: int) -> tuple[float, int] | None:
    """The greatest factor on the job's weight at which it is left fewer nodes, and how many.

    None if the others have no use for them.
    """
    fall = found.own[here] - found.own
    worse = (np.arange(fall.size) < here) & (fall > 0)
    factors = np.where(worse, (found.others - found.others[here]) / np.where(worse, fall, 1.0), -np.inf)
    best = int(np.argmax(factors))
    return (float(factors[best]), int(found.nodes[best])) if factors[best] > 0 else None


def _more(outlook: Outlook, found: Alternatives, here: int) -> str:
    running_s = outlook.allocator.running_s(outlook.nodes)
    own = (found.own[here + 1] - found.own[here]) / running_s
    others = (found.others[here + 1] - found.others[here]) / running_s
    text = f"with {int(found.nodes[here + 1])}: itself {_flops(own)}, the others {_flops(others)}"
    change = weight_for_more(found, here)
    if change is None:
        return f"{text}, and no weight would change that"
    return f"{text}; its weight × {change[0]:.3g} would give it {_nodes(change[1])}"


def _fewer(found: Alternatives, here: int) -> str:
    change = weight_for_fewer(found, here)
    if change is None:
        return "none of its nodes is of use to the others"
    return f"its weight × {change[0]:.3g} would leave it {_nodes(change[1])}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.3g} s"


def _flops(value: float) -> str:
    factor, unit = scaled(abs(value), "FLOP/s")
    return f"{value / factor:+.3g} {unit}"
