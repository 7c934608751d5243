"""How the gradient is cut, and where its finished parts gather. Arithmetic and memory alone: no sockets.

The parameters' gradients, in the order of the parameter list from its end (the order in which backward
finishes them), form one flat vector for each dtype and device. Buckets are consecutive ranges of it (E11),
shards are consecutive ranges of a bucket, one for each member of a generation. A leaf is a list with the
gradient of each parameter, or None where the micro-batch did not reach it (E1, E2).

Within a parameter the elements are in the parameter's own memory order, so a gradient as autograd makes it
is sent from where it lies and a result is used where it lands.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perdure.schema.errors import ProtectError, ProtocolError
from perdure.schema.plan import Span
from perdure.worker.memory import Pieces

BUCKET_BYTES = 16 << 20
FIRST_BUCKET_BYTES = 2 << 20
_BUCKETS_MAX = 128
# Shards begin at multiples of this many elements, so that two owners share no cache line.
_SHARD_UNIT = 64
_LAYOUTS_MAX = 4096

Leaf = Sequence[Tensor | None]


class Member(NamedTuple):
    """Elements `start` … `stop`−1 of parameter `parameter` lie from `offset` on in the bucket."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.stop - self.start


class Bucket(NamedTuple):
    """`size` elements of one dtype on one device, `base` elements into flat vector `flat`."""

    dtype: torch.dtype
    device: torch.device
    flat: int
    base: int
    size: int
    members: tuple[Member, ...]


class Buckets:
    """The fixed cut of a parameter list: the same in every worker whose list has the same shapes and dtypes.

    `bucket_bytes` is the size aimed at, `first_bytes` that of the bucket which backward finishes first, so
    that sending begins early. A larger parameter is cut; a very large model gets larger buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        # The strides of a dense tensor in the parameter's memory order; AccumulateGrad gives gradients these.
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        size_bytes = max(bucket_bytes, -(-total // _BUCKETS_MAX))
        cuts: dict[tuple[torch.dtype, torch.device], _Cut] = {}
        for index in reversed(range(len(parameters))):
            parameter = parameters[index]
            key = (parameter.dtype, parameter.device)
            if key not in cuts:
                cuts[key] = _Cut(len(cuts), *key, size_bytes, min(first_bytes, size_bytes))
            cuts[key].add(index, parameter.numel())
        self.flats = tuple((cut.dtype, cut.device, cut.finish()) for cut in cuts.values())
        # In the order in which backward finishes them: by the parameter that each waits for last.
        found = [bucket for cut in cuts.values() for bucket in cut.buckets]
        found.sort(key=lambda bucket: -min(member.parameter for member in bucket.members))
        self.buckets = tuple(found)
        self.sizes = tuple(bucket.size for bucket in found)
        homes: list[list[int]] = [[] for _ in parameters]
        for number, bucket in enumerate(found):
            for member in bucket.members:
                homes[member.parameter].append(number)
        self._offsets = [[member.offset for member in bucket.members] for bucket in found]
        self._layouts: dict[tuple[int, int, int], Layout] = {}
        self.homes = tuple(tuple(home) for home in homes)
        """For each parameter the buckets that hold it; none for one without elements."""

    def __len__(self) -> int:
        return len(self.buckets)

    def shard(self, bucket: int, rank: int, size: int) -> tuple[int, int]:
        """(lo, hi) of the shard that member `rank` of `size` owns; empty when there are too few elements."""
        elements = self.sizes[bucket]
        units = -(-elements // _SHARD_UNIT)
        lo = units * rank // size * _SHARD_UNIT
        hi = units * (rank + 1) // size * _SHARD_UNIT
        return min(lo, elements), min(hi, elements)

    def touched(self, bucket: int, lo: int, hi: int) -> tuple[int, int]:
        """The members from the first up to, not including, the second are those with elements in [lo, hi)."""
        offsets = self._offsets[bucket]
        return (bisect.bisect_right(offsets, lo) - 1, bisect.bisect_left(offsets, hi)) if lo < hi else (0, 0)

    def full(self, bucket: int, lo: int, hi: int) -> int:
        """Presence with the bit of every member that has an element in [lo, hi)."""
        first, last = self.touched(bucket, lo, hi)
        return (1 << last) - (1 << first)

    def layout(self, span: Span) -> Layout:
        """Where the members lie in a span; remembered, as a generation asks for the same few every step."""
        key = (span.bucket, span.lo, span.hi)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            layout = self._layouts[key] = Layout(self, span)
        return layout

    def portion(self, bucket: int, leaf: Leaf) -> Portion:
        """A leaf's part of a bucket, ready to be cut; raises ProtectError for a gradient that cannot be."""
        return Portion(self, bucket, leaf)

    def slices(self, bucket: int, lo: int, hi: int, leaf: Leaf) -> Pieces:
        """The bytes of what a leaf has in [lo, hi). For several cuts of one leaf use `portion`."""
        return self.portion(bucket, leaf).slices(lo, hi)

    def dense(self, parameter: int, gradient: Tensor) -> Tensor:
        """The gradient in the parameter's memory order, its elements side by side; a copy only if need be."""
        shape, strides = self._shapes[parameter], self._strides[parameter]
        if gradient.layout is not torch.strided or gradient.shape != shape:
            raise ProtectError(
                f"parameter {parameter} of shape {tuple(shape)} has a gradient of {gradient.layout} and shape"
                f" {tuple(gradient.shape)}; gradients must be dense and of the parameter's shape"
            )
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.stride() == strides:
            return gradient
        copy = torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device)
        return copy.copy_(gradient)

    def unflatten(self, parameter: int, flat: Tensor) -> Tensor:
        """A view of the elements that begin `flat`, with the parameter's shape and strides."""
        return flat.as_strided(self._shapes[parameter], self._strides[parameter])


class Layout:
    """Where the members of a bucket lie in one span of it.

    `full` has the bit of each, `ranges` are (member, first element, last + 1) counted from the span's start.
    """

    def __init__(self, buckets: Buckets, span: Span) -> None:
        first, last = buckets.touched(span.bucket, span.lo, span.hi)
        members = buckets.buckets[span.bucket].members
        self.full = (1 << last) - (1 << first)
        self.ranges = [
            (bit, max(members[bit].offset - span.lo, 0), min(members[bit].end, span.hi) - span.lo)
            for bit in range(first, last)
        ]


class Portion:
    """One leaf's part of one bucket. It keeps the gradients alive; they must not change meanwhile.

    `presence` has a bit for each member of the bucket, set where the leaf has a gradient. On a CUDA device
    the gradients are copied to pinned host memory here, on the current stream, which is waited for.
    """

    def __init__(self, buckets: Buckets, bucket: int, leaf: Leaf) -> None:
        self._buckets = buckets
        self._bucket = bucket
        cut = buckets.buckets[bucket]
        self.members = cut.members
        self.presence = 0
        # For each member a dense tensor, and which of its elements is the member's first.
        self._sources: list[tuple[Tensor, int] | None] = []
        for bit, member in enumerate(cut.members):
            gradient = leaf[member.parameter]
            if gradient is None:
                self._sources.append(None)
                continue
            if gradient.dtype != cut.dtype:
                raise ProtectError(
                    f"parameter {member.parameter} of {cut.dtype} has a gradient of {gradient.dtype};"
                    " gradients must have their parameter's dtype"
                )
            self.presence |= 1 << bit
            self._sources.append((buckets.dense(member.parameter, gradient), member.start))
        if cut.device.type != "cpu":
            self._sources = _to_host(self._sources, cut)

    def slices(self, lo: int, hi: int) -> Pieces:
        """The bytes of the gradients in [lo, hi), where they lie; absent parameters are left out."""
        places: list[int] = []
        for bit in range(*self._buckets.touched(self._bucket, lo, hi)):
            source = self._sources[bit]
            if source is not None:
                member = self.members[bit]
                start, stop = max(lo, member.offset), min(hi, member.end)
                tensor, base = source
                item = tensor.itemsize
                places += (
                    tensor.data_ptr() + (base + start - member.offset) * item,
                    (stop - start) * item,
                )
        return Pieces(places, self)

    def pieces(self, lo: int, hi: int) -> Iterator[tuple[int, int, int, Tensor]]:
        """(member, its first element in the bucket, its last + 1, values) of what lies in [lo, hi)."""
        for bit in range(*self._buckets.touched(self._bucket, lo, hi)):
            source = self._sources[bit]
            if source is not None:
                member = self.members[bit]
                start, stop = max(lo, member.offset), min(hi, member.end)
                tensor, base = source
                at = tensor.storage_offset() + base + start - member.offset
                yield bit, start, stop, tensor.as_strided((stop - start,), (1,), at)


class Results:
    """The finished gradient, apart from every leaf (P1), filled span by span.

    Its memory lives as long as it does and is used again every step: `.grad` holds it from the end of a
    step until `clear`, like DDP's bucket views.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._flats = [_host(size, dtype, device) for dtype, device, size in buckets.flats]
        self._bytes = [bytes_of(flat) for flat in self._flats]
        self._spans: list[list[tuple[int, int]]] = [[] for _ in buckets.buckets]
        self._presence = [0 for _ in buckets.buckets]
        self._missing = sum(buckets.sizes)

    def clear(self) -> None:
        """Forget everything: a new step. Only when nobody writes into it any more (P1)."""
        self._spans = [[] for _ in self._spans]
        self._presence = [0 for _ in self._presence]
        self._missing = sum(self._buckets.sizes)

    def tensor(self, bucket: int, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a bucket, to be written."""
        cut = self._buckets.buckets[bucket]
        return self._flats[cut.flat][cut.base + lo : cut.base + hi]

    def view(self, bucket: int, lo: int, hi: int) -> memoryview:
        """The bytes of `tensor`: where to receive a finished span."""
        cut = self._buckets.buckets[bucket]
        item = cut.dtype.itemsize
        return self._bytes[cut.flat][(cut.base + lo) * item : (cut.base + hi) * item]

    def mark(self, bucket: int, lo: int, hi: int, presence: int) -> None:
        """[lo, hi) is finished; `presence` says which of its members have a gradient at all.

        What is finished already may come again: a finished element has one value, whoever folded it.
        """
        if lo == hi:
            return
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self._spans[bucket], (lo, hi)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        before = sum(stop - start for start, stop in self._spans[bucket])
        self._spans[bucket] = merged
        self._presence[bucket] |= presence & self._buckets.full(bucket, lo, hi)
        self._missing -= sum(stop - start for start, stop in merged) - before

    def spans(self) -> tuple[Span, ...]:
        """What is finished, adjacent spans joined."""
        return tuple(
            Span(bucket, lo, hi) for bucket, spans in enumerate(self._spans) for lo, hi in spans
        )  # fmt: skip

    def presence(self, bucket: int) -> int:
        """The bits of the members of a bucket that have a gradient, as far as it is finished."""
        return self._presence[bucket]

    @property
    def complete(self) -> bool:
        """Every element is finished."""
        return self._missing == 0

    def as_grads(self) -> list[Tensor | None]:
        """The global gradient of every parameter, as views to be swapped into `.grad`; None where nobody
        had one. Raises ProtocolError while something is missing."""
        if not self.complete:
            raise ProtocolError(f"P2: {self._missing} elements of the gradient are not here yet")
        flats = [
            flat if device.type == "cpu" else flat.to(device, non_blocking=True)
            for flat, (_, device, _) in zip(self._flats, self._buckets.flats, strict=True)
        ]
        grads: list[Tensor | None] = [None] * len(self._buckets.homes)
        for bucket, presence in zip(self._buckets.buckets, self._presence, strict=True):
            for bit, member in enumerate(bucket.members):
                # A parameter that several buckets hold lies in one piece: take it from its first element.
                if presence >> bit & 1 and member.start == 0:
                    flat = flats[bucket.flat][bucket.base + member.offset :]
                    grads[member.parameter] = self._buckets.unflatten(member.parameter, flat)
        return grads


class _Cut:
    """Cuts one flat vector into buckets."""

    def __init__(
        self, flat: int, dtype: torch.dtype, device: torch.device, size_bytes: int, first_bytes: int
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.buckets: list[Bucket] = []
        self._flat = flat
        self._limit = max(first_bytes // dtype.itemsize, 1)
        self._next = max(size_bytes // dtype.itemsize, 1)
        self._base = 0
        self._size = 0
        self._members: list[Member] = []

    def add(self, parameter: int, numel: int) -> None:
        if numel > self._next:
            self._close()
            parts = -(-numel // self._next)
            for part in range(parts):
                self._append(parameter, numel * part // parts, numel * (part + 1) // parts)
                self._close()
        elif numel:
            self._append(parameter, 0, numel)
            if self._size >= self._limit:
                self._close()

    def finish(self) -> int:
        self._close()
        return self._base

    def _append(self, parameter: int, start: int, stop: int) -> None:
        self._members.append(Member(parameter, start, stop, self._size))
        self._size += stop - start

    def _close(self) -> None:
        if self._members:
            self.buckets.append(
                Bucket(self.dtype, self.device, self._flat, self._base, self._size, tuple(self._members))
            )
            self._base += self._size
            self._members, self._size, self._limit = [], 0, self._next


def bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a dense one-dimensional CPU tensor, of any dtype, without a copy."""
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def _host(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cuda" or not size:
        return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
    # Peers read results out of this memory, and that costs by the page: ask for huge ones.
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _to_host(sources: list[tuple[Tensor, int] | None], cut: Bucket) -> list[tuple[Tensor, int] | None]:
    stage = torch.empty(cut.size, dtype=cut.dtype, pin_memory=cut.device.type == "cuda")
    staged: list[tuple[Tensor, int] | None] = []
    for member, source in zip(cut.members, sources, strict=True):
        if source is None:
            staged.append(None)
            continue
        tensor, base = source
        length = member.stop - member.start
        values = tensor.as_strided((length,), (1,), tensor.storage_offset() + base)
        staged.append((stage[member.offset : member.end].copy_(values, non_blocking=True), 0))
    if cut.device.type == "cuda":
        torch.cuda.current_stream(cut.device).synchronize()
    return staged
