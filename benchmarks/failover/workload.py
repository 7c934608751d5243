"""The objects that every arm trains, from the command line: model, optimizer, schedule, data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt import GPT, GPTConfig, Text, load_text, loss_fn, make_optimizer, make_scheduler

CLIP = 1.0


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments of `settings.Workload`, and those that every arm has."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("layers", "width", "context", "micro-batch", "per-step", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gate", help="socket of the driver that lets segments run (gate.py)")
    parser.add_argument("--segment", type=int, default=0, help="steps between two gates")
    parser.add_argument("--diary", type=Path, help="append (time, step) of every commit to PID.steps here")
    return parser


@dataclass
class Parts:
    """One arm's objects."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: Text

    def loss(self, model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Loss of one micro-batch; `model` is this one or a wrapper around it."""
        tokens, targets = batch
        return loss_fn(model(tokens), targets)

    def update(self) -> None:
        """The commit: clip, step, forget the gradients, schedule."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def build(args: argparse.Namespace) -> Parts:
    """The parts, from the global generators' state."""
    model = GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context))
    optimizer = make_optimizer(model, lr=1e-3)
    scheduler = make_scheduler(optimizer, args.steps)
    data, _ = load_text(None, args.context)
    return Parts(model, optimizer, scheduler, data)
