"""The user's side: `join`, `Job`.

    job = perdure.join(seed=0)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(batches, until=1000):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        optimizer.step(); optimizer.zero_grad()

What a turn of `job.steps` does:

1. The step before is committed; a checkpoint is copied if one was asked for.
2. The worker waits if its generation is sealed, takes state if it is a joiner, or leaves the loop.
3. The step is yielded; iterating it computes this worker's share and ends with the global `.grad`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from perdure.core import assignment
from perdure.core.member import Do, Member
from perdure.schema import messages as msg
from perdure.schema.errors import RestoreError, UsageError
from perdure.schema.plan import Position, Record, Shape
from perdure.schema.progress import Phase
from perdure.state import checkpoint
from perdure.state.keepers import keeper_for
from perdure.worker import boot, defect, determinism
from perdure.worker.alone import GENERATION, ME, Alone
from perdure.worker.data import MicroBatches
from perdure.worker.groups import Groups
from perdure.worker.heal import Desk, Patient
from perdure.worker.link import Link
from perdure.worker.listener import Listener
from perdure.worker.loader import Loader
from perdure.worker.loop import Loop
from perdure.worker.progress import ProgressPage
from perdure.worker.rng import fix_threads, generators_kept, seed_evaluation, seed_everything
from perdure.worker.runtime import Runtime
from perdure.worker.saver import Saver
from perdure.worker.step import Step, is_text
from perdure.worker.taking_part import take_part
from perdure.worker.training import Training
from perdure.worker.unwinding import leaver, unwinding

EVALUATION_LOADERS_MAX = 4
"""A script may make its MicroBatches anew for every evaluation; not all their processes are kept."""

NAMED = (
    "the script left job.steps, but something still has a name for its iterator (a generator around it, or "
    "what iter() gave): the last step ends with the script, and the saved state has what came after the "
    "loop; let the loop make that iterator itself"
)

_joined: Job | None = None


def join(seed: int = 0, exact: bool = True) -> Job:
    """Become a worker of the job that `perdure run` started, or a job of one when run alone.

    Args:
        seed: seeds Python's, numpy's and torch's generators alike in every worker, and everything that is
            drawn later: data order, dropout, transforms.
        exact: with False, bits may depend on who computed what while workers are missing, which saves the
            memory of their separate gradients.

    Raises:
        UsageError: join was called twice, or the seed is not an integer.
    """
    global _joined
    if _joined is not None:
        raise UsageError("perdure.join was called twice: keep the job that the first call returned")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"perdure.join: seed={seed!r}; expected an integer")
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is for nested ones
    fix_threads(int(outermost) if outermost.isdecimal() and int(outermost) else 1)
    _joined = Job(seed, exact)
    seed_everything(seed, "join")
    return _joined


class Job:
    """One training job, seen from one of its workers. Made by `join`."""

    def __init__(self, seed: int, exact: bool) -> None:
        self.seed = seed
        self.exact = exact
        self._context = boot.CONTEXT
        self._objects: dict[str, object] = {}
        self._runtime: Runtime | None = None
        self._step: Step | None = None
        self._started = False
        self._loaders: dict[int, Loader] = {}
        self._saver: Saver | None = None
        self._patient: Patient | None = None
        self._desk: Desk | None = None
        self._until = 0
        self._batches: MicroBatches | None = None
        self._loop: Callable[[], Generator[Step] | None] = lambda: None
        self._welcome = msg.Welcome(job="alone", blocks=1)
        self._alone: Alone | None = None
        if self._context is None:
            self._alone = Alone()
            self._send: Callable[[msg.WorkerMessage], None] = self._alone.send
        else:
            self._welcomed = threading.Event()
            link = Link(self._context, self._on_message)
            self._send = link.send
            lifeline = link.start()
            link.leave_on_sigterm()
            self._send(msg.Joined(lifeline))
            self._welcomed.wait()

    # ── what the script sees ────────────────────────────────────────────────────────────────────────

    @property
    def device(self) -> torch.device:
        """Where this worker computes: a CUDA device of its own if there are any, else the CPU."""
        if torch.cuda.is_available():
            worker = self._context.worker if self._context is not None else 0
            return torch.device("cuda", worker % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def leader(self) -> bool:
        """Whether this worker is the one for things to be done once; the role may move."""
        plan = self._runtime.plan if self._runtime is not None else None
        if plan is None:
            return self._context is None
        return bool(plan.ranks) and plan.ranks[0] == self._runtime.member.worker if self._runtime else False

    def protect(self, **objects: object) -> None:
        """Name the state that must survive: modules, optimizers, schedulers, scalers, generators, …

        Raises:
            ProtectError: an object cannot be kept exact; the message says what to do instead.
        """
        if self._started:
            raise UsageError("job.protect after job.steps began: protect everything before the loop")
        twice = sorted(set(objects) & set(self._objects))
        if twice:
            raise UsageError(f"job.protect: {twice[0]} is protected already; use another name")
        for name, thing in objects.items():
            keeper_for(name, thing)  # refuses what it knows no way to keep
        self._objects.update(objects)

    def steps(self, batches: MicroBatches, until: int) -> Iterator[Step]:
        """Yield the steps that are still to be done, up to step `until`−1.

        Raises:
            UsageError: called twice, nothing protected, or wrong arguments.
        """
        if self._started:
            raise UsageError("job.steps was called twice: a job is one loop")
        if not self._objects:
            raise UsageError("job.steps before job.protect: name the model and the optimizer first")
        if not isinstance(batches, MicroBatches):
            raise UsageError(f"job.steps: expected a perdure.MicroBatches, got {type(batches).__name__}")
        if isinstance(until, bool) or not isinstance(until, int) or until < 0:
            raise UsageError(f"job.steps: until={until!r}; expected a number of steps ≥ 0")
        self._started = True
        self._until = until
        self._batches = batches
        steps = self._steps(batches)
        self._loop = weakref.ref(steps)
        return Loop(steps)

    def evaluate(self, fn: Callable[[Any], Any], batches: MicroBatches) -> dict[str, float]:
        """Deal the batches of one epoch out to the workers, without gradients; the means, in their order.

        Call it between a step's loop and the next turn of `job.steps`, on all workers alike. It leaves the
        random generators, the modules' buffers and their modes as they were.

        Args:
            fn: maps a batch to a dict of numbers, or to (dict, weight); the same names for all batches.
            batches: what to evaluate.

        Raises:
            UsageError: it is called elsewhere, or `fn` returned something else.
        """
        runtime, step = self._in_commit("job.evaluate")
        if not isinstance(batches, MicroBatches):
            raise UsageError(f"job.evaluate: expected a perdure.MicroBatches, got {type(batches).__name__}")
        if batches is self._batches:
            raise UsageError(
                "job.evaluate: these MicroBatches are the ones of job.steps; make another MicroBatches for "
                "the evaluation, of the same data set if that is meant"
            )
        batches.bind(self.seed, 1)
        loader = self._evaluation_loader(batches)
        items = [(s, m) for s in range(batches.steps_per_epoch) for m in batches.micro_batches(s)]
        index, step.evaluations = step.evaluations, step.evaluations + 1

        def compute(item: int) -> tuple[dict[str, float], float]:
            batch = loader.get(*items[item])
            seed_evaluation(self.seed, step.index, index, item)
            with torch.no_grad(), runtime.training.buffers.spared():
                return _values(fn(batch))

        with generators_kept(), runtime.training.modes_kept():
            answer = take_part(runtime, step.index, index, len(items), compute)
        return _means(answer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the protected state to `path`, a checkpoint directory: atomic, fenced, once for all workers.

        An earlier checkpoint at `path` is replaced, anything else that is there is refused.

        Raises:
            UsageError: it could not be written; the message says why.
        """
        runtime, step = self._in_commit("job.save")
        index, step.evaluations = step.evaluations, step.evaluations + 1
        target = Path(os.path.abspath(path))
        if not target.name:
            raise UsageError(f"job.save: {target} is no place for a checkpoint; give a new directory in it")

        def write(_: int) -> tuple[dict[str, float], float]:
            assert self._saver is not None
            failed = self._saver.save_to(step.index, index, target)
            return ({failed: 1.0} if failed else {}), 1.0

        # The one value of the task, if there is one, is named by what went wrong: so all workers know it.
        (failed,) = take_part(runtime, step.index, index, 1, write).values
        if failed:
            raise UsageError(f"job.save: {target} could not be written: {next(iter(failed))}")

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────

    def _steps(self, batches: MicroBatches) -> Generator[Step]:
        batches.bind(self.seed, self._welcome.blocks)
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(Loader(batches))
            loader.start()
            runtime = self._start(batches)
            stack.callback(self._close_loaders)
            if self._alone is not None:
                stack.callback(_forget_job)
            while self._at_boundary(runtime, loader):
                step = self._step = Step(runtime, loader, batches, self.seed)
                try:
                    yield step
                except GeneratorExit:
                    if self._broken_off(runtime, step):
                        self._step = None
                    elif self._context is not None:
                        stack.pop_all()  # an error must not be told late; loaders end with the process
                    return
                if not step.complete:
                    raise UsageError(_left_early(step))
                self._commit(runtime, step)
                self._step = None
            self._finish(runtime)

    def _start(self, batches: MicroBatches) -> Runtime:
        """Make the runtime, say that the first step is reached."""
        training = Training(self._objects, self._welcome.digest_every, self.exact)
        shape = Shape(
            per_step=batches.per_step,
            blocks=batches.blocks,
            until=self._until,
            buckets=training.bucket_sizes,
            signature=training.signature(),
            state_bytes=training.state.total_bytes,
            first_block_whole=training.whole_first_block,
            exact=self.exact,
            epoch_steps=batches.steps_per_epoch,
            last_in_epoch=_short_end(batches),
        )
        context = self._context
        member = Member(context.worker if context is not None else ME, shape)
        page = context.progress if context is not None else ProgressPage()
        runtime = Runtime(member, training, self._send, page)
        runtime.log_samples = self._welcome.log_samples
        bits = {"exact": int(self.exact), "threads (OMP_NUM_THREADS)": torch.get_num_threads()}
        self._saver = Saver(runtime, self.seed, batches.described | bits)
        warning = determinism.warning(parameter.device for parameter in training.leaves.parameters)
        if context is None:
            assert self._alone is not None
            if warning:
                print(f"perdure: {warning}", file=sys.stderr)
            self._alone.deliver = runtime.on_message
            member.sealed = GENERATION
            self._runtime = runtime
            with runtime.lock:
                runtime.perform(member.open(self._alone.plan(shape)))
            return runtime
        self._desk = Desk(runtime)
        listener = Listener(
            context.host, context.data_key, context.worker, self._desk.on_heal, self._on_stranger
        )
        runtime.groups = Groups(context.worker, listener, runtime.ear)
        self._patient = Patient(runtime, context.data_key)
        self._runtime = runtime
        context.unconfirmed = runtime.unconfirmed
        context.in_step = lambda: self._step is not None
        context.script_ended = self._script_ended
        position = Position(worker=context.worker)
        self._send(msg.Ready(listener.host, listener.port, shape, position, warning))
        return runtime

    def _at_boundary(self, runtime: Runtime, loader: Loader) -> bool:
        """Between two steps: restore, heal, wait for a plan; false at the loop's end."""
        member = runtime.member
        while True:
            runtime.wait_for(
                lambda: runtime.inbox.restore is not None or self._knows(runtime) or self._can_prepare()
            )
            with runtime.lock:
                restore, runtime.inbox.restore = runtime.inbox.restore, None
                now, plan = member.next(), member.plan
            if restore is not None:
                self._restore(runtime, restore)
            elif self._patient is not None and self._can_prepare() and not self._knows(runtime):
                self._patient.prepare(hurry=lambda: self._knows(runtime))
            elif runtime.inbox.release is not None and not (member.ended or member.left):
                raise SystemExit(runtime.inbox.release.exit_code)
            elif now.do is Do.HEAL:
                assert plan is not None
                assert self._patient is not None
                runtime.page.write(Phase.HEAL, member.committed + 1, -1, 0)
                self._patient.heal(plan, member.committed)
            elif now.do is Do.END:
                return False
            else:
                self._look_ahead(runtime, loader)
                return True

    def _can_prepare(self) -> bool:
        return self._patient is not None and self._patient.can_prepare()

    def _knows(self, runtime: Runtime) -> bool:
        """Whether the main thread has something to do at a boundary."""
        member = runtime.member
        if runtime.inbox.release is not None or member.ended or member.left:
            return True
        return member.plan is not None and member.sealed <= member.plan.generation

    def _look_ahead(self, runtime: Runtime, loader: Loader) -> None:
        member = runtime.member
        with runtime.lock:
            plan, queue = member.plan, tuple(member.work.queue)
        step = member.committed + 1
        assert plan is not None
        home, ranks = plan.home, plan.ranks

        def beyond() -> Iterator[tuple[int, int]]:
            for later in range(step + 1, self._until):
                shares, _ = assignment.nominal(member.shape, later, home, ranks)
                for micro_batch in shares.get(member.worker, ()):
                    yield later, micro_batch

        loader.schedule(step, queue, beyond())
        loader.forget(step)

    def _restore(self, runtime: Runtime, restore: msg.Restore) -> None:
        refused: list[tuple[str, str]] = []
        for path in restore.paths:
            try:
                meta = checkpoint.restore(runtime.training.state, Path(path))
            except RestoreError as error:
                refused.append((path, str(error).removeprefix(f"checkpoint {path}: ")))
                continue
            runtime.training.restored()
            with runtime.lock:
                runtime.member.committed = meta.step
                runtime.member.digest = meta.digest
                if 0 <= restore.left_after <= meta.step:
                    runtime.perform(runtime.member.stop_here())
            assert self._saver is not None
            differs = self._saver.difference(meta)
            self._send(msg.Restored(meta.step, meta.digest, path, tuple(refused), differs))
            return
        self._send(msg.Restored(-1, "", "", tuple(refused)))

    def _commit(self, runtime: Runtime, step: Step) -> None:
        plan = runtime.plan
        assert plan is not None
        record = Record(
            step=step.index,
            loss=step.loss,
            digest="",
            time=time.time(),
            workers=len(plan.ranks),
            logged=step.logged,
            samples=runtime.summed,
        )
        step.over = True
        if self._desk is not None:
            self._desk.forget()
        runtime.training.buffers.check(in_commit=True)
        runtime.commit_ended(record)
        self._checkpoint(runtime)

    def _checkpoint(self, runtime: Runtime) -> None:
        with runtime.lock:
            wanted, committed = runtime.inbox.checkpoint, runtime.member.committed
            if wanted is not None and committed >= wanted.step:
                runtime.inbox.checkpoint = None
        if wanted is not None and self._saver is not None:
            if committed >= wanted.step:
                self._saver.save(committed, Path(wanted.directory))
            else:
                self._saver.prepare()

    def _finish(self, runtime: Runtime) -> None:
        """P17: say that all is committed; stay a donor, and write what is asked for, until released."""
        member = runtime.member
        digest = runtime.training.digest_now()
        with runtime.lock:
            if not member.left:
                runtime.perform(member.finished(digest))

        def asked() -> bool:
            wanted = runtime.inbox.checkpoint
            return wanted is not None and wanted.step <= member.committed

        while True:
            runtime.wait_for(lambda: runtime.inbox.release is not None or asked())
            if runtime.inbox.release is not None:
                break
            self._checkpoint(runtime)
        if runtime.groups is not None:
            with runtime.lock:
                runtime.groups.close()
        runtime.training.hooks.remove()
        runtime.training.unchanged.remove()
        if runtime.inbox.release.exit_code:
            raise SystemExit(runtime.inbox.release.exit_code)

    def _evaluation_loader(self, batches: MicroBatches) -> Loader:
        """The loader of these batches; those used last are kept, with their processes, for the next time."""
        loader = self._loaders.pop(id(batches), None) or Loader(batches, "evaluation")
        self._loaders[id(batches)] = loader
        while len(self._loaders) > EVALUATION_LOADERS_MAX:
            self._loaders.pop(next(iter(self._loaders))).close()
        return loader

    def _close_loaders(self) -> None:
        for loader in self._loaders.values():
            loader.close()

    def _broken_off(self, runtime: Runtime, step: Step) -> bool:
        """`break` from job.steps: a clean end if the step was whole (or not begun), on all workers alike.

        False if it was no `break`. Nothing may leave this: python drops what a generator raises now.
        """
        if boot.ENDING or sys.is_finalizing() or self._context is None:
            return False
        left = leaver(sys._getframe(2))
        if unwinding(left):
            return False
        try:
            if step.entered and not step.complete:
                where = TracebackType(None, left, left.f_lasti, left.f_lineno)
                raise UsageError(_left_early(step)).with_traceback(where)
            if step.complete:
                runtime.member.broke_off = True
                self._commit(runtime, step)
            with runtime.lock:
                runtime.perform(runtime.member.stop_here())
            self._finish(runtime)
        except SystemExit:
            pass  # the job was asked to stop as well: its exit code says so; this loop has ended
        except BaseException as error:
            defect.end(error)
        return True

    def _script_ended(self) -> None:
        """After `break` python ends the loop's generator at once, unless something has a name for it."""
        steps = self._loop()
        if steps is None or inspect.getgeneratorstate(steps) != inspect.GEN_SUSPENDED:
            return
        print(f"perdure: {NAMED}", file=sys.stderr)
        steps.close()

    # ── tasks ───────────────────────────────────────────────────────────────────────────────────────

    def _in_commit(self, what: str) -> tuple[Runtime, Step]:
        if self._runtime is None or self._step is None or not self._step.complete:
            raise UsageError(f"{what} belongs between a step's loop and the next turn of job.steps")
        return self._runtime, self._step

    def _on_stranger(self, peer: str, reason: str) -> None:
        self._send(msg.Stranger(peer, reason))

    def _on_message(self, message: msg.CoordinatorMessage) -> None:
        if isinstance(message, msg.Welcome):
            self._welcome = message
            self._welcomed.set()
        elif self._runtime is not None:
            self._runtime.on_message(message)
        elif isinstance(message, msg.Release):
            os._exit(message.exit_code)


def _forget_job() -> None:
    """A script that runs alone may join again after its loop."""
    global _joined
    _joined = None


def _left_early(step: Step) -> str:
    return (
        f"step {step.index} was left before its end: iterate it whole; "
        "to end the job, `break` from the loop over job.steps after it"
    )


def _short_end(batches: MicroBatches) -> int:
    """How many micro-batches the last step of an epoch has, if that is fewer than the others."""
    last = len(batches.micro_batches(batches.steps_per_epoch - 1))
    return last if last < batches.per_step else 0


def _values(result: Any) -> tuple[dict[str, float], float]:
    values, weight = result if isinstance(result, tuple) else (result, 1.0)
    if not isinstance(values, dict):
        raise UsageError(f"job.evaluate: fn returned {type(values).__name__}; expected a dict of numbers")
    for name in values:
        if not isinstance(name, str) or not is_text(name):
            raise UsageError(f"job.evaluate: fn returned the name {name!a}; expected text")
    return {name: float(value) for name, value in values.items()}, float(weight)


def _means(answer: msg.EvaluationAll) -> dict[str, float]:
    """The weighted mean of each value, summed in the order of the batches; nan where nothing has weight."""
    names = answer.values[0].keys()
    different = [values for values in answer.values if values.keys() != names]
    if different:
        raise UsageError(
            f"job.evaluate: fn returned {sorted(names)} for one batch and {sorted(different[0])} for "
            "another; return the same names for all"
        )
    total = sum(answer.weights)
    sums = {
        name: sum(v[name] * w for v, w in zip(answer.values, answer.weights, strict=True)) for name in names
    }
    return {name: value / total if total else math.nan for name, value in sums.items()}
