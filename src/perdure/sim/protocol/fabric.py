"""The connections between workers, one for each pair and generation, and all that can happen to them.

Between two workers what is sent in one generation keeps its order; between different pairs, directions and
generations nothing does. A connection that is closed loses what is under way, and the other end is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from perdure.schema.ids import Generation, WorkerId
from perdure.sim.protocol.world import Link, World

Sent = Callable[[float], None]
"""Told the time at which the kernel has the whole of a message."""


class Endpoint(Protocol):
    """What a worker does about its connections."""

    alive: bool

    def arrived(self, generation: Generation, peer: WorkerId, message: Any) -> None: ...

    def connected(self, generation: Generation, peer: WorkerId) -> None: ...

    def hung_up(self, generation: Generation, peer: WorkerId) -> None: ...


@dataclass(slots=True)
class _Connection:
    generation: Generation
    links: dict[WorkerId, Link]
    wanted: set[WorkerId] = field(default_factory=set)
    up: bool = False
    closed: bool = False
    waiting: list[tuple[WorkerId, Any, Sent | None]] = field(default_factory=list)


class Fabric:
    """All connections of a run."""

    def __init__(self, world: World, typical_s: float) -> None:
        self._world = world
        self._typical_s = typical_s
        self._ends: dict[WorkerId, Endpoint] = {}
        self._of: dict[WorkerId, dict[tuple[Generation, WorkerId], _Connection]] = {}

    def enter(self, worker: WorkerId, endpoint: Endpoint) -> None:
        """A worker exists."""
        self._ends[worker] = endpoint
        self._of[worker] = {}

    def form(self, worker: WorkerId, generation: Generation, peers: Iterable[WorkerId]) -> None:
        """A worker wants to be connected to these in a generation; it takes two."""
        for peer in peers:
            connection = self._between(worker, peer, generation)
            connection.wanted.add(worker)
            if connection.closed or not self._ends[peer].alive:
                self._tell(worker, lambda end, p=peer: end.hung_up(generation, p))
            elif len(connection.wanted) == 2:
                delay = self._world.chance.delay(self._typical_s)
                self._world.after(delay, lambda c=connection, p=peer: self._establish(c, worker, p))

    def send(
        self, generation: Generation, source: WorkerId, peer: WorkerId, message: Any, sent: Sent | None = None
    ) -> None:
        """Send a message; it waits for the connection to come up, and is lost if that is closed."""
        connection = self._between(source, peer, generation)
        if connection.closed:
            return
        if connection.up:
            self._dispatch(connection, source, message, sent)
        else:
            connection.waiting.append((source, message, sent))

    def close(self, worker: WorkerId, below: Generation) -> None:
        """A worker destroys its connections of older generations: what is under way is lost."""
        for (generation, peer), connection in self._of[worker].items():
            if generation < below and not connection.closed:
                self._close(connection)
                if peer in connection.wanted:
                    self._tell(peer, lambda end, g=generation: end.hung_up(g, worker))

    def sever(self, a: WorkerId, b: WorkerId) -> bool:
        """The network breaks every connection between two workers; both see it."""
        broken = False
        for (generation, peer), connection in self._of[a].items():
            if peer == b and not connection.closed and len(connection.wanted) == 2:
                broken = True
                self._close(connection)
                self._tell(a, lambda end, g=generation: end.hung_up(g, b))
                self._tell(b, lambda end, g=generation: end.hung_up(g, a))
        return broken

    def die(self, worker: WorkerId) -> None:
        """A worker ended: what the kernel had may still arrive, then the others see the end."""
        for (generation, peer), connection in self._of[worker].items():
            if connection.closed:
                continue
            connection.closed = True
            connection.links[peer].cut()
            if self._world.chance.flip(0.3):
                connection.links[worker].cut()
            if peer in connection.wanted:
                end = self._ends[peer]
                connection.links[worker].send(
                    lambda g=generation, e=end: e.hung_up(g, worker) if e.alive else None
                )

    def direct(self) -> Link:
        """A connection of its own, for healing."""
        return Link(self._world, self._typical_s)

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────

    def _between(self, worker: WorkerId, peer: WorkerId, generation: Generation) -> _Connection:
        connection = self._of[worker].get((generation, peer))
        if connection is None:
            links = {w: Link(self._world, self._typical_s) for w in (worker, peer)}
            connection = _Connection(generation, links)
            self._of[worker][(generation, peer)] = connection
            self._of[peer][(generation, worker)] = connection
        return connection

    def _establish(self, connection: _Connection, a: WorkerId, b: WorkerId) -> None:
        if connection.closed or connection.up:
            return
        connection.up = True
        waiting, connection.waiting = connection.waiting, []
        for source, message, sent in waiting:
            self._dispatch(connection, source, message, sent)
        self._tell(a, lambda end: end.connected(connection.generation, b))
        self._tell(b, lambda end: end.connected(connection.generation, a))

    def _dispatch(self, connection: _Connection, source: WorkerId, message: Any, sent: Sent | None) -> None:
        peer = next(worker for worker in connection.links if worker != source)
        end = self._ends[peer]

        def deliver() -> None:
            if end.alive:
                end.arrived(connection.generation, source, message)

        at_s = connection.links[source].send(deliver)
        if sent is not None:
            sent(self._world.chance.between(self._world.now, at_s))

    def _close(self, connection: _Connection) -> None:
        connection.closed = True
        for link in connection.links.values():
            link.cut()

    def _tell(self, worker: WorkerId, what: Callable[[Endpoint], None]) -> None:
        end = self._ends[worker]
        delay = self._world.chance.delay(self._typical_s)
        self._world.after(delay, lambda: what(end) if end.alive else None)
