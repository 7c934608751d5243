"""After a coordinator's restart: whom the one before had is collected before anything opens (P9). Pure.

Those workers go on meanwhile. Where they stand they say when they are asked (sealed), not when they are
seen again: what an agent repeats is their first word.
"""

from __future__ import annotations

from perdure.core.office import Office
from perdure.schema.ids import WorkerId

REJOIN_S = 10.0
"""Agents have this long to say hello again."""


class Rejoin:
    """Waits for the members of before, if there may be any."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._until: float | None = None
        self._kept: set[WorkerId] = set()
        self._expects = office.settings.cut_off

    @property
    def waits(self) -> bool:
        """Whether somebody is waited for."""
        return self._until is not None

    @property
    def _elastic(self) -> bool:
        settings = self._office.settings
        return settings.max_nodes is None or settings.max_nodes > settings.min_nodes

    def seen(self, worker: WorkerId, now: float) -> None:
        """A worker of before is there: of another coordinator, or of a node that was given up for lost."""
        self._kept.add(worker)
        self._until = self._until or now + REJOIN_S

    def may_come(self, now: float) -> bool:
        """Whether there may be members of before, whom a stop has to wait for."""
        settings, begun = self._office.settings, self._office.membership.begun
        # Blocks are kept once a worker was at its first step.
        if settings.max_nodes != 1 and settings.incarnation > 1 and settings.blocks and not begun:
            self._until = self._until or now + REJOIN_S
        return self.waits

    def expect(self, now: float) -> None:
        """A node without workers is here. A job that may begin with fewer nodes waits for the others once.

        Not after a run that was ended in order: it left nobody.
        """
        expects, self._expects = self._expects, False
        if expects and self._elastic and not self.waits and self.may_come(now):
            self._office.say(f"waiting {REJOIN_S:g} s at most for workers of before the launcher was lost")

    def is_vain(self, now: float) -> bool:
        """When all are there or the time is over, go on with those of before; true if there are none."""
        office, membership = self._office, self._office.membership
        there = membership.peers
        nodes = len(office.staff.nodes) >= office.settings.min_nodes
        assert self._until is not None
        kept = not self._kept.isdisjoint(there)
        gone = bool(self._kept) and not kept and nodes and not self._elastic
        complete = kept and len(there) >= office.staff.target and nodes
        if not (complete or gone or (now > self._until and (there or office.stopping))):
            return False
        self._until = None
        if not kept:
            return True
        membership.progress = office.records.last  # until they have reported
        office.carry(membership.start(sorted(there)), now)
        return False
