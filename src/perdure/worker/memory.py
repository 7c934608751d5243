"""Bytes that lie somewhere in this process, named by address: what a payload is made of."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import overload

import numpy as np


class Pieces(Sequence[memoryview]):
    """A payload as it lies: pieces of memory, in order.

    `places` is address, length, address, length, …; `keep` is what owns the memory. As a sequence it gives
    byte views, made when they are asked for: a peer that reads this memory needs the numbers alone.
    """

    __slots__ = ("_keep", "nbytes", "places")

    def __init__(self, places: Sequence[int], keep: object) -> None:
        self.places = places
        self.nbytes = sum(places[1::2])
        self._keep = keep

    @classmethod
    def of(cls, buffers: Sequence[memoryview]) -> Pieces:
        """The pieces that contiguous byte views show."""
        if isinstance(buffers, Pieces):
            return buffers
        places: list[int] = []
        for buffer in buffers:
            places += (address_of(buffer), buffer.nbytes)
        return cls(places, buffers)

    def __len__(self) -> int:
        return len(self.places) // 2

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        address, length = self.places[2 * at], self.places[2 * at + 1]
        memory = (ctypes.c_ubyte * length).from_address(address)
        memory.keep = self._keep  # type: ignore[attr-defined]
        return memoryview(memory)


def address_of(view: memoryview) -> int:
    """Address of a contiguous byte view's first byte."""
    if not view.readonly and view.nbytes:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address
