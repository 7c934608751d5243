"""A perdure script that goes wrong in the way its first argument names: the subject of test_run_cli."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import perdure

STEPS = 6


def once(directory: Path, name: str) -> bool:
    """True in the first process that asks."""
    try:
        (directory / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def ended_by_sigterm() -> bool:
    """Whether a child that the script forks ends by SIGTERM, as it would without perdure."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        signal.pause()
        os._exit(9)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def go_wrong(mode: str, directory: Path, step: perdure.Step, loss: torch.Tensor) -> None:
    """Inside the loop over a step's batches."""
    if mode == "exit 0" and step.index == 2 and once(directory, mode):
        sys.exit(0)
    if mode == "always exit 0" and step.index == 2:
        sys.exit(0)
    if mode == "error" and step.index == 3:
        raise ValueError("no such luck")
    if mode == "give up" and step.index >= 1 and once(directory, f"step {step.index}"):
        os._exit(7)
    if mode == "fork" and step.index == 1:
        print("a child ended by SIGTERM:", ended_by_sigterm())
    if mode == "misuse":
        loss.backward()


def main() -> None:
    mode, directory = sys.argv[1], Path(sys.argv[2])
    job = perdure.join(seed=1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=generator))
    batches = perdure.MicroBatches(data, batch_size=2, per_step=4)
    until = 10_000 if mode == "endless" else STEPS
    for step in job.steps(batches, until=until):
        for (x,) in step:
            loss = model(x).square().mean()
            go_wrong(mode, directory, step, loss)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if mode == "save nowhere":
            job.save("/proc/nowhere/x")
        if step.index == 1 and job.leader:
            print("half a line ", end="")
            print("and the rest, from", Path(sys.argv[0]).name)


if __name__ == "__main__":
    main()
