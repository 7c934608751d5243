"""The live state moves to huge pages a little at a time, and stays where and what it is."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from perdure.state.capture import ProtectedState
from perdure.state.huge_pages import BLOCK, SHARE, SWITCH, HugePages, blocks, collapse


class Machine:
    """A clock, and a kernel that takes `cost_s` for each block."""

    def __init__(self, cost_s: float) -> None:
        self.now = 0.0
        self.cost_s = cost_s
        self.moved: list[int] = []

    def clock(self) -> float:
        return self.now

    def move(self, block: int) -> bool:
        self.now += self.cost_s
        self.moved.append(block)
        return True


def test_blocks_are_those_that_are_half_full() -> None:
    half = BLOCK // 2
    assert blocks([(10 * BLOCK, BLOCK), (13 * BLOCK, half - 1), (14 * BLOCK - half, half)]) == [
        10 * BLOCK,
        13 * BLOCK,
    ]
    assert blocks([(20 * BLOCK + half, BLOCK)]) == [20 * BLOCK, 21 * BLOCK]
    assert blocks([(30 * BLOCK, 100)]) == []


def test_a_large_state_is_moved_over_many_steps() -> None:
    machine = Machine(cost_s=0.01)
    pages = HugePages(machine.move, machine.clock)
    memory = [(BLOCK, 100 * BLOCK)]
    while len(machine.moved) < 100:
        machine.now += 1.0
        before = machine.now
        pages.advance(memory)
        assert 0 < machine.now - before <= 1.0 * SHARE + 2 * machine.cost_s
    assert machine.moved == [BLOCK * (1 + number) for number in range(100)]
    pages.advance(memory)
    assert len(machine.moved) == 100


def test_what_is_new_follows_and_nothing_is_moved_twice() -> None:
    machine = Machine(cost_s=0.0)
    pages = HugePages(machine.move, machine.clock)
    machine.now = 1.0
    pages.advance([(BLOCK, BLOCK)])
    machine.now = 2.0
    pages.advance([(BLOCK, BLOCK), (3 * BLOCK, BLOCK)])
    assert machine.moved == [BLOCK, 3 * BLOCK]


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    machine = Machine(cost_s=0.0)
    HugePages(machine.move, machine.clock).advance([(BLOCK, BLOCK)])
    assert machine.moved == []


def test_the_bytes_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(2048, 2048)
    state = ProtectedState({"model": model})
    addresses, digest = sorted(state.host_memory()), state.digest()
    pages = HugePages(clock=iter(range(0, 1000, 100)).__next__)
    pages.advance(state.host_memory())
    assert state.digest() == digest
    assert sorted(state.host_memory()) == addresses


def test_the_kernel_does_it() -> None:
    memory = mmap.mmap(-1, 4 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    view.fill_(7)
    block = -(-view.data_ptr() // BLOCK) * BLOCK
    if not collapse(block):
        pytest.skip("this kernel moves nothing to huge pages")
    huge = Path("/proc/self/smaps").read_text()
    assert any(
        line.startswith("AnonHugePages:") and int(line.split()[1]) >= 2048 for line in huge.splitlines()
    )
    assert bool((view == 7).all())
