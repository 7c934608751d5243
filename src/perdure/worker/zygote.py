"""A process that has imported torch and forks workers: 0.1 s for each instead of 5.

The agent starts `main(FD, AGENT_PID)` by `python -c`, after taking the directory that `-c` and `-m` put in
front off sys.path: there, a user's `types.py` would be imported in place of the library's.

The protocol of one fork (P19), over the socket FD, one request at a time:

1. agent → zygote     `Fork`, with control socket, progress page, stdout and stderr as descriptors
2. zygote             forks twice; the one between ends at once, so that the agent, a subreaper, becomes
                      the worker's parent and can reap it. Workers do not die with the zygote.
3. worker             waits until the agent is its parent, asks to be killed with it, leaves the session of
                      the terminal, takes its streams, and waits for one byte on its control socket
4. zygote → agent     `Forked` with the worker's pid, or `ForkFailed`
5. agent → worker     the byte; a worker that the agent does not know of gets end-of-file and runs nothing

When the agent is gone the socket ends: the zygote then kills what carries the agent's mark in its
environment (workers die with the agent by themselves, what they started does not) and ends.

CUDA is never initialised here, and no thread is left when it serves: neither survives a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from perdure.schema.messages import Fork, Forked, ForkFailed, ZygoteReady
from perdure.schema.wire import Decoder, encode
from perdure.worker import boot
from perdure.worker.parent import SCRATCH, die_with_parent

MARK: Final = "PERDURE_AGENT"
"""Environment variable that tells one agent's processes from another's; everything below it inherits it."""

_PRELOADED = (
    "numpy",
    "torch",
    "torch.optim",
    "torch.utils.data",
    "torch.distributed",
    "torch._dynamo",
    "perdure.worker.api",
)
_REPARENT_S = 10.0
_LENGTH = struct.Struct(">I")
_PID = struct.Struct("=q")


class _Task(msgspec.Struct, frozen=True):
    """What a forked worker is to do: the request and its four descriptors."""

    fork: Fork
    control: int
    page: int
    out: int
    err: int


def main(fd: int, agent_pid: int) -> None:
    """Serve forks until the agent closes the socket; returns in the zygote and in each worker, at its end."""
    with socket.socket(fileno=fd) as agent:
        with _until_gone(agent):
            _preload()
        agent.sendall(encode(ZygoteReady()))
        task = _serve(agent, agent_pid)
    if task is None:
        _clear_away()
        return
    control = socket.socket(fileno=task.control)
    if control.recv(1) != b"\0":
        return
    _become(task)
    boot.run(task.fork, control, task.page)


@contextlib.contextmanager
def _until_gone(agent: socket.socket) -> Iterator[None]:
    """Imports take seconds: if the agent is gone meanwhile, clear away and end, on a thread of its own."""
    waking, wake = os.pipe()

    def watch() -> None:
        poll = select.poll()
        poll.register(agent, select.POLLRDHUP)
        poll.register(waking, select.POLLIN)
        if agent.fileno() in dict(poll.poll()):
            _clear_away()
            os._exit(1)

    thread = threading.Thread(target=watch, name="perdure-zygote", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(wake, b"x")
        thread.join()  # threads do not survive a fork
        os.close(waking)
        os.close(wake)


def _preload() -> None:
    """Import what every worker needs. A failure is the script's to meet, with a traceback of its own."""
    gc.disable()
    environment = dict(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to count devices another way initialises CUDA
    for name in _PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    os.environ.clear()  # torch._dynamo leaves a variable there too
    os.environ.update(environment)
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise write to, and so copy, every shared page


def _serve(agent: socket.socket, agent_pid: int) -> _Task | None:
    """Fork on request. Returns None when the agent closes, and in each worker what it is to do."""
    decoder: Decoder[Fork] = Decoder(Fork)
    while True:
        header, descriptors, _, _ = socket.recv_fds(agent, _LENGTH.size, 4, socket.MSG_CMSG_CLOEXEC)
        if not header:
            return None
        body = _exactly(agent, _LENGTH.unpack(header)[0])
        if body is None:
            return None
        task = _Task(decoder.decode(body), *descriptors)
        try:
            pid = _fork_twice(agent_pid)
        except OSError as error:
            agent.sendall(encode(ForkFailed(task.fork.worker, str(error))))
        else:
            if pid == 0:
                return task
            agent.sendall(encode(Forked(task.fork.worker, pid)))
        for descriptor in descriptors:
            os.close(descriptor)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _fork_twice(agent_pid: int) -> int:
    """The worker's pid; 0 in the worker, which then has the agent as its parent. Raises OSError."""
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _between(agent_pid, writing)
            return 0
        os.close(writing)
        writing = -1
        told = os.read(reading, _PID.size)
        _, status = os.waitpid(between, 0)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if len(told) != _PID.size:
        code = os.waitstatus_to_exitcode(status)
        raise OSError(code, os.strerror(code) if code > 0 else f"the forking process was killed ({code})")
    return int(_PID.unpack(told)[0])


def _between(agent_pid: int, writing: int) -> None:
    """Fork the worker and end; returns in the worker alone."""
    own_pid = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        os._exit(error.errno or 1)
    if worker != 0:
        os.write(writing, _PID.pack(worker))
        os._exit(0)
    deadline = time.monotonic() + _REPARENT_S
    while os.getppid() == own_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    die_with_parent(agent_pid)


def _become(task: _Task) -> None:
    """Make this fork a process of its own: session, signals, streams, environment, directory."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(task.out, 1)
    os.dup2(task.err, 2)
    os.close(task.out)
    os.close(task.err)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(task.fork.env)
    os.chdir(task.fork.cwd)
    _as_if_started()


def _as_if_started() -> None:
    """What the libraries drew or read when the zygote imported them, once more, for this process."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and (torch := sys.modules.get("torch")):
        torch.set_num_threads(int(threads))


def _clear_away() -> None:
    """SIGKILL every other process that has this zygote's mark in its environment; remove the scratch."""
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
    if scratch := os.environ.get(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
