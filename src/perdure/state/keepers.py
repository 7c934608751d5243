"""How each kind of protected object is read into a tree and put back.

A keeper has two duties. `walk` names the object's tensors to a `Scribe` and returns the tree. `plan` compares
a saved tree with the live object, raises `RestoreError` if they cannot be reconciled, and leaves steps with a
`Restoration`; nothing is written before every keeper has planned.

Optimizers are read from `.state` and `.param_groups` directly: `load_state_dict` would cast the fp32 state of
bf16 parameters to bf16 and replace tensor learning rates by new ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from perdure.schema.errors import ProtectError, RestoreError
from perdure.state.layout import TensorSpec, Tree
from perdure.state.restoration import Restoration, dtype_name
from perdure.state.scribe import Scribe
from perdure.state.tree import TAG, decode, encode

CPU: Final = torch.device("cpu")


class Keeper(Protocol):
    """Reads one protected object and puts it back.

    `changed` says what the last walk found that cannot be put back into an object that a script makes anew
    (None: nothing): something is not what it was when the keeper was made.
    """

    changed: str | None

    def walk(self, scribe: Scribe) -> dict[str, Tree]:
        """The object's tree; its tensors are left with the scribe."""

    def plan(self, tree: dict[str, Tree], restoration: Restoration) -> None:
        """Leave with `restoration` the steps that make the object equal to the tree."""


def keeper_for(name: str, thing: object) -> Keeper:
    """The keeper for an object given to `job.protect(name=thing)`.

    Raises `ProtectError` for one that has none.
    """
    if isinstance(thing, nn.Module):
        return ModuleKeeper(name, thing)
    if isinstance(thing, torch.optim.LBFGS):
        raise ProtectError(
            f"job.protect({name}=LBFGS): it evaluates the loss several times inside one step, which "
            "cannot be shared "
            "between workers; use an optimizer whose step() takes no closure"
        )
    if isinstance(thing, torch.optim.Optimizer):
        _refuse_undefined_bits(name, thing)
        return OptimizerKeeper(name, thing)
    if isinstance(thing, torch.Generator):
        return GeneratorKeeper(name, thing)
    if isinstance(thing, random.Random):
        return PlainKeeper(name, thing, thing.getstate, thing.setstate)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return PlainKeeper(name, thing, lambda: bits.state, lambda value: setattr(bits, "state", value))
    save, load = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    if isinstance(thing, type) or not callable(save) or not callable(load):
        raise ProtectError(
            f"job.protect({name}={type(thing).__qualname__}): it has no state_dict and load_state_dict; "
            "give it both, "
            "or protect the parts of it that have them"
        )
    return PlainKeeper(name, thing, save, load)


def _refuse_undefined_bits(name: str, optimizer: torch.optim.Optimizer) -> None:
    """torch 2.13's fused SGD leaves elements of a half-precision momentum on the CPU as memory had them."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        half = any(
            p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in group["params"]
        )
        if group["fused"] and group["momentum"] and half:
            raise ProtectError(
                f"job.protect({name}=SGD): with fused=True and momentum torch does not write all of a "
                "half-precision momentum on the CPU, so that replicas would differ; leave fused out"
            )


class ModuleKeeper:
    """A module: parameters, buffers (those that state_dict leaves out too), `requires_grad`, extra state.

    Besides, which of its modules are in evaluation mode.
    """

    KIND: Final = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.changed: str | None = None
        self._name = name
        self._module = module
        self._modules = dict(self.modules())
        self._names: frozenset[str] | None = None

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, with the prefix of its names.

        What torch.compile wrapped is taken out of its wrapper.
        """
        seen: set[int] = set()
        stack = [(self._name, self._module)]
        while stack:
            prefix, module = stack.pop()
            if "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
                module = module._modules["_orig_mod"] or module
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield prefix, module
            children = [
                (f"{prefix}.{key}", child) for key, child in module._modules.items() if child is not None
            ]
            stack.extend(reversed(children))

    def evaluating(self) -> Iterator[str]:
        """The names of the modules that are in evaluation mode."""
        return (prefix for prefix, module in self.modules() if not module.training)

    def walk(self, scribe: Scribe) -> dict[str, Tree]:
        parameters: dict[str, str] = {}
        buffers: dict[str, str | None] = {}
        frozen: list[str] = []
        extra: dict[str, Tree] = {}
        self.changed = None
        for prefix, module in self.modules():
            if self._modules.get(prefix, module) is not module:
                self.changed = (
                    f"another module was put in the place of {prefix}: change what that holds in place, as "
                    "load_state_dict does"
                )
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    path = f"{prefix}.{key}"
                    parameters[path] = scribe.parameter(path, parameter).name
                    if not parameter.requires_grad:
                        frozen.append(path)
            for key, buffer in module._buffers.items():
                path, buffer = f"{prefix}.{key}", scribe.homes.get((id(module), key), buffer)
                buffers[path] = None if buffer is None else scribe.buffer(path, buffer).name
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                path = f"{prefix}.extra_state"
                extra[prefix] = encode(module.get_extra_state(), path, scribe.refer_volatile)
        self._compare(parameters.keys() | buffers.keys())
        return {
            "kind": self.KIND, "parameters": parameters, "buffers": buffers, "frozen": frozen, "extra": extra,
        }  # fmt: skip

    def _compare(self, names: Set[str]) -> None:
        self._names = self._names or frozenset(names)
        if names != self._names:
            new, gone = names - self._names, self._names - names
            self.changed = (
                f"{self._name} got other parameters or buffers ({len(new)} new, {len(gone)} gone: "
                f"{min(new | gone)}): have all before that; one forward pass makes those that come when they "
                "are needed, pruning makes masks"
            )

    def plan(self, tree: dict[str, Tree], restoration: Restoration) -> None:
        live = dict(self.modules())
        here = {
            f"{prefix}.{key}": p
            for prefix, m in live.items()
            for key, p in m._parameters.items()
            if p is not None
        }
        saved, frozen = tree["parameters"], set(tree["frozen"])
        same_names(self._name, "parameter", here.keys(), saved.keys())
        for path, parameter in here.items():
            restoration.into(path, parameter, saved[path])
            if parameter.requires_grad is (path in frozen):
                restoration.later(lambda p=parameter, flag=path not in frozen: p.requires_grad_(flag))  # type: ignore[misc]
        slots = {
            f"{prefix}.{key}": (module, key) for prefix, module in live.items() for key in module._buffers
        }
        same_names(self._name, "buffer", slots.keys(), tree["buffers"].keys())
        for path, (module, key) in slots.items():
            self._plan_buffer(path, module, key, tree["buffers"][path], restoration)
        if (evaluating := restoration.evaluating) is not None:
            for prefix, module in live.items():
                restoration.later(partial(set_mode, module, prefix not in evaluating))
        same_names(self._name, "extra state", _with_extra(live), tree["extra"].keys())
        for prefix, sub in tree["extra"].items():
            restoration.later(
                lambda m=live[prefix], sub=sub: m.set_extra_state(_decoded(sub, restoration))  # type: ignore[misc]
            )

    def _plan_buffer(
        self, path: str, module: nn.Module, key: str, name: str | None, restoration: Restoration
    ) -> None:
        """A buffer may be None here and a tensor there."""
        buffer = module._buffers[key]
        if name is None:
            restoration.later(lambda: module._buffers.__setitem__(key, None))
        elif buffer is not None and name not in restoration.moved:
            restoration.into(path, buffer, name)
        else:
            spec = restoration.spec(name)
            beside = self._module.parameters() if buffer is None else [buffer]
            device = next((tensor.device for tensor in beside), CPU)
            restoration.later(lambda: module._buffers.__setitem__(key, restoration.make(spec, device)))


def set_mode(module: nn.Module, training: bool) -> None:
    """This module alone: `train()` goes down to its children, and may be the script's own."""
    if module.training is not training:
        module.training = training


def _with_extra(modules: Mapping[str, nn.Module]) -> set[str]:
    return {
        p for p, module in modules.items() if type(module).get_extra_state is not nn.Module.get_extra_state
    }


class OptimizerKeeper:
    """An optimizer: its parameters (state too if no protected module holds them), groups and state."""

    KIND: Final = "optimizer"

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.changed: str | None = None
        self._name = name
        self._optimizer = optimizer
        self._sizes = self._group_sizes()

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def walk(self, scribe: Scribe) -> dict[str, Tree]:
        name, refer = self._name, scribe.refer
        parameters: list[str] = []
        groups: list[dict[str, Tree]] = []
        state: dict[str, Tree] = {}
        every = self._optimizer.state
        self.changed = None
        if (sizes := self._group_sizes()) != self._sizes:
            self.changed = (
                f"{name} has groups of {sizes} parameters and had {self._sizes}: add every group before the "
                "loop; parameters that are frozen for a time stay as they are"
            )
        for position, group in enumerate(self._optimizer.param_groups):
            tree = {
                key: encode(value, f"{name}.groups.{position}.{key}", refer)
                for key, value in group.items()
                if key != "params"
            }
            groups.append({"size": len(group["params"]), "options": tree})
            for parameter in group["params"]:
                index = len(parameters)
                parameters.append(scribe.parameter(f"{name}.parameters.{index}", parameter).name)
                held = every.get(parameter)
                if held:
                    prefix = f"{name}.state.{index}"
                    state[str(index)] = {
                        key: encode(value, f"{prefix}.{key}", refer) for key, value in held.items()
                    }
        other = {key: value for key, value in every.items() if not isinstance(key, torch.Tensor)}
        return {
            "kind": self.KIND,
            "class": type(self._optimizer).__name__,
            "parameters": parameters,
            "groups": groups,
            "state": state,
            "other": encode(other, f"{name}.other", refer),
        }

    def plan(self, tree: dict[str, Tree], restoration: Restoration) -> None:
        optimizer, name = self._optimizer, self._name
        if type(optimizer).__name__ != tree["class"]:
            raise RestoreError(
                f"{name} was saved from {tree['class']} but is {type(optimizer).__name__} here"
            )
        sizes = self._group_sizes()
        saved_sizes = [group["size"] for group in tree["groups"]]
        if sizes != saved_sizes:
            raise RestoreError(
                f"{name} was saved with groups of {saved_sizes} parameters but has {sizes} here; add "
                "every group before "
                "the loop of job.steps begins"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(tree["parameters"]) != len(parameters):
            raise RestoreError(
                f"{name} was saved with {len(tree['parameters'])} parameters but has {len(parameters)}"
            )
        for index, (parameter, entry) in enumerate(zip(parameters, tree["parameters"], strict=True)):
            restoration.into(f"{name}.parameters.{index}", parameter, entry)
        restoration.later(lambda: self._apply(tree, parameters, restoration))

    def _apply(self, tree: dict[str, Tree], parameters: list[torch.Tensor], restoration: Restoration) -> None:
        optimizer = self._optimizer
        index = 0
        for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
            options = {
                key: _refreshed(sub, group.get(key), restoration, _as_saved)
                for key, sub in saved["options"].items()
            }
            for key in [key for key in group if key != "params" and key not in options]:
                del group[key]
            group.update(options)
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                home = Home(parameter.device, restoration.spec(tree["parameters"][index]).device, on_device)
                self._apply_state(parameter, tree["state"].get(str(index)), home, restoration)
                index += 1
        state: dict[Any, Any] = optimizer.state
        for plain in [key for key in state if not isinstance(key, torch.Tensor)]:
            del state[plain]
        state.update(_decoded(tree["other"], restoration))

    def _apply_state(
        self, parameter: torch.Tensor, saved: dict[str, Tree] | None, home: Home, restoration: Restoration
    ) -> None:
        if not saved:
            self._optimizer.state.pop(parameter, None)
            return
        held = self._optimizer.state.get(parameter, {})
        fresh = {
            key: _refreshed(sub, held.get(key), restoration, home.of_counter if key == "step" else home.of)
            for key, sub in saved.items()
        }
        held.clear()
        held.update(fresh)
        self._optimizer.state[parameter] = held


@dataclass(frozen=True)
class Home:
    """Where a parameter's new optimizer state goes, also when the job moved to another kind of device."""

    here: torch.device
    saved_kind: str
    counters_on_device: bool

    def of(self, spec: TensorSpec) -> torch.device:
        """Beside the parameter if it was beside it when saved, else on the host."""
        return self.here if spec.device == self.saved_kind else CPU

    def of_counter(self, spec: TensorSpec) -> torch.device:
        """As `of`, but a counter stays on the host unless the kernel that reads it is on the device."""
        return CPU if spec.device == "cpu" and not self.counters_on_device else self.of(spec)


def _as_saved(spec: TensorSpec) -> torch.device:
    """The kind of device that the tensor was saved from, if there is one here, else the host."""
    if spec.device == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def _refreshed(
    sub: Tree, live: object, restoration: Restoration, place: Callable[[TensorSpec], torch.device]
) -> Any:
    """The saved value.

    A live tensor of the same form is overwritten and stays itself, everything else is made.
    """
    if isinstance(live, torch.Tensor) and isinstance(sub, dict) and sub.get(TAG) == "tensor":
        spec = restoration.spec(sub["name"])
        if tuple(live.shape) == spec.shape and dtype_name(live) == spec.dtype:
            restoration.overwrite(live, spec)
            return live

    def tensor(name: str) -> torch.Tensor:
        spec = restoration.spec(name)
        return restoration.make(spec, place(spec))

    return decode(sub, tensor)


def _decoded(sub: Tree, restoration: Restoration) -> Any:
    """The saved value for code of others, all its tensors new and on their own."""

    def tensor(name: str) -> torch.Tensor:
        spec = restoration.spec(name)
        return restoration.make(spec, _as_saved(spec), own=True)

    return decode(sub, tensor)


class GeneratorKeeper:
    """A torch.Generator of the user's own, by its whole state."""

    KIND: Final = "generator"

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self.changed: str | None = None
        self._name = name
        self._generator = generator

    def walk(self, scribe: Scribe) -> dict[str, Tree]:
        state = self._generator.get_state()
        return {
            "kind": self.KIND,
            "device": self._generator.device.type,
            "state": scribe.refer_volatile(self._name, state),
        }

    def plan(self, tree: dict[str, Tree], restoration: Restoration) -> None:
        if tree["device"] != self._generator.device.type:
            raise RestoreError(
                f"{self._name} was saved from a {tree['device']} generator but is a "
                f"{self._generator.device.type} one here"
            )
        spec = restoration.spec(tree["state"]["name"])
        restoration.later(lambda: void(self._generator.set_state(restoration.make(spec, CPU, own=True))))


class PlainKeeper:
    """Anything else: what its `save` returns is its state, and `load` takes it back."""

    KIND: Final = "object"

    def __init__(
        self, name: str, thing: object, save: Callable[[], object], load: Callable[[Any], object]
    ) -> None:
        self.changed: str | None = None
        self._name = name
        self._class = type(thing).__name__
        self._save = save
        self._load = load

    def walk(self, scribe: Scribe) -> dict[str, Tree]:
        value = encode(self._save(), self._name, scribe.refer_volatile)
        return {"kind": self.KIND, "class": self._class, "value": value}

    def plan(self, tree: dict[str, Tree], restoration: Restoration) -> None:
        if tree["class"] != self._class:
            raise RestoreError(f"{self._name} was saved from {tree['class']} but is {self._class} here")

        def load() -> None:
            try:
                self._load(_decoded(tree["value"], restoration))
            except Exception as error:
                raise RestoreError(
                    f"{self._name}: load_state_dict of {self._class} raised {type(error).__name__}: {error}"
                ) from error

        restoration.later(load)


def same_names(owner: str, what: str, here: Any, saved: Any) -> None:
    """Raise `RestoreError` naming a thing that only one side has."""
    if missing := sorted(set(saved) - set(here)):
        raise RestoreError(
            f"{owner}: the saved state has the {what} {missing[0]}, which is not here ({len(missing)} in all)"
        )
    if extra := sorted(set(here) - set(saved)):
        raise RestoreError(
            f"{owner}: the {what} {extra[0]} is here but not in the saved state ({len(extra)} in all)"
        )


def void(_: object) -> None:
    """Drop a result."""
