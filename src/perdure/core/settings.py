"""What is fixed for one run of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.schema.ids import WorkerId


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The launcher's options, and what the run directory knows of earlier runs.

    `key` tells the job from others, whatever they are called. `blocks`, `first_worker`, `given_up`,
    `last_step`, `digests` and `checkpoints` come from the run directory, and so does `cut_off`: the run
    before was not ended in order. `home_node` is the node whose disk the checkpoints are on. A job of at
    most `max_nodes` nodes turns others away.
    """

    job: str
    key: str = ""
    incarnation: int
    home_node: str
    min_nodes: int = 1
    max_nodes: int | None = None
    max_failures: int = 1000
    checkpoint_every: int | None = None
    digest_every: int = 1
    log_samples: bool = False
    blocks: int = 0
    first_worker: WorkerId = 0
    given_up: tuple[WorkerId, ...] = ()
    last_step: int = -1
    cut_off: bool = False
    digests: dict[int, str] = field(default_factory=dict)
    checkpoints: tuple[str, ...] = ()
    checkpoint_dir: str = ""
