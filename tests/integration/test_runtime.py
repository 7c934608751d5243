"""The runtime between two generations: real threads and connections, the coordinator's messages by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from perdure.core.member import Member
from perdure.schema import messages as msg
from perdure.schema.ids import Generation
from perdure.schema.plan import Address, Entry, Leaf, Plan, Shape
from perdure.worker import defect
from perdure.worker.gradients import Buckets, Portion
from perdure.worker.groups import Groups
from perdure.worker.leaves import Gradients
from perdure.worker.listener import Listener
from perdure.worker.mesh import Mesh
from perdure.worker.progress import ProgressPage
from perdure.worker.runtime import Runtime
from perdure.worker.training import Training

DEADLINE_S = 10.0
FIRST, SECOND, THIRD = (Generation(1, number) for number in (1, 2, 3))
ME, GONE, OTHER = 1, 2, 3


class Worker:
    """Worker 1 of a model with one weight, with its two micro-batches of the first generation computed."""

    def __init__(self) -> None:
        weight = torch.nn.Linear(1, 1, bias=False)
        training = Training({"model": weight})
        shape = Shape(per_step=4, blocks=4, until=10, buckets=training.bucket_sizes)
        self.runtime = Runtime(Member(ME, shape), training, lambda message: None, ProgressPage())
        self.listener = Listener("127.0.0.1", bytes(32), ME, lambda sock, hello: sock.close())
        self.groups = self.runtime.groups = Groups(ME, self.listener, self.runtime.ear)
        self.members = {
            worker: Address(worker, "node", "127.0.0.1", self.listener.port) for worker in (ME, GONE, OTHER)
        }
        self.seal(FIRST, ME, GONE, OTHER)
        self.open(FIRST, {ME: (0, 1), GONE: (2,), OTHER: (3,)})
        training.hooks.allowed = True
        for micro_batch in (0, 1):
            assert self.runtime.next_micro_batch() == micro_batch
            weight(torch.ones(1, 1)).sum().backward()
            self.runtime.finish_micro_batch(Entry(micro_batch, 1.0, 1.0), void=False)

    def seal(self, generation: Generation, *members: int) -> None:
        self.runtime.on_message(msg.Seal(generation, tuple(self.members[member] for member in members)))

    def open(self, generation: Generation, shares: dict[int, tuple[int, ...]], *void: int) -> None:
        """`shares` say who still computes what; what is in none of them is worker 1's, and held by it."""
        members = tuple(self.members[member] for member in shares)
        whose = {micro_batch: worker for worker, share in shares.items() for micro_batch in share}
        leaves = tuple(Leaf(micro_batch, 1, whose.get(micro_batch, ME)) for micro_batch in range(4))
        plan = Plan(generation, members, -1, (ME, ME, -1, OTHER), shares, leaves, void=void)
        self.runtime.on_message(msg.Open(plan))

    def settle(self, defects: list[BaseException]) -> None:
        """Wait until the interrupted transports have ended, or something went wrong."""
        settled = threading.Event()
        self.groups.when_clear(settled.set)
        assert settled.wait(DEADLINE_S) or defects

    def mesh(self, generation: Generation) -> Mesh:
        mesh = self.groups.get(generation)
        assert mesh is not None
        return mesh


@pytest.fixture
def defects(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What would have ended the worker."""
    found: list[BaseException] = []
    monkeypatch.setattr(defect, "end", found.append)
    return found


@pytest.fixture
def worker(defects: list[BaseException]) -> Iterator[Worker]:
    """It ends with the test."""
    worker = Worker()
    yield worker
    worker.groups.close()
    worker.listener.close()


def test_a_round_that_is_sealed_before_it_could_begin_never_begins(
    worker: Worker, defects: list[BaseException]
) -> None:
    """Its memory was still in use when it was opened, and its group is gone when that is over."""
    still_at_work = threading.Event()
    worker.mesh(FIRST).submit(lambda: still_at_work.wait(DEADLINE_S) and None)
    worker.seal(SECOND, ME, GONE, OTHER)
    worker.open(SECOND, {ME: (), GONE: (2,), OTHER: (3,)})
    worker.seal(THIRD, ME, OTHER)
    still_at_work.set()
    worker.settle(defects)
    assert not defects

    worker.open(THIRD, {ME: (2,), OTHER: (3,)})
    assert worker.runtime.next_micro_batch() == 2


def test_leaves_that_another_plan_lets_go_may_still_be_on_their_way(
    worker: Worker, defects: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round of the second generation is contributing when the third throws all leaves away."""
    begun, go_on = threading.Event(), threading.Event()
    portion = Buckets.portion

    def slow(buckets: Buckets, bucket: int, gradients: Gradients) -> Portion:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return portion(buckets, bucket, gradients)

    monkeypatch.setattr(Buckets, "portion", slow)
    worker.seal(SECOND, ME, GONE, OTHER)
    worker.open(SECOND, {ME: (), GONE: (2,), OTHER: (3,)})
    assert begun.wait(DEADLINE_S)
    worker.seal(THIRD, ME, OTHER)
    worker.open(THIRD, {ME: (0, 1, 2), OTHER: (3,)}, ME)
    go_on.set()
    worker.settle(defects)
    assert not defects
    assert worker.runtime.next_micro_batch() == 0
