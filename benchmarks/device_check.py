"""perdure on a CUDA device, in one short run: `make device-check`.

1. Two workers share the device; one is killed in the middle of a step. Every step's digest is that of the
   undisturbed run (deterministic algorithms, so that bits mean something).
2. One worker under `perdure run` against the same loop in plain PyTorch, in turn: the runtime's overhead.

Without CUDA it says so and is content. `--cpu` runs the same, smaller, on the CPU, to check this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import perdure
from perdure.cli.demo_kills import Hunter, Strike
from perdure.cli.spectator import Spectator, digests
from perdure.schema.progress import Phase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, load_text, loss_fn, make_optimizer

STEPS, WARM_UP, TURNS, PER_STEP = 30, 5, 3, 8
LARGE = {"layers": 8, "width": 512, "context": 256, "micro_batch": 8}
SMALL = {"layers": 2, "width": 64, "context": 32, "micro_batch": 2}


# ── the training script, run by this file as another process ────────────────────────────────────────


def train(args: argparse.Namespace) -> None:
    """`STEPS` steps with or without perdure; the moment after each is appended to `args.times`."""
    torch.use_deterministic_algorithms(True)
    size = SMALL if args.cpu else LARGE
    job = perdure.join(seed=0)
    device = torch.device("cpu") if args.cpu else job.device
    model = GPT(GPTConfig(layers=size["layers"], width=size["width"], context=size["context"])).to(device)
    optimizer = make_optimizer(model, lr=1e-3)
    data, _ = load_text(None, size["context"])

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, targets = (part.to(device) for part in batch)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels' backward is not deterministic
            return loss_fn(model(tokens), targets)

    def commit() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        with open(args.times, "a") as file:
            file.write(f"{time.monotonic()}\n")

    if args.train == "plain":
        _plain(data, size["micro_batch"], loss_of, commit)
        return
    job.protect(model=model, optimizer=optimizer)
    batches = perdure.MicroBatches(data, batch_size=size["micro_batch"], per_step=PER_STEP)
    for step in job.steps(batches, until=STEPS):
        for batch in step:
            step.backward(loss_of(batch))
        commit()


def _plain(
    data: torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]],
    micro_batch: int,
    loss_of: Callable[[list[torch.Tensor]], torch.Tensor],
    commit: Callable[[], None],
) -> None:
    loader = torch.utils.data.DataLoader(data, batch_size=micro_batch, shuffle=True)
    batches = itertools.cycle(loader)
    for _ in range(STEPS):
        for batch in itertools.islice(batches, PER_STEP):
            (loss_of(batch) / PER_STEP).backward()
        commit()


# ── the check ───────────────────────────────────────────────────────────────────────────────────────


def script(kind: str, times: Path, cpu: bool) -> list[str]:
    return [__file__, "--train", kind, "--times", str(times), *(["--cpu"] if cpu else [])]


def kill_one(folder: Path, cpu: bool) -> dict[str, object]:
    """Two workers on the device, without and with a kill."""
    options = ("--nproc-per-node", "2", "--checkpoint-every", "0")
    struck = None
    for part in ("undisturbed", "killed"):
        strikes = (Strike(since=STEPS // 3, phase=Phase.COMPUTE),) if part == "killed" else ()
        with Spectator(folder / part, options, script("perdure", folder / f"{part}.times", cpu)) as run:
            hunter = Hunter(run, strikes, first=2)
            while run.ended() is None:
                for event in run.events.read():
                    if event["event"] == "worker_started":
                        hunter.workers[event["worker"]] = event["pid"]
                struck = hunter.look() or struck
                time.sleep(0.002)
        if run.ended() != 0:
            raise SystemExit(f"the run ended with {run.ended()}:\n{run.output.read_text()}")
    expected, found = digests(folder / "undisturbed"), digests(folder / "killed")
    if struck is None:
        raise SystemExit("the run was over before a worker could be killed")
    return {
        "killed_in_step": struck.doing.step,
        "steps": len(found),
        "digests_that_differ": sum(found.get(step) != digest for step, digest in expected.items()),
    }


def overhead(folder: Path, cpu: bool) -> dict[str, object]:
    """Median step of one worker and of plain PyTorch, run in turn."""
    medians: dict[str, list[float]] = {"plain": [], "perdure": []}
    for turn in range(TURNS):
        for kind, found in medians.items():
            times = folder / f"{kind}-{turn}.times"
            launcher = ["-m", "perdure.cli.main", "run", "--run-dir", str(folder / f"one-{turn}")]
            before = [*launcher, "--checkpoint-every", "0"] if kind == "perdure" else []
            subprocess.run([sys.executable, *before, *script(kind, times, cpu)], check=True)
            moments = [float(line) for line in times.read_text().split()][WARM_UP:]
            found.append(statistics.median(b - a for a, b in itertools.pairwise(moments)))
    ratios = [one / plain for one, plain in zip(medians["perdure"], medians["plain"], strict=True)]
    return {
        "plain_step_s": statistics.median(medians["plain"]),
        "perdure_step_s": statistics.median(medians["perdure"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="run the same, smaller, on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    parser.add_argument("--train", choices=("plain", "perdure"), help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.train:
        train(args)
        return 0
    if not args.cpu and not torch.cuda.is_available():
        print("device check: there is no CUDA device here, so there is nothing to check")
        return 0
    device = "cpu" if args.cpu else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        result = {"device": device, "torch": torch.__version__, "kill": kill_one(Path(folder), args.cpu)}
        print(json.dumps(result["kill"]), flush=True)
        result["overhead"] = overhead(Path(folder), args.cpu)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["kill"]["digests_that_differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
