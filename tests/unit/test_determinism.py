"""E12: a job on a device says when its bits may not come again."""

from __future__ import annotations

import pytest
import torch

from perdure.worker.determinism import missing, warning

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_on_cpus_nothing_is_missing() -> None:
    assert missing([CPU, CPU]) == ()
    assert warning([CPU]) == ""


def test_on_a_device_every_setting_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    text = warning([CPU, CUDA])
    assert text.startswith("replica-consistent, not exact")
    for setting in ("use_deterministic_algorithms(True)", "cudnn.benchmark = False", ":4096:8"):
        assert setting in text


def test_with_all_of_them_set_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.use_deterministic_algorithms(True)
    try:
        assert missing([CUDA]) == ()
    finally:
        torch.use_deterministic_algorithms(False)
