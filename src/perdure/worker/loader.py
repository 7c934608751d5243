"""Loading of batches by number: what a worker takes its micro-batches from.

    loader.schedule(step, share, beyond)   what this worker expects to need, in order
    loader.get(step, micro_batch)          exactly that batch, whether expected or not
    loader.forget(step)                    nothing before it will be asked for

With `num_workers` loader processes they are torch's DataLoader workers, forked, fed by an endless
sampler (`LookAhead`, which decides what is loaded next) and read in order. So they live as long as the
loader.

Bits do not depend on any of this: generators are seeded for each sample and for the collate call, in
loader processes and in the main process alike, and both compute with one thread.

How it fails: an exception in the data set or in collate is kept with its batch and raised by `get` of
that batch alone. Loader processes that die, killed for memory perhaps, are replaced, and what was in
flight is loaded again; only when they die a second time over one and the same batch does its `get` raise
LoaderDiedError. A batch that cannot be sent between processes ends its loader process, which says why on
stderr. Loader processes die with their parent.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch._C import _remove_worker_pids
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from perdure.schema.errors import ProtocolError
from perdure.worker.data import MicroBatches
from perdure.worker.look_ahead import Key, LookAhead, Request
from perdure.worker.parent import SCRATCH, die_with_parent
from perdure.worker.rng import one_thread, seed_collate, seed_sample

_PREFETCH_FACTOR = 2  # requests in flight per loader process; torch's own default
_LOOK_S = 0.25  # the longest wait for an answer before the loader processes are looked at
_DEATH_SEEN_S = 1.0  # the longest from a broken connection to the end of the process that held it
_CLOSE_GRACE_S = 1.0  # for loader processes that are busy when the loader is closed


class LoaderDiedError(RuntimeError):
    """A loader process died, and not of an exception in the data set."""


class Loader:
    """Gives the batches of `batches` by number; see the module's docstring.

    `key` names the stream and is part of the seeds of transforms (`rng.seed_sample`): two streams over one
    data set, one for training, one for evaluation, draw different numbers.

    Use it from one thread, and one that lives as long as the loader: loader processes die with the
    thread that forked them. They are forked by `start`, else by the first `get`, and inherit every
    file descriptor that is open then: start before peers are connected.
    """

    def __init__(self, batches: MicroBatches, key: int | str = "train") -> None:
        self._batches = batches
        self._recipe = _Recipe(batches, key)
        self._pin = batches.pin_memory and torch.cuda.is_available()
        self._requests = LookAhead(self._request, depth=_PREFETCH_FACTOR * batches.num_workers)
        self._pipeline: _Pipeline | None = None
        self._died_over: Key | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Fork the loader processes now, if there are to be any and they do not run yet."""
        if self._closed:
            raise ProtocolError("the loader is closed")
        if self._pipeline is None and self._batches.num_workers > 0:
            self._pipeline = _Pipeline(self._data_loader())

    @property
    def pids(self) -> list[int]:
        """The loader processes that have been started."""
        return [] if self._pipeline is None else [process.pid for process in self._pipeline.processes]

    def schedule(
        self, step: int, micro_batches: Iterable[int], beyond: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Say what this worker expects to need: `micro_batches` of `step`, then what `beyond` yields.

        `beyond` yields (step, micro_batch) pairs and may be endless: it is read lazily, in this thread,
        as loaders have room. None keeps the earlier one. The rest of the look-ahead is replaced. What is
        here, in flight or has been read since its step was last forgotten is not loaded again (`get` still
        gives it); an absent micro-batch not at all. A `step` before what was forgotten starts over there.
        """
        keys = [Key(step, micro_batch) for micro_batch in micro_batches]
        self._requests.plan(step, keys, None if beyond is None else (Key(*pair) for pair in beyond))

    def get(self, step: int, micro_batch: int) -> Any:
        """The batch of micro-batch `micro_batch` of `step`, as `collate_fn` made it.

        The generators are left in any state. Raises what the data set or `collate_fn` raised: from a
        loader process an exception of the same type, with the original traceback as its text;
        LoaderDiedError if loader processes died twice over this batch; ProtocolError if the micro-batch is
        absent or the loader closed.
        """
        key = Key(step, micro_batch)
        if self._batches.num_workers > 0:
            return self._wait_for(key)
        if self._closed:
            raise ProtocolError("the loader is closed")
        request = self._request(key)
        if request is None:
            raise ProtocolError(f"micro-batch {micro_batch} of step {step} has no samples, yet was asked for")
        with one_thread():
            batch = self._recipe.load(request)
        return pin_memory(batch) if self._pin else batch  # type: ignore[no-untyped-call]

    def forget(self, before_step: int) -> None:
        """Drop what belongs to steps before `before_step`, here and in the look-ahead; once a step."""
        self._requests.forget(before_step)

    def close(self) -> None:
        """End the loader processes; one still busy after a second is killed. Closing again is harmless."""
        self._closed = True
        deadline = time.monotonic() + _CLOSE_GRACE_S
        self._requests.finish()
        try:
            while self._pipeline and self._requests.busy and time.monotonic() < deadline:
                answer = self._pipeline.next_answer()
                if answer is not None:
                    self._requests.arrived(answer[0])
        except RuntimeError:
            pass  # one has died already: nothing is waited for any more
        finally:
            self._stop()

    def _wait_for(self, key: Key) -> Any:
        found, result = False, None
        while not found:
            self.start()
            found, result = self._requests.take(key)
            if not found:
                self._requests.demand(key)
                found, result = self._receive(key)
        self._died_over = None
        if isinstance(result, ExceptionWrapper):
            result.reraise()  # type: ignore[no-untyped-call]
        return result

    def _receive(self, wanted: Key) -> tuple[bool, Any]:
        """Whether it came, and the batch; it did not if loader processes died that may be replaced."""
        try:
            while True:
                answer = self._pipeline.next_answer()  # type: ignore[union-attr] # started by _wait_for
                if answer is None:
                    continue
                key, result = answer
                self._requests.arrived(key)
                if key == wanted:
                    return True, result
                self._requests.keep(key, result)
        except BaseException as error:
            self._stop()  # what is in flight can no longer be told: a later get starts afresh
            if not isinstance(error, LoaderDiedError) or self._died_over == wanted:
                raise
            self._died_over = wanted
            print(f"perdure: {error}; others are started", file=sys.stderr, flush=True)
            return False, None

    def _request(self, key: Key) -> Request | None:
        epoch, ids = self._batches.sample_ids(key.step, key.micro_batch)
        return Request(key, epoch, ids) if ids else None

    def _data_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._recipe,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._requests,
            num_workers=self._batches.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            prefetch_factor=_PREFETCH_FACTOR,
            timeout=_LOOK_S,
            worker_init_fn=functools.partial(_enter_loader_process, os.getpid()),
            # Only fork runs scripts without a main guard, and data sets that cannot be pickled.
            multiprocessing_context="fork",
            generator=torch.Generator(),  # else an iterator draws its base seed from the main generator
        )

    def _stop(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        self._requests.lost()
        if pipeline is not None:
            pipeline.end()


class _Recipe:
    """How a request becomes a batch; runs in loader processes, or in the main process without them."""

    def __init__(self, batches: MicroBatches, stream: int | str) -> None:
        self._dataset = batches.dataset
        self._collate: Callable[[list[Any]], Any] = batches.collate_fn or default_collate
        self._seed = batches.seed
        self._stream = stream

    def load(self, request: Request) -> Any:
        """Load and collate, each sample and the collate call under its own seed."""
        samples = []
        for sample in request.ids:
            seed_sample(self._seed, request.epoch, sample, self._stream)
            samples.append(self._dataset[sample])
        seed_collate(self._seed, *request.key, self._stream)
        return self._collate(samples)

    def __getitem__(self, request: Request | None) -> tuple[Key, Any] | None:
        """Torch's view: the request is the index. A failure is an answer like any other."""
        if request is None:
            return None
        try:
            return request.key, self.load(request)
        except Exception:
            failure = ExceptionWrapper(where="in a loader process")  # type: ignore[no-untyped-call]
            kind = sys.exc_info()[0]
            if kind is not None and "<locals>" in kind.__qualname__:  # cannot be sent by name
                failure.exc_type = RuntimeError
            return request.key, failure


def _as_it_is(answer: Any) -> Any:
    """No conversion: the user's collate function has made the batch already."""
    return answer


class _Pipeline:
    """A DataLoader's iterator, made to bear that its processes are killed at any moment.

    Torch's own handling of a death can hang or strike elsewhere, so it is replaced:

    - its SIGCHLD handler raises in whatever the main thread is doing, which may be a commit: taken back;
    - the event that tells processes to end has a lock, which a killed process may hold for ever: out of
      reach; processes are ended by SIGKILL;
    - a process killed in the middle of an answer leaves the reader waiting for the rest as long as
      another one holds the pipe: a thread ends all when one dies, and the reader comes to the pipe's end.
    """

    def __init__(self, data_loader: DataLoader[Any]) -> None:
        _make_temp_dir()
        previous = signal.getsignal(signal.SIGCHLD)
        iterator: Any = iter(data_loader)
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        if signal.getsignal(signal.SIGCHLD) is not previous:
            signal.signal(signal.SIGCHLD, previous)
        iterator._workers_done_event = threading.Event()  # looked at in this process only
        self._pins = hasattr(iterator, "_pin_memory_thread")
        if not self._pins:
            iterator._worker_result_queue._writer.close()  # else the pipe would have no end
        self._iterator = iterator
        self.processes: list[Any] = iterator._workers
        self._first_dead: Any = None
        self._watcher = threading.Thread(target=self._watch, name="perdure-loaders", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in self.processes])
        self._first_dead = next(process for process in self.processes if process.sentinel in ended)
        for process in self.processes:
            if process.sentinel not in ended:
                process.kill()

    def next_answer(self) -> tuple[Key, Any] | None:
        """The next answer in the order of the requests; None for an idle one, or if none came for a moment.

        Raises LoaderDiedError if a process died.
        """
        try:
            answer = next(self._iterator)
        except Exception as error:
            late = isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")
            # A dying process closes its connections first: torch may speak of one that was lost.
            self._watcher.join(0 if late else _DEATH_SEEN_S)
            if self._first_dead is not None:
                self._first_dead.join()
                raise LoaderDiedError(
                    f"loader process {self._first_dead.pid} died (exit code {self._first_dead.exitcode}; "
                    "-N: by signal N): its stderr may say why; often memory or shared memory ran out"
                ) from error
            if late:
                return None  # torch is as it was, and can be asked again
            raise
        return None if answer is None else (Key(*answer[0]), answer[1])  # pinning makes tuples lists

    def end(self) -> None:
        """Kill the processes and wait for them."""
        self._iterator._shutdown = True  # its __del__ has nothing left to do
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._watcher.join()
        queues = list(self._iterator._index_queues)
        if self._pins:
            self._iterator._pin_memory_thread_done_event.set()  # it reads the other queue, 5 s at a time
        else:
            queues.append(self._iterator._worker_result_queue)
        for queue in queues:
            queue.cancel_join_thread()
            queue.close()
        _remove_shared_memory(self.processes)


def _make_temp_dir() -> None:
    """Have a directory for the sockets between processes that goes, however this worker ends.

    Without a launcher multiprocessing's own: made in this process it is removed by it, not by a loader.
    """
    scratch = os.environ.get(SCRATCH)
    if scratch is not None:
        with contextlib.suppress(OSError):  # it makes its own then
            os.makedirs(scratch, mode=0o700, exist_ok=True)
            multiprocessing.process.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined]
    multiprocessing.util.get_temp_dir()


def _remove_shared_memory(processes: list[Any]) -> None:
    """Remove what a process that was killed just then had created and not yet unlinked.

    Torch unlinks a segment as soon as it is mapped, so a name that is left belongs to nobody.
    """
    for process in processes:
        for path in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
            path.unlink(missing_ok=True)


def _enter_loader_process(parent_pid: int, _worker_id: int) -> None:
    """First thing in a loader process: leave with the parent, and shed the worker's signal handlers."""
    die_with_parent(parent_pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the worker decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # By default an answer that cannot be pickled is lost with a message, and the worker waits for ever.
    # The hook is the one that concurrent.futures overrides.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_unsendable)  # type: ignore[attr-defined]


def _end_unsendable(error: Exception, _answer: object) -> None:
    traceback.print_exception(error)
    print("perdure: a batch cannot be sent from a loader process: return plain data, or set num_workers=0",
          file=sys.stderr, flush=True)  # fmt: skip
    os._exit(1)
