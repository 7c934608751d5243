"""Values to trees and back: plain data, exact to the bit, without pickle.

JSON and MessagePack know no tuples, no integer keys, no NaN (JSON) and no long integers (MessagePack). Such a
value becomes `{"~": kind, ...}`; a dictionary that happens to use the key `~` is tagged itself. A tensor
becomes `{"~": "tensor", "name": entry}`. No tag names a class to import: a file can never make perdure run
code.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import torch

from perdure.schema.errors import ProtectError, RestoreError
from perdure.state.layout import Tree

TAG: Final = "~"
DEPTH_MAX: Final = 32

Refer = Callable[[str, torch.Tensor], dict[str, str]]
"""Takes a tensor's name and the tensor; returns its reference."""

_MAPPINGS: Final[dict[type, str]] = {
    dict: "dict",
    defaultdict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}
_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", torch.Size: "size", deque: "deque"}
_PLAIN: Final = frozenset({str, bool, type(None)})
_NUMPY_SCALARS: Final = "biufc"


def encode(value: Any, name: str, refer: Refer, depth: int = 0) -> Tree:
    """The tree of `value`, whose tensors `refer` records under names that begin with `name`.

    Raises `ProtectError` for what is not plain data, naming the place.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else {TAG: "int", "hex": hex(value)}
    if isinstance(value, torch.Tensor):
        return refer(name, value)
    if depth >= DEPTH_MAX:
        raise ProtectError(
            f"job.protect: {name} is nested deeper than {DEPTH_MAX}; make its state_dict flatter"
        )
    if kind is list:
        return [encode(item, f"{name}.{index}", refer, depth + 1) for index, item in enumerate(value)]
    # A defaultdict's factory is code: the script's own object brings it.
    if kind in (dict, defaultdict) and TAG not in value and all(type(key) is str for key in value):
        return {key: encode(item, f"{name}.{key}", refer, depth + 1) for key, item in value.items()}
    return _encode_tagged(value, name, refer, depth)


def _encode_tagged(value: Any, name: str, refer: Refer, depth: int) -> Tree:
    """The kinds that need a tag. The names of kinds are those that `_decode_tagged` knows."""
    kind = type(value)
    if kind in _MAPPINGS:
        items = [
            [encode(key, f"{name}.keys", refer, depth + 1), encode(item, f"{name}.{key}", refer, depth + 1)]
            for key, item in value.items()
        ]
        return {TAG: _MAPPINGS[kind], "items": items}
    if kind in _SEQUENCES:
        items = [encode(item, f"{name}.{index}", refer, depth + 1) for index, item in enumerate(value)]
        tree: dict[str, Tree] = {TAG: _SEQUENCES[kind], "items": items}
        if isinstance(value, deque):
            tree["limit"] = value.maxlen
        return tree
    if kind in (set, frozenset):
        members = [encode(item, f"{name}.items", refer, depth + 1) for item in value]
        members.sort(key=msgspec.msgpack.encode)  # a set has no order of its own
        return {TAG: kind.__name__, "items": members}
    if isinstance(value, bytes):
        return {TAG: "bytes", "hex": value.hex()}
    if kind is complex:
        return {TAG: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMPY_SCALARS and value.dtype.isnative:
        return {**refer(name, torch.from_numpy(np.array(value, order="C"))), TAG: "ndarray"}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_SCALARS:
        return {TAG: "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "text": str(value).removeprefix("torch.")}
    raise ProtectError(
        f"job.protect: {name} holds a {kind.__module__}.{kind.__qualname__}, which is not plain data; "
        "let its state_dict return only tensors, arrays, numbers, strings, bytes, lists, tuples and dicts"
    )


def decode(tree: Tree, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value of a tree; `tensor` returns the tensor of an entry.

    Raises `RestoreError` for a tree that is none.
    """
    if isinstance(tree, list):
        return [decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(item, tensor) for key, item in tree.items()}
    try:
        return _decode_tagged(tree, tensor)
    except (KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise RestoreError(
            f"the saved state holds a value of kind {tree[TAG]!r} that cannot be read: {error}"
        ) from None


def _decode_tagged(tree: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    kind = tree[TAG]
    if kind == "tensor":
        return tensor(tree["name"])
    if kind == "ndarray":
        return tensor(tree["name"]).cpu().numpy().copy()
    if kind in ("dict", "ordered", "counter"):
        pairs = {decode(key, tensor): decode(item, tensor) for key, item in tree["items"]}
        return {"dict": dict, "ordered": OrderedDict, "counter": Counter}[kind](pairs)
    if kind in ("tuple", "size", "deque", "set", "frozenset"):
        items = decode(tree["items"], tensor)
        if kind == "deque":
            return deque(items, maxlen=tree["limit"])
        return {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}[kind](items)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(tree["bits"]))[0]
    if kind == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(tree["bits"])))
    if kind == "int":
        return int(tree["hex"], 16)
    if kind == "bytes":
        return bytes.fromhex(tree["hex"])
    if kind == "numpy":
        return np.frombuffer(bytes.fromhex(tree["hex"]), dtype=np.dtype(tree["dtype"]))[0]
    if kind == "dtype":
        return named_dtype(tree["text"])
    raise ValueError("unknown kind")


def named_dtype(text: str) -> torch.dtype:
    """The dtype called `text` ("float32"). Raises `RestoreError` if torch has none of that name."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise RestoreError(
            f"the saved state uses the dtype {text!r}, which this version of torch does not have"
        )
    return found
