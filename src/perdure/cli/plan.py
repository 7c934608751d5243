"""`perdure plan`: which job gets which nodes of a cluster, why, and what an event would change."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track

from perdure.cli.figures import computing_with, narrow_table
from perdure.core.allocation import Demand, Outlook, Plan, allocate
from perdure.core.cost import expected_running, node_loss_rate, transition_seconds
from perdure.core.curve import Curve, job_curve
from perdure.core.explain import explain
from perdure.core.gpus import gpu_kind
from perdure.core.placement import Nodes, place
from perdure.core.scenario_checks import check_policies, check_size
from perdure.core.units import scaled
from perdure.schema.cluster import Scenario, load_jobs, load_scenario
from perdure.schema.errors import UsageError

EVENTS = "'lose node-N', 'return node-N', 'finish JOB' or 'submit FILE'"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("cluster", metavar="CLUSTER.toml", help="the cluster and its jobs")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--what-if",
        metavar="EVENT",
        action="append",
        default=[],
        help=f"show the plan after an event: {EVENTS}; may be given several times, in order",
    )


def run(args: argparse.Namespace) -> int:
    """Plan, apply the events, print."""
    with computing_with(args.cluster):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    scenario = load_scenario(args.cluster)
    check_policies(scenario)
    running_s = expected_running(_loss_rate(scenario))
    events = [_parse(text) for text in args.what_if]
    scenario = _with_newcomers(scenario, events)
    check_size(scenario)
    world, outlook, figures = _first_plan(scenario, _away(events, scenario), running_s, quiet=args.json)
    before = world
    changes = []
    for event in events:
        after = _apply(world, outlook, event)
        changes.append(_change(event, world, after))
        world, outlook = after, after.outlook()
    figures["event_ms_max"] = _slowest_lookup_ms(outlook)
    report = {**_report(world, outlook), **figures}
    if events:
        report |= {"events": changes, "before": {"jobs": _counts(before)}}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(world, before, report)
    return 0


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happens: `lose`, `return`, `finish` or `submit`, and to what."""

    verb: str
    subject: str

    @property
    def node(self) -> int:
        """The number of the node; only for `lose` and `return`."""
        return int(self.subject.removeprefix("node-"))

    def __str__(self) -> str:
        return f"{self.verb} {self.subject}"


@dataclasses.dataclass(frozen=True)
class World:
    """The jobs, the nodes that are alive, who holds which, and D_running for any number of nodes."""

    scenario: Scenario
    curves: tuple[Curve, ...]
    alive: frozenset[int]
    held: dict[str, Nodes]
    running_s: Callable[[int], float]

    def demand(self, curve: Curve) -> Demand:
        """What the planner has to know of one job."""
        return Demand(
            name=curve.name,
            waf=curve.job.weight * curve.flops_per_s,
            current=len(self.held.get(curve.name, ())),
            transition_s=transition_seconds(curve, self.scenario),
        )

    def outlook(self) -> Outlook:
        """Every single event's outcome, from here."""
        return Outlook([self.demand(curve) for curve in self.curves], len(self.alive), self.running_s)

    def settled(self, plan: Plan) -> World:
        """This world under `plan`."""
        return dataclasses.replace(self, held=place(self.held, plan.nodes, self.alive))


def _parse(text: str) -> Event:
    match = re.fullmatch(r"\s*(?:(lose|return)\s+(node-\d{1,9})|(finish|submit)\s+(\S.*?))\s*", text)
    if match is None:
        raise UsageError(f"--what-if {text!r}: not an event, expected {EVENTS}")
    return Event(match[1] or match[3], match[2] or match[4])


def _away(events: Iterable[Event], scenario: Scenario) -> frozenset[int]:
    """Nodes of the cluster that return before they are lost: they are away when the plan is made."""
    seen: set[int] = set()
    away = set()
    for event in events:
        if event.verb in ("lose", "return") and event.node not in seen:
            seen.add(event.node)
            if event.verb == "return" and event.node < scenario.cluster.nodes:
                away.add(event.node)
    return frozenset(away)


def _with_newcomers(scenario: Scenario, events: Iterable[Event]) -> Scenario:
    """The scenario with as many spares as nodes beyond the cluster's come, so that jobs know their use."""
    cluster = scenario.cluster
    come = {event.node for event in events if event.verb == "return" and event.node >= cluster.nodes}
    spares = max(cluster.spares, len(come))
    return msgspec.structs.replace(scenario, cluster=msgspec.structs.replace(cluster, spares=spares))


def _first_plan(
    scenario: Scenario, away: frozenset[int], running_s: Callable[[int], float], quiet: bool
) -> tuple[World, Outlook, dict[str, float]]:
    """The plan for the nodes that are there, its look-ups, and how long all of it took."""
    kind = gpu_kind(scenario)
    started = time.perf_counter()
    screen = Console(stderr=True)
    hidden = quiet or not screen.is_terminal
    jobs = track(scenario.job, "speeds", console=screen, transient=True, disable=hidden)
    curves = tuple(job_curve(job, scenario.cluster, kind) for job in jobs)
    curves_s = time.perf_counter() - started
    alive = frozenset(range(scenario.cluster.nodes)) - away
    world = World(scenario, curves, alive, _held_now(scenario, alive), running_s)
    demands = [world.demand(curve) for curve in curves]
    world = world.settled(allocate(demands, len(alive), world.running_s))
    outlook = world.outlook()
    return world, outlook, {"curves_s": curves_s, "plan_s": time.perf_counter() - started}


def _loss_rate(scenario: Scenario) -> float:
    """Node losses per node and second: what the cluster says, or what its trace shows; as the simulator's."""
    if scenario.cluster.mtbf_hours_per_node is not None or scenario.cluster.trace is None:
        return node_loss_rate(scenario.cluster)
    from perdure.sim.scenario import loss_rate  # only a trace needs the simulator's readers

    return loss_rate(scenario)


def _held_now(scenario: Scenario, alive: frozenset[int]) -> dict[str, Nodes]:
    """The nodes that the jobs hold already (`gpus.now`), in the order of the file."""
    counts = {job.name: -(-job.gpus.now // scenario.cluster.gpus_per_node) for job in scenario.job}
    if sum(counts.values()) > len(alive):
        raise UsageError(
            f"job.gpus.now: the jobs hold {sum(counts.values())} nodes, expected at most {len(alive)}"
        )
    return place({}, counts, alive)


def _apply(world: World, outlook: Outlook, event: Event) -> World:
    """The world after one event: the look-up, and the nodes that change hands."""
    where = f"--what-if {str(event)!r}"
    if event.verb == "lose":
        if event.node not in world.alive:
            raise UsageError(f"{where}: {event.subject} is not there, expected a node that is")
        owner = next((name for name, nodes in world.held.items() if event.node in nodes), None)
        left = dataclasses.replace(world, alive=world.alive - {event.node})
        return left.settled(outlook.lose(owner))
    if event.verb == "return":
        if event.node in world.alive:
            raise UsageError(f"{where}: {event.subject} is there already, expected one that is not")
        return dataclasses.replace(world, alive=world.alive | {event.node}).settled(outlook.gain())
    if event.verb == "finish":
        names = [curve.name for curve in world.curves]
        if event.subject not in names:
            raise UsageError(f"{where}: no such job, expected one of {', '.join(names) or 'none'}")
        rest = tuple(curve for curve in world.curves if curve.name != event.subject)
        return dataclasses.replace(world, curves=rest).settled(outlook.finish(event.subject))
    return _submitted(world, outlook, event.subject)


def _submitted(world: World, outlook: Outlook, path: str) -> World:
    present = tuple(curve.job for curve in world.curves)
    scenario = msgspec.structs.replace(world.scenario, job=present)
    jobs = load_jobs(path, scenario)
    check_size(scenario, jobs)
    for job in jobs:
        curve = job_curve(job, scenario.cluster, gpu_kind(scenario))
        plan = outlook.submit(world.demand(curve))
        world = dataclasses.replace(world, curves=(*world.curves, curve)).settled(plan)
        outlook = world.outlook()
    return world


def _slowest_lookup_ms(outlook: Outlook) -> float:
    """The slowest answer to any single event; each is the best of three, to leave the scheduler out."""
    asks: list[Callable[[], Plan]] = [outlook.gain]
    for demand in outlook.demands:
        again = dataclasses.replace(demand, name=f"{demand.name}-again", current=0)
        asks += [partial(outlook.finish, demand.name), partial(outlook.submit, again)]
        if demand.current:
            asks.append(partial(outlook.lose, demand.name))
    return max(min(_timed(ask) for _ in range(3)) for ask in asks) * 1e3


def _timed(ask: Callable[[], Plan]) -> float:
    started = time.perf_counter()
    ask()
    return time.perf_counter() - started


def _counts(world: World) -> dict[str, Any]:
    found = {}
    for curve in world.curves:
        nodes = len(world.held[curve.name])
        found[curve.name] = {
            "nodes": nodes,
            "gpus": int(curve.gpus[min(nodes, curve.nodes_max)]),
            "waf": curve.job.weight * curve.at(nodes),
        }
    return found


def _report(world: World, outlook: Outlook) -> dict[str, Any]:
    jobs = _counts(world)
    for position, curve in enumerate(world.curves):
        jobs[curve.name]["why"] = explain(outlook, position)
        jobs[curve.name]["node_names"] = [f"node-{node}" for node in sorted(world.held[curve.name])]
    used = sum(len(nodes) for nodes in world.held.values())
    return {
        "jobs": jobs,
        "nodes": len(world.alive),
        "idle_nodes": len(world.alive) - used,
        "waf": sum(job["waf"] for job in jobs.values()),
        "expected_running_s": world.running_s(len(world.alive)),
    }


def _change(event: Event, before: World, after: World) -> dict[str, Any]:
    """Which jobs get another number of nodes."""
    names = dict.fromkeys((*before.held, *after.held))
    counts = {name: [len(world.held.get(name, ())) for world in (before, after)] for name in names}
    changed = {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
    return {"event": str(event), "changed": changed}


def _show(world: World, before: World, report: dict[str, Any]) -> None:
    console = Console()
    per_node = world.scenario.cluster.gpus_per_node
    largest = max((abs(job["waf"]) for job in report["jobs"].values()), default=0.0)
    factor, unit = scaled(largest, "FLOP/s")
    table = narrow_table(
        f"{_counted(report['nodes'], 'node')} × {_counted(per_node, 'GPU')}",
        "job",
        ("weight", "nodes", "GPUs", "layout t·p·d", unit, "weighted"),
    )
    for curve in world.curves:
        job = report["jobs"][curve.name]
        earlier = len(before.held.get(curve.name, ()))
        nodes = f"{earlier} → {job['nodes']}" if earlier != job["nodes"] else str(job["nodes"])
        layout = curve.layout(job["nodes"]) if job["nodes"] else None
        table.add_row(
            curve.name,
            f"{curve.job.weight:g}",
            nodes,
            str(job["gpus"]),
            f"{layout.tensor}·{layout.pipeline}·{layout.data}" if layout else "",
            f"{curve.at(job['nodes']) / factor:.4g}",
            f"{job['waf'] / factor:.4g}",
        )
    console.print(table)
    for event in report.get("events", ()):
        moved = ", ".join(f"{name} {a} → {_counted(b, 'node')}" for name, (a, b) in event["changed"].items())
        console.print(f"{event['event']}: {moved or 'nothing changes'}", highlight=False)
    for name, job in report["jobs"].items():
        console.print(f"{name} {job['why']}", highlight=False)
    total, total_unit = scaled(report["waf"], "FLOP/s")
    console.print(
        f"weighted total {report['waf'] / total:.4g} {total_unit}, {_counted(report['idle_nodes'], 'node')} "
        "idle; planned, "
        f"with all look-ups, in {report['plan_s']:.3f} s; an event is answered in at most "
        f"{report['event_ms_max']:.3f} ms",
        highlight=False,
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
