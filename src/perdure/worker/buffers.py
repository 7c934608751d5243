"""Module buffers that forward passes change: running statistics, power iterations (E8).

The committed values are put back before each run of micro-batches; the values that block 0's run leaves
are the next committed ones and travel to everybody as one more span of the step. Other runs'
changes are dropped. Buffers outside the state_dict are taken to be constant, which is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from perdure.schema.errors import ProtectError


class Buffers:
    """The changing buffers of the protected modules.

    Args:
        buffers: (name, buffer, whether it is in the state_dict) of every buffer, each tensor once.
    """

    def __init__(self, buffers: Sequence[tuple[str, torch.Tensor, bool]]) -> None:
        self._changing = [tensor for _, tensor, persistent in buffers if persistent]
        self._constant = [(name, tensor) for name, tensor, persistent in buffers if not persistent]
        self._versions = [tensor._version for _, tensor in self._constant]
        self.nbytes = sum(tensor.nbytes for tensor in self._changing)
        self._committed: list[torch.Tensor] = []
        self._left: torch.Tensor | None = None
        self.note_restored()

    def note_committed(self) -> None:
        """A step was committed: the live values are the committed ones now."""
        self.note_restored()
        self._left = None

    def note_restored(self) -> None:
        """The state was taken from elsewhere; block 0's values of the next step may be here already."""
        self._committed = [tensor.detach().clone() for tensor in self._changing]
        self._versions = [tensor._version for _, tensor in self._constant]

    def put_back(self) -> None:
        """Make the live values the committed ones."""
        with torch.no_grad():
            for live, value in zip(self._changing, self._committed, strict=True):
                live.copy_(value)

    def committed(self) -> dict[int, torch.Tensor]:
        """Data pointer of each live buffer → its committed value."""
        return {t.data_ptr(): v for t, v in zip(self._changing, self._committed, strict=True)}

    def block_0_ended(self) -> torch.Tensor:
        """Block 0's run is computed: its values (flat bytes) become the committed ones with the step."""
        flat = [t.detach().contiguous().view(-1).view(torch.uint8).cpu() for t in self._changing]
        self._left = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        return self._left

    def landing(self) -> torch.Tensor:
        """Where block 0's values are received (flat bytes)."""
        if self._left is None:
            self._left = torch.empty(self.nbytes, dtype=torch.uint8)
        return self._left

    @property
    def left(self) -> torch.Tensor | None:
        """Block 0's values, if they are here."""
        return self._left

    def apply(self) -> None:
        """Commit: the live values are those that block 0 left."""
        if self._left is None:
            return
        offset = 0
        with torch.no_grad():
            for live in self._changing:
                piece = self._left[offset : offset + live.nbytes]
                live.copy_(piece.view(live.dtype).view(live.shape) if piece.numel() else live)
                offset += live.nbytes

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """What forward passes change meanwhile is put back."""
        values = [live.detach().clone() for live in self._changing]
        try:
            yield
        finally:
            with torch.no_grad():
                for live, value in zip(self._changing, values, strict=True):
                    live.copy_(value)

    def check(self) -> None:
        """Raise if a forward pass changed a buffer that is not in the state_dict."""
        for (name, tensor), version in zip(self._constant, self._versions, strict=True):
            if tensor._version != version:
                raise ProtectError(
                    f"the forward pass changed the buffer {name}, which is not in the state_dict, so it "
                    "would differ between workers: register it with persistent=True"
                )
