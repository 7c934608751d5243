"""Runs of micro-batches in `.grad`, and what the hooks make of the way gradients come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perdure.schema.errors import ProtectError
from perdure.schema.plan import Run
from perdure.worker.leaves import Hooks, Leaves

Piece = Callable[[], None]


def pieces(parameter: torch.nn.Parameter, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(parameter.shape, generator=generator) for _ in range(count)]


def give(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    (parameter * gradient).sum().backward()


class Bench:
    """One parameter, its leaves and hooks, driven as a step does."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1000))
        self.leaves = Leaves([self.parameter], ["model.weight"])
        self.hooks = Hooks([self.parameter], [0], 1)
        self.hooks.allowed = True
        self.early: list[int] = []

    def micro_batch(self, first: int, gradients: list[torch.Tensor], last: bool = False) -> bool:
        """Compute one; true if it spoilt its run."""
        self.leaves.bind(first)
        self.hooks.begin(self.early.append if last else None, self.leaves.incomplete)
        for gradient in gradients:
            give(self.parameter, gradient)
        self.hooks.end()
        if self.leaves.in_pieces(self.hooks.several):
            self.leaves.keep(())
            return True
        self.leaves.capture()
        return False


def test_a_gradient_in_one_piece_accumulates_as_in_plain_pytorch() -> None:
    bench = Bench()
    a, b, c = pieces(bench.parameter, 3)
    for gradient in (a, b, c):
        assert not bench.micro_batch(0, [gradient])
    assert torch.equal(bench.leaves.get(0)[0], (a + b) + c)


def test_a_gradient_in_pieces_is_summed_before_it_joins_its_run() -> None:
    bench = Bench()
    a, b, c, d = pieces(bench.parameter, 4)
    assert not bench.micro_batch(0, [a, b])  # the first of a run is alone in .grad
    assert not bench.micro_batch(0, [c, d])
    assert torch.equal(bench.leaves.get(0)[0], (a + b) + (c + d))
    assert not torch.equal(bench.leaves.get(0)[0], ((a + b) + c) + d)


def test_pieces_that_come_unexpected_spoil_the_run_once() -> None:
    bench = Bench()
    a, b, c = pieces(bench.parameter, 3)
    assert not bench.micro_batch(0, [a])
    assert bench.micro_batch(0, [b, c])
    assert not bench.micro_batch(0, [a])
    assert not bench.micro_batch(0, [b, c])
    assert torch.equal(bench.leaves.get(0)[0], a + (b + c))


def test_a_run_that_is_not_whole_in_grad_does_not_go_early() -> None:
    bench = Bench()
    a, b, c, d = pieces(bench.parameter, 4)
    bench.micro_batch(0, [a, b])
    bench.micro_batch(0, [c, d], last=True)
    assert bench.early == []
    bench.micro_batch(4, [a, b], last=True)  # a run of one micro-batch is whole
    assert bench.early == [0]
    bench.leaves.keep([Run(4, 1)])
    assert torch.equal(bench.leaves.get(4)[0], a + b)


def test_a_piece_after_its_bucket_went_is_a_violation_and_ends_early_sending() -> None:
    bench = Bench()
    a, b = pieces(bench.parameter, 2)
    bench.micro_batch(0, [a])
    bench.micro_batch(4, [a, b], last=True)
    assert bench.early == [0]
    assert bench.hooks.violated
    bench.micro_batch(5, [a], last=True)
    assert bench.early == [0]


def test_backward_that_the_step_is_not_told_of_is_refused() -> None:
    bench = Bench()
    bench.hooks.allowed, bench.hooks.watched = False, True
    with pytest.raises(ProtectError, match=r"call step\.backward"):
        give(bench.parameter, torch.ones(1000))
    bench.hooks.watched = False
    give(bench.parameter, torch.ones(1000))
    bench.hooks.remove()
    bench.hooks.watched = True
    give(bench.parameter, torch.ones(1000))


def test_sparse_gradients_are_refused_by_name() -> None:
    table = torch.nn.Embedding(8, 4, sparse=True)
    leaves = Leaves([table.weight], ["model.table.weight"])
    leaves.bind(0)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ProtectError, match=r"model\.table\.weight is sparse.*sparse=False"):
        leaves.capture()
