"""Checkpoints on disk as a supervisor sees them: named, verified, published, pruned. Knows no torch.

    checkpoints/
      step-000000099/            the state after the commit of step 99
        tensors.safetensors      the entries' bytes
        rest.json                the description: trees, names, shapes
        manifest.json            size and XXH3-128 of the two files, step, digest; checksummed itself
      step-000000149.partial/    being written, or left by a writer that died: never read

A checkpoint is written aside (`checkpoint.write`, with every file flushed), then renamed into place by
`publish`, whoever is entitled to. So a name without `.partial` has been complete; what happened to it
since is what `verify` finds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from perdure.state.layout import FORMAT

TENSORS: Final = "tensors.safetensors"
REST: Final = "rest.json"
MANIFEST: Final = "manifest.json"
PARTIAL: Final = ".partial"

_MANIFEST_BYTES_MAX: Final = 1 << 20
_READ_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"step-(\d{9,})")
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job must know to go on.

    The last committed step, the state's digest after it, the fixed layout, and what else decides which
    samples come (`data`; checkpoints from before it was kept have none).
    """

    step: int
    digest: str
    blocks: int
    per_step: int
    seed: int
    data: dict[str, int] = msgspec.field(default_factory=dict)


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size in bytes and its XXH3-128 in hex."""

    bytes: int
    xxh3_128: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last file of a checkpoint to be written: what the others must be."""

    format: int
    meta: Meta
    files: dict[str, FileSum]


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    checksum: str
    manifest: msgspec.Raw


@dataclass(frozen=True)
class Refused:
    """A checkpoint that must not be used, and why (one clause)."""

    path: Path
    reason: str


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as one line of JSON that carries its own checksum."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))) + b"\n"


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises `ValueError`, one clause that says what is wrong."""
    try:
        with open(path / MANIFEST, "rb") as file:
            data = file.read(_MANIFEST_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    if len(data) > _MANIFEST_BYTES_MAX:
        raise ValueError(f"{MANIFEST} is longer than {_MANIFEST_BYTES_MAX} bytes")
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.manifest)
        if xxhash.xxh3_128_hexdigest(body) != sealed.checksum:
            raise ValueError(f"{MANIFEST} has the wrong checksum")
        version = msgspec.json.decode(body, type=_Version).format
        if version != FORMAT:
            raise ValueError(f"it has format {version}; this version of perdure reads format {FORMAT}")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from None
    if encode_manifest(manifest) != data:
        raise ValueError(f"{MANIFEST} is damaged: it is not written as perdure writes it")
    return manifest


class _Version(msgspec.Struct):
    format: int


def verify(path: Path) -> str | None:
    """Why the checkpoint at `path` must not be used, as one clause.

    None if every byte is as it was written.
    """
    if path.name.endswith(PARTIAL):
        return "it is unfinished: its writing was interrupted"
    if not path.is_dir():
        return "there is no such directory"
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return str(error)
    if manifest.files.keys() != {TENSORS, REST}:
        return f"{MANIFEST} lists {sorted(manifest.files)} instead of {sorted((TENSORS, REST))}"
    for name, expected in sorted(manifest.files.items()):
        try:
            found = sum_file(path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found.bytes != expected.bytes:
            return f"{name} has {found.bytes} bytes instead of {expected.bytes}"
        if found.xxh3_128 != expected.xxh3_128:
            return f"{name} has the wrong checksum"
    return None


def sum_file(path: Path) -> FileSum:
    """Size and checksum of a file. Raises `OSError`."""
    hasher = xxhash.xxh3_128()
    size = 0
    block = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
            size += count
    return FileSum(size, hasher.hexdigest())


def sync_directory(path: Path) -> None:
    """Make the names in a directory last through a power cut. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, final: Path) -> None:
    """Give a finished `partial` directory its final name, for good; one that was there is replaced.

    At every moment `final` is the old checkpoint or the new one, whole. Raises `OSError`; nothing has
    changed then.
    """
    sync_directory(partial)
    if final.exists():
        _exchange(partial, final)
        sync_directory(final.parent)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        os.rename(partial, final)
        sync_directory(final.parent)


def aside(target: Path, writer: str) -> Path:
    """Where `writer` writes what is to become `target`, in the same directory."""
    return target.with_name(f".{target.name}.{writer}{PARTIAL}")


def taken(target: Path) -> str:
    """Why a checkpoint must not be put at `target`, as one clause: it would replace somebody's file.

    Empty if nothing is there, or an empty directory, or a checkpoint, damaged or not: its name and its
    manifest's name make one.
    """
    if not os.path.lexists(target):
        return ""
    if target.is_symlink():
        return "it is a symbolic link; give the path of a directory"
    if not target.is_dir():
        return "it is a file that is no checkpoint of perdure's; move it away, or give another path"
    if (target / MANIFEST).is_file() or not any(target.iterdir()):
        return ""
    return "it is a directory that is no checkpoint of perdure's; move it away, or give another path"


def publish_save(partial: Path, target: Path, is_over: Callable[[str], bool]) -> None:
    """`publish`, and remove what writers that are no more (`is_over`) left of earlier tries at `target`.

    Raises `OSError`; so too where something else than a checkpoint is `taken` by that name.
    """
    if reason := taken(target):
        raise FileExistsError(reason)
    publish(partial, target)
    name = re.compile(rf"\.{re.escape(target.name)}\.(w\d+){re.escape(PARTIAL)}")
    for path in target.parent.iterdir():
        if (found := name.fullmatch(path.name)) and is_over(found[1]):
            shutil.rmtree(path, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names atomically (renameat2 of Linux); where that is unknown, in two renames."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):  # what a file system says that cannot exchange
            raise OSError(code, os.strerror(code), str(other))
    aside = other.with_name(f"{other.name}.replaced{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


class Shelf:
    """The checkpoints of one job, in one directory (which need not exist)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def final(self, step: int) -> Path:
        """Where the checkpoint of the state after `step` is published."""
        return self.directory / f"step-{step:09d}"

    def partial(self, step: int, writer: str = "") -> Path:
        """Where that checkpoint is written before; each writer has a place of its own.

        A writer that writes several times calls itself `NAME.1`, `NAME.2` …: what is thrown away in the
        background must not be what is written anew.
        """
        return self.directory / f"step-{step:09d}{f'-{writer}' if writer else ''}{PARTIAL}"

    def discard(self, writer: str) -> None:
        """Remove what this writer, which is no more, has not finished."""
        for path in self._names():
            name = path.name.removesuffix(PARTIAL)
            if name != path.name and name.rpartition("-")[2].partition(".")[0] == writer:
                remove(path)

    def newest_first(self) -> list[Path]:
        """The published checkpoints, good or bad, by step, the newest first."""
        steps = {path: int(found[1]) for path in self._names() if (found := _NAME.fullmatch(path.name))}
        return sorted(steps, key=steps.__getitem__, reverse=True)

    def verify(self, path: Path) -> str | None:
        """As `verify`, and the name must tell the step."""
        reason = verify(path)
        if reason is None and self.final(read_manifest(path).meta.step) != path:
            return f"its name does not fit its step {read_manifest(path).meta.step}"
        return reason

    def newest_good(self) -> tuple[Path | None, list[Refused]]:
        """The newest checkpoint that may be used, and the newer ones that may not."""
        refused: list[Refused] = []
        for path in self.newest_first():
            reason = self.verify(path)
            if reason is None:
                return path, refused
            refused.append(Refused(path, reason))
        return None, refused

    def publish(self, partial: Path) -> Path:
        """Publish a checkpoint written to a `self.partial(…)`; returns its place. Raises `OSError`."""
        found = _NAME.match(partial.name)
        if found is None:
            raise OSError(errno.EINVAL, f"{partial.name} does not name a step")
        final = self.final(int(found[1]))
        publish(partial, final)
        return final

    def prune(self, keep: int = 2, leftovers: bool = True) -> list[Path]:
        """Remove what is no longer needed and return it: all but the newest `keep` good ones, and leftovers.

        Nothing published is removed unless a good one stays; without `leftovers` partial directories, one of
        which may be in use, are left alone. The ones that stay are read in full, so that a good one is never
        given up for one that only looks good.
        """
        good: list[Path] = []
        rest: list[Path] = []
        for path in self.newest_first():
            (good if len(good) < keep and self.verify(path) is None else rest).append(path)
        partial = [path for path in self._names() if path.name.endswith(PARTIAL)] if leftovers else []
        removed = partial + (rest if good else [])
        for path in removed:
            remove(path)
        return removed

    def sweep(self) -> None:
        """Remove what writers that are no more have left unfinished."""
        for path in self._names():
            if path.name.endswith(PARTIAL):
                remove(path)

    def clear(self) -> None:
        """Remove every checkpoint, for a job that starts anew."""
        leftovers = [path for path in self._names() if path.name.endswith(PARTIAL)]
        for path in [*self.newest_first(), *leftovers]:
            remove(path)

    def _names(self) -> list[Path]:
        try:
            return sorted(self.directory.iterdir())
        except FileNotFoundError:
            return []


def remove(path: Path) -> None:
    """Remove a checkpoint; a removal that is cut short leaves no damaged one under a published name."""
    if not path.name.endswith(PARTIAL):
        aside = path.with_name(f"{path.name}.removed{PARTIAL}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        path = aside
    shutil.rmtree(path, ignore_errors=True)
