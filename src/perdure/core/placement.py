"""Which nodes a job gets, once it is known how many.

A job keeps the nodes it has; it gives back its last ones; it takes the first free ones. Nothing else moves,
so a plan interrupts no more than its numbers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Nodes = tuple[int, ...]


def place(held: Mapping[str, Nodes], counts: Mapping[str, int], alive: Iterable[int]) -> dict[str, Nodes]:
    """Node numbers of each job of `counts`, from the nodes `alive`; `held` is who had what before.

    Raises `ValueError` if `counts` asks for more nodes than are alive.
    """
    living = set(alive)
    kept = {
        name: tuple(n for n in held.get(name, ()) if n in living)[:count] for name, count in counts.items()
    }
    free = sorted(living.difference(*kept.values()), reverse=True)
    if sum(counts.values()) > len(living):
        raise ValueError(f"the plan asks for {sum(counts.values())} nodes of {len(living)}")
    return {
        name: (*kept[name], *(free.pop() for _ in range(count - len(kept[name]))))
        for name, count in counts.items()
    }
