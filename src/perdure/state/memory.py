"""A tensor's memory as bytes, without a copy wherever the memory allows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from perdure.schema.errors import ProtectError
from perdure.state.layout import TensorSpec, header
from perdure.state.tree import TAG, named_dtype

STAGING_BYTES: Final = 32 << 20
"""Size of the host buffer through which a device's memory passes."""

_uint8 = torch.uint8


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a one-dimensional uint8 tensor that shares it, on the same device.

    It goes through the storage because `Tensor.view` refuses scalars and some dtypes, and because the result
    must not take part in autograd.
    """
    window = torch.empty(0, dtype=_uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return window.set_(storage, tensor.storage_offset() * tensor.element_size(), (tensor.nbytes,))  # type: ignore[call-overload,no-any-return]


def view_of(flat: torch.Tensor) -> memoryview:
    """A writable view of a flat uint8 CPU tensor; it keeps the memory alive.

    torch lets no storage grow any more of which numpy has a view: one without bytes is left alone.
    """
    if not flat.nbytes:
        return memoryview(bytearray())
    return flat.numpy().data


def typed(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor of `spec` that lives in the memory of `flat` (uint8, `spec.nbytes` long, aligned)."""
    dtype = named_dtype(spec.dtype)
    window = torch.empty(0, dtype=dtype, device=flat.device)
    offset, rest = divmod(int(flat.storage_offset()), dtype.itemsize)
    if rest:
        raise ValueError(f"the bytes of {spec.name!r} are not aligned to {dtype.itemsize}")
    stride = spec.stride or contiguous_stride(spec.shape)
    return window.set_(flat.untyped_storage(), offset, spec.shape, stride)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without holes or overlaps, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


class Region:
    """A tensor met in a walk of the state, with what is worth keeping until the next walk.

    A walk meets the same tensors step after step; only a comparison of address, shape, stride and dtype
    stands between it and the view made the first time. `entry` is the region whose bytes stand for this one:
    itself, or the first region met with exactly the same memory (a tie).
    """

    __slots__ = (
        "dense", "dtype", "entry", "flat", "header", "name", "nbytes", "place", "pointer", "reference",
        "shape", "spec", "stride", "tensor", "view", "volatile",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, name: str, volatile: bool) -> None:
        check_supported(tensor, name)
        self.tensor = tensor
        self.volatile = volatile
        self.pointer = tensor.data_ptr()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.place = (self.pointer, self.nbytes, self.dtype, tuple(self.shape), self.stride)
        self.dense = self.nbytes == 0 or is_dense(tuple(self.shape), self.stride)
        self.flat: torch.Tensor | None = flat_bytes(tensor) if self.dense else None
        self.view: memoryview | None = None
        if self.flat is not None and tensor.device.type == "cpu":
            self.view = view_of(self.flat)
        self.entry = self
        self.rename(name)

    def rename(self, name: str) -> None:
        """Give the region the name under which this walk met it."""
        self.name = name
        stride = () if not self.dense or self.tensor.is_contiguous() else self.stride
        self.spec = TensorSpec(
            name=name,
            dtype=str(self.dtype).removeprefix("torch."),
            shape=tuple(self.shape),
            stride=stride,
            nbytes=self.nbytes,
            device=self.tensor.device.type,
        )
        self.header = header(self.spec)
        self.reference = {TAG: "tensor", "name": name}

    def still(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the region's own, with the same memory in the same form as before."""
        return (
            self.tensor is tensor
            and self.dense
            and tensor.data_ptr() == self.pointer
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype is self.dtype
        )

    def bytes_now(self) -> torch.Tensor:
        """The entry's bytes, flat, on the tensor's device: its memory, or a copy in order if it has holes."""
        if self.flat is not None:
            return self.flat
        return flat_bytes(self.tensor.detach().contiguous())


def check_supported(tensor: torch.Tensor, name: str) -> None:
    """Raise `ProtectError` for a tensor whose memory is not plain bytes, saying what to do."""
    if isinstance(tensor, UninitializedTensorMixin):
        raise ProtectError(
            f"job.protect: {name} has no shape yet; run one batch through the lazy module first"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ProtectError(f"job.protect: {name} is sparse or quantised; only dense tensors can be protected")
    if tensor.device.type == "meta":
        raise ProtectError(f"job.protect: {name} is on the meta device; give it memory with to_empty() first")
    if tensor.is_conj() or tensor.is_neg():
        raise ProtectError(
            f"job.protect: {name} is a lazy conjugate; call resolve_conj().resolve_neg() on it first"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ProtectError(
            f"job.protect: {name} is a {type(tensor).__qualname__}; protect its local plain tensor"
        )


class Staging:
    """A host buffer through which device memory passes: copies are queued, then waited for together.

    Many small tensors on a device would otherwise cost a round trip each.
    """

    def __init__(self, capacity: int = STAGING_BYTES) -> None:
        self._buffer = torch.empty(capacity, dtype=_uint8, pin_memory=torch.cuda.is_available())
        self._view = view_of(self._buffer)

    def through(self, pieces: Iterable[bytes | memoryview | torch.Tensor]) -> Iterator[bytes | memoryview]:
        """Yield host bytes for every piece, in order; flat device tensors are cut as the buffer demands.

        A yielded view is valid until the next is asked for.
        """
        queue: list[bytes | memoryview] = []
        devices: set[torch.device] = set()
        used = 0
        for piece in pieces:
            if not isinstance(piece, torch.Tensor):
                queue.append(piece)
                continue
            start = 0
            while start < piece.nbytes:
                if used == len(self._view):
                    yield from self._drain(queue, devices)
                    used = 0
                length = min(piece.nbytes - start, len(self._view) - used)
                self._buffer[used : used + length].copy_(piece[start : start + length], non_blocking=True)
                devices.add(piece.device)
                queue.append(self._view[used : used + length])
                used, start = used + length, start + length
        yield from self._drain(queue, devices)

    @staticmethod
    def _drain(queue: list[bytes | memoryview], devices: set[torch.device]) -> Iterator[bytes | memoryview]:
        for device in devices:
            wait_for(device)
        yield from queue
        queue.clear()
        devices.clear()


def wait_for(device: torch.device) -> None:
    """Wait until the copies queued on the device's current stream have ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
