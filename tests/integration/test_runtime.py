"""The runtime between two generations: real threads and connections, the coordinator's messages by hand."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

import msgspec
import pytest
import torch

from perdure.core.member import Member
from perdure.schema import messages as msg
from perdure.schema.errors import UsageError
from perdure.schema.ids import Generation
from perdure.schema.plan import Address, Entry, Leaf, Plan, Shape, Source, Span
from perdure.worker import defect
from perdure.worker.gradients import Buckets, Portion
from perdure.worker.groups import Groups
from perdure.worker.handshake import HEAL, Hello
from perdure.worker.heal import Ask, Desk
from perdure.worker.leaves import Gradients
from perdure.worker.listener import Listener
from perdure.worker.mesh import Mesh
from perdure.worker.progress import ProgressPage
from perdure.worker.reduce import RESULT
from perdure.worker.runtime import Runtime
from perdure.worker.taking_part import Result, take_part
from perdure.worker.training import Training
from perdure.worker.transport import Bulk

DEADLINE_S = 10.0
FIRST, SECOND, THIRD = (Generation(1, number) for number in (1, 2, 3))
ME, GONE, OTHER = 1, 2, 3


Said = TypeVar("Said")


class Counter:
    """Protected state that a donor's walk may find in the middle of a change."""

    def __init__(self) -> None:
        self.on_walk: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, int]:
        self.on_walk()
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError  # this worker only gives its state, it takes none


class Worker:
    """Worker 1, in a first generation in which it has micro-batches 0 and 1 to compute."""

    def __init__(self) -> None:
        self.weight = torch.nn.Linear(6, 1, bias=False)
        self.said: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.counter = Counter()
        training = Training({"model": self.weight, "counter": self.counter})
        shape = Shape(per_step=4, blocks=4, until=10, buckets=training.bucket_sizes)
        self.runtime = Runtime(Member(ME, shape), training, self.said.put, ProgressPage())
        self.listener = Listener("127.0.0.1", bytes(32), ME, lambda sock, hello: sock.close())
        self.groups = self.runtime.groups = Groups(ME, self.listener, self.runtime.ear)
        self.members = {
            worker: Address(worker, "node", "127.0.0.1", self.listener.port) for worker in (ME, GONE, OTHER)
        }
        self.seal(FIRST, ME, GONE, OTHER)
        self.open(FIRST, {ME: (0, 1), GONE: (2,), OTHER: (3,)})
        training.hooks.allowed = True

    def says(self, kind: type[Said]) -> Said:
        """The next message of a kind that it sends to the coordinator."""
        while not isinstance(message := self.said.get(timeout=DEADLINE_S), kind):
            pass
        return message

    def compute(self) -> None:
        """Compute both."""
        for micro_batch in (0, 1):
            assert self.runtime.next_micro_batch() == micro_batch
            self.weight(torch.ones(1, 6)).sum().backward()
            self.runtime.finish_micro_batch(Entry(micro_batch, 1.0, 1.0), void=False)

    def seal(self, generation: Generation, *members: int) -> None:
        self.runtime.on_message(msg.Seal(generation, tuple(self.members[member] for member in members)))

    def open(
        self,
        generation: Generation,
        shares: dict[int, tuple[int, ...]],
        void: tuple[int, ...] = (),
        gather: tuple[Source, ...] = (),
    ) -> None:
        """`shares` say who still computes what; what is in none of them is worker 1's, and held by it."""
        members = tuple(self.members[member] for member in shares)
        whose = {micro_batch: worker for worker, share in shares.items() for micro_batch in share}
        leaves = () if gather else tuple(Leaf(m, 1, whose.get(m, ME)) for m in range(4))
        plan = Plan(generation, members, -1, (ME, ME, -1, OTHER), shares, leaves, gather, void=void)
        self.runtime.on_message(msg.Open(plan))

    def settle(self, defects: Defects) -> None:
        """Wait until the interrupted transports have ended, or something went wrong."""
        settled = threading.Event()
        self.groups.when_clear(settled.set)
        assert settled.wait(DEADLINE_S) or defects

    def mesh(self, generation: Generation) -> Mesh:
        mesh = self.groups.get(generation)
        assert mesh is not None
        return mesh


class Defects:
    """What would have ended the worker."""

    def __init__(self) -> None:
        self.found: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return not self.found.empty()


@pytest.fixture
def defects(monkeypatch: pytest.MonkeyPatch) -> Defects:
    defects = Defects()
    monkeypatch.setattr(defect, "end", defects.found.put)
    return defects


class Gate:
    """Where the transport's thread stops when it is about to contribute a leaf, unless it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        portion = Buckets.portion

        def gated(buckets: Buckets, bucket: int, gradients: Gradients) -> Portion:
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)
            return portion(buckets, bucket, gradients)

        monkeypatch.setattr(Buckets, "portion", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def worker(gate: Gate, defects: Defects) -> Iterator[Worker]:
    """It ends with the test."""
    worker = Worker()
    yield worker
    gate.opened.set()
    worker.groups.close()
    worker.listener.close()


def test_a_round_that_is_sealed_before_it_could_begin_never_begins(
    worker: Worker, gate: Gate, defects: Defects
) -> None:
    """Its memory was still in use when it was opened, and its group is gone when that is over."""
    worker.compute()
    assert gate.reached.wait(DEADLINE_S)
    worker.seal(SECOND, ME, GONE, OTHER)
    worker.open(SECOND, {ME: (), GONE: (2,), OTHER: (3,)})
    worker.seal(THIRD, ME, OTHER)
    gate.opened.set()
    worker.settle(defects)
    assert not defects

    worker.open(THIRD, {ME: (2,), OTHER: (3,)})
    assert worker.runtime.next_micro_batch() == 2


def test_leaves_that_another_plan_lets_go_may_still_be_on_their_way(
    worker: Worker, gate: Gate, defects: Defects
) -> None:
    """The round of the second generation is contributing when the third throws all leaves away."""
    gate.opened.set()
    worker.compute()
    gate.opened.clear()
    gate.reached.clear()
    worker.seal(SECOND, ME, GONE, OTHER)
    worker.open(SECOND, {ME: (), GONE: (2,), OTHER: (3,)})
    assert gate.reached.wait(DEADLINE_S)
    worker.seal(THIRD, ME, OTHER)
    worker.open(THIRD, {ME: (0, 1, 2), OTHER: (3,)}, void=(ME,))
    gate.opened.set()
    worker.settle(defects)
    assert not defects
    assert worker.runtime.next_micro_batch() == 0


def test_what_an_abandoned_round_still_does_does_not_count_for_the_next(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch, defects: Defects
) -> None:
    """The round of the first generation folds when the second is planned, and has not begun."""
    worker.compute()
    assert gate.reached.wait(DEADLINE_S)
    arrived = Member.leaf_arrived
    counted: list[int] = []

    def count(member: Member, bucket: int, first: int, worker: int) -> bool:
        counted.append(first)
        return arrived(member, bucket, first, worker)

    monkeypatch.setattr(Member, "leaf_arrived", count)
    before_it_begins: list[list[int]] = []
    worker.seal(SECOND, ME, OTHER)
    worker.groups.when_clear(lambda: before_it_begins.append(list(counted)))
    worker.open(SECOND, {ME: (2,), OTHER: (3,)})
    gate.opened.set()
    worker.settle(defects)
    assert before_it_begins == [[]]
    assert not defects


def test_a_result_that_came_after_the_seal_may_come_again(
    worker: Worker, gate: Gate, defects: Defects
) -> None:
    """The reported position is without it, so that the plan has it sent once more."""
    gate.opened.set()
    worker.compute()
    span = Span(0, 4, 6)
    header = Bulk(RESULT, 0, span.bucket, 0, span.lo, span.hi, b"\1")
    old, new = worker.runtime.ear(FIRST), worker.runtime.ear(SECOND)
    landing = old.buffer(OTHER, header, 8, False)
    assert isinstance(landing, memoryview)
    worker.seal(SECOND, ME, OTHER)
    old.bulk(OTHER, header, landing)

    worker.open(SECOND, {ME: (), OTHER: ()}, gather=(Source(Span(0, 0, 4), ME), Source(span, OTHER)))
    worker.settle(defects)
    landing = new.buffer(OTHER, header, 8, False)
    assert isinstance(landing, memoryview)
    new.bulk(OTHER, header, landing)
    assert worker.runtime.member.work.reduced == (span,)
    assert not new.buffer(OTHER, header, 8, False), "now it is known"
    assert not defects


@pytest.mark.parametrize("went_on", [True, False])
def test_a_walk_through_the_state_may_fail_once_the_worker_went_on(
    worker: Worker, went_on: bool, defects: Defects
) -> None:
    """Nobody waits for a joiner that has died: its donors commit. Else a failure is a defect."""
    member = worker.runtime.member

    def changed() -> NoReturn:
        member.committing = went_on
        raise RuntimeError("dictionary changed size during iteration")

    worker.counter.on_walk = changed
    ours, theirs = socket.socketpair()
    with ours:
        Desk(worker.runtime).on_heal(theirs, Hello(HEAL, FIRST, OTHER, ME))
        question = msgspec.msgpack.encode(Ask(-1, ""))
        ours.sendall(struct.pack("<I", len(question)) + question)
        ours.settimeout(DEADLINE_S)
        answer = ours.recv(1 << 10)
        while ours.recv(1 << 10):
            pass
    assert bool(answer) is went_on
    if not went_on:
        assert isinstance(defects.found.get(timeout=DEADLINE_S), RuntimeError)
    assert not defects


def test_what_was_dealt_twice_is_computed_once_and_not_for_the_next_task(worker: Worker) -> None:
    """A seal makes the worker ask anew while an item is on its way to it."""
    runtime, computed = worker.runtime, []

    def compute(item: int) -> Result:
        computed.append(item)
        return {"loss": 1.0 + item}, 1.0

    def deal(index: int, item: int) -> None:
        runtime.on_message(msg.EvaluationDeal(0, index, (item,)))

    def answer(index: int, count: int) -> None:
        runtime.on_message(msg.EvaluationAll(0, index, ({"loss": 1.0},) * count, (1.0,) * count))

    with ThreadPoolExecutor(1) as main:
        first = main.submit(take_part, runtime, 0, 0, 8, compute)
        worker.says(msg.EvaluationAsk)
        deal(0, 3)
        assert worker.says(msg.EvaluationResult).micro_batch == 3
        worker.seal(SECOND, ME, OTHER)
        worker.says(msg.EvaluationAsk)
        deal(0, 3)
        assert worker.says(msg.EvaluationResult).values == {"loss": 4.0}
        with runtime.lock:
            deal(0, 7)
            answer(0, 8)
        assert len(first.result(DEADLINE_S).values) == 8
        assert computed == [3]

        second = main.submit(take_part, runtime, 0, 1, 1, compute)
        worker.says(msg.EvaluationAsk)
        deal(1, 0)
        assert worker.says(msg.EvaluationResult).micro_batch == 0
        answer(1, 1)
        second.result(DEADLINE_S)
        assert computed == [3, 0]


def test_workers_that_evaluate_different_things_are_told(worker: Worker) -> None:
    """One of them is dealt an item that it does not have."""
    with ThreadPoolExecutor(1) as main:
        task = main.submit(take_part, worker.runtime, 0, 0, 2, lambda item: ({}, 1.0))
        worker.says(msg.EvaluationAsk)
        worker.runtime.on_message(msg.EvaluationDeal(0, 0, (5,)))
        with pytest.raises(UsageError, match="for more parts where this one did for 2"):
            task.result(DEADLINE_S)
