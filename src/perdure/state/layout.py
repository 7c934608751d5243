"""What protected state looks like, apart from its bytes: a description that travels and is written.

A state is a list of *entries* (each a run of bytes with a name, a dtype, a shape and a stride) and, for every
protected object, a *tree*: JSON-like data in which a tensor is a reference to an entry by name. The tree is
built from `None`, `bool`, `int`, `float`, `str`, `list` and `dict` with string keys only, so that MessagePack
and JSON both carry it exactly; anything else is tagged (`tree.py`).

This module knows no torch: it is what a coordinator or a command can read of a state.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from perdure.schema.errors import RestoreError

FORMAT: Final = 1
"""Version of the description, of the digest and of the files written from them."""

DESCRIPTION_BYTES_MAX: Final = 64 << 20
"""A longer description is refused: a state has thousands of entries, not millions."""

Tree = Any
"""JSON-like data; typed `Any` because every reader checks it as it goes."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry: where its bytes come in the order of names, and how to read them.

    `stride` is empty for a contiguous tensor; otherwise the tensor is dense in another order (channels last)
    and its bytes are in the order of memory. `device` is the kind of device the tensor was on; it is no part
    of the digest.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    device: str


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole state without its bytes: `objects` maps each protected name to its tree.

    `tensors` is in name order. `evaluating` names the modules that are in evaluation mode, all others train;
    None in what older versions wrote. It is no part of the digest: a script may leave one worker's modules in
    another mode until the next step begins. Nor is `moved`: the entries of parameters and buffers that the
    script has given other memory since the loop began.
    """

    format: int
    objects: dict[str, Tree]
    tensors: list[TensorSpec]
    evaluating: tuple[str, ...] | None = None
    moved: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all entries together."""
        return sum(spec.nbytes for spec in self.tensors)

    def specs(self) -> dict[str, TensorSpec]:
        """The entries by name."""
        return {spec.name: spec for spec in self.tensors}


_canonical = msgspec.msgpack.Encoder(order="deterministic")
_plain = msgspec.msgpack.Encoder()
_description = msgspec.msgpack.Decoder(Description)


def header(spec: TensorSpec) -> bytes:
    """What the digest takes of an entry besides its bytes: name, dtype, shape and stride."""
    return _plain.encode((spec.name, spec.dtype, spec.shape, spec.stride))


def canonical(objects: dict[str, Tree]) -> bytes:
    """The trees as bytes that do not depend on the order in which dictionaries were filled."""
    return _canonical.encode(objects)


def encode_description(description: Description) -> bytes:
    """The description as MessagePack."""
    return _plain.encode(description)


def decode_description(data: bytes) -> Description:
    """The opposite of `encode_description`. Raises `RestoreError` for anything that is not one."""
    if len(data) > DESCRIPTION_BYTES_MAX:
        raise RestoreError(
            f"the state's description has {len(data)} bytes; at most {DESCRIPTION_BYTES_MAX} are read"
        )
    try:
        description = _description.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RestoreError(f"the state's description cannot be read: {error}") from None
    check_description(description)
    return description


def check_description(description: Description) -> None:
    """Raise `RestoreError` unless the version is ours and the entries are in name order and sane."""
    if description.format != FORMAT:
        raise RestoreError(
            f"the state was written in format {description.format}; this version of perdure reads format "
            f"{FORMAT}"
        )
    previous = ""
    for spec in description.tensors:
        if spec.name <= previous:
            raise RestoreError(f"the state's entries are not in name order at {spec.name!r}")
        if spec.nbytes < 0 or any(size < 0 for size in spec.shape):
            raise RestoreError(f"entry {spec.name!r} has a negative size")
        if spec.stride and len(spec.stride) != len(spec.shape):
            raise RestoreError(
                f"entry {spec.name!r} has {len(spec.shape)} sizes but {len(spec.stride)} strides"
            )
        previous = spec.name


def difference(here: Tree, saved: Tree, path: str) -> str | None:
    """The first place where two trees differ, as one clause; None if they are equal, bit for bit."""
    if type(here) is not type(saved):
        return f"{path} is {_short(saved)} in the saved state and {_short(here)} here"
    if isinstance(saved, dict):
        for key in sorted(saved.keys() | here.keys()):
            if key not in here:
                return f"{path}.{key} is in the saved state but not here"
            if key not in saved:
                return f"{path}.{key} is here but not in the saved state"
            if found := difference(here[key], saved[key], f"{path}.{key}"):
                return found
        return None
    if isinstance(saved, list):
        if len(saved) != len(here):
            return f"{path} has {len(saved)} items in the saved state and {len(here)} here"
        for index, (mine, theirs) in enumerate(zip(here, saved, strict=True)):
            if found := difference(mine, theirs, f"{path}.{index}"):
                return found
        return None
    if _plain.encode(here) != _plain.encode(saved):  # -0.0 is not 0.0 here
        return f"{path} is {_short(saved)} in the saved state and {_short(here)} here"
    return None


def _short(value: Tree) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
