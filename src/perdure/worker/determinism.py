"""What keeps a device's operations from giving the same bits again (E12)."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG under which cuBLAS always takes the same way."""


def missing(devices: Iterable[torch.device]) -> tuple[str, ...]:
    """What a script that trains on these devices would have to set, so that its runs were exact.

    Nothing for CPUs, whose operations are deterministic with a fixed number of threads (E5). The TF32
    setting is the script's own, the same in all its workers. Kernels that torch.compile chooses by timing
    them are not seen.
    """
    if all(device.type != "cuda" for device in devices):
        return ()
    wanted = {
        "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.benchmark = False": not torch.backends.cudnn.benchmark,
        f"CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]} in the environment": (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG") in WORKSPACES
        ),
    }
    return tuple(setting for setting, there in wanted.items() if not there)


def warning(devices: Iterable[torch.device]) -> str:
    """One line that says so, or nothing."""
    settings = missing(tuple(devices))
    return f"replica-consistent, not exact: for that set {', '.join(settings)}" if settings else ""
