"""What a plan is worth: weighted achieved FLOP/s, over the time it will last, less what changing to it costs.

Unicron (arXiv 2401.00134, section 5), for job t with weight w on x nodes now and x' under the plan:

    F(t, x)  = w(t) · T(t, x)                                    WAF, FLOP/s; T is 0 below the job's minimum
    G(t, x') = F(t, x') · D_running − [x' ≠ x, or a worker of t failed] · F(t, x) · D_transition

in weighted FLOP. D_running is the expected time until the next event that makes a new plan, D_transition the
time for which a changed job does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perdure.core.curve import Curve, state_bytes
from perdure.core.throughput import LINK_SHARE
from perdure.schema.cluster import Cluster, Scenario
from perdure.schema.errors import UsageError

SETUP_S = 15.0
"""Seconds to form the new process groups and start on them: an assumption, of the order that TrainMover (20 s
at 1,024 GPUs, state included) and FlashRecovery (150 s at 4,800 devices, restarts included) report; `[plan]
transition_s` replaces it."""
LONGEST_RUN_S = 365 * 86_400.0
"""D_running where nothing ever fails: a year, so that gains stay finite."""


def gains(
    waf: NDArray[np.float64],
    current: int,
    options: NDArray[np.int64],
    running_s: float,
    transition_s: float,
    failed: bool = False,
) -> NDArray[np.float64]:
    """G of each of `options` (node counts), in weighted FLOP; F(n) is `waf[n]`, flat beyond its end."""
    last = waf.size - 1
    kept = (options == current) & (not failed)
    penalty = float(waf[min(current, last)]) * transition_s
    return np.asarray(waf[np.minimum(options, last)] * running_s - np.where(kept, 0.0, penalty))


def node_loss_rate(cluster: Cluster) -> float:
    """Expected losses per node and second: SEV1 faults and preemptions, the ones that need a new plan.

    SEV2 and SEV3 leave the nodes, and so the plan, as they are. Raises `UsageError` if the cluster says
    nothing of its failures but a trace.
    """
    if cluster.mtbf_hours_per_node is None:
        raise UsageError(
            "cluster.mtbf_hours_per_node: missing, expected it beside the trace, as what planners believe"
        )
    rate = cluster.severity.shares[0] / (cluster.mtbf_hours_per_node * 3600)
    if cluster.preemption is not None:
        rate += 1 / (cluster.preemption.mean_hours_per_node * 3600)
    return rate


def expected_running(rate_per_node_s: float) -> Callable[[int], float]:
    """D_running as a function of the number of nodes, in s: 1 / (nodes · rate), at most `LONGEST_RUN_S`."""

    def running_s(nodes: int) -> float:
        rate = nodes * rate_per_node_s
        return min(LONGEST_RUN_S, 1 / rate) if rate > 0 else LONGEST_RUN_S

    return running_s


def transition_seconds(curve: Curve, scenario: Scenario) -> float:
    """D_transition of a job, in s: `[plan] transition_s`, or `SETUP_S` and its state's way to a joiner.

    A node that joins receives its share of one replica from live replicas, on all its network cards.
    """
    if scenario.plan.transition_s is not None:
        return scenario.plan.transition_s
    job, kind = curve.job, curve.machine.kind
    if job.model is None and job.state_gb is None:
        return SETUP_S
    layout = curve.layout(curve.nodes_max)
    per_node = scenario.cluster.gpus_per_node
    replica_nodes = math.ceil(layout.tensor * layout.pipeline / per_node) if layout else 1
    return SETUP_S + state_bytes(job) / replica_nodes / (per_node * kind.inter_gb_s * 1e9 * LINK_SHARE)
