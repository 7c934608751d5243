"""A cluster and its jobs as one TOML file: what `perdure plan` and `perdure simulate` read.

    [cluster]                       machines, how they fail, what they cost
    [[job]]                         one per training run: who it is, how many GPUs, how fast
    [plan]                          what a change of plan costs, when it is known better than the model
    [simulate]                      how long, from which seed
    [policy.NAME]                   free overrides; each policy validates its own
    [gpu.NAME]                      a GPU kind of your own, see `perdure.core.gpus`

Every struct below is one table and its fields are the keys; a unit stands last in the name. Whatever is wrong
is a `UsageError` of one line that names the key, what was found and what was expected. Files that a scenario
names are looked for beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from perdure.schema.errors import UsageError
from perdure.schema.measured import Measured, load_measured
from perdure.schema.tables import Table, convert, override, read_toml

Count = Annotated[int, Meta(ge=1, le=10**9)]
Positive = Annotated[float, Meta(ge=1e-12, le=1e30)]
NonNegative = Annotated[float, Meta(ge=0, le=1e30)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1, le=1e6)]
NODES_MAX = 100_000
"""Planned nodes, or spares, of a cluster; on more, a plan takes minutes and a simulation hours."""
DAYS_MAX = 3_650.0
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class Severity(Table, frozen=True):
    """How faults divide into severities; weights, so that counts can be written as they were published.

    SEV3 is retried in place, SEV2 restarts a process, SEV1 isolates the node until it is repaired. The
    default is the mix of Unicron (arXiv 2401.00134, table 1): 28.1, 15.7 and 48.6 %, with its 7.6 % of
    'others' counted as SEV2, since a restart is what is done about an error without a class.
    """

    sev1: NonNegative = 0.281
    sev2: NonNegative = 0.233
    sev3: NonNegative = 0.486

    def problem(self) -> str | None:
        if self.sev1 + self.sev2 + self.sev3 <= 0:
            return "sev1, sev2, sev3: all are 0, expected at least one weight above 0"
        return None

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of SEV1, SEV2 and SEV3; their sum is 1."""
        total = self.sev1 + self.sev2 + self.sev3
        return self.sev1 / total, self.sev2 / total, self.sev3 / total


class Hours(Table, frozen=True):
    """A time in hours that varies: a uniform range, an exponential or a log-normal.

    Exactly one of `{fixed}`, `{min, max}` (uniform), `{mean}` (exponential), `{median, sigma}` (log-normal,
    `sigma` of its natural logarithm). A plain number in the file is `{fixed}`.
    """

    PLAIN: ClassVar[str | None] = "fixed"

    fixed: NonNegative | None = None
    min: NonNegative | None = None
    max: NonNegative | None = None
    mean: Positive | None = None
    median: Positive | None = None
    sigma: Annotated[float, Meta(ge=0, le=10)] | None = None

    def problem(self) -> str | None:
        given = {field for field in self.__struct_fields__ if getattr(self, field) is not None}
        if given not in ({"fixed"}, {"min", "max"}, {"mean"}, {"median", "sigma"}):
            return (
                f"{' and '.join(sorted(given)) or 'fixed'}: not a distribution, expected a number of hours, "
                "{min, max}, {mean} or {median, sigma}"
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            return f"min: {self.min} is above max = {self.max}, expected min ≤ max"
        return None

    @property
    def kind(self) -> Literal["fixed", "uniform", "exponential", "lognormal"]:
        """Which distribution the keys name."""
        if self.fixed is not None:
            return "fixed"
        if self.min is not None:
            return "uniform"
        return "exponential" if self.mean is not None else "lognormal"

    @property
    def mean_hours(self) -> float:
        """The expected value, in hours."""
        if self.fixed is not None:
            return self.fixed
        if self.min is not None and self.max is not None:
            return (self.min + self.max) / 2
        if self.median is not None and self.sigma is not None:
            return self.median * math.exp(self.sigma**2 / 2)
        return self.mean or 0.0


class FailureProcess(Table, frozen=True):
    """How the failures of the given mean rate are spread over time and nodes.

    `poisson`; `weibull` (`shape` < 1 clusters them, > 1 is wear); `bursts` (a share `burst_share` of all
    failures comes in bursts that take `burst_nodes` neighbouring nodes at once); `infant` (the rate starts at
    `factor` times its later value after a node is new or repaired and decays with `decay_hours`); `lemons` (a
    share `lemon_share` of the nodes fails `factor` times as often as the others).
    """

    kind: Literal["poisson", "weibull", "bursts", "infant", "lemons"] = "poisson"
    shape: Annotated[float, Meta(ge=0.05, le=100)] = 0.7
    burst_share: Share = 0.2
    burst_nodes: Count = 4
    factor: Factor = 10.0
    decay_hours: Annotated[float, Meta(gt=0, le=1e9)] = 72.0
    lemon_share: Share = 0.02


class Preemption(Table, frozen=True):
    """Nodes that their owner takes back: how often, with what notice, for how long they are away."""

    mean_hours_per_node: Positive
    notice_s: NonNegative = 120.0
    notice_share: Share = 1.0
    absent_hours: Hours = Hours(mean=1.0)


class Degradation(Table, frozen=True):
    """Nodes that become slow without failing: how often, by which factor of a step's time, for how long."""

    mean_hours_per_node: Positive
    slowdown: Factor = 1.5
    lasts_hours: Hours = Hours(mean=6.0)


class LateNodes(Table, frozen=True):
    """The last `nodes` of the cluster are not there at the start; each arrives after a time of its own."""

    nodes: Count
    arrive_hours: Hours


class Cluster(Table, frozen=True):
    """The machines.

    `mtbf_hours_per_node` is the mean time between two faults of any severity on one node; `trace` is a file
    of events to replay instead (`trace_source` says where to get it). With both, the trace happens and the
    mean is what planners believe. `spares` are further nodes that only replace failed ones; they are paid for
    like the others. `storage_gb_s` is the bandwidth of the shared checkpoint storage, all clients together,
    in GB/s (10^9 bytes).
    """

    nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)]
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)]
    gpu: str
    mtbf_hours_per_node: Positive | None = None
    trace: str | None = None
    trace_source: str = ""
    repair_hours: Hours = Hours(fixed=24.0)
    spares: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 0
    storage_gb_s: Positive = 20.0
    price_per_gpu_hour: NonNegative = 2.0
    severity: Severity = Severity()
    failures: FailureProcess = FailureProcess()
    preemption: Preemption | None = None
    degradation: Degradation | None = None
    late: LateNodes | None = None

    def problem(self) -> str | None:
        if self.mtbf_hours_per_node is None and self.trace is None:
            return "mtbf_hours_per_node or trace: neither is given, expected one of them"
        if self.late is not None and self.late.nodes > self.nodes:
            return f"late.nodes: {self.late.nodes} of {self.nodes} nodes, expected at most all"
        return None

    @property
    def gpus(self) -> int:
        """All GPUs of the planned nodes, without the spares."""
        return self.nodes * self.gpus_per_node


class GpuRange(Table, frozen=True):
    """How many GPUs a job can use: `min`, `min + step`, … up to `max`. `now` is what it holds already.

    Nodes are given whole: on n nodes a job uses the largest such number that n nodes have.
    """

    min: Count
    max: Count
    step: Count = 1
    now: Annotated[int, Meta(ge=0)] = 0

    def problem(self) -> str | None:
        if self.min > self.max:
            return f"min: {self.min} is above max = {self.max}, expected min ≤ max"
        if self.now > self.max:
            return f"now: {self.now} is above max = {self.max}, expected now ≤ max"
        return None


class Model(Table, frozen=True):
    """A GPT-like transformer and its global batch (in sequences of `sequence` tokens)."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    hidden: Count
    heads: Count
    sequence: Count
    vocabulary: Count
    global_batch: Count

    def problem(self) -> str | None:
        if self.hidden % self.heads:
            return f"heads: {self.heads} does not divide hidden = {self.hidden}, expected a divisor"
        return None

    @property
    def parameters(self) -> float:
        """12·l·h²·(1 + 13/(12h) + (V + s)/(12·l·h)) (Narayanan et al., SC'21, equation 2)."""
        layers, hidden = self.layers, self.hidden
        tables = (self.vocabulary + self.sequence) / (12 * layers * hidden)
        return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + tables)

    @property
    def step_flop(self) -> float:
        """FLOP of one step that count as achieved, recomputation not among them.

        72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h)): forward and backward of Narayanan et al., SC'21, section 3.
        """
        layers, hidden = self.layers, self.hidden
        extra = self.sequence / (6 * hidden) + self.vocabulary / (12 * layers * hidden)
        return 72.0 * self.global_batch * self.sequence * layers * hidden**2 * (1 + extra)


class Job(Table, frozen=True):
    """One training run. Its speed comes from `model`, or from `throughput`, or from both.

    `throughput` names measurements (a CSV file, or a run of perdure's own), which then rule the speed;
    `model` still gives FLOP per step and the size of the state. Without a model, `flop_per_sample` turns
    measured samples into FLOP (`global_batch` of them are a step) and `state_gb` is the size of a checkpoint.
    `arrive_hours` is when it is submitted; after `steps` steps it ends.
    """

    HIDDEN: ClassVar[frozenset[str]] = frozenset({"measured"})

    name: Name
    gpus: GpuRange
    weight: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    model: Model | None = None
    throughput: str | None = None
    global_batch: Count | None = None
    flop_per_sample: Positive | None = None
    state_gb: Positive | None = None
    arrive_hours: NonNegative = 0.0
    steps: Count | None = None
    measured: Measured | None = None
    """The table that `throughput` names, read by `load_scenario`; not a key of the file."""

    def problem(self) -> str | None:
        if self.model is None and self.throughput is None:
            return "model or throughput: neither is given, expected how fast the job is"
        if self.model is not None and self.global_batch not in (None, self.model.global_batch):
            return f"global_batch: {self.global_batch} is not model.global_batch = {self.model.global_batch}"
        return None


class Plan(Table, frozen=True):
    """What a change of plan costs, where it was measured: seconds in which a changed job does nothing."""

    transition_s: NonNegative | None = None


class Simulate(Table, frozen=True):
    """How long is simulated, and from which seed."""

    days: Annotated[float, Meta(gt=0, le=DAYS_MAX)] = 7.0
    seed: Annotated[int, Meta(ge=0)] = 0


class GpuKind(Table, frozen=True):
    """What the throughput model knows of a GPU and its node.

    `peak_tflops`: dense 16-bit; `memory_gb` and `memory_gb_s` (HBM); `intra_gb_s`: NVLink or PCIe to its
    neighbours, one direction; `inter_gb_s`: this GPU's share of the node's network, one direction; `intra_us`
    and `inter_us`: the latency of one message. GB are 10^9 bytes.
    """

    peak_tflops: Positive
    memory_gb: Positive
    memory_gb_s: Positive
    intra_gb_s: Positive
    inter_gb_s: Positive
    intra_us: NonNegative = 5.0
    inter_us: NonNegative = 15.0


class Scenario(Table, frozen=True):
    """A whole file."""

    cluster: Cluster
    job: tuple[Job, ...]
    plan: Plan = Plan()
    simulate: Simulate = Simulate()
    policy: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    gpu: dict[str, GpuKind] = msgspec.field(default_factory=dict)

    def problem(self) -> str | None:
        if not self.job:
            return "job: there is none, expected at least one [[job]]"
        names = [job.name for job in self.job]
        for name in names:
            if names.count(name) > 1:
                return f"job: the name {name} is used twice, expected different names"
        held = sum(-(-job.gpus.now // self.cluster.gpus_per_node) for job in self.job)
        if held > self.cluster.nodes:
            return f"job.gpus.now: the jobs hold {held} nodes, expected at most {self.cluster.nodes}"
        return next((text for job in self.job if (text := unfit(job, self.cluster))), None)


def unfit(job: Job, cluster: Cluster) -> str | None:
    """Why `job` can never run on `cluster` (its minimum exceeds the whole cluster), or None."""
    if job.gpus.min <= cluster.gpus:
        return None
    return (
        f"job.{job.name}.gpus.min: {job.gpus.min} GPUs fit nowhere, the cluster has {cluster.nodes} nodes × "
        f"{cluster.gpus_per_node} = {cluster.gpus}; expected at most that"
    )


def load_scenario(path: str | Path, overrides: Mapping[str, object] | None = None) -> Scenario:
    """Read and validate a scenario.

    `overrides` maps dotted keys (`cluster.repair_hours`, `job.NAME.weight`, `policy.megatron.timeout_s`) to
    values that replace the file's. Raises `UsageError` with one line for whatever is wrong.
    """
    path = Path(path)
    raw = read_toml(path)
    override(raw, overrides or {}, str(path))
    cluster = raw.get("cluster")
    if isinstance(cluster, dict) and isinstance(cluster.get("gpu"), list | dict):
        raise UsageError(
            f"{path}: cluster.gpu: several kinds in one cluster, expected one name: a synchronous step goes "
            "at the pace of its slowest GPU, so write one file for each kind"
        )
    scenario = convert(raw, Scenario, str(path))
    if scenario.cluster.trace is not None:
        trace = str(path.parent / scenario.cluster.trace)
        scenario = msgspec.structs.replace(
            scenario, cluster=msgspec.structs.replace(scenario.cluster, trace=trace)
        )
    return msgspec.structs.replace(scenario, job=tuple(_with_table(job, path) for job in scenario.job))


def load_jobs(path: str | Path, scenario: Scenario) -> tuple[Job, ...]:
    """Read a file of nothing but `[[job]]` tables, to be submitted to `scenario`. Raises `UsageError`."""
    path = Path(path)
    jobs = convert(read_toml(path), _Jobs, str(path)).job
    if not jobs:
        raise UsageError(f"{path}: job: there is none, expected at least one [[job]]")
    taken = {job.name for job in scenario.job}
    for job in jobs:
        if job.name in taken:
            raise UsageError(f"{path}: job: the name {job.name} is used already, expected a new one")
        taken.add(job.name)
        if text := unfit(job, scenario.cluster):
            raise UsageError(f"{path}: {text}")
    return tuple(_with_table(job, path) for job in jobs)


class _Jobs(Table, frozen=True):
    job: tuple[Job, ...]


def _with_table(job: Job, path: Path) -> Job:
    """`job` with the measurements that its `throughput` names."""
    if job.throughput is None:
        return job
    where = f"{path}: job.{job.name}.throughput"
    return msgspec.structs.replace(job, measured=load_measured(path.parent / job.throughput, where))
