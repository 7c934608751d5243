"""The global stream of batches: which samples micro-batch m of step s is made of, whoever computes it.

Everything here is a function of (seed, step, micro-batch). There is no iterator to save, to restore or
to move: a worker that takes over a dead peer's micro-batch asks for it by its number, and a resumed
job goes on at its step. Loading is in `loader`.

One epoch is one permutation of the data set, cut into steps, these into micro-batches:

    position in the epoch    0 ....................................................... len(dataset)
    step of the epoch        |          0           |          1           | … | what drop_last drops
    micro-batch              | 0 | 1 | … | P-1      | 0 | 1 | … | P-1      |

with P = per_step and batch_size samples in each. A block is a contiguous run of P / blocks micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from perdure.schema.errors import ProtectError, UsageError
from perdure.worker.rng import stable_seed

_EPOCHS_KEPT = 2  # the look-ahead of a loader crosses from one epoch into the next


class MicroBatches:
    """Describes the batches of a training loop, in DataLoader's words; give it to `job.steps`.

    Args:
        dataset: map-style: `len(dataset)` and `dataset[i]`; its `__getitem__` and transforms may draw from
            Python's, numpy's and torch's global generators, which are seeded for each sample (E9). A
            `__getitems__` is not used: it would mix the draws of several samples.
        batch_size: samples in a micro-batch.
        per_step: micro-batches in a step; batch_size * per_step samples make the global batch.
        blocks: the groups of the canonical sum, a divisor of per_step; None: the number of workers at the
            job's first start. The job's bits depend on it.
        shuffle: a new permutation each epoch, from (seed, epoch); else the data set's own order.
        seed: for permutations and transforms; None: the job's.
        drop_last: leave out what does not fill a whole step at the epoch's end. Else the last step of an
            epoch is short: its last micro-batch may have fewer samples, and further ones are absent.
        num_workers: loader processes per worker; 0 loads in the worker itself. Never changes the bits.
        collate_fn: makes a batch of a list of samples; None: torch.utils.data.default_collate.
        pin_memory: return batches in pinned memory, where CUDA is there.

    Raises:
        UsageError: a number or a function is not one that makes sense.
        ProtectError: the data set cannot be addressed by sample, or does not fill one step.

    Permutations of this and the next epoch are kept: 4 bytes a sample each (8 beyond 2**32 samples).
    One is made when a step first needs its epoch: 0.02 s for 10**6 samples, 0.5 s for 10**7, 6.5 s for
    10**8, once per epoch. `shuffle=False` costs neither.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        per_step: int,
        *,
        blocks: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> None:
        _check_count("batch_size", batch_size, least=1)
        _check_count("per_step", per_step, least=1)
        _check_count("num_workers", num_workers, least=0)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise UsageError(f"MicroBatches: seed={seed!r}: expected an integer or None (the job's seed)")
        if collate_fn is not None and not callable(collate_fn):
            raise UsageError(
                f"MicroBatches: collate_fn={collate_fn!r}: expected a function of a list of samples"
            )
        if blocks is not None:
            _check_count("blocks", blocks, least=1)
            _check_blocks(per_step, blocks, "given")
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last), ("pin_memory", pin_memory)):
            if not isinstance(flag, bool):
                raise UsageError(f"MicroBatches: {name}={flag!r}: expected True or False")
        self.dataset = dataset
        self.batch_size = batch_size
        self.per_step = per_step
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.samples = _count_samples(dataset)
        self._requested = (seed, blocks)
        self._bound: tuple[int, int] | None = None
        self._orders: dict[int, npt.NDArray[Any]] = {}
        self._check_size()

    def _check_size(self) -> None:
        whole = self.batch_size * self.per_step
        if self.samples == 0:
            raise ProtectError("MicroBatches: the dataset is empty: give one with samples")
        if self.drop_last and self.samples < whole:
            raise ProtectError(
                f"MicroBatches: the dataset has {self.samples} samples, fewer than one step needs "
                f"(batch_size {self.batch_size} * per_step {self.per_step} = {whole}): lower one of these, "
                "or set drop_last=False for steps that are not full"
            )

    # -- what the job decides ------------------------------------------------------------------------

    @property
    def bound(self) -> bool:
        """Whether `bind` has been called: the stream is then fixed."""
        return self._bound is not None

    def bind(self, seed: int, default_blocks: int) -> None:
        """Fix what was left open: the job's seed, and `default_blocks` blocks if the script named none.

        Binding again to the same is allowed. Raises ProtectError if per_step is not divisible by the
        blocks, or if it is bound to other values already (it belongs to another job then).
        """
        own_seed, own_blocks = self._requested
        blocks = default_blocks if own_blocks is None else own_blocks
        _check_blocks(self.per_step, blocks, "the number of workers at the first start")
        bound = (seed if own_seed is None else own_seed, blocks)
        if self._bound is not None and self._bound != bound:
            raise ProtectError(
                f"MicroBatches: in use with seed={self._bound[0]} and blocks={self._bound[1]}, now asked for "
                f"with seed={bound[0]} and blocks={bound[1]}: make another MicroBatches for this use"
            )
        self._bound = bound

    @property
    def described(self) -> dict[str, int]:
        """What decides which samples come, beside `per_step`; known once bound."""
        return {
            "batch_size": self.batch_size,
            "samples": self.samples,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
            "the seed of MicroBatches": self.seed,
        }

    @property
    def seed(self) -> int:
        """The seed of this stream's permutations and transforms; known once bound."""
        return self._fixed()[0]

    @property
    def blocks(self) -> int:
        """Into how many groups the canonical sum is cut; known once bound."""
        return self._fixed()[1]

    def _fixed(self) -> tuple[int, int]:
        if self._bound is None:
            raise UsageError("MicroBatches: not part of a job yet: give it to job.steps or job.evaluate")
        return self._bound

    # -- which samples -------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data set; with drop_last=False the last may be short."""
        whole = self.batch_size * self.per_step
        return self.samples // whole if self.drop_last else -(-self.samples // whole)

    def micro_batches(self, step: int) -> range:
        """The micro-batches that step has: all of 0 … per_step-1, or at a short end those with samples."""
        whole = self.batch_size * self.per_step
        left = self.samples - self._epoch(step)[1] * whole
        return range(min(self.per_step, -(-left // self.batch_size)))

    def sample_ids(self, step: int, micro_batch: int) -> tuple[int, list[int]]:
        """The epoch, and the indices into the data set, of a micro-batch; none for an absent one.

        Raises IndexError for a negative step or a micro-batch outside 0 … per_step-1.
        """
        if not 0 <= micro_batch < self.per_step:
            raise IndexError(f"micro-batch {micro_batch} of {self.per_step}")
        epoch, index = self._epoch(step)
        start = (index * self.per_step + micro_batch) * self.batch_size
        stop = min(start + self.batch_size, self.samples)
        if start >= stop:
            return epoch, []
        if not self.shuffle:
            return epoch, list(range(start, stop))
        ids: list[int] = self._order(epoch)[start:stop].tolist()
        return epoch, ids

    def block_of(self, micro_batch: int) -> int:
        """The block that a micro-batch belongs to. Raises IndexError outside 0 … per_step-1."""
        if not 0 <= micro_batch < self.per_step:
            raise IndexError(f"micro-batch {micro_batch} of {self.per_step}")
        return micro_batch // (self.per_step // self.blocks)

    def _epoch(self, step: int) -> tuple[int, int]:
        if step < 0:
            raise IndexError(f"step {step} is negative")
        return divmod(step, self.steps_per_epoch)

    def _order(self, epoch: int) -> npt.NDArray[Any]:
        order = self._orders.pop(epoch, None)
        if order is None:
            # The narrow type halves the memory and draws the same permutation.
            order = np.arange(self.samples, dtype=np.uint32 if self.samples <= 2**32 else np.int64)
            np.random.Generator(np.random.PCG64(stable_seed(self.seed, "order", epoch))).shuffle(order)
        self._orders[epoch] = order  # last in the dict is used last
        while len(self._orders) > _EPOCHS_KEPT:
            self._orders.pop(next(iter(self._orders)))
        return order


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"MicroBatches: {name}={value!r}: expected an integer of at least {least}")


def _check_blocks(per_step: int, blocks: int, origin: str) -> None:
    if blocks < 1 or per_step % blocks:
        divisors = [count for count in range(1, min(per_step, 256) + 1) if per_step % count == 0]
        raise ProtectError(
            f"MicroBatches: per_step={per_step} is not divisible by blocks={blocks} ({origin}): "
            f"set blocks to one of {divisors}, or per_step to a multiple of {blocks}"
        )


def _count_samples(dataset: Any) -> int:
    """How many samples there are; refuses what cannot be addressed by sample, with what to do instead."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ProtectError(
            f"MicroBatches: {kind} is an IterableDataset: a dead worker's samples could not be read again; "
            "give a map-style dataset (__len__ and __getitem__), for a stream one that reads by offset"
        )
    if not hasattr(dataset, "__getitem__"):
        raise ProtectError(
            f"MicroBatches: {kind} has no __getitem__: give a map-style dataset, one sample per index"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ProtectError(
            f"MicroBatches: {kind} has no __len__: add one, so that an epoch has an end and an order"
        ) from error
