"""How fast a joiner takes a large state, against a bare transfer of as many bytes beside the same job."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path

from figures import Figure, interval
from rundir import RunDir
from settings import HEALING, WORKERS

import jobs

JOINS = 7
STATE_BYTES_MIN = 200_000_000


def measure(scale: float) -> list[Figure]:
    """Kill, let the replacement heal, and after each healing time a bare transfer."""
    healed: list[float] = []
    bare: list[float] = []
    sizes: list[int] = []
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as name:
        files = RunDir(Path(name) / "run")
        with jobs.perdure(HEALING, files.path, 100_000):
            files.wait(lambda: len(files.members) == WORKERS and files.last_step >= 2)
            for _ in range(max(2, round(JOINS * scale))):
                kill = files.kill(files.members[-1])
                files.wait_replaced(kill)
                done = files.find("healed", kill.time)[0]
                sizes.append(done["bytes"])
                healed.append(done["bytes"] / done["seconds"])
                bare.append(transfer(done["bytes"]))
                print(f"  healed at {healed[-1] / 1e9:.2f} GB/s, bare {bare[-1] / 1e9:.2f} GB/s", flush=True)
                files.wait_steps(1)
    if min(sizes) < STATE_BYTES_MIN:
        raise RuntimeError(f"a state of {min(sizes)} bytes is too small for this measurement")
    ratios = [ours / theirs for ours, theirs in zip(healed, bare, strict=True)]
    return [
        Figure(
            name="healing bandwidth / bare transfer",
            value=statistics.median(ratios),
            bound=0.7,
            least=True,
            interval=interval(ratios),
            samples=ratios,
            note=f"state of {sizes[0] / 1e6:.0f} MB; medians {statistics.median(healed) / 1e9:.2f} and"
            f" {statistics.median(bare) / 1e9:.2f} GB/s, both beside the computing workers",
        )
    ]


def transfer(nbytes: int) -> float:
    """Bytes per second of a bare transfer (transfer.py)."""
    command = [str(jobs.PYTHON), str(jobs.HERE / "transfer.py"), str(nbytes)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
