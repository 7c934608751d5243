"""The canonical sum of one span: the same bits whoever computed what and whatever arrives first.

Inside a block ((g0 + g1) + g2) + …, over the blocks ((B0 + B1) + B2) + …; more than 32 blocks the same in
a fixed tree of fan-in 32. Leaves that lack a parameter are skipped for it, zeros never added (E1); one
division by the sum of the weights comes last. All of it in the bucket's dtype (E11).

The order is a tree whose leaves are the terms. Each node adds its children in order, as soon as they are
there, into the memory of its first child, and the leftmost path of the tree is the result's own memory: the
usual case, every term from a whole block and every parameter present, is one addition for each term.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from perdure.schema.errors import ProtocolError
from perdure.schema.plan import Span
from perdure.worker.gradients import Buckets, Portion, Results, bytes_of

FAN_IN = 32
# torch cuts longer operations into parts for a team of threads, which every thread that starts one has of
# its own; a fold runs beside the training thread and must not double the threads at work.
_SERIAL_ELEMENTS = 32768


# Terms by their first micro-batch; a list is summed before what it stands in.
_Tree = int | list["_Tree"]


class Scratch:
    """Memory that is used again: places for terms that come before their turn, and partial sums."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """`size` elements of anything."""
        free = self._free[size, dtype]
        return free.pop() if free else torch.empty(size, dtype=dtype)

    def give(self, tensor: Tensor) -> None:
        """Back for the next one."""
        self._free[tensor.numel(), tensor.dtype].append(tensor)

    def clear(self) -> None:
        """Return the memory to the system."""
        self._free.clear()


class Fold:
    """Sums one span. `blocks` names, in canonical order, the terms of each block by their first micro-batch.

    A term is either the Portion of a leaf held here (`contribute`), or received: `place` says where its
    bytes go and `received` that they are there. Terms may come in any order. Not thread-safe.
    Raises ProtocolError on a term that is not wanted, or comes twice.
    """

    def __init__(
        self,
        buckets: Buckets,
        span: Span,
        blocks: Sequence[Sequence[int]],
        results: Results,
        scratch: Scratch,
    ) -> None:
        self.span = span
        self._results = results
        self._frame = _Frame(buckets, span, scratch)
        self._slots: dict[int, tuple[_Node, int]] = {}
        self._placed: dict[int, _Term] = {}
        tree: list[_Tree] = [list(block) for block in blocks]
        while len(tree) > FAN_IN:
            tree = [tree[start : start + FAN_IN] for start in range(0, len(tree), FAN_IN)]
        out = results.tensor(span.bucket, span.lo, span.hi)
        self._root = _Node(self._frame, tree, None, self._slots, out)

    @property
    def complete(self) -> bool:
        """All terms are in the sum."""
        return self._root.complete

    def wants(self, first: int) -> bool:
        """Whether this term would be added at once; any other would have to be kept until its turn."""
        slot = self._slots.get(first)
        return slot is not None and slot[0].next == slot[1]

    def expects(self, first: int) -> bool:
        """Whether this term is still to come; one that has a place but is not received yet is."""
        return first in self._slots

    def contribute(self, first: int, portion: Portion) -> None:
        """Add a leaf that is held here; its memory is only read."""
        node, index = self._slot(first)
        span = self.span
        presence = portion.presence & self._frame.full
        node.give(index, _Term(presence, pieces=lambda: portion.pieces(span.lo, span.hi)))

    def place(self, first: int, presence: int) -> memoryview:
        """Where to put a term's bytes; `presence` says which parameters they contain. The same when asked
        again."""
        if first not in self._slots:
            raise ProtocolError(f"P4: term {first} of {self.span} is not expected")
        term = self._placed.get(first)
        if term is None:
            node, index = self._slots[first]
            term = self._placed[first] = node.place(index, presence & self._frame.full)
        assert term.flat is not None
        return bytes_of(term.flat)

    def received(self, first: int) -> None:
        """The bytes of the term are in the place that was given."""
        term = self._placed.pop(first, None)
        if term is None:
            raise ProtocolError(f"P4: term {first} of {self.span} was given no place")
        node, index = self._slot(first)
        node.give(index, term)

    def accept(self, first: int, presence: int, flat: Tensor) -> None:
        """Add a term that was received before this fold existed, by a peer that is a step ahead (P12).

        `flat` has the elements that `presence` says, was taken from the scratch memory, and goes back there.
        """
        node, index = self._slot(first)
        node.give(index, _Term(presence & self._frame.full, flat=flat, own=flat))

    def _slot(self, first: int) -> tuple[_Node, int]:
        slot = self._slots.pop(first, None)
        if slot is None:
            raise ProtocolError(f"P4: term {first} of {self.span} is not expected")
        return slot

    def finish(self, weight: float) -> int:
        """Divide by the sum of the weights and mark the span finished; returns its presence bits."""
        if self._root.sum is None or not self.complete:
            raise ProtocolError(f"P2: terms {sorted(self._slots)} of {self.span} are missing")
        dense, presence = self._root.sum.dense, self._root.sum.presence
        if presence != self._frame.full:
            for bit, start, stop in self._frame.ranges:
                if not presence >> bit & 1:
                    dense[start:stop].zero_()
        for part in _parts(dense):
            part.div_(weight)
        self._results.mark(self.span.bucket, self.span.lo, self.span.hi, presence)
        return presence


class _Frame:
    """What every node of one fold shares: the span's members and where they lie in it."""

    def __init__(self, buckets: Buckets, span: Span, scratch: Scratch) -> None:
        layout = buckets.layout(span)
        self.lo = span.lo
        self.size = span.hi - span.lo
        self.dtype = buckets.buckets[span.bucket].dtype
        self.scratch = scratch
        self.full = layout.full
        self.ranges = layout.ranges

    def compact(self, presence: int) -> int:
        """Elements of a term that has only these members."""
        if presence == self.full:
            return self.size
        return sum(stop - start for bit, start, stop in self.ranges if presence >> bit & 1)


class _Term:
    """One summand: received bytes in `flat` (absent members left out), or the pieces of a leaf held here.

    `own` is scratch memory to give back once the term has been added.
    """

    __slots__ = ("flat", "own", "pieces", "presence")

    def __init__(
        self,
        presence: int,
        flat: Tensor | None = None,
        own: Tensor | None = None,
        pieces: Callable[[], Iterator[tuple[int, int, int, Tensor]]] | None = None,
    ) -> None:
        self.presence = presence
        self.flat = flat
        self.own = own
        self.pieces = pieces

    def parts(self, frame: _Frame) -> Iterator[tuple[int, int, int, Tensor]]:
        """(member, start, stop within the span, values) of what is present."""
        if self.flat is None:
            assert self.pieces is not None
            for bit, start, stop, values in self.pieces():
                yield bit, start - frame.lo, stop - frame.lo, values
            return
        at = 0
        for bit, start, stop in frame.ranges:
            if self.presence >> bit & 1:
                yield bit, start, stop, self.flat[at : at + stop - start]
                at += stop - start


class _Sum:
    """A sum so far, in memory for the whole span; members without a bit in `presence` hold garbage."""

    __slots__ = ("_frame", "dense", "presence")

    def __init__(self, frame: _Frame, dense: Tensor) -> None:
        self.dense = dense
        self.presence = 0
        self._frame = frame

    def add(self, term: _Term) -> None:
        frame = self._frame
        if term.flat is self.dense:
            # Received in place as the first summand.
            self.presence = term.presence
            return
        if term.flat is not None and term.presence == self.presence == frame.full:
            _add(self.dense, term.flat)
        else:
            for bit, start, stop, values in term.parts(frame):
                if self.presence >> bit & 1:
                    _add(self.dense[start:stop], values)
                else:
                    _copy(self.dense[start:stop], values)
            self.presence |= term.presence
        if term.own is not None:
            frame.scratch.give(term.own)

    def term(self) -> _Term:
        """This sum as a summand of the next, its memory to be given back afterwards."""
        if self.presence == self._frame.full:
            return _Term(self.presence, flat=self.dense, own=self.dense)
        return _Term(self.presence, own=self.dense, pieces=self._pieces)

    def _pieces(self) -> Iterator[tuple[int, int, int, Tensor]]:
        lo = self._frame.lo
        for bit, start, stop in self._frame.ranges:
            if self.presence >> bit & 1:
                yield bit, start + lo, stop + lo, self.dense[start:stop]


class _Node:
    """Adds its children in order, each as soon as it and all before it are there.

    A child is a term, or a node below. The first child's sum is built where this node's is, so that no
    addition is needed to begin; `out` is the place of the whole tree's sum, and given at its root alone.
    """

    def __init__(
        self,
        frame: _Frame,
        children: Sequence[_Tree],
        parent: tuple[_Node, int] | None,
        slots: dict[int, tuple[_Node, int]],
        out: Tensor | None = None,
    ) -> None:
        self.next = 0
        self.sum: _Sum | None = None
        self._frame = frame
        self._parent = parent
        self._count = len(children)
        self._early: dict[int, _Term] = {}
        self._out = out
        for index, child in enumerate(children):
            while isinstance(child, list) and len(child) == 1:
                child = child[0]
            if isinstance(child, list):
                _Node(frame, child, (self, index), slots)
            else:
                slots[child] = (self, index)

    @property
    def complete(self) -> bool:
        return self.next == self._count

    def memory(self) -> Tensor:
        """Where this node's sum is built; taken when it is first needed."""
        if self._out is None:
            if self._parent is not None and self._parent[1] == 0:
                self._out = self._parent[0].memory()
            else:
                self._out = self._frame.scratch.take(self._frame.size, self._frame.dtype)
        return self._out

    def place(self, index: int, presence: int) -> _Term:
        """A term whose bytes are still to be received."""
        if index == 0 and presence == self._frame.full:
            return _Term(presence, flat=self.memory())
        flat = self._frame.scratch.take(self._frame.compact(presence), self._frame.dtype)
        return _Term(presence, flat=flat, own=flat)

    def give(self, index: int, term: _Term) -> None:
        """Child `index` is there."""
        self._early[index] = term
        if self.sum is None and 0 in self._early:
            self.sum = _Sum(self._frame, self.memory())
        self._go_on()

    def begin(self, total: _Sum) -> None:
        """Child 0 was a node and is complete; its sum lies in this node's memory already."""
        self.sum = total
        self.next = 1
        self._go_on()

    def _go_on(self) -> None:
        while self.sum is not None and self.next in self._early:
            self.sum.add(self._early.pop(self.next))
            self.next += 1
        if self.sum is not None and self.complete and self._parent is not None:
            node, index = self._parent
            if index == 0:
                node.begin(self.sum)
            else:
                node.give(index, self.sum.term())


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() <= _SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        return (tensor,)
    return torch.split(tensor, _SERIAL_ELEMENTS)


def _add(target: Tensor, values: Tensor) -> None:
    if target.numel() <= _SERIAL_ELEMENTS:
        target.add_(values)
        return
    for into, part in zip(_parts(target), _parts(values), strict=True):
        into.add_(part)


def _copy(target: Tensor, values: Tensor) -> None:
    if target.numel() <= _SERIAL_ELEMENTS:
        target.copy_(values)
        return
    for into, part in zip(_parts(target), _parts(values), strict=True):
        into.copy_(part)
