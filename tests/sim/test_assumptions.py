"""Every assumption moves the result in the direction that it states, across its whole range."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from bench import modelled_job, run
from perdure.core.policies import POLICIES
from perdure.core.policies.base import Assumption, Method, assumptions_of
from perdure.schema.cluster import Model
from perdure.sim.happenings import Happening, Kind

HOUR = 3600.0
BIG = Model(layers=24, hidden=4096, heads=32, sequence=2048, vocabulary=50_304, global_batch=256)
CASES = [(name, found) for name, (_, settings) in POLICIES.items() for found in assumptions_of(settings)]


def faults(shift_s: float) -> list[Happening]:
    """Every kind of fault, four hours apart, so that each is over before the next."""
    found = []
    kinds: tuple[tuple[Literal[1, 2, 3], Method, int], ...] = (
        (1, Method.NODE, 3),
        (2, Method.EXCEPTION, 1),
        (3, Method.STATISTICAL, 2),
        (2, Method.PROCESS, 4),
        (1, Method.EXCEPTION, 0),
        (3, Method.EXCEPTION, 5),
        (2, Method.STATISTICAL, 6),
    )
    for number, (severity, method, node) in enumerate(kinds, start=1):
        time = 4 * HOUR * number + 777.7 * number + shift_s
        found.append(Happening(time, Kind.FAULT, node, severity, method, 2 * HOUR))
    # Two neighbours at once are fatal to a pipeline that keeps shadows; all nodes at once to everybody. What
    # is lost since the last checkpoint depends on when that was: nothing comes after the last loss.
    for hour, nodes in ((35, (2, 3)), (37, range(9)), (40, (1,))):
        time = hour * HOUR + shift_s
        found.extend(Happening(time, Kind.FAULT, node, 1, Method.NODE, HOUR / 2) for node in nodes)
    return found


def waf(policy: str, name: str, value: float) -> float:
    """Accumulated WAF with one assumption at `value`, with and without a spare.

    Checkpoints are frequent, and the faults come at two phases of them, so that little hangs on when the
    last was.
    """
    settings: dict[str, Any] = {"save_every_s": 120.0, "snapshot_s": 1.0}
    known = {field.name for field in msgspec.structs.fields(POLICIES[policy][1])}
    settings = {key: setting for key, setting in settings.items() if key in known} | {name: value}
    # How much memory a node needs matters where nodes are small.
    gpus_per_node = 1 if name == "state_factor" else 8
    job = modelled_job(8, gpus_per_node, model=BIG)
    return sum(
        run(policy, [job], 8, faults(shift_s), 42 * HOUR, settings, spares, 200.0, keep_log=False).waf
        for spares in (0, 1)
        for shift_s in (0.0, 60.0)
    )


@pytest.mark.parametrize(("policy", "found"), CASES, ids=[f"{name}-{found.name}" for name, found in CASES])
def test_the_range_moves_the_result_as_stated(policy: str, found: Assumption) -> None:
    assert found.range.low <= found.value <= found.range.high
    low, high = waf(policy, found.name, found.range.low), waf(policy, found.name, found.range.high)
    if found.range.more_is == "worse":
        assert low > high
    elif found.range.more_is == "better":
        assert low < high
    else:
        assert low != high


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_names_every_assumption_with_its_value_and_range(policy: str) -> None:
    """docs/policies.md is written by hand; this keeps its figures those of the settings."""
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    section = " ".join(text.split(f"\n## {policy}\n")[1].split("\n## ")[0].split())
    for found in assumptions_of(POLICIES[policy][1]):
        across = f"({found.range.low:g}–{found.range.high:g})"
        assert f"`{found.name}` {found.value:g} {across}" in section
