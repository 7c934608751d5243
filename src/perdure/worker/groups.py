"""The transports of one worker, by generation: formed in the background, torn down without waiting.

A transport that was interrupted may still be at work on the step's memory for a moment. `when_clear`
runs what needs that memory once all such have ended (P1); the closing, which waits for a thread, is done
by a thread that holds no lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Address
from perdure.worker import defect
from perdure.worker.listener import Listener
from perdure.worker.mesh import Mesh
from perdure.worker.transport import Handlers

RETIRE_S = 10.0


class Groups:
    """Transports by generation. All methods are called under the runtime's lock."""

    def __init__(self, me: WorkerId, listener: Listener, ear: Callable[[Generation], Handlers]) -> None:
        self._me = me
        self._listener = listener
        self._ear = ear
        self._meshes: dict[Generation, Mesh] = {}
        self._retiring: list[Mesh] = []
        self._counting = threading.Lock()
        self._closing = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=defect.fatal(self._run), name="perdure-groups", daemon=True)
        self._thread.start()

    def form(self, generation: Generation, members: Sequence[Address]) -> bool:
        """Begin to form a group; true if it is complete at once, because nobody else is in it."""
        if generation in self._meshes:
            return False
        if len(members) == 1:
            return True
        self._meshes[generation] = Mesh(generation, self._me, members, self._listener, self._ear(generation))
        return False

    def get(self, generation: Generation) -> Mesh | None:
        """The transport of a generation; none for a member alone."""
        return self._meshes.get(generation)

    def interrupt(self, below: Generation) -> None:
        """Tear down all transports of generations older than this."""
        for generation in [g for g in self._meshes if g < below]:
            self._bury(self._meshes.pop(generation))
        for mesh in self._retiring:
            self._bury(mesh)
        self._retiring = []

    def retire(self, below: Generation) -> None:
        """Let older transports deliver what was sent, and end (P12)."""
        for generation in [g for g in self._meshes if g < below]:
            mesh = self._meshes.pop(generation)
            mesh.retire(RETIRE_S)
            self._retiring.append(mesh)

    def when_clear(self, call: Callable[[], None]) -> None:
        """Call at once if no interrupted transport is left, else from another thread when that is so."""
        if self._closing == 0:
            call()
        else:
            self._work.put(call)

    def close(self) -> None:
        """Tear everything down; does not wait."""
        self.interrupt(Generation(1 << 60, 0))
        self._work.put(None)

    def _bury(self, mesh: Mesh) -> None:
        mesh.interrupt()
        with self._counting:
            self._closing += 1
        self._work.put(lambda: self._close(mesh))

    def _close(self, mesh: Mesh) -> None:
        mesh.close()
        with self._counting:
            self._closing -= 1

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()
