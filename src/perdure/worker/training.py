"""What the user protects, as the step transaction needs it: parameters, gradients, buffers, digests."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash

from perdure.schema.errors import ProtectError
from perdure.schema.plan import Entry
from perdure.state.capture import ProtectedState, Snapshot
from perdure.state.huge_pages import HugePages
from perdure.state.keepers import set_mode
from perdure.state.transfer import Donor, Session
from perdure.worker.buffers import Buffers, Place
from perdure.worker.gradients import Buckets
from perdure.worker.leaves import Hooks, Leaves
from perdure.worker.unchanged import Bystanders, Unchanged


class Training:
    """The protected objects between the user's script and the runtime.

    Raises `ProtectError` for what cannot be kept exact.
    """

    def __init__(self, objects: Mapping[str, object], digest_every: int = 1, exact: bool = True) -> None:
        _wake_scalers(objects)
        self.state = ProtectedState(objects)
        things = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
        self._modules = list(itertools.chain.from_iterable(thing.modules() for thing in things))
        every = _parameters(objects)
        names, parameters = _trainable(every)
        for name, parameter in zip(names, parameters, strict=True):
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ProtectError(
                    f"{name} has a post-accumulate-grad hook of its own, which would see one worker's part "
                    "of the gradient: do that work after the step's loop, where .grad is global"
                )
        _refuse_sparse(objects)
        self._scalers = [thing for thing in objects.values() if isinstance(thing, torch.amp.GradScaler)]
        self._parameters = dict(zip(map(id, every.values()), every.values(), strict=True))
        self._trained = frozenset(map(id, parameters))
        self.buckets = Buckets(parameters)
        self.leaves = Leaves(parameters, names, exact)
        optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        self.unchanged = Unchanged(every, optimizers)
        changing, still = _places(objects, every.values())
        self.buffers = Buffers(changing, still)
        self.bystanders = Bystanders(objects, still)
        first_bucket = [homes[-1] if homes else 0 for homes in self.buckets.homes]
        self.hooks = Hooks(parameters, first_bucket, len(self.buckets))
        self.loss = float("nan")
        self.usual_calls = 0
        self.restorations = 0
        self._digest_every = digest_every
        self._digests: dict[int, str] = {}
        self._names = names
        self._walking = threading.Lock()
        self._huge_pages = HugePages()

    @property
    def whole_first_block(self) -> bool:
        """Whether block 0 must be computed in order by one worker (E8)."""
        return self.buffers.nbytes > 0

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Elements of each bucket; the bytes of the buffers that block 0 leaves come last."""
        extra = (self.buffers.nbytes,) if self.buffers.nbytes else ()
        return (*self.buckets.sizes, *extra)

    def signature(self) -> str:
        """A digest over names, shapes and dtypes: the same in every worker that trains the same thing."""
        parts = [
            f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            for name, parameter in zip(self._names, self.leaves.parameters, strict=True)
        ]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    def begin(self, first: int, in_order: bool) -> None:
        """Make ready for a micro-batch of the run that starts at `first`.

        It begins with the committed buffers, unless it comes `in_order` after another one of block 0: where a
        block is not computed by one worker alone, its bits would depend on who computes what.
        """
        if not in_order:
            self.buffers.put_back()
        self.leaves.bind(first)

    def protects_scaler(self, scaler: object) -> bool:
        """Whether this is a protected GradScaler, or one that is off and has no state."""
        off = isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()
        return off or any(scaler is known for known in self._scalers)

    def digest(self, committed: int) -> str:
        """The digest of the state after step `committed`, or '' if that step is not to be digested."""
        if (committed + 1) % self._digest_every:
            return ""
        if committed not in self._digests:
            self._digests = {committed: self.digest_now()}
        return self._digests[committed]

    def digest_now(self) -> str:
        """The digest of the live state.

        Raises ProtectError if it is not made of the same parts as when training began: gradients of others
        would not be summed, and whoever starts the script anew has the same.
        """
        with self._walking:
            digest = self.state.digest()
            now, changed = self.state.parameters, self.state.changed
        if changed:
            raise ProtectError(f"since job.steps began {changed}")
        thawed = sum(p.requires_grad and number not in self._trained for number, p in now.items())
        new, gone = len(now.keys() - self._parameters.keys()), len(self._parameters.keys() - now.keys())
        if new or gone:
            raise ProtectError(
                f"the protected objects have other parameters than when job.steps began ({new} new, {gone} "
                "gone): have all before job.protect, and change their values in place"
            )
        if thawed:
            raise ProtectError(
                f"protected parameters require gradients now that did not when job.steps began ({thawed}): "
                "let all that will ever be trained require them there, and freeze some at the top of the "
                "loop over job.steps for as long as you like"
            )
        return digest

    def donor(self, step: int) -> Donor:
        """Give the state after `step` away; called beside the main thread while that computes step+1."""
        with self._walking:
            return Donor(self.state, Session(step, ""), buffers=self.buffers.committed())

    @contextlib.contextmanager
    def modes_kept(self) -> Iterator[None]:
        """`eval()` and `train()` meanwhile, which not all workers may come to call, are undone."""
        modes = [(module, module.training) for module in self._modules]
        try:
            yield
        finally:
            for module, mode in modes:
                set_mode(module, mode)

    def snapshot(self, slab: torch.Tensor | None = None) -> Snapshot:
        """A private copy of the state, for writing in the background."""
        with self._walking:
            return self.state.snapshot(slab)

    def swap_in(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put the global gradient into `.grad` and block 0's buffers into the modules."""
        for parameter, gradient in zip(self.leaves.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.buffers.apply()

    def note_losses(self, ledger: Mapping[int, Entry], present: int) -> None:
        """The step's loss: the weighted mean over its micro-batches, in their order."""
        entries = [ledger[micro_batch] for micro_batch in range(present)]
        weight = sum(entry.weight for entry in entries)
        total = sum(entry.weighted_loss for entry in entries)
        self.loss = total / weight if weight else float("nan")

    def committed(self) -> None:
        """The user's commit code is through: this is the state now."""
        self.buffers.note_committed()
        self.state.note_modes()
        self._huge_pages.advance(self.state.host_memory())

    def restored(self) -> None:
        """The state was taken from elsewhere."""
        self._digests = {}
        self.restorations += 1
        self.buffers.note_restored()


def _parameters(objects: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """All of them, each once: of the modules first, then what only an optimizer knows."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            for key, parameter in thing.named_parameters():
                found.setdefault(id(parameter), (f"{name}.{key}", parameter))
    for name, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            parameters = itertools.chain.from_iterable(group["params"] for group in thing.param_groups)
            for index, parameter in enumerate(parameters):
                found.setdefault(id(parameter), (f"{name}.params[{index}]", parameter))
    return dict(found.values())


def _trainable(parameters: Mapping[str, torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
    """Everything that gets a gradient."""
    wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not wanted:
        raise ProtectError(
            "job.protect: none of the protected objects has a parameter that requires a gradient"
        )
    return [*wanted], [*wanted.values()]


def _wake_scalers(objects: Mapping[str, object]) -> None:
    """A GradScaler makes its tensors at the first loss that it scales, which not every worker may have."""
    for thing in objects.values():
        if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled() and thing._scale is None:
            thing._lazy_init_scale_growth_tracker(torch.device(thing._device))


def _refuse_sparse(objects: Mapping[str, object]) -> None:
    """Embeddings say beforehand that their gradient will be sparse; others are found out in `Leaves`."""
    for name, thing in objects.items():
        for path, module in thing.named_modules() if isinstance(thing, torch.nn.Module) else ():
            if getattr(module, "sparse", False) is True:
                where = ".".join(filter(None, (name, path)))
                raise ProtectError(f"{where} has sparse=True; perdure sums dense gradients: leave it out")


def _inside(tensor: torch.Tensor, memory: Sequence[tuple[int, int]]) -> bool:
    at = tensor.data_ptr()
    return tensor.nbytes > 0 and any(begin <= at < end for begin, end in memory)


def _places(
    objects: Mapping[str, object], parameters: Iterable[torch.Tensor]
) -> tuple[list[Place], list[Place]]:
    """The buffers of modules that are trained, and of those without a parameter to train.

    These (an averaged copy, a teacher) change in the commit alone (`Bystanders`). A buffer in the memory of a
    parameter is that.
    """
    theirs = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters if p.nbytes]
    modules = [(name, thing) for name, thing in objects.items() if isinstance(thing, torch.nn.Module)]
    modules.sort(key=lambda pair: not any(p.requires_grad for p in pair[1].parameters()))
    found: dict[tuple[int, str], tuple[Place, bool]] = {}
    for name, thing in modules:
        trained = any(p.requires_grad for p in thing.parameters())
        for prefix, module in thing.named_modules():
            for key, buffer in module._buffers.items():
                path = ".".join(filter(None, (name, prefix, key)))
                # Outside of inference mode nothing can be written into what was made there.
                fixed = buffer is not None and (buffer.is_inference() or _inside(buffer, theirs))
                if not fixed:
                    found.setdefault((id(module), key), (Place(path, module, key), trained))
    places = [place for place, trained in found.values() if trained]
    ours = {id(place.now) for place in places if place.now is not None}
    return places, [place for place, trained in found.values() if not trained and id(place.now) not in ours]
