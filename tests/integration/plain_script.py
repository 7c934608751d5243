"""A script that knows nothing of perdure, only torchrun's environment: the subject of test_run_cli.

    plain_script.py MODE DIR

Each start of a worker leaves DIR/RANK.ATTEMPT, which holds its environment as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    mode, directory = sys.argv[1], Path(sys.argv[2])
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    note = directory / f"{rank}.{attempt}"
    note.write_text(json.dumps({name: os.environ[name] for name in NAMES}))
    if mode == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"worker {rank} saved something"))
        note.rename(note.with_suffix(".waiting"))
        signal.pause()
    if mode == "raise":
        raise ValueError(f"attempt {attempt}")
    # Over the sum of two attempts this is a real process group twice, at two addresses.
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    total = torch.tensor([float(rank) + 1])
    dist.all_reduce(total)
    if mode == "kill" and attempt == "0" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} has {total.item():.0f}")


if __name__ == "__main__":
    main()
