"""What to buy or change: spares, the checkpoint interval and the policy, in GPU-hours and money.

Every option is simulated over the same traces as the present arrangement. What it gains is accumulated WAF,
which knows the weights of jobs: one per cent more is worth one per cent of the useful GPU-hours that there
are now, at what GPU-hours cost. Spares cost what GPUs cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from perdure.core.policies import make
from perdure.core.scenario_checks import save_every_min_s
from perdure.schema.cluster import Scenario
from perdure.sim.experiment import Tick, compare
from perdure.sim.scenario import loss_rate

SPARES = (1, 2, 4, 8, 16)
INTERVALS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True)
class Option:
    """One change: what it gains and what it costs, over the simulated time.

    `waf_gain` is the accumulated WAF that it adds as a share of the present one, None where nothing is done
    at present; `worth_gpu_hours` is that share of the useful GPU-hours there are now, or all of the useful
    GPU-hours where there are none.
    """

    kind: str
    change: str
    useful_gpu_hours: float
    gained_gpu_hours: float
    waf_gain: float | None
    worth_gpu_hours: float
    bought_gpu_hours: float
    goodput: float
    price: float

    @property
    def net_money(self) -> float:
        """Worth of what is gained less the price of what is bought."""
        return (self.worth_gpu_hours - self.bought_gpu_hours) * self.price

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "change": self.change,
            "useful_gpu_hours": self.useful_gpu_hours,
            "gained_gpu_hours": self.gained_gpu_hours,
            "waf_gain": self.waf_gain,
            "worth_gpu_hours": self.worth_gpu_hours,
            "bought_gpu_hours": self.bought_gpu_hours,
            "goodput": self.goodput,
            "net_money": self.net_money,
        }


def variants(
    scenario: Scenario, policy: str, others: Sequence[str]
) -> Iterator[tuple[str, str, Scenario, str]]:
    """(kind, change in words, scenario, policy) of the present arrangement, first, and of every option."""
    yield "now", f"{policy} as it is", scenario, policy
    cluster = scenario.cluster
    if cluster.trace is None:
        for count in SPARES:
            if count <= max(2, cluster.nodes // 10):
                changed = msgspec.structs.replace(cluster, spares=cluster.spares + count)
                more = msgspec.structs.replace(scenario, cluster=changed)
                yield "spares", f"{count} more spare node{'s' if count > 1 else ''}", more, policy
    every_s = getattr(make(policy, scenario.policy.get(policy)).settings, "save_every_s", None)
    if every_s is not None:
        intervals = {every_s * factor for factor in INTERVALS} | set(_best_interval(scenario, policy))
        for interval in sorted(intervals):
            if interval < save_every_min_s(scenario):
                continue
            table = {**scenario.policy.get(policy, {}), "save_every_s": interval}
            tables = {**scenario.policy, policy: table}
            changed_scenario = msgspec.structs.replace(scenario, policy=tables)
            yield "interval", f"a checkpoint every {_minutes(interval)}", changed_scenario, policy
    for other in others:
        if other != policy:
            yield "policy", other, scenario, other


def _best_interval(scenario: Scenario, policy: str) -> Iterator[float]:
    """√(2w / rate) (Young 1974; Meta, HPCA'25) for the stall w of a checkpoint; nothing if it does not
    stall.
    """
    write_s = scenario.policy.get(policy, {}).get("write_s")
    rate = loss_rate(scenario) * scenario.cluster.nodes / max(scenario.cluster.severity.shares[0], 1e-9)
    if write_s and rate > 0:
        yield math.sqrt(2 * write_s / rate)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def advise(
    scenario: Scenario, policy: str, others: Sequence[str], seeds: int, tick: Tick | None = None
) -> list[Option]:
    """Every option, the present arrangement first, then by what it nets. Raises `UsageError`."""
    options: list[Option] = []
    base_hours, base_waf, base_gpus = 0.0, 0.0, 0
    hours = scenario.simulate.days * 24
    for kind, change, changed, name in variants(scenario, policy, others):
        found = compare(changed, (name,), seeds, tick)
        cluster = changed.cluster
        gpus = (cluster.nodes + cluster.spares) * cluster.gpus_per_node
        useful, waf = found.gpu_seconds(name, "useful").mean / 3600, found.waf(name).mean
        if kind == "now":
            base_hours, base_waf, base_gpus = useful, waf, gpus
        gain = waf / base_waf - 1 if base_waf > 0 else None
        options.append(
            Option(
                kind=kind,
                change=change,
                useful_gpu_hours=useful,
                gained_gpu_hours=useful - base_hours,
                waf_gain=gain,
                worth_gpu_hours=useful if gain is None else gain * base_hours,
                bought_gpu_hours=(gpus - base_gpus) * hours,
                goodput=found.goodput(name).mean,
                price=cluster.price_per_gpu_hour,
            )
        )
    return options[:1] + sorted(options[1:], key=lambda option: -option.net_money)


def best(options: Sequence[Option]) -> Option:
    """The option that nets most, the present arrangement included."""
    return max(options, key=lambda option: (option.net_money, option.kind == "now"))
