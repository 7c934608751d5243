"""The reading pass over a protected state.

Every tensor met gets an entry, every run of memory one entry only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from perdure.state.memory import Region


class Scribe:
    """One walk over the protected objects: gives every tensor an entry, and tied tensors the same one.

    `known` holds the regions of the walk before, by identity of tensor; those that are still valid are used
    again. `homes` are the tensors that stand for a module's buffers, by (id of the module, key), whatever a
    forward pass that is under way has put there.
    """

    def __init__(self, known: dict[int, Region], homes: Mapping[tuple[int, str], torch.Tensor]) -> None:
        self._known = known
        self.homes = homes
        self._names: set[str] = set()
        self._first: dict[int, Region] = {}
        self._also: dict[tuple[object, ...], Region] = {}
        self.regions: dict[int, Region] = {}
        self.entries: list[Region] = []
        self.parameters: dict[int, torch.Tensor] = {}
        self.lasting: dict[str, Region] = {}
        """The entries of parameters and buffers, by path: the script made these, and may have other names."""

    def entry(self, name: str, tensor: torch.Tensor, volatile: bool = False) -> Region:
        """The entry that holds the tensor's bytes.

        `volatile` says that it may change before the next commit.
        """
        region = self.regions.get(
            id(tensor)
        )  # `regions` keeps its tensors alive, so an id cannot be used again
        if region is not None:
            return region.entry
        region = self._known.get(id(tensor))
        if region is None or not region.still(tensor):
            region = Region(tensor, name, volatile)
        self.regions[id(tensor)] = region
        if region.nbytes:
            twin = self._first.setdefault(region.pointer, region)
            if twin is not region and twin.place != region.place:
                twin = self._also.setdefault(region.place, region)
            if twin is not region:
                region.entry = twin
                return twin
        if name in self._names:  # "a.b" and "b" inside "a" are different keys with the same name
            name = self._free(name)
        self._names.add(name)
        if region.name != name:
            region.rename(name)
        region.entry = region
        self.entries.append(region)
        return region

    def parameter(self, name: str, tensor: torch.Tensor) -> Region:
        """As `entry`, for a tensor that may be trained."""
        self.parameters[id(tensor)] = tensor
        self.lasting[name] = region = self.entry(name, tensor)
        return region

    def buffer(self, name: str, tensor: torch.Tensor) -> Region:
        """As `entry`, for a module's buffer."""
        self.lasting[name] = region = self.entry(name, tensor, volatile=True)
        return region

    def refer(self, name: str, tensor: torch.Tensor) -> dict[str, str]:
        """The reference to put in a tree for a tensor that only its own object may change."""
        return self.entry(name, tensor).reference

    def refer_volatile(self, name: str, tensor: torch.Tensor) -> dict[str, str]:
        """As `refer`, for a tensor that may be a copy or may change before the next commit."""
        return self.entry(name, tensor, volatile=True).reference

    def _free(self, name: str) -> str:
        number = 2
        while f"{name}#{number}" in self._names:
            number += 1
        return f"{name}#{number}"
