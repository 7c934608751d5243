"""What must not last: a seal without an answer, healing, a broken connection, a process that should end."""

from __future__ import annotations

from perdure.core.actions import SIGKILL, Kill
from perdure.core.deaths import Deaths
from perdure.core.failures import Death
from perdure.core.office import Office
from perdure.schema.ids import Generation, WorkerId

NODE_GRACE_S = 0.5
"""A node whose connection broke has this long to come back."""

REPORT_S = 30.0
"""A sealed worker answers within this time: it may be in a micro-batch or a commit."""

HEAL_S = 60.0
HEAL_BYTES_PER_S_MIN = 20e6
"""A joiner has its state within this time, and as much more as it takes at so slow a pace (P15)."""

TROUBLE_S = 1.0
"""A connection that failed is usually a death that is told in a moment; after this it is not."""

TROUBLES_MAX = 3
"""When so many new groups in a row fail again, with no step between them, one worker is at fault."""


LINGER_S = 10.0
"""A process whose script has raised, or that is seen to end, may clean up for so long."""


class Deadlines:
    """Looks at the time. `trouble` notes what may have to be acted upon later."""

    def __init__(self, office: Office, deaths: Deaths) -> None:
        self._office = office
        self._deaths = deaths
        self._troubles: dict[WorkerId, tuple[Generation, float]] = {}

    def look(self, now: float) -> None:
        """Time passed."""
        for node in list(self._office.staff.nodes.values()):
            if node.lost_at is not None and now - node.lost_at > NODE_GRACE_S:
                self._deaths.node_lost(node, now)
        for worker in self._office.staff.workers.values():
            if worker.ending_since is not None and now - worker.ending_since > LINGER_S:
                worker.ending_since = None
                self._office.want(Kill(worker.id, SIGKILL))
        self._deaths.give_up_missing(now)
        self._opening(now)
        self._connections(now)

    def trouble(self, generation: Generation, peer: WorkerId, now: float) -> None:
        """A worker lost its connection to `peer`."""
        known = self._troubles.get(peer)
        # One on offer may be the next: its trouble must outlast that of the one in force.
        if self._office.membership.concerns(generation) and (known is None or known[0] < generation):
            self._troubles[peer] = (generation, now)

    def _opening(self, now: float) -> None:
        membership = self._office.membership
        opening, waited = membership.opening, now - self._office.opened_at
        if opening is not None and waited > REPORT_S:
            for member in opening.members:
                if member.worker not in opening.positions:
                    self._hung(member.worker, f"no answer to a seal within {REPORT_S:.0f} s", now)
        elif opening is None and membership.current is not None and waited > self._heal_s:
            for worker in membership.current.ranks:
                if worker in membership.peers and not membership.peers[worker].healed:
                    self._hung(worker, f"no complete state within {self._heal_s:.0f} s", now)

    @property
    def _heal_s(self) -> float:
        shape = self._office.membership.shape
        return HEAL_S + (shape.state_bytes / HEAL_BYTES_PER_S_MIN if shape is not None else 0.0)

    def _connections(self, now: float) -> None:
        """P11: a connection that failed without a death is a new generation of the same members."""
        office = self._office
        for peer, (generation, since) in list(self._troubles.items()):
            if not office.membership.concerns(generation):
                del self._troubles[peer]
            elif now - since > TROUBLE_S and peer in office.membership.peers:
                self._troubles.clear()
                office.troubles += 1
                if office.troubles > TROUBLES_MAX:
                    office.troubles = 0
                    self._hung(peer, "its connections keep failing", now)
                else:
                    office.opened_at = now
                    office.carry(office.membership.again(), now)
                return

    def _hung(self, worker: WorkerId, message: str, now: float) -> None:
        self._deaths.fault(worker, Death("hang", None, None, message=message), "progress", now)
