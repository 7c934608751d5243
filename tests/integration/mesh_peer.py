"""A worker's mesh in a process of its own, driven by lines of JSON: what test_mesh.py stops and kills."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from perdure.schema.ids import Generation
from perdure.schema.plan import Address
from perdure.worker.listener import Listener
from perdure.worker.mesh import Mesh
from perdure.worker.transport import Bulk


class Handlers:
    """Takes everything and tells the parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, *words: object) -> None:
        with self._lock:
            print(json.dumps(words), flush=True)

    def formed(self) -> None:
        self.say("formed")

    def buffer(self, peer: int, header: Bulk, nbytes: int, deferrable: bool) -> memoryview:
        return memoryview(bytearray(nbytes))

    def bulk(self, peer: int, header: Bulk, view: memoryview) -> None:
        self.say("bulk", peer, view.nbytes)

    def control(self, peer: int, body: bytes) -> None:
        self.say("control", peer, body.decode())

    def lost(self, peer: int, reason: str) -> None:
        self.say("lost", peer)

    def broken(self, error: Exception) -> None:
        self.say("broken", repr(error))


def main() -> None:
    me, secret, pull = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3] == "pull"
    handlers = Handlers()
    listener = Listener("127.0.0.1", secret, me, lambda sock, hello: sock.close())
    handlers.say("port", listener.port)
    payload = bytearray(64 << 20)
    mesh: Mesh | None = None
    for line in sys.stdin:
        match json.loads(line):
            case ["mesh", members]:
                addresses = [Address(worker, "here", "127.0.0.1", port) for worker, port in members]
                mesh = Mesh(Generation(1, 1), me, addresses, listener, handlers, pull)
            case ["post", peer, nbytes] if mesh is not None:
                mesh.post(peer, Bulk(0, 0, 0, 0, 0, nbytes), [memoryview(payload)[:nbytes]])
            case ["fork"]:
                child = os.fork()
                if not child:
                    signal.pause()
                handlers.say("child", child)
            case ["close"]:
                if mesh is not None:
                    mesh.close()
                listener.close()
                handlers.say("threads", threading.active_count())
                return


if __name__ == "__main__":
    main()
