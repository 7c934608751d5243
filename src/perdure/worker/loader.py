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
that batch alone. A loader process that dies raises RuntimeError in the `get` that waits, or in the next;
a later `get` starts new processes. A batch that cannot be sent between processes ends its loader process,
which says why on stderr. Loader processes die with their parent.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch._C import _remove_worker_pids
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from perdure.schema.errors import ProtocolError
from perdure.worker.data import MicroBatches
from perdure.worker.look_ahead import Key, LookAhead, Request
from perdure.worker.parent import die_with_parent
from perdure.worker.rng import one_thread, seed_collate, seed_sample

_PREFETCH_FACTOR = 2  # requests in flight per loader process; torch's own default
_LOOK_S = 0.25  # between two looks at the loader processes, while one batch is waited for
_DEATH_SEEN_S = 1.0  # from a broken connection to the death that broke it
_CLOSE_GRACE_S = 1.0  # for loader processes that are busy when the loader is closed


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
        self._iterator: Any = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Fork the loader processes now, if there are to be any and they do not run yet."""
        if self._closed:
            raise ProtocolError("the loader is closed")
        if self._iterator is None and self._batches.num_workers > 0:
            self._iterator = _start_iterator(self._data_loader())

    @property
    def pids(self) -> list[int]:
        """The loader processes that have been started."""
        return [] if self._iterator is None else [process.pid for process in self._iterator._workers]

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
        loader process an exception of the same type, with the original traceback as its text; RuntimeError
        if a loader process died; ProtocolError if the micro-batch is absent or the loader closed.
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
        self._stop()

    def _wait_for(self, key: Key) -> Any:
        self.start()
        requests = self._requests
        found, result = requests.take(key)
        if not found:
            requests.demand(key)
            result = self._receive(key)
        if isinstance(result, ExceptionWrapper):
            result.reraise()  # type: ignore[no-untyped-call]
        return result

    def _receive(self, wanted: Key) -> Any:
        processes = self._iterator._workers
        try:
            with _deaths_interrupt(processes):
                while True:
                    answer = self._next_answer()
                    if answer is None:
                        continue
                    key, result = Key(*answer[0]), answer[1]  # pinning turns tuples into lists
                    self._requests.arrived(key)
                    if key == wanted:
                        return result
                    self._requests.keep(key, result)
        except Exception:
            try:  # torch says less about a death, or speaks of a connection that was lost with it
                _await_death(processes)
                _check_alive(processes)
            finally:
                self._stop()
            raise
        except BaseException:
            self._stop()  # what is in flight can no longer be told: a later get starts afresh
            raise

    def _next_answer(self) -> Any:
        while True:
            try:
                return next(self._iterator)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                _check_alive(self._iterator._workers)  # torch is as it was: ask again

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
        iterator, self._iterator = self._iterator, None
        self._requests.lost()
        if iterator is not None:
            _end_iterator(iterator)


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


def _start_iterator(data_loader: DataLoader[Any]) -> Any:
    """Fork the loader processes, without what torch does to the whole process meanwhile.

    Torch installs a SIGCHLD handler that raises in whatever the main thread is doing when a loader
    process dies, which may be a commit. Here only `_deaths_interrupt` raises.
    """
    multiprocessing.util.get_temp_dir()  # made here it is removed here, however a loader process ends
    previous = signal.getsignal(signal.SIGCHLD)
    iterator: Any = iter(data_loader)
    _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    if signal.getsignal(signal.SIGCHLD) is not previous:
        signal.signal(signal.SIGCHLD, previous)
    return iterator


def _end_iterator(iterator: Any) -> None:
    """End an iterator's loader processes: by asking, if all can still answer.

    Torch joins the processes one by one, for 5 s each: too long for one in a slow transform, hence the
    timer. And it sets an event whose lock a process that was killed may hold for ever: then, and
    whenever one is dead, the rest is killed and torch's own ending is left out.
    """
    processes = iterator._workers
    if all(process.is_alive() for process in processes):
        impatience = threading.Timer(_CLOSE_GRACE_S, _kill_all, (processes,))
        impatience.start()
        try:
            iterator._shutdown_workers()
        finally:
            impatience.cancel()
            impatience.join()
        _remove_shared_memory(processes)
        return
    iterator._shutdown = True  # its __del__ has nothing left to do
    _kill_all(processes)
    for process in processes:
        process.join()
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()  # it looks every 5 s
    for queue in (*iterator._index_queues, iterator._worker_result_queue):
        queue.cancel_join_thread()
        queue.close()
    _remove_shared_memory(processes)


def _remove_shared_memory(processes: list[Any]) -> None:
    """Remove what a process that was killed just then had created and not yet unlinked.

    Torch unlinks a segment as soon as it is mapped, so a name that is left belongs to nobody.
    """
    for process in processes:
        for path in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
            path.unlink(missing_ok=True)


def _kill_all(processes: list[Any]) -> None:
    for process in processes:
        process.kill()


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


@contextmanager
def _deaths_interrupt(processes: list[Any]) -> Iterator[None]:
    """Meanwhile the death of one of these processes raises here at once, also if it died before.

    A signal that comes just before a wait does not end the wait, and other threads than the main one
    get none: the loader also looks every `_LOOK_S`. But only a signal ends the reading of an answer that
    was cut in the middle.
    """
    _check_alive(processes)
    previous = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return

    def child_ended(signum: int, frame: FrameType | None) -> None:
        if callable(previous):
            previous(signum, frame)
        _check_alive(processes)

    signal.signal(signal.SIGCHLD, child_ended)
    try:
        _check_alive(processes)  # one may have died before the handler was there
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)


def _await_death(processes: list[Any]) -> None:
    """After a failure: wait until a death that may have caused it can be seen.

    A dying process closes its connections, then its sentinel, and can be waited for a moment later.
    """
    ended = multiprocessing.connection.wait([process.sentinel for process in processes], _DEATH_SEEN_S)
    for process in processes:
        if process.sentinel in ended:
            process.join(_DEATH_SEEN_S)


def _check_alive(processes: list[Any]) -> None:
    for process in processes:
        if not process.is_alive():
            raise RuntimeError(
                f"loader process {process.pid} died (exit code {process.exitcode}; -N: by signal N): "
                "its own stderr may say why; often it is out of memory or of shared memory"
            )
