"""The file that holds a job's secret: made once, readable by its owner alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from perdure.schema.errors import UsageError

SECRET_CHARS_MIN: Final = 16
SECRET_CHARS_MAX: Final = 4096


def new_secret() -> bytes:
    """A fresh secret of 256 bits: for a run that nobody else joins."""
    return secrets.token_hex(32).encode()


def read_or_make_secret(path: Path) -> bytes:
    """The secret in `path`, which is made with mode 0600 if absent.

    Several launchers may do this at once on one file: all get the same secret. Raises UsageError if the
    file cannot be made or read, is not a plain file of 16 to 4096 characters, or if others may read it.
    """
    try:
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise UsageError(f"secret {path}: {error.strerror}; give --secret a file that can be read") from error


def _make(path: Path) -> None:
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(new_secret() + b"\n")
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):  # another launcher was first: its secret is the one
            os.link(aside, path)
    finally:
        aside.unlink()


def _read(path: Path) -> bytes:
    # Not to wait for a writer if it is a named pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"secret {path}: not a plain file; name one, or a path where one can be made")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise UsageError(f"secret {path}: mode {mode:04o} lets others at it; run: chmod 600 {path}")
        secret = file.read(SECRET_CHARS_MAX + 2).strip()
    if not SECRET_CHARS_MIN <= len(secret) <= SECRET_CHARS_MAX:
        raise UsageError(
            f"secret {path}: {len(secret)} characters; expected {SECRET_CHARS_MIN} to {SECRET_CHARS_MAX}; "
            "remove the file to have one made"
        )
    return secret
