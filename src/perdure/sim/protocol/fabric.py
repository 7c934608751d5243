"""The connections between workers, one for each pair and generation, and all that can happen to them.

Between two workers what is sent in one generation keeps its order; between different pairs, directions and
generations nothing does. A connection that is closed loses what is under way, and the other end is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
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
                self._hang_up(worker, generation, peer)
            elif len(connection.wanted) == 2:
                delay = self._world.chance.delay(self._typical_s)
                self._world.after(delay, partial(self._establish, connection, worker, peer))

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
                    self._hang_up(peer, generation, worker)

    def sever(self, a: WorkerId, b: WorkerId) -> bool:
        """The network breaks every connection between two workers; both see it."""
        broken = False
        for (generation, peer), connection in self._of[a].items():
            if peer == b and not connection.closed and len(connection.wanted) == 2:
                broken = True
                self._close(connection)
                self._hang_up(a, generation, b)
                self._hang_up(b, generation, a)
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
                connection.links[worker].send(partial(self._hung_up, peer, generation, worker))

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
        for worker, peer in ((a, b), (b, a)):
            delay = self._world.chance.delay(self._typical_s)
            self._world.after(delay, partial(self._connected, worker, connection.generation, peer))

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

    def _hang_up(self, worker: WorkerId, generation: Generation, peer: WorkerId) -> None:
        delay = self._world.chance.delay(self._typical_s)
        self._world.after(delay, partial(self._hung_up, worker, generation, peer))

    def _hung_up(self, worker: WorkerId, generation: Generation, peer: WorkerId) -> None:
        if self._ends[worker].alive:
            self._ends[worker].hung_up(generation, peer)

    def _connected(self, worker: WorkerId, generation: Generation, peer: WorkerId) -> None:
        if self._ends[worker].alive:
            self._ends[worker].connected(generation, peer)
