"""Hits a worker exactly at a named moment, from inside: the test's hand in the worker process.

The runtime has no hooks for this. `install` wraps its well-named methods in this one process, so that the
thread that comes to a moment first asks `Traps.at` whether a fault is meant for it. What the runtime does
otherwise stays as it is, but for its small pieces: tiny models still have several buckets, several shards
and several chunks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from perdure.chaos.faults import Fault, Manner, Moment
from perdure.schema import messages as msg
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Hold, PeerMessage
from perdure.state import checkpoint
from perdure.state.shelf import TENSORS
from perdure.state.transfer import Donor, Receiver, Session
from perdure.worker import api, boot, heal, runtime, training
from perdure.worker.fold import Fold
from perdure.worker.gradients import Buckets
from perdure.worker.groups import Groups
from perdure.worker.loader import Loader
from perdure.worker.reduce import RESULT, Attempt, Reducer, tell_all
from perdure.worker.runtime import Runtime
from scenario import Scenario, Strike, strikes
from tasks import Parts, Task

BUCKET_BYTES = 16 << 10
CHUNK_BYTES = 8 << 10
GATE_S = 30.0


class Traps:
    """The faults of a scenario, as one worker process meets them. Any thread may call `at`."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self._scenario = scenario
        self._directory = directory
        (directory / f"worker-{_me()}.pid").write_text(str(os.getpid()))
        self._spent: set[str] = set()
        self._comings: Counter[str] = Counter()

    def wants(self, moment: Moment) -> bool:
        """Whether some fault of that moment has not struck yet, as far as is known here."""
        return any(
            fault.moment is moment and fault.name not in self._spent for fault in self._scenario.faults
        )

    def at(self, moment: Moment, step: int | None) -> None:
        """The calling thread has come to `moment` in `step`: a fault that fits strikes here and now."""
        for fault in self._scenario.faults:
            if fault.moment is moment and self._due(fault, step) and self._claim(fault):
                self._strike(fault, step)
                return

    @property
    def runtime(self) -> Runtime | None:
        """The worker's runtime; None before its first step."""
        return api._joined._runtime if api._joined is not None else None

    @property
    def step(self) -> int | None:
        """The step in progress; None before the first plan."""
        now = self.runtime
        return now.member.committed + 1 if now is not None and now.plan is not None else None

    @property
    def _rank(self) -> int | None:
        now = self.runtime
        plan = now.plan if now is not None else None
        return plan.ranks.index(_me()) if plan is not None and _me() in plan.ranks else None

    def _due(self, fault: Fault, step: int | None) -> bool:
        if fault.name in self._spent:
            return False
        if fault.after and not (self._directory / f"{fault.after}.fired").exists():
            return False
        if not fault.target.fits(step, self._rank, _me()):
            return False
        self._comings[fault.name] += 1
        return self._comings[fault.name] >= fault.nth

    def _claim(self, fault: Fault) -> bool:
        """Whether this process is the one that the fault strikes."""
        try:
            (self._directory / f"{fault.name}.claimed").touch(exist_ok=False)
        except FileExistsError:
            return False
        finally:
            self._spent.add(fault.name)
        return True

    def _strike(self, fault: Fault, step: int | None) -> None:
        strike = Strike(
            name=fault.name,
            manner=fault.manner,
            pid=os.getpid(),
            worker=_me(),
            step=step,
            rank=self._rank,
            thread=threading.current_thread().name,
        )
        strike.note(self._directory)
        self._strike_others(fault, strike)
        match fault.manner:
            case Manner.EXIT:
                os._exit(3)
            case Manner.RAISE:
                # A type of its own: the same one twice without a commit between is the user's error (G7).
                raise type(f"Raised{len(fault.name)}{fault.name.title()}", (RuntimeError,), {})(fault.name)
            case Manner.SEGV:
                ctypes.string_at(0)
            case Manner.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Manner.TERM:
                os.kill(os.getpid(), signal.SIGTERM)
                if fault.moment is not Moment.START_UP:
                    return
            case Manner.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
        threading.Event().wait()  # the signal is on its way: nothing more is done here

    def _strike_others(self, fault: Fault, own: Strike) -> None:
        """Kill those that are to die in the same instant: with a donor donors, with a joiner joiners."""
        now = self.runtime
        plan = now.plan if now is not None else None
        if not fault.also or plan is None or own.rank is None:
            return
        struck = {strike.worker for strike in strikes(self._directory).values()}
        turned = (*plan.ranks[own.rank :], *plan.ranks[: own.rank])
        alike = {
            Moment.DONOR: lambda worker: worker not in plan.joiners,
            Moment.JOINER: lambda worker: worker in plan.joiners,
        }.get(fault.moment, lambda _: True)
        others = [worker for worker in turned if alike(worker) and worker not in struck]
        for number, worker in enumerate(others[: fault.also], 1):
            pid = int((self._directory / f"worker-{worker}.pid").read_text())
            name = f"{fault.name}, with it {number}"
            strike = msgspec.structs.replace(own, name=name, manner=Manner.KILL, pid=pid, worker=worker)
            strike.note(self._directory)
            os.kill(pid, signal.SIGKILL)

    def gate(self) -> None:
        """In a commit: wait until everybody is at work, or will be after the next step."""
        now = self.runtime
        if not self._scenario.whole or now is None:
            return
        with now.changed:
            now.changed.wait_for(lambda: self._full(now), GATE_S)

    def _full(self, now: Runtime) -> bool:
        member, plan = now.member, now.member.plan
        if plan is None or member.sealed > plan.generation:
            return True  # somebody was lost in the next step already: its own commit is the place to wait
        offered = member.prepared
        ranks = offered.ranks if offered is not None and offered.generation in member.formed else plan.ranks
        gone = {strike.worker for strike in strikes(self._directory).values()}
        return len(ranks) == self._scenario.members and not gone.intersection(ranks)

    def around(self, task: Task, steps: int) -> Task:
        """The task with the moments of the user's own code trapped."""

        def build(seed: int) -> Parts:
            parts = task.build(seed)
            module = next(thing for thing in parts.protected.values() if isinstance(thing, nn.Module))
            optimizer = next(
                thing for thing in parts.protected.values() if isinstance(thing, torch.optim.Optimizer)
            )
            *_, inner, _ = (module, module, *module.children())  # the last but one, if it has as many
            inner.register_forward_hook(lambda *args: self._in_forward(args[2], steps))
            optimizer.register_step_post_hook(lambda *_: self.at(Moment.OPTIMIZER, self.step))

            def commit() -> None:
                parts.commit()
                self.gate()

            return dataclasses.replace(parts, commit=commit)

        return dataclasses.replace(task, build=build)

    def _in_forward(self, output: torch.Tensor, steps: int) -> None:
        self.at(Moment.FORWARD, self.step)
        if self.step == steps - 1:
            self.at(Moment.LAST_STEP, self.step)
        if output.requires_grad:
            output.register_hook(lambda _: self.at(Moment.BACKWARD, self.step))


def _me() -> WorkerId:
    assert boot.CONTEXT is not None, "faults are for workers of a launcher"
    return boot.CONTEXT.worker


def install(traps: Traps) -> None:
    """Wrap the runtime's methods in this process."""
    _small_pieces()
    _main_thread(traps)
    _reduction(traps)
    _healing(traps)
    _before(Groups, "form", lambda *_: None if traps.step is not None else traps.at(Moment.FIRST_GROUP, None))

    _recovery(traps)


def _before(owner: Any, name: str, trap: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        trap(*args, **keywords)
        return original(*args, **keywords)

    setattr(owner, name, wrapped)


def _small_pieces() -> None:
    training.Buckets = functools.partial(Buckets, bucket_bytes=BUCKET_BYTES, first_bytes=BUCKET_BYTES // 4)  # type: ignore[assignment,misc]
    training.Donor = functools.partial(Donor, chunk_bytes=CHUNK_BYTES)  # type: ignore[assignment,misc]
    heal.Receiver = functools.partial(Receiver, chunk_bytes=CHUNK_BYTES)  # type: ignore[assignment,misc]


def _main_thread(traps: Traps) -> None:
    _before(Loader, "get", lambda _, step, *__: traps.at(Moment.DATA_FETCH, step))
    _before(api.Job, "_checkpoint", lambda _, now: traps.at(Moment.BETWEEN, now.member.committed))
    _before(api.Job, "_finish", lambda _, now: traps.at(Moment.AFTER_LAST, now.member.committed))

    def wait_for(now: Runtime, *_: Any) -> None:
        if now.member._final:  # it has said that it is done, and waits to be released
            traps.at(Moment.AFTER_LAST, now.member.committed)

    _before(Runtime, "wait_for", wait_for)
    write = checkpoint.write

    def write_trapped(snapshot: Any, directory: Path, meta: Any) -> Any:
        def stage(name: str) -> None:
            if name == f"{TENSORS} written":
                traps.at(Moment.CHECKPOINT, meta.step)

        return write(snapshot, directory, meta, stage)

    checkpoint.write = write_trapped  # type: ignore[assignment]


def _reduction(traps: Traps) -> None:
    early, on_thread = Reducer.early, Reducer._on_thread
    under_backward = threading.local()

    def early_trapped(*args: Any) -> None:
        under_backward.now = True
        try:
            early(*args)
        finally:
            under_backward.now = False

    def on_thread_trapped(reducer: Reducer, attempt: Attempt, call: Callable[[], None]) -> None:
        if not getattr(under_backward, "now", False):
            on_thread(reducer, attempt, call)
            return

        def trapped() -> None:
            traps.at(Moment.REDUCE, attempt.step)
            call()

        on_thread(reducer, attempt, trapped)

    Reducer.early, Reducer._on_thread = early_trapped, on_thread_trapped  # type: ignore[method-assign]
    _before(Fold, "finish", lambda *_: traps.at(Moment.FOLD, traps.step))
    Reducer._post = _gather(traps)  # type: ignore[method-assign]

    def tell_all_trapped(transport: Any, me: WorkerId, ranks: Sequence[WorkerId], body: PeerMessage) -> None:
        if not isinstance(body, Hold):
            tell_all(transport, me, ranks, body)
            return
        others = [worker for worker in ranks if worker != me]
        tell_all(transport, me, others[:1], body)
        _flush(transport)  # one peer may commit on it, the others may not
        traps.at(Moment.LEAVING, body.step)
        tell_all(transport, me, others[1:], body)

    runtime.tell_all = tell_all_trapped


def _gather(traps: Traps) -> Callable[..., None]:
    """A worker comes to it before its second finished piece goes out, and before its last.

    The last one waits until every member has sent its header: the others then have all that they need, but
    one. What waits is the piece, not the transport's thread, on which the headers come in.
    """
    post = Reducer._post
    posted: Counter[int] = Counter()

    def post_last(reducer: Reducer, attempt: Attempt, *payload: Any) -> None:
        headers = set(reducer._member.round.headers)
        if reducer._attempt is attempt and not headers >= set(attempt.exchange.ranks):
            attempt.transport.submit(lambda: post_last(reducer, attempt, *payload))  # type: ignore[union-attr]
            return
        _flush(attempt.transport)
        traps.at(Moment.GATHER, attempt.step)
        post(reducer, attempt, *payload)

    def post_trapped(reducer: Reducer, attempt: Attempt, *payload: Any) -> None:
        if payload[1].kind == RESULT and traps.wants(Moment.GATHER):
            posted[id(attempt)] += 1
            folds = sum(fold is not None for fold in attempt.folds)
            if posted[id(attempt)] == folds * (len(attempt.exchange.ranks) - 1):
                post_last(reducer, attempt, *payload)
                return
            if posted[id(attempt)] == 2:
                _flush(attempt.transport)  # one peer has a finished piece, the others have not
                traps.at(Moment.GATHER, attempt.step)
        post(reducer, attempt, *payload)

    return post_trapped


def _recovery(traps: Traps) -> None:
    """A survivor comes to it when it is sealed, when the plan arrives, and when its new group is formed."""

    def on_message(now: Runtime, message: msg.CoordinatorMessage) -> None:
        if isinstance(message, msg.Seal | msg.Open) and now.plan is not None:
            traps.at(Moment.RECOVERY, now.member.committed + 1)

    def group_formed(now: Runtime, generation: Generation) -> None:
        if generation == now.member.sealed:
            traps.at(Moment.RECOVERY, now.member.committed + 1)

    _before(Runtime, "on_message", on_message)
    _before(Runtime, "group_formed", group_formed)


def _flush(transport: Any) -> None:
    for peer in list(transport._peers.values()):
        transport._flush(peer)


def _healing(traps: Traps) -> None:
    if traps.wants(Moment.DONOR):
        # Through the socket: a donor whose memory is read takes no part in it that could be caught.
        heal.Patient._read_from = lambda *_: True  # type: ignore[method-assign]
    served: Counter[int] = Counter()

    def read_views(donor: Donor, session: Session, _: int) -> None:
        served[id(donor)] += 1
        if served[id(donor)] > 1:
            traps.at(Moment.DONOR, session.step)

    _before(Donor, "read_views", read_views)
    _before(Receiver, "landed", lambda _, session, __: traps.at(Moment.JOINER, session.step))
