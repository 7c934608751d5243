"""Batches by number, with real loader processes: the same bits whoever loads, and nothing left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.schema.errors import ProtocolError
from perdure.worker.data import MicroBatches
from perdure.worker.loader import Loader, LoaderDiedError
from perdure.worker.rng import seed_collate, seed_everything

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

DEADLINE_S = 20.0


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)  # what other processes do gives this one no event


def gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ignores_ctrl_c(pid: int) -> bool:
    mask = Path(f"/proc/{pid}/status").read_text().split("SigIgn:")[1].split()[0]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def loader_pids() -> set[int]:
    """Of all loaders of this process."""
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = loader_pids()
    handler = signal.getsignal(signal.SIGCHLD)
    threads = torch.get_num_threads()
    yield
    assert signal.getsignal(signal.SIGCHLD) is handler
    assert torch.get_num_threads() == threads
    wait_until(lambda: loader_pids() <= before, "loader processes are left")


class Noisy:
    """Every transform that a user may think of: draws from all three libraries, and a sum worth cutting."""

    def __init__(self, samples: int = 48) -> None:
        self.samples = samples
        self.weight = torch.linspace(-1, 1, 100_001)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any, int, str]:
        noise = torch.randn(16) + random.gauss(0, 1) + float(np.random.randn())
        cut = (self.weight * noise[0] + 0.1).sum()  # two threads would each sum a half
        return noise * cut, np.random.randn(3), index, f"sample {index} {random.random()}"


class Plain:
    """Samples that say who they are, and may fail, wait or die."""

    def __init__(self, samples: int = 48, do: Callable[[int], object] = lambda index: None) -> None:
        self.samples = samples
        self.do = do

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.do(index)
        return index


def noisy_collate(samples: list[Any]) -> Any:
    noise = torch.rand(2), random.random(), np.random.rand()
    return [torch.stack([sample[0] for sample in samples]), [sample[1:] for sample in samples], noise]


def make(dataset: Any, num_workers: int, **options: Any) -> MicroBatches:
    batches = MicroBatches(dataset, 2, 4, num_workers=num_workers, **options)
    batches.bind(seed=1, default_blocks=4)
    return batches


def same(one: Any, other: Any) -> bool:
    """Equal bits, whatever the nesting."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def nominal(first: int, micro_batches: list[int], until: int | None = None) -> Iterator[tuple[int, int]]:
    steps = itertools.count(first) if until is None else range(first, until)
    return ((step, micro_batch) for step in steps for micro_batch in micro_batches)


ALL = [(step, micro_batch) for step in range(8) for micro_batch in range(4)]  # crosses into the next epoch


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], Any]:
    with Loader(make(Noisy(), 0, collate_fn=noisy_collate)) as loader:
        return {key: loader.get(*key) for key in ALL}


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("order", ["as scheduled", "reversed", "shuffled", "not scheduled"])
def test_bits_depend_on_neither_processes_nor_order(
    expected: dict[tuple[int, int], Any], num_workers: int, order: str
) -> None:
    keys = list(ALL)
    if order == "reversed":
        keys.reverse()
    if order == "shuffled":
        random.Random(0).shuffle(keys)
    with Loader(make(Noisy(), num_workers, collate_fn=noisy_collate)) as loader:
        if order != "not scheduled":
            loader.schedule(0, range(4), nominal(1, [0, 1, 2, 3]))
        for key in keys:
            assert same(loader.get(*key), expected[key]), key


def test_bits_depend_on_neither_owner_nor_threads(expected: dict[tuple[int, int], Any]) -> None:
    """Three workers of different kinds deal the steps out anew each step."""
    kinds = [make(Noisy(), count, collate_fn=noisy_collate) for count in (0, 1, 2)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loaders = [Loader(batches) for batches in kinds]
        for step in range(8):
            shares = [[m for m in range(4) if (m + step) % 3 == worker] for worker in range(3)]
            for loader, share in zip(loaders, shares, strict=True):
                loader.schedule(step, share, nominal(step + 1, share))
                for micro_batch in share:
                    assert same(loader.get(step, micro_batch), expected[step, micro_batch])
                loader.forget(step + 1)
        for loader in loaders:
            loader.close()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_default_collate_and_two_streams(num_workers: int) -> None:
    got = []
    for stream in ("train", "evaluation"):
        with Loader(make(Noisy(), num_workers), stream) as loader:
            got.append(loader.get(0, 1))
    (train, _, ids, names), (evaluation, _, other_ids, _) = got
    assert train.shape == (2, 16)
    assert isinstance(ids, torch.Tensor)
    assert isinstance(names, (list, tuple))
    assert ids.tolist() == other_ids.tolist()
    assert not torch.equal(train, evaluation)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_order_of_calls_gives_the_batch_that_was_asked_for(
    shared_loader: Loader, data: st.DataObject
) -> None:
    """Plans, demands, repeats and forgetting in any order, against one pair of loader processes."""
    pairs = st.tuples(st.integers(0, 12), st.integers(0, 3))
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            share = data.draw(st.lists(st.integers(0, 3), unique=True))
            beyond = data.draw(st.none() | st.lists(pairs, max_size=20))
            shared_loader.schedule(data.draw(st.integers(0, 12)), share, beyond)
        if data.draw(st.booleans()):
            shared_loader.forget(data.draw(st.integers(0, 12)))
        for step, micro_batch in data.draw(st.lists(pairs, max_size=5)):
            ids = shared_loader._batches.sample_ids(step, micro_batch)[1]
            assert shared_loader.get(step, micro_batch).tolist() == ids
        assert len(shared_loader._requests._early) <= 2 * shared_loader._requests._depth


@pytest.fixture(scope="module")
def shared_loader() -> Iterator[Loader]:
    with Loader(make(Plain(), 2)) as loader:
        loader.start()
        yield loader


def test_the_look_ahead_is_loaded_before_it_is_asked_for(tmp_path: Path) -> None:
    def note(index: int) -> None:
        (tmp_path / str(index)).touch()

    batches = make(Plain(do=note), 2)
    with Loader(batches) as loader:
        loader.schedule(0, [1], nominal(1, [1]))
        loader.start()
        soon = [sample for step in range(4) for sample in batches.sample_ids(step, 1)[1]]
        wait_until(lambda: {path.name for path in tmp_path.iterdir()} == set(map(str, soon)), "no look-ahead")
        # A foreign micro-batch jumps the queue; what was in flight is kept, not loaded again.
        assert loader.get(0, 2).tolist() == batches.sample_ids(0, 2)[1]
        for path in tmp_path.iterdir():
            path.unlink()
        for step in range(4):
            assert loader.get(step, 1).tolist() == batches.sample_ids(step, 1)[1]
        assert not {path.name for path in tmp_path.iterdir()} & set(map(str, soon))


def test_a_look_ahead_that_fell_behind_catches_up(tmp_path: Path) -> None:
    """Steps 0 to 2 are read without regard to the plan; then the planned ones must come early again."""

    def note(index: int) -> None:
        with (tmp_path / str(index)).open("a") as file:
            file.write("x")

    batches = make(Plain(400, do=note), 2, shuffle=False)
    with Loader(batches) as loader:
        loader.schedule(0, [0, 1], nominal(1, [0, 1]))
        for step in range(3):
            for micro_batch in (3, 2, 1):
                loader.get(step, micro_batch)
            loader.forget(step + 1)
        for step in range(3, 9):
            for micro_batch in (0, 1):
                assert loader.get(step, micro_batch).tolist() == batches.sample_ids(step, micro_batch)[1]
            loader.forget(step + 1)
        soon = [path for sample in batches.sample_ids(9, 0)[1] for path in [tmp_path / str(sample)]]
        wait_until(lambda: all(path.exists() for path in soon), "no look-ahead")
    for step in range(9):
        for sample in (sample for m in range(4) for sample in batches.sample_ids(step, m)[1]):
            path = tmp_path / str(sample)
            assert not path.exists() or path.read_text() == "x", (
                f"sample {sample} of step {step} loaded twice"
            )


def test_a_stream_can_be_read_again_from_its_start(tmp_path: Path) -> None:
    def note(index: int) -> None:
        (tmp_path / str(index)).touch()

    batches = make(Plain(8, do=note), 1, shuffle=False)  # one step: an evaluation
    with Loader(batches, "evaluation") as loader:
        for _ in range(2):
            loader.schedule(0, [0, 1], iter(()))
            assert loader.get(0, 0).tolist() == [0, 1]
            wait_until((tmp_path / "3").exists, "no look-ahead")
            assert loader.get(0, 1).tolist() == [2, 3]
            loader.forget(1)
            for path in tmp_path.iterdir():
                path.unlink()


def test_an_empty_look_ahead_idles_and_can_be_filled_again() -> None:
    batches = make(Plain(), 2)
    with Loader(batches) as loader:
        loader.start()
        pids = loader.pids
        for step in (0, 5, 1):
            loader.schedule(step, range(4), iter(()))
            for micro_batch in range(4):
                assert loader.get(step, micro_batch).tolist() == batches.sample_ids(step, micro_batch)[1]
        assert loader.pids == pids, "the processes were started anew"


def test_starting_loaders_draws_nothing_from_the_main_generators() -> None:
    seed_everything("before")
    wanted = random.random(), np.random.rand(), torch.rand(())
    seed_everything("before")
    with Loader(make(Plain(), 2)) as loader:
        loader.schedule(0, range(4), nominal(1, [0]))
        loader.start()
        assert loader.get(0, 0).shape == (2,)
        assert (random.random(), np.random.rand(), torch.rand(())) == wanted


@pytest.mark.parametrize("num_workers", [0, 2])
def test_absent_micro_batches_and_closed_loaders_are_refused(num_workers: int) -> None:
    loader = Loader(make(Plain(9), num_workers, drop_last=False))
    loader.schedule(1, range(4), nominal(2, [0]))  # step 1 has one sample
    assert loader.get(1, 0).shape == (1,)
    with pytest.raises(ProtocolError, match="no samples"):
        loader.get(1, 1)
    assert loader.get(2, 3).shape == (2,)
    loader.close()
    loader.close()
    with pytest.raises(ProtocolError, match="closed"):
        loader.get(2, 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_draws_under_its_own_seed(num_workers: int) -> None:
    with Loader(make(Plain(), num_workers, collate_fn=lambda samples: random.random())) as loader:
        drawn = loader.get(1, 2)
    seed_collate(1, 1, 2)
    assert drawn == random.random()


class OwnError(Exception):
    pass


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_users_exception_is_raised_for_its_own_batch_only(num_workers: int) -> None:
    broken = make(Plain(), 0).sample_ids(1, 1)[1][1]

    def fail(index: int) -> None:
        if index == broken:
            raise OwnError(f"sample {index} is broken")

    batches = make(Plain(do=fail), num_workers)
    with Loader(batches) as loader:
        loader.schedule(0, range(4), nominal(1, [0, 1, 2, 3]))
        for step, micro_batch in nominal(0, [0, 1, 2, 3], until=3):
            if (step, micro_batch) == (1, 1):
                with pytest.raises(OwnError, match=f"sample {broken} is broken"):
                    loader.get(step, micro_batch)
            else:
                assert loader.get(step, micro_batch).tolist() == batches.sample_ids(step, micro_batch)[1]


def test_an_exception_of_a_local_type_keeps_its_message() -> None:
    class LocalError(Exception):
        pass

    def fail(index: int) -> None:
        raise LocalError("from a local class")

    with Loader(make(Plain(do=fail), 1)) as loader, pytest.raises(RuntimeError, match="from a local class"):
        loader.get(0, 0)


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    with Loader(make(Plain(), 1, collate_fn=lambda samples: lambda: samples)) as loader:
        with pytest.raises(RuntimeError, match="exit code 1"):
            loader.get(0, 0)
        assert "cannot be sent from a loader process" in capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_killed_loader_process_is_replaced_at_once(
    num_workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stuck = set(make(Plain(), 0).sample_ids(0, 0)[1])
    reached, released = tmp_path / "reached", tmp_path / "released"

    def block(index: int) -> None:
        if index in stuck and not released.exists():
            reached.touch()
            signal.pause()

    batches = make(Plain(do=block), num_workers)
    with Loader(batches) as loader:
        loader.schedule(0, range(4), nominal(1, [0, 1, 2, 3]))
        loader.start()
        wait_until(reached.exists, "the transform was not reached")
        released.touch()
        # The kill comes while the main thread waits; which of the processes it is does not matter.
        killer = threading.Timer(0.1, os.kill, (loader.pids[0], signal.SIGKILL))
        killer.start()
        for key in ALL[:8]:
            assert loader.get(*key).tolist() == batches.sample_ids(*key)[1]
        killer.join()
    said = capfd.readouterr().err
    assert re.search(r"perdure: loader process \d+ died \(exit code -9.*; others are started", said)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_batch_that_kills_its_loader_process_is_an_error_of_that_batch_alone(num_workers: int) -> None:
    deadly = set(make(Plain(), 0).sample_ids(0, 2)[1])

    def die(index: int) -> None:
        if index in deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    batches = make(Plain(do=die), num_workers)
    with Loader(batches) as loader:
        loader.schedule(0, range(2))
        for micro_batch in (0, 1):
            loader.get(0, micro_batch)
        with pytest.raises(LoaderDiedError, match=r"loader process \d+ died"):
            loader.get(0, 2)
        loader.schedule(1, range(4))
        assert loader.get(1, 0).tolist() == batches.sample_ids(1, 0)[1]


def test_a_loader_process_killed_between_two_gets_does_not_disturb_other_code() -> None:
    with Loader(make(Plain(), 2)) as loader:
        loader.start()
        victim = loader.pids[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: gone(victim), "not killed")  # torch's own handler would raise in here
        assert loader.get(0, 0).shape == (2,)


# The standard library leaves a socket to the collector when the peer dies in the middle of a handshake.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_kills_at_random_moments_cost_no_batch_and_leave_nothing() -> None:
    """Long answers, so that some are cut in the middle, and tensors, so that shared memory is in use."""
    chance = random.Random(3)
    dataset = [("x" * 20_000, torch.ones(50) * index) for index in range(200)]
    with Loader(make(dataset, 2)) as loader:
        for _ in range(20):
            loader.forget(0)
            loader.schedule(0, range(4), nominal(1, [0, 1, 2, 3]))
            loader.get(0, 0)
            pids = loader.pids
            killer = threading.Timer(chance.uniform(0, 0.02), os.kill, (chance.choice(pids), signal.SIGKILL))
            killer.start()
            for step, micro_batch in nominal(0, [0, 1, 2, 3], until=20):
                asked = time.monotonic()
                assert len(loader.get(step, micro_batch)[0]) == 2
                assert time.monotonic() - asked < 4.0
                loader.forget(step)
            killer.join()
            assert not [name for pid in pids for name in Path("/dev/shm").glob(f"torch_{pid}_*")]


def test_closing_does_not_wait_for_a_slow_transform(tmp_path: Path) -> None:
    reached = tmp_path / "reached"

    def wait_for_ever(index: int) -> None:
        reached.touch()
        signal.pause()

    loader = Loader(make(Plain(do=wait_for_ever), 2))
    loader.schedule(0, range(4))
    loader.start()
    wait_until(reached.exists, "the transform was not reached")
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 4.0


PARENT = """
    import os, signal, sys, threading
    import multiprocessing
    from perdure.worker.data import MicroBatches
    from perdure.worker.loader import Loader

    class Slow:
        def __len__(self):
            return 64
        def __getitem__(self, index):
            if index % 2:
                threading.Event().wait(600)    # half of the loaders are stuck in a transform
            return index

    signal.signal(signal.SIGTERM, lambda *_: None)    # a worker has handlers; its loaders must not
    batches = MicroBatches(Slow(), 1, 2, shuffle=False, num_workers=2)
    batches.bind(0, 1)
    loader = Loader(batches)
    loader.schedule(0, range(2), ((step, m) for step in range(1, 99) for m in range(2)))
    assert loader.get(0, 0).item() == 0
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    ) as process:
        yield process
        process.kill()


def test_loader_processes_die_with_their_parent(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(gone, pids))
    parent.kill()
    assert parent.wait(DEADLINE_S) == -signal.SIGKILL
    wait_until(lambda: all(map(gone, pids)), "loader processes outlive their parent")


def test_ctrl_c_is_ignored_and_sigterm_obeyed_by_loader_processes(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    wait_until(lambda: all(map(ignores_ctrl_c, pids)), "Ctrl-C would end the loader processes")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: all(map(gone, pids)), "SIGTERM did not end the loader processes")
