"""The floating-point mode of a thread: whether it flushes denormal numbers to zero (E5).

`torch.set_flush_denormal` changes the calling thread alone, and a fold in a thread with another mode than
the main thread's would give other bits.
"""

from __future__ import annotations

import torch

_TINIEST_NORMAL = 2.0**-126


def flushes_denormals() -> bool:
    """Whether the calling thread flushes denormals to zero; found by trying, torch does not say."""
    return torch.tensor([_TINIEST_NORMAL]).mul_(0.5).item() == 0.0


def flush_denormals(flush: bool) -> None:
    """Set the calling thread's mode to what the main thread's `flushes_denormals` said."""
    torch.set_flush_denormal(flush)
