"""The recovery policies, by name: `make(name, overrides)`; see `base` for their interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perdure.core.policies.bamboo import Bamboo, BambooSettings
from perdure.core.policies.base import Policy
from perdure.core.policies.common import Settings
from perdure.core.policies.megatron import Megatron, MegatronSettings
from perdure.core.policies.oobleck import Oobleck, OobleckSettings
from perdure.core.policies.perdure import Perdure, PerdureSettings
from perdure.core.policies.recycle import Recycle, RecycleSettings
from perdure.core.policies.unicron import Unicron, UnicronSettings
from perdure.core.policies.varuna import Varuna, VarunaSettings
from perdure.schema.errors import UsageError
from perdure.schema.tables import convert

POLICIES: dict[str, tuple[Callable[[Any], Policy], type[Settings]]] = {
    "megatron": (Megatron, MegatronSettings),
    "varuna": (Varuna, VarunaSettings),
    "oobleck": (Oobleck, OobleckSettings),
    "bamboo": (Bamboo, BambooSettings),
    "recycle": (Recycle, RecycleSettings),
    "unicron": (Unicron, UnicronSettings),
    "perdure": (Perdure, PerdureSettings),
}
"""name → (policy, its settings)."""


def make(name: str, overrides: Mapping[str, Any] | None = None) -> Policy:
    """The policy `name` with the settings of its `[policy.NAME]` table.

    Raises `UsageError` for an unknown name or setting, or a value out of bounds.
    """
    if name not in POLICIES:
        raise UsageError(f"policy.{name}: unknown policy, expected one of {', '.join(POLICIES)}")
    build, settings = POLICIES[name]
    return build(convert(dict(overrides or {}), settings, f"policy.{name}"))
