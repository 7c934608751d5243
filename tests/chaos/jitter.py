"""Threads that are late: what the scheduler does once in a thousand runs on a busy machine happens often.

`install` lets the threads of a worker process sleep for a moment, now and then, where they hand something
over to one another: before and after the runtime's lock, and before what was submitted to the thread of a
group. An interpreter that switches threads often does the rest.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from perdure.worker import runtime
from perdure.worker.groups import Groups
from perdure.worker.mesh import Mesh

LONGEST_S = 0.03
SWITCH_S = 2e-4


class Late:
    """Sleeps, with some probability, for at most `LONGEST_S`."""

    def __init__(self, probability: float) -> None:
        self._probability = probability
        self._random = random.Random(os.getpid())

    def __call__(self) -> None:
        if self._random.random() < self._probability:
            delay_s = LONGEST_S * self._random.random() ** 3
            time.sleep(delay_s)  # the delay is what is tested; nothing waits by it

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, late."""

        @functools.wraps(call)
        def late(*args: Any, **keywords: Any) -> Any:
            self()
            return call(*args, **keywords)

        return late


class LateLock:
    """A `threading.RLock` that is had late and let go early."""

    def __init__(self, late: Late) -> None:
        self._lock: Any = threading.RLock()
        self._late = late
        # What threading.Condition asks of its lock.
        self._is_owned = self._lock._is_owned
        self._release_save = self._lock._release_save
        self._acquire_restore = self._lock._acquire_restore

    def acquire(self, *args: Any, **keywords: Any) -> bool:
        self._late()
        return bool(self._lock.acquire(*args, **keywords))

    def release(self) -> None:
        self._lock.release()
        self._late()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def install(probability: float) -> None:
    """Make the threads of this worker process late, before its runtime is made."""
    sys.setswitchinterval(SWITCH_S)
    late = Late(probability)
    late_threading = types.SimpleNamespace(**vars(threading))
    late_threading.RLock = lambda: LateLock(late)
    runtime.threading = late_threading  # type: ignore[assignment]
    submit, close = Mesh.submit, Groups._close
    Mesh.submit = lambda mesh, call: submit(mesh, late.before(call))  # type: ignore[method-assign]
    Groups._close = late.before(close)  # type: ignore[method-assign]
