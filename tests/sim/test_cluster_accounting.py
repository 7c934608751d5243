"""Every GPU-second has exactly one cause, each is what the event log says, and one seed replays a run."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from bench import modelled_job, plain_job, run
from perdure.core.policies import POLICIES
from perdure.core.policies.base import CAUSES, Method
from perdure.core.policies.work import Workload
from perdure.sim.cluster import Result
from perdure.sim.happenings import Happening, Kind

SPAN_S = 40_000.0
QUICK = {
    "megatron": {"timeout_s": 300.0, "queue_s": 30.0, "setup_s": 60.0, "save_every_s": 900.0},
    "varuna": {"timeout_s": 300.0, "save_every_steps": 50},
    "oobleck": {"timeout_s": 300.0, "save_every_s": 900.0},
    "bamboo": {"timeout_s": 300.0, "save_every_s": 900.0},
    "recycle": {"timeout_s": 300.0, "save_every_s": 900.0},
    "unicron": {"save_every_s": 900.0},
    "perdure": {"save_every_s": 900.0},
}


def storm(seed: int, nodes: int) -> tuple[list[Happening], frozenset[int]]:
    """Everything that can happen to nodes, often and at once."""
    rng = random.Random(seed)
    found: list[Happening] = []
    absent = frozenset(rng.sample(range(nodes), rng.randint(0, 2)))
    found.extend(Happening(rng.uniform(0, SPAN_S), Kind.ADD, node) for node in absent)
    for _ in range(60):
        time, node = round(rng.uniform(0, SPAN_S), rng.choice((-2, 3))), rng.randrange(nodes)
        match rng.randrange(5):
            case 0:
                found.append(
                    Happening(time, Kind.FAULT, node, 1, rng.choice(list(Method)), rng.uniform(0, 9000))
                )
            case 1:
                severity = rng.choice((2, 3))
                found.append(Happening(time, Kind.FAULT, node, severity, rng.choice(list(Method))))
            case 2:
                found.append(Happening(time, Kind.NOTICE, node, lasts_s=120.0))
                found.append(Happening(time + 120, Kind.REMOVE, node))
                found.append(Happening(time + 120 + rng.uniform(0, 5000), Kind.ADD, node))
            case 3:
                found.append(
                    Happening(time, Kind.SLOW, node, lasts_s=rng.uniform(0, 5000), factor=rng.uniform(1, 5))
                )
            case 4:
                found.append(Happening(time, Kind.REMOVE, node))
                found.append(Happening(time + rng.uniform(0, 5000), Kind.ADD, node))
    return found, absent


def jobs(kind: str) -> list[Workload]:
    if kind == "plain":
        return [plain_job(4, 9.0, name="a", weight=2.0), plain_job(3, 7.0, name="b")]
    return [modelled_job(6, 2, name="a"), modelled_job(6, 2, name="b")]


def by_the_log(result: Result, gpus_per_node: int) -> dict[str, float]:
    """GPU-seconds by cause, from nothing but the event log and the definitions of the causes."""
    spent = dict.fromkeys(CAUSES, 0.0)
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in result.log:
        if line["event"] in ("job_state", "pool_state"):
            lines[line.get("job", "pool")].append(line)
    for owner, states in lines.items():
        for now, after in zip(states, [*states[1:], {"time_s": result.span_s}], strict=True):
            span = after["time_s"] - now["time_s"]
            if owner == "pool":
                spent["idle"] += span * gpus_per_node * (now["free"] + now["resting"])
                spent["transition"] += span * gpus_per_node * now["returning"]
                spent["down"] += span * gpus_per_node * now["down"]
                continue
            held = now["nodes"] * gpus_per_node
            if now["state"] in ("run", "recompute"):
                used = min(held, now["gpus"])
                useful, overhead = now["useful"] / now["slowdown"], now["overhead"] / now["slowdown"]
                spent["useful" if now["state"] == "run" else "recomputed"] += span * used * useful
                spent["healthy_overhead"] += span * used * overhead
                spent["degraded"] += span * used * (1 - useful - overhead)
                spent["transition" if now["joining"] else "idle"] += span * (held - used)
            else:
                names = {"wait": "idle", "detect": "detection", "checkpoint": "checkpoint"}
                spent[names.get(now["state"], "transition")] += span * held
    return spent


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["plain", "modelled"])
@pytest.mark.parametrize("seed", range(6))
def test_causes_add_up_and_are_those_of_the_log(policy: str, kind: str, seed: int) -> None:
    happenings, absent = storm(seed, 8)
    works = jobs(kind)
    result = run(policy, works, 7, happenings, SPAN_S, QUICK[policy], spares=1, absent=absent)
    per_node = works[0].gpus_per_node
    assert sum(result.gpu_seconds.values()) == pytest.approx(SPAN_S * 8 * per_node, rel=1e-9)
    assert min(result.gpu_seconds.values()) >= -1e-6
    assert result.gpu_seconds == pytest.approx(by_the_log(result, per_node), rel=1e-6, abs=1e-3)
    assert result.waf == pytest.approx(
        sum(work.weight * work.step_flop * result.jobs[work.name].steps for work in works)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_down_time_is_the_nodes_own_whatever_the_policy(policy: str) -> None:
    """Losses come from the trace alone: every policy sees the same."""
    happenings, absent = storm(3, 8)
    first = run("megatron", jobs("plain"), 7, happenings, SPAN_S, spares=1, absent=absent)
    other = run(policy, jobs("plain"), 7, happenings, SPAN_S, spares=1, absent=absent)
    assert other.gpu_seconds["down"] == pytest.approx(first.gpu_seconds["down"])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_replays_to_the_bit(policy: str) -> None:
    happenings, absent = storm(4, 8)
    twice = [run(policy, jobs("modelled"), 7, happenings, SPAN_S, absent=absent, spares=1) for _ in range(2)]
    assert twice[0].gpu_seconds == twice[1].gpu_seconds
    assert twice[0].log == twice[1].log


@pytest.mark.parametrize("policy", POLICIES)
def test_positions_never_pass_what_was_computed(policy: str) -> None:
    """The furthest position only grows, and a job is never further than it was."""
    happenings, absent = storm(5, 8)
    result = run(policy, jobs("plain"), 7, happenings, SPAN_S, absent=absent, spares=1)
    furthest: dict[str, float] = defaultdict(float)
    for line in result.log:
        if line["event"] == "job_state":
            assert line["furthest"] >= furthest[line["job"]] - 1e-9
            assert line["position"] <= line["furthest"] + 1e-6
            furthest[line["job"]] = line["furthest"]


def test_a_job_ends_after_its_steps_and_frees_its_nodes() -> None:
    result = run("perdure", [plain_job(2)], 2, [], 3000.0, {"snapshot_s": 0.0}, steps=100)
    assert result.jobs["job"].steps == pytest.approx(100)
    assert result.gpu_seconds["useful"] == pytest.approx(2 * 1000)
    assert result.gpu_seconds["idle"] == pytest.approx(2 * 2000)


def test_a_slow_node_slows_its_whole_job() -> None:
    """Three of four GPUs wait for the fourth, which takes 1.5 times as long for 1000 s."""
    slow = [Happening(500.0, Kind.SLOW, 0, lasts_s=1000.0, factor=1.5)]
    result = run("megatron", [plain_job(4)], 4, slow, 2000.0, {"save_every_s": 1e9})
    assert result.jobs["job"].steps == pytest.approx(100 + 1000 / 15)
    assert result.gpu_seconds["degraded"] == pytest.approx(4 * 1000 * (1 - 1 / 1.5))


@pytest.mark.parametrize("policy", ["unicron", "perdure"])
@pytest.mark.parametrize("seed", range(8))
def test_when_all_is_quiet_again_the_whole_plan_runs(policy: str, seed: int) -> None:
    """All nodes are back long before the end: every job runs on all that it holds, nobody waits to join."""
    happenings, absent = storm(seed, 8)
    result = run(policy, jobs("modelled"), 8, happenings, SPAN_S + 50_000, absent=absent)
    last = {line["job"]: line for line in result.log if line["event"] == "job_state"}
    pool = [line for line in result.log if line["event"] == "pool_state"][-1]
    assert pool["down"] == pool["returning"] == 0
    assert sum(line["nodes"] for line in last.values()) + pool["free"] == 8
    for line in last.values():
        if line["nodes"]:
            assert line["state"] in ("run", "recompute", "checkpoint")
            assert not line.get("joining")
            assert line.get("slowdown", 1) == 1


@pytest.mark.parametrize("policy", ["oobleck", "unicron", "perdure"])
def test_a_checkpoint_due_while_one_is_on_its_way_is_skipped_and_counted(policy: str) -> None:
    """10 GB at 5 MB/s take 2,000 s: of those due every 900 s two in three are skipped."""
    settings = {"save_every_s": 900.0} | ({} if policy == "unicron" else {"snapshot_s": 5.0})
    slow = run(policy, [plain_job(4)], 4, [], SPAN_S, settings, storage_gb_s=0.005).jobs["job"]
    fast = run(policy, [plain_job(4)], 4, [], SPAN_S, settings).jobs["job"]
    due = SPAN_S // 900
    assert slow.saves == pytest.approx(due / 3, abs=1)
    assert slow.skipped_saves == pytest.approx(due * 2 / 3, abs=1)
    assert (fast.saves, fast.skipped_saves) == (pytest.approx(due, abs=1), 0)
