"""One connection between two meshes: frames out from any thread, frames in on the mesh's own.

The socket never blocks. Whoever sends writes at once, as far as the kernel takes it; the rest waits in a
queue that the mesh's thread drains when the socket is writable again. Payloads go out as they lie in the
tensors (gathered by `sendmsg`) and come in straight to where they belong.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from perdure.worker.frames import HEAD_BYTES, Head, parse_head

# Small: what a payload leaves in it has to be copied once more.
_STAGE_BYTES = 16 << 10
_GATHER = 256
# What one peer may bring in before the others have their turn.
_BURST_BYTES = 8 << 20

Buffer = bytes | memoryview


class Sink(Protocol):
    """What a channel does with frames that came in."""

    def arrived(self, channel: Channel, head: Head, tail: bytes) -> memoryview | None:
        """A frame is here. For INLINE: where its payload goes, None to throw it away."""

    def filled(self, channel: Channel, head: Head, tail: bytes, view: memoryview) -> None:
        """The payload of an INLINE frame is complete in `view`."""


class _Outgoing:
    """A frame on its way: `left` bytes of `buffers` are not sent."""

    __slots__ = ("buffers", "done", "left")

    def __init__(self, buffers: Sequence[Buffer], done: Callable[[], None] | None) -> None:
        self.buffers = buffers
        self.left = sum(map(len, buffers))
        self.done = done

    def sent(self, nbytes: int) -> None:
        """The first `nbytes` of what was left are sent, not all of it."""
        self.left -= nbytes
        kept = iter(self.buffers)
        for buffer in kept:
            if nbytes < len(buffer):
                self.buffers = [memoryview(buffer)[nbytes:], *kept]
                return
            nbytes -= len(buffer)


class Channel:
    """Framing over one connected socket, to and from worker `peer`."""

    def __init__(self, sock: socket.socket, peer: int, sink: Sink) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self._sink = sink
        self._lock = threading.Lock()
        self._out: deque[_Outgoing] = deque()
        self._closed = False
        self._stage = bytearray(_STAGE_BYTES)
        self._room = memoryview(self._stage)
        self._pos = 0
        self._fill = 0
        self._frame: tuple[Head, bytes] | None = None
        # The payload being received: where it goes as a whole, what is left of that place, and how much
        # is to come. No place at all: it goes through the stage and is dropped.
        self._target: memoryview | None = None
        self._view: memoryview | None = None
        self._left = 0

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────

    def push(self, buffers: Sequence[Buffer], done: Callable[[], None] | None = None) -> None:
        """Queue one frame; `done` is called when the kernel has all of it. Dropped on a closed channel."""
        with self._lock:
            if not self._closed:
                self._out.append(_Outgoing(buffers, done))

    def flush(self) -> bool:
        """Send what the kernel takes now; false when something is left and the socket is full.

        A broken connection empties the queue: the reading side finds out and reports it.
        """
        finished: list[Callable[[], None]] = []
        try:
            with self._lock:
                return self._flush(finished)
        finally:
            for done in finished:
                done()

    def _flush(self, finished: list[Callable[[], None]]) -> bool:
        out = self._out
        while out:
            batch: list[Buffer] = []
            for frame in out:
                batch += frame.buffers
                if len(batch) >= _GATHER:
                    break
            try:
                sent = self.sock.sendmsg(batch[:_GATHER])
            except BlockingIOError:
                return False
            except OSError:
                out.clear()
                return True
            while out and out[0].left <= sent:
                frame = out.popleft()
                sent -= frame.left
                if frame.done is not None:
                    finished.append(frame.done)
            if sent:
                out[0].sent(sent)
        return True

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent."""
        return not self._out

    def unsent(self) -> list[Callable[[], None]]:
        """The `done` of every frame that is still in the queue."""
        with self._lock:
            return [out.done for out in self._out if out.done is not None]

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────

    def receive(self) -> bool:
        """Take what is there and hand it on; false at the end of the stream.

        Raises OSError when the connection failed, WireError on a frame that no worker sends.
        """
        burst = 0
        while burst < _BURST_BYTES:
            into = self._view if self._view is not None else self._room[self._fill :]
            try:
                got = self.sock.recv_into(into)
            except BlockingIOError:
                return True
            if not got:
                return False
            burst += got
            if self._view is not None:
                self._view = self._view[got:]
                self._left -= got
                self._advance()
            else:
                self._fill += got
                self._parse()
            if got < len(into):
                return True
        return True

    def _parse(self) -> None:
        while True:
            if self._left:
                size = min(self._left, self._fill - self._pos)
                if self._view is not None:
                    self._view[:size] = self._room[self._pos : self._pos + size]
                    self._view = self._view[size:]
                self._pos += size
                self._left -= size
                self._advance()
                if self._left:
                    break
            if self._fill - self._pos < HEAD_BYTES:
                break
            head = parse_head(self._stage, self._pos)
            end = self._pos + HEAD_BYTES + head.tail
            if end > self._fill:
                self._compact(HEAD_BYTES + head.tail)
                return
            tail = bytes(self._room[self._pos + HEAD_BYTES : end])
            self._pos = end
            self._begin(head, tail)
        self._compact(HEAD_BYTES)

    def _begin(self, head: Head, tail: bytes) -> None:
        view = self._sink.arrived(self, head, tail)
        if head.carries_payload:
            self._frame = (head, tail)
            self._target = view
            self._view = view if head.length else None
            self._left = head.length
            self._advance()

    def _advance(self) -> None:
        """Close the frame whose payload is complete."""
        if self._left or self._frame is None:
            return
        (head, tail), view = self._frame, self._target
        self._frame = self._view = self._target = None
        if view is not None:
            self._sink.filled(self, head, tail, view)

    def _compact(self, need: int) -> None:
        """Move what is unread to the front of the stage, and make room for a frame of `need` bytes."""
        unread = bytes(self._room[self._pos : self._fill])
        if need > len(self._stage):
            self._room.release()
            self._stage = bytearray(need)
            self._room = memoryview(self._stage)
        self._room[: len(unread)] = unread
        self._pos, self._fill = 0, len(unread)

    # ── end ─────────────────────────────────────────────────────────────────────────────────────────

    def finish_sending(self) -> None:
        """Tell the other side that nothing more comes; receiving goes on."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def sever(self) -> None:
        """Cut the connection both ways, from any thread; the descriptor stays for `close`."""
        # Under the lock, so that the descriptor cannot have been closed and given to someone else.
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and forget what was queued."""
        with self._lock:
            self._closed = True
            self._out.clear()
            self.sock.close()
