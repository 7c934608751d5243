"""A snapshot written to disk and read back: the simplest hard state.

`write` works aside, in a directory that ends in `.partial`, and never touches another; `shelf.publish`
renames it into place once whoever calls it is sure that this generation may (G4). The tensors' file
follows the safetensors format, so any tool can open it; it is written here, entry by entry from the
snapshot's memory, because that gives the checksum in the same pass and an `OSError` for a full disk. It is
read by the safetensors library, which checks the header. The rest is JSON.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from perdure.schema.errors import ProtocolError, RestoreError
from perdure.state.capture import ProtectedState, Snapshot, check_source
from perdure.state.layout import FORMAT, Description, TensorSpec
from perdure.state.memory import flat_bytes, view_of
from perdure.state.shelf import (
    MANIFEST,
    REST,
    TENSORS,
    FileSum,
    Manifest,
    Meta,
    encode_manifest,
    read_manifest,
    sync_directory,
    verify,
)
from perdure.state.tree import named_dtype

_BLOCK_BYTES: Final = 4 << 20

# Names of the safetensors format; a dtype that it lacks is written as bytes and named in the description.
_FORMAT_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

Moment = Callable[[str], None]
"""Called at each stage of a write with its name, so that a test can end the process exactly there."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: its bytes are mapped from the file and read when they are used."""

    meta: Meta
    description: Description
    tensors: dict[str, torch.Tensor]


def write(snapshot: Snapshot, directory: Path, meta: Meta, at: Moment = lambda _: None) -> Manifest:
    """Write a checkpoint into `directory` (made anew; name it `*.partial`), flushed to the disk.

    Raises `ProtocolError` if the snapshot is not the state that `meta.digest` names, and `OSError`, of a
    full disk for one; the directory is then removed again. Older checkpoints are never touched.
    """
    if (digest := snapshot.digest()) != meta.digest:
        raise ProtocolError(
            f"the copy for step {meta.step} has the digest {digest}, the state had {meta.digest}"
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        at("begin")
        files = {
            TENSORS: _write_file(directory / TENSORS, _tensor_blocks(snapshot), at),
            REST: _write_file(directory / REST, [msgspec.json.encode(snapshot.description)], at),
        }
        manifest = Manifest(format=FORMAT, meta=meta, files=files)
        _write_file(directory / MANIFEST, [encode_manifest(manifest)], at)
        sync_directory(directory)
        at("end")
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)  # a full disk is not made fuller
        raise
    return manifest


def _write_file(path: Path, blocks: Iterable[bytes | memoryview], at: Moment) -> FileSum:
    """Write, flush and sum one file in a single pass."""
    hasher = xxhash.xxh3_128()
    size = 0
    try:
        with open(path, "xb") as file:
            for block in blocks:
                at(f"{path.name} at {size}")
                hasher.update(block)
                file.write(block)
                size += len(block)
            file.flush()
            at(f"{path.name} written")
            os.fsync(file.fileno())
            at(f"{path.name} synced")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileSum(size, hasher.hexdigest())


def _tensor_blocks(snapshot: Snapshot) -> Iterator[bytes | memoryview]:
    """The safetensors file: length of the header (8 bytes, little endian), header (JSON, padded to 8), data.

    Entries are in order of falling item size, so that each is aligned to its own.
    https://github.com/huggingface/safetensors#format
    """
    specs = sorted(snapshot.description.tensors, key=lambda spec: (-_itemsize(spec), spec.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        dtype, shape = _format_form(spec)
        entries[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for spec in specs:
        view = view_of(snapshot.tensors[spec.name])
        for start in range(0, spec.nbytes, _BLOCK_BYTES):
            yield view[start : start + _BLOCK_BYTES]


def _itemsize(spec: TensorSpec) -> int:
    return named_dtype(spec.dtype).itemsize if spec.dtype in _FORMAT_DTYPES else 1


def _format_form(spec: TensorSpec) -> tuple[str, list[int]]:
    """dtype and shape in the file.

    Flat for a dtype that the format lacks and for another order of dimensions.
    """
    dtype = _FORMAT_DTYPES.get(spec.dtype)
    if dtype is None:
        return "U8", [spec.nbytes]
    return dtype, [spec.nbytes // _itemsize(spec)] if spec.stride else list(spec.shape)


def load(path: Path) -> Saved:
    """Verify and read a checkpoint. Raises `RestoreError` with one line that says what is wrong with it."""
    if reason := verify(path):
        raise RestoreError(f"checkpoint {path}: {reason}")
    try:
        meta = read_manifest(path).meta
        description = msgspec.json.decode((path / REST).read_bytes(), type=Description)
        with safe_open(path / TENSORS, framework="pt") as file:
            names = set(file.keys())
            expected = {spec.name for spec in description.tensors}
            if names != expected:
                raise RestoreError(f"{TENSORS} and {REST} disagree about {min(names ^ expected)!r}")
            tensors = {name: flat_bytes(file.get_tensor(name)) for name in sorted(names)}
        check_source(description, tensors)
    except (RestoreError, ProtocolError, SafetensorError, msgspec.DecodeError, OSError, ValueError) as error:
        raise RestoreError(f"checkpoint {path}: {error}") from error
    return Saved(meta, description, tensors)


def restore(state: ProtectedState, path: Path) -> Meta:
    """Make the live objects equal to the checkpoint at `path` and check the digest. Raises `RestoreError`."""
    saved = load(path)
    try:
        state.restore(saved.description, saved.tensors)
    except RestoreError as error:
        raise RestoreError(f"checkpoint {path}: {error}") from error
    if (digest := state.digest()) != saved.meta.digest:
        raise RestoreError(
            f"checkpoint {path}: its state has the digest {digest} instead of {saved.meta.digest}"
        )
    return saved.meta
