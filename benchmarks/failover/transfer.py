"""A bare point-to-point transfer: one process sends, another receives, over one TCP connection on loopback.

python transfer.py BYTES      prints the receiver's bytes per second
"""

from __future__ import annotations

import os
import socket
import sys
import time


def main() -> None:
    nbytes = int(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        payload = bytearray(b"\1") * nbytes
        with socket.create_connection(listener.getsockname()) as sock:
            sock.recv(1)
            sock.sendall(payload)
        os._exit(0)
    place = bytearray(b"\1") * nbytes
    sock, _ = listener.accept()
    started = time.perf_counter()
    sock.sendall(b"g")
    view = memoryview(place)
    while view.nbytes:
        view = view[sock.recv_into(view) :]
    print(nbytes / (time.perf_counter() - started))
    os.wait()


if __name__ == "__main__":
    main()
