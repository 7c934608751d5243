"""The nodes of the cluster: who has them, which are away, and the account of those that belong to no job."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.sim.ledger import INDEX, Account, Journal


class Pool:
    """Nodes that belong to no job.

    `free` can be dealt out. `resting` work but must not be dealt out (slow, or about to leave).
    `returning` start their processes anew. `down` are being repaired or absent. Every node is in one of
    these or held by a job. `absent` says how often a node was taken away and not brought back: more than
    one cause may keep it away, and it is there when the last one has ended.
    """

    def __init__(self, nodes: int, absent: Iterable[int], gpus_per_node: int, journal: Journal) -> None:
        self.down: set[int] = set(absent)
        self.absent: dict[int, int] = dict.fromkeys(self.down, 1)
        self.repairing: dict[int, float] = {}
        self.free: dict[int, None] = dict.fromkeys(node for node in range(nodes) if node not in self.down)
        self.resting: set[int] = set()
        self.returning: set[int] = set()
        self.slow: dict[int, tuple[float, float]] = {}
        self.leaving: set[int] = set()
        self.account = Account()
        self._gpus = gpus_per_node
        self._journal = journal

    def some(self, count: int) -> tuple[int, ...]:
        """Up to `count` free nodes, those first that have been free for longest."""
        found: list[int] = []
        if count > 0:
            for node in self.free:
                found.append(node)
                if len(found) == count:
                    break
        return tuple(found)

    def admit(self, node: int) -> None:
        """A node that no job has and that works is free, or rests."""
        self.returning.discard(node)
        self.resting.discard(node)
        if node in self.slow or node in self.leaving:
            self.resting.add(node)
        else:
            self.free[node] = None

    def lose(self, node: int) -> None:
        """A node goes down, wherever in the pool it was."""
        self.free.pop(node, None)
        self.resting.discard(node)
        self.returning.discard(node)
        self.slow.pop(node, None)
        self.leaving.discard(node)
        self.down.add(node)

    def taken(self, node: int) -> None:
        """One more cause keeps a node away."""
        self.absent[node] = self.absent.get(node, 0) + 1

    def brought(self, node: int) -> None:
        """One cause less keeps a node away."""
        left = self.absent.pop(node, 0) - 1
        if left > 0:
            self.absent[node] = left

    def recovered(self, node: int) -> bool:
        """Whether a node that was down can work again: it is repaired and present."""
        return node in self.down and node not in self.absent and node not in self.repairing

    def settle(self, now: float) -> None:
        """Account for the pool as it is from `now` on."""
        idle = (len(self.free) + len(self.resting)) * self._gpus
        rates = (
            (INDEX["idle"], idle),
            (INDEX["transition"], len(self.returning) * self._gpus),
            (INDEX["down"], len(self.down) * self._gpus),
        )
        self.account.change(now, rates)
        self._journal.write(
            now,
            "pool_state",
            free=len(self.free),
            resting=len(self.resting),
            returning=len(self.returning),
            down=len(self.down),
        )
