"""Loading of batches by number: what a worker takes its micro-batches from.

    loader.schedule(step, share, beyond)   what this worker expects to need, in order
    loader.get(step, micro_batch)          exactly that batch, whether expected or not
    loader.forget(step)                    nothing before it will be asked for

With `num_workers` loader processes they are torch's DataLoader workers, forked, fed by an endless
sampler (`_Requests`) and read in order. Torch keeps a fixed number of requests in flight, two per
process: each batch that is read makes room for one request, and the sampler then names the next one:

1. a batch that `get` waits for and that nobody has requested yet — it jumps the queue;
2. else the next batch of the look-ahead, unless as many as fit in flight have come early already;
3. else nothing at all, an idle request, which a loader answers at once with nothing.

So the sampler never ends, and the processes live as long as the loader. What is in flight ahead of a
jump comes early and is kept: at most twice what fits in flight. A batch that came early and is no
longer wanted is dropped when its step is forgotten.

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
import multiprocessing.queues
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch._C import _error_if_any_worker_fails
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from perdure.schema.errors import ProtocolError
from perdure.worker.data import MicroBatches
from perdure.worker.parent import die_with_parent
from perdure.worker.rng import one_thread, seed_collate, seed_sample

_PREFETCH_FACTOR = 2  # requests in flight per loader process; torch's own default
_SKIPPED_MAX = 10_000  # keys of the look-ahead passed over, because known or absent, per request
_CLOSE_GRACE_S = 1.0  # for loader processes that are busy when the loader is closed


class _Key(NamedTuple):
    step: int
    micro_batch: int


class _Request(NamedTuple):
    """All that a loader process has to know: it holds no permutation."""

    key: _Key
    epoch: int
    ids: list[int]


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
        self._requests = _Requests(self._request, depth=_PREFETCH_FACTOR * batches.num_workers)
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
            with _deaths_interrupt():
                self._iterator = iter(self._data_loader())

    def schedule(
        self, step: int, micro_batches: Iterable[int], beyond: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Say what this worker expects to need: `micro_batches` of `step`, then what `beyond` yields.

        `beyond` yields (step, micro_batch) pairs and may be endless: it is read lazily, in this thread,
        as loaders have room. None keeps the earlier one. The rest of the look-ahead is replaced. What is
        here or in flight already is not requested again, an absent micro-batch not at all.
        """
        keys = [_Key(step, micro_batch) for micro_batch in micro_batches]
        self._requests.plan(step, keys, None if beyond is None else (_Key(*pair) for pair in beyond))

    def get(self, step: int, micro_batch: int) -> Any:
        """The batch of micro-batch `micro_batch` of `step`, as `collate_fn` made it.

        The generators are left in any state. Raises what the data set or `collate_fn` raised: from a
        loader process an exception of the same type, with the original traceback as its text; RuntimeError
        if a loader process died; ProtocolError if the micro-batch is absent or the loader closed.
        """
        key = _Key(step, micro_batch)
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
        """Drop what belongs to steps before `before_step`, here and in the look-ahead."""
        self._requests.forget(before_step)

    def close(self) -> None:
        """End the loader processes; one still busy after a second is killed. Closing again is harmless."""
        self._closed = True
        self._stop()

    def _wait_for(self, key: _Key) -> Any:
        self.start()
        requests = self._requests
        found, result = requests.take(key)
        if not found:
            requests.demand(key)
            result = self._receive(key)
        if isinstance(result, ExceptionWrapper):
            result.reraise()  # type: ignore[no-untyped-call]
        return result

    def _receive(self, wanted: _Key) -> Any:
        try:
            with _deaths_interrupt():
                while True:
                    answer = next(self._iterator)
                    if answer is None:
                        continue
                    key, result = _Key(*answer[0]), answer[1]  # pinning turns tuples into lists
                    self._requests.arrived(key)
                    if key == wanted:
                        return result
                    self._requests.keep(key, result)
        except BaseException:
            self._stop()  # what is in flight can no longer be told: a later get starts afresh
            raise

    def _request(self, key: _Key) -> _Request | None:
        epoch, ids = self._batches.sample_ids(key.step, key.micro_batch)
        return _Request(key, epoch, ids) if ids else None

    def _data_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._recipe,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._requests,
            num_workers=self._batches.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            prefetch_factor=_PREFETCH_FACTOR,
            worker_init_fn=functools.partial(_enter_loader_process, os.getpid()),
            # Only fork runs scripts without a main guard, and data sets that cannot be pickled.
            multiprocessing_context="fork",
            generator=torch.Generator(),  # else an iterator draws its base seed from the main generator
        )

    def _stop(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._requests.lost()
        if iterator is None:
            return
        # Torch joins the processes one by one, for 5 s each: too long for one in a slow transform.
        impatience = threading.Timer(_CLOSE_GRACE_S, _kill_all, (iterator._workers,))
        impatience.start()
        try:
            iterator._shutdown_workers()
        finally:
            impatience.cancel()
            impatience.join()


class _Requests:
    """The sampler: decides what to load next, and keeps what came early. No process, no clock."""

    def __init__(self, describe: Callable[[_Key], _Request | None], depth: int) -> None:
        self._describe = describe
        self._depth = depth
        self._demands: deque[_Key] = deque()
        self._planned: deque[_Key] = deque()
        self._beyond: Iterator[_Key] = iter(())
        self._in_flight: set[_Key] = set()
        self._early: dict[_Key, Any] = {}
        self._first_step = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Request | None:
        """The next request, or None to idle (torch would take the end of a sampler for good)."""
        while self._demands:
            request = self._claim(self._demands.popleft())
            if request is not None:
                return request
        if len(self._early) >= self._depth:
            return None
        for _ in range(_SKIPPED_MAX):
            key = self._planned.popleft() if self._planned else next(self._beyond, None)
            if key is None:
                return None
            request = self._claim(key)
            if request is not None:
                return request
        return None

    def _claim(self, key: _Key) -> _Request | None:
        if key.step < self._first_step or key in self._early or key in self._in_flight:
            return None
        request = self._describe(key)
        if request is not None:
            self._in_flight.add(key)
        return request

    def plan(self, step: int, keys: list[_Key], beyond: Iterator[_Key] | None) -> None:
        """Replace the look-ahead; what came early for `step` and is not in it is dropped."""
        wanted = set(keys)
        for key in [key for key in self._early if key.step == step and key not in wanted]:
            del self._early[key]
        self._planned = deque(keys)
        if beyond is not None:
            self._beyond = beyond

    def demand(self, key: _Key) -> None:
        """Load `key` next, unless it is on its way. Raises ProtocolError if it has no samples."""
        if self._describe(key) is None:
            raise ProtocolError(
                f"micro-batch {key.micro_batch} of step {key.step} has no samples, yet was asked for"
            )
        self._first_step = min(self._first_step, key.step)
        if key not in self._in_flight:
            self._demands.append(key)

    def take(self, key: _Key) -> tuple[bool, Any]:
        """(True, the batch) if it came early; it is then no longer here."""
        if key in self._early:
            return True, self._early.pop(key)
        return False, None

    def arrived(self, key: _Key) -> None:
        """A batch was read: it is no longer in flight."""
        self._in_flight.discard(key)

    def keep(self, key: _Key, result: Any) -> None:
        """Keep a batch that came early, unless its step is over."""
        if key.step >= self._first_step:
            self._early[key] = result

    def forget(self, before_step: int) -> None:
        """Drop all that belongs to earlier steps."""
        self._first_step = before_step
        for key in [key for key in self._early if key.step < before_step]:
            del self._early[key]

    def lost(self) -> None:
        """The loader processes are gone, and what was in flight with them."""
        self._planned.extendleft(sorted(self._in_flight, reverse=True))
        self._in_flight.clear()
        self._demands.clear()


class _Recipe:
    """How a request becomes a batch; runs in loader processes, or in the main process without them."""

    def __init__(self, batches: MicroBatches, stream: int | str) -> None:
        self._dataset = batches.dataset
        self._collate: Callable[[list[Any]], Any] = batches.collate_fn or default_collate
        self._seed = batches.seed
        self._stream = stream

    def load(self, request: _Request) -> Any:
        """Load and collate, each sample and the collate call under its own seed."""
        samples = []
        for sample in request.ids:
            seed_sample(self._seed, request.epoch, sample, self._stream)
            samples.append(self._dataset[sample])
        seed_collate(self._seed, *request.key, self._stream)
        return self._collate(samples)

    def __getitem__(self, request: _Request | None) -> tuple[_Key, Any] | None:
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
def _deaths_interrupt() -> Iterator[None]:
    """Meanwhile a loader process's death raises here at once, also one that has happened before.

    Torch installs a SIGCHLD handler that raises in whatever the main thread is doing, which may be a
    commit. Here it is in force only while a batch is waited for. In other threads signals do not arrive,
    and torch's own check, every 5 s, finds the death.
    """
    previous = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return

    def raise_if_dead(signum: int, frame: FrameType | None) -> None:
        _error_if_any_worker_fails()
        if callable(previous):
            previous(signum, frame)

    signal.signal(signal.SIGCHLD, raise_if_dead)
    try:
        _error_if_any_worker_fails()
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)
