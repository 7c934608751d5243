"""What is trained: the same GPT, data and shapes in every arm. Free of torch: the driver reads it too."""

from __future__ import annotations

from dataclasses import dataclass

WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shapes of one measurement; `per_step` counts micro-batches over all workers."""

    name: str
    layers: int = 4
    width: int = 256
    context: int = 128
    micro_batch: int = 4
    per_step: int = 16

    def arguments(self) -> list[str]:
        """Command-line arguments for the training scripts (`workload.parse_args`)."""
        return [
            *("--layers", str(self.layers), "--width", str(self.width), "--context", str(self.context)),
            *("--micro-batch", str(self.micro_batch), "--per-step", str(self.per_step)),
        ]


STEP_1S = Workload(name="step near 1 s", micro_batch=3)
STEP_100MS = Workload(name="step near 0.1 s", context=16, micro_batch=1, per_step=4)
HEALING = Workload(name="state over 200 MB", layers=6, width=512, context=32, micro_batch=1, per_step=8)
MEMORY = Workload(name="over 50 M parameters", layers=8, width=768, context=32, micro_batch=1, per_step=8)
