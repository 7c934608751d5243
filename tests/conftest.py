"""Makes the modules beside this file importable from every test; what several tests begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import perdure
from perdure.worker import api


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[perdure.Job]:
    """The job of a script that runs alone."""
    monkeypatch.setattr(api, "_joined", None)
    threads = torch.get_num_threads()
    yield perdure.join(seed=0)
    torch.set_num_threads(threads)
