"""Megatron's weak- and strong-scaling tables."""

from __future__ import annotations

import statistics

from perdure.core.calibration import STRONG, WEAK, calibrate, predicted_tflops
from published.page import Page


def throughput(page: Page) -> None:
    """Megatron's weak- and strong-scaling tables."""
    page.section(
        "Megatron's scaling tables",
        """
Narayanan et al., SC'21 (certainty M). TFLOP/s per GPU at the table's own tensor and pipeline degrees. Three
constants are calibrated on half of the weak-scaling rows; the other half and all of strong scaling were
never seen.
""",
    )
    odd, even = calibrate(WEAK[0::2]), calibrate(WEAK[1::2])
    rows = []
    worst = 0.0
    for index, row in enumerate(WEAK):
        held_out = index % 2 == 1
        ours = predicted_tflops(row, odd if held_out else even)
        error = ours / row.tflops - 1
        worst = max(worst, abs(error))
        split = "rows 1, 3, 5, 7, 9" if held_out else "rows 2, 4, 6, 8, 10"
        rows.append((f"{row.parameters_b:g} B", row.gpus, row.tflops, f"{ours:.1f}", f"{error:+.1%}", split))
    page.table(("model", "GPUs", "published", "ours", "error", "calibrated on"), rows)
    means = {
        "rows 1, 3, 5, 7, 9": (WEAK[1::2], odd),
        "rows 2, 4, 6, 8, 10": (WEAK[0::2], even),
    }
    beaten = True
    for name, (held, constants) in means.items():
        ours = statistics.fmean(abs(predicted_tflops(row, constants) / row.tflops - 1) for row in held)
        average = statistics.fmean(row.tflops for row in WEAK)
        naive = statistics.fmean(abs(average / row.tflops - 1) for row in held)
        beaten &= ours < naive
        page.say(f"Calibrated on {name}: mean error {ours:.2%}; predicting the table's mean {naive:.2%}.")
    page.bound(
        "Weak scaling, held-out rows",
        "within 6 % each, better than the mean",
        f"worst {worst:.1%}",
        worst <= 0.06 and beaten,
    )
    strong = []
    worst, falls = 0.0, True
    for row, before in zip(STRONG, (None, *STRONG), strict=False):
        ours = predicted_tflops(row, odd)
        worst = max(worst, abs(ours / row.tflops - 1))
        if before is not None and before.parameters_b == row.parameters_b:
            falls &= ours < predicted_tflops(before, odd)
        strong.append(
            (f"{row.parameters_b:g} B", row.gpus, row.tflops, f"{ours:.1f}", f"{ours / row.tflops - 1:+.1%}")
        )
    page.table(("strong scaling", "GPUs", "published", "ours", "error"), strong)
    page.bound("Strong scaling", "within 8 % each, falling", f"worst {worst:.1%}", worst <= 0.08 and falls)
