"""The secret's file: made once, for its owner alone, and refused if anybody else can read it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perdure.agent.secret import new_secret, read_or_make_secret
from perdure.schema.errors import UsageError


def test_an_absent_file_is_made_for_its_owner_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = read_or_make_secret(path)
    assert len(secret) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_make_secret(path) == secret
    assert list(tmp_path.iterdir()) == [path]


def test_secrets_differ() -> None:
    assert new_secret() != new_secret()


def test_launchers_that_start_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(read_or_make_secret, [path] * 32))
    assert secrets == {read_or_make_secret(path)}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_a_file_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    read_or_make_secret(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 600 {path}"):
        read_or_make_secret(path)


def test_what_is_no_secret_is_refused(tmp_path: Path) -> None:
    short, large, pipe = tmp_path / "short", tmp_path / "large", tmp_path / "pipe"
    short.write_text("too short\n")
    large.write_text("x" * 5000)
    os.mkfifo(pipe, 0o600)
    for path in (short, large):
        path.chmod(0o600)
    for path, reason in ((short, "9 characters"), (large, "characters"), (pipe, "not a plain file")):
        with pytest.raises(UsageError, match=reason):
            read_or_make_secret(path)
    with pytest.raises(UsageError, match="No such file"):
        read_or_make_secret(tmp_path / "nowhere" / "secret")
    with pytest.raises(UsageError, match=str(tmp_path)):
        read_or_make_secret(tmp_path)
