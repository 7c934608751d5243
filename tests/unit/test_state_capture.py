"""The protected state: the digest sees every bit, and restoring gives every bit back.

One file of more than 600 lines: a kind of protected object is a few lines, and all go through the same rig.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedules

from perdure.schema.errors import ProtectError, RestoreError
from perdure.state.capture import ProtectedState, digest_of, touched_slab
from perdure.state.layout import decode_description, encode_description
from perdure.state.memory import Staging
from perdure.state.transfer import Donor, Receiver, Session
from perdure.state.tree import decode, encode

Script = dict[str, Any]


class Net(nn.Module):
    """Tied weights, BatchNorm (int64 counter), a frozen parameter, a buffer that state_dict leaves out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6, dtype=dtype)
        self.inner = nn.Sequential(nn.Linear(6, 6, dtype=dtype), nn.BatchNorm1d(6, dtype=dtype), nn.GELU())
        self.head = nn.Linear(6, 8, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype), requires_grad=False)
        self.register_buffer("mask", torch.randn(3, dtype=dtype), persistent=False)
        self.register_buffer("late", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.embed(tokens)) * self.scale)
        return out


def train(script: Script, steps: int, seed: int = 1) -> None:
    """A few steps of ordinary training of whatever the script has."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 8, (5,), generator=generator)
        loss = nn.functional.cross_entropy(script["model"](tokens).float(), tokens)
        script["optimizer"].zero_grad()
        loss.backward()
        script["optimizer"].step()
        if isinstance(script.get("scheduler"), schedules.ReduceLROnPlateau):
            script["scheduler"].step(1.0)
        elif "scheduler" in script:
            script["scheduler"].step()


def heal(source: Script, target: Script) -> tuple[ProtectedState, ProtectedState]:
    """Copy the state from one script to another that did not train, and compare digests."""
    donor, joiner = ProtectedState(source), ProtectedState(target)
    before = donor.digest()
    copied = donor.snapshot()
    assert copied.digest() == before
    joiner.restore(decode_description(donor.describe()), copied.tensors)
    assert joiner.digest() == before == donor.digest()
    return donor, joiner


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal form and equal bytes (NaN is NaN, -0 is not 0)."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.detach().contiguous().reshape(-1).view(torch.uint8).equal(
            other.detach().contiguous().reshape(-1).view(torch.uint8)
        )
    )  # fmt: skip


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(same_bits(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, maximize=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": torch.optim.SGD,
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def test_every_optimizer_of_torch_is_in_the_list() -> None:
    known = {name.split()[0] for name in OPTIMIZERS} | {"LBFGS", "SparseAdam", "Optimizer", "Muon"}
    assert {name for name in dir(torch.optim) if name[0].isupper()} <= known


def script_with(make: Callable[..., torch.optim.Optimizer], seed: int, dtype: torch.dtype) -> Script:
    torch.manual_seed(seed)
    model = Net(dtype)
    return {"model": model, "optimizer": make([p for p in model.parameters() if p.requires_grad])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healed_optimizer_goes_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    source, target = (script_with(OPTIMIZERS[name], seed, dtype) for seed in (0, 7))
    if (name, dtype) == ("SGD fused", torch.bfloat16):
        with pytest.raises(ProtectError, match="leave fused out"):
            ProtectedState(source)
        return
    train(source, 3)
    donor, joiner = heal(source, target)
    train(source, 2, seed=5)
    train(target, 2, seed=5)
    assert donor.digest() == joiner.digest()
    assert same_parameters(source["model"], target["model"])


def test_muon_heals() -> None:
    def make(seed: int) -> Script:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4, bias=False)
        return {"model": model, "optimizer": torch.optim.Muon(model.parameters())}

    source, target = make(0), make(1)
    source["model"].weight.grad = torch.ones(4, 4)
    source["optimizer"].step()
    heal(source, target)


def test_healing_an_optimizer_that_is_ahead_takes_its_state_back() -> None:
    source, target = (script_with(torch.optim.AdamW, seed, torch.float32) for seed in (0, 7))
    train(target, 3)
    heal(source, target)
    assert not target["optimizer"].state


def test_live_tensors_keep_their_identity_and_memory() -> None:
    source, target = (script_with(OPTIMIZERS["AdamW tensor lr"], seed, torch.float32) for seed in (0, 7))
    train(source, 3)
    train(target, 1)
    optimizer = target["optimizer"]
    weight = target["model"].embed.weight
    held = [weight, optimizer.state[weight]["exp_avg"], optimizer.param_groups[0]["lr"], target["model"].mask]
    addresses = [tensor.data_ptr() for tensor in held]
    heal(source, target)
    again = [
        target["model"].embed.weight, optimizer.state[weight]["exp_avg"],
        optimizer.param_groups[0]["lr"], target["model"].mask,
    ]  # fmt: skip
    assert all(a is b for a, b in zip(held, again, strict=True))
    assert [tensor.data_ptr() for tensor in again] == addresses
    assert target["model"].head.weight is weight


def test_fp32_state_of_bf16_parameters_is_not_truncated() -> None:
    source, target = (script_with(torch.optim.AdamW, seed, torch.bfloat16) for seed in (0, 7))
    train(source, 1)
    for state in source["optimizer"].state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-4  # as a mixed-precision optimizer holds it
    heal(source, target)
    for mine, theirs in zip(
        source["optimizer"].state.values(), target["optimizer"].state.values(), strict=True
    ):
        assert theirs["exp_avg"].dtype is torch.float32
        assert same_bits(mine["exp_avg"], theirs["exp_avg"])


def test_several_groups_and_options_set_by_the_script() -> None:
    def make(seed: int) -> Script:
        torch.manual_seed(seed)
        model = Net()
        groups = [
            {"params": model.inner.parameters(), "weight_decay": 0.0, "tag": ("no", "decay")},
            {"params": [model.embed.weight], "lr": 0.5},
        ]
        return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1, momentum=0.9)}

    source, target = make(0), make(1)
    train(source, 2)
    source["optimizer"].param_groups[1]["lr"] = 0.25
    source["optimizer"].param_groups[0]["note"] = float("nan")
    target["optimizer"].param_groups[0]["stale"] = 1
    heal(source, target)
    first, second = target["optimizer"].param_groups
    assert second["lr"] == 0.25
    assert math.isnan(first["note"])
    assert first["tag"] == ("no", "decay")
    assert "stale" not in first


def test_unfreezing_and_late_buffers_travel() -> None:
    source, target = ({"model": Net()} for _ in range(2))
    source["model"].scale.requires_grad_(True)
    source["model"].late = torch.arange(4)
    heal(source, target)
    assert target["model"].scale.requires_grad
    assert target["model"].late.tolist() == [0, 1, 2, 3]
    source["model"].late = None
    heal(source, target)
    assert target["model"].late is None


def test_modes_travel_and_decide_no_digest() -> None:
    source, target = ({"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))} for _ in range(2))
    state, other = ProtectedState(source), ProtectedState(target)
    digest = state.digest()
    source["model"][1].eval()
    copy = state.snapshot()
    assert copy.digest() == digest
    target["model"][0].eval()
    other.restore(copy.description, copy.tensors)
    assert [module.training for module in target["model"].modules()] == [True, True, False]
    target["model"].eval()
    other.restore(copy.without_modes().description, copy.tensors)
    assert not any(module.training for module in target["model"].modules()), "it says nothing of modes"


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=30),
    "Cosine": lambda o: schedules.CosineAnnealingLR(o, 30),
    "Restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "Plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "Sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "Chained": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o), schedules.StepLR(o, 2)]),
    "MultiStep": lambda o: schedules.MultiStepLR(o, [1, 2, 2, 5]),
    "Lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "Multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "Cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "Polynomial": lambda o: schedules.PolynomialLR(o, 10),
    "Constant": lambda o: schedules.ConstantLR(o),
    "SWA": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_heal_and_go_on(name: str, tensor_lr: bool) -> None:
    def make(seed: int) -> Script:
        torch.manual_seed(seed)
        model = Net()
        lr = torch.tensor(0.05) if tensor_lr else 0.05
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    source, target = make(0), make(1)
    train(source, 3)
    donor, joiner = heal(source, target)
    train(source, 4)
    train(target, 4)
    assert donor.digest() == joiner.digest()


def test_scaler_ema_and_generators() -> None:
    def make(seed: int) -> Script:
        torch.manual_seed(seed)
        model = Net()
        return {
            "model": model,
            "ema": torch.optim.swa_utils.AveragedModel(model),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
            "generator": torch.Generator().manual_seed(seed),
            "python": random.Random(seed),
            "numbers": np.random.Generator(np.random.PCG64(seed)),
            "legacy": np.random.Generator(np.random.MT19937(seed)),
        }

    source, target = make(3), make(4)
    source["ema"].update_parameters(source["model"])
    source["scaler"].scale(torch.ones(1))
    torch.rand(5, generator=source["generator"])
    torch.randn(3, generator=source["generator"])
    source["python"].gauss()
    source["numbers"].random(3)
    heal(source, target)
    for draw in (
        lambda s: torch.randn(4, generator=s["generator"]).tolist(),
        lambda s: [s["python"].gauss(), s["python"].random()],
        lambda s: s["numbers"].random(3).tolist(),
        lambda s: s["legacy"].random(3).tolist(),
        lambda s: s["scaler"].get_scale(),
    ):
        assert draw(source) == draw(target)


def test_compiled_and_plain_models_have_the_same_state() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    assert ProtectedState({"model": model}).digest() == ProtectedState({"model": compiled}).digest()


def test_autocast_does_not_serve_casts_of_the_old_weights() -> None:
    source, target = ({"model": nn.Linear(3, 3)} for _ in range(2))
    donor, joiner = ProtectedState(source), ProtectedState(target)
    ones = torch.ones(1, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stale = target["model"](ones)
        joiner.restore(donor.description(), donor.snapshot().tensors)
        assert torch.equal(target["model"](ones), source["model"](ones))
        assert not torch.equal(target["model"](ones), stale)


# --- memory -------------------------------------------------------------------------------------------------


def test_ties_appear_once() -> None:
    model = Net()
    state = ProtectedState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    entries = state.tensors()
    pointers = [entry.tensor.data_ptr() for entry in entries]
    assert len(set(pointers)) == len(pointers)
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    assert state.total_bytes == sum(entry.tensor.nbytes for entry in entries)
    assert "model.head.weight" not in {entry.name for entry in entries}


def test_a_tie_on_one_side_only_is_refused() -> None:
    tied, untied = Net(), Net()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    donor, joiner = ProtectedState({"model": tied}), ProtectedState({"model": untied})
    with pytest.raises(
        RestoreError, match=r"model\.parameters\.model\.head\.weight is 'model\.embed\.weight'"
    ):
        joiner.restore(donor.description(), donor.snapshot().tensors)


class Curriculum(nn.Module):
    """Its buffer and a parameter are now one, now the other of what the script keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [torch.zeros(3), torch.ones(3)]
        self.register_buffer("mask", self.masks[0])
        self.prompts = [torch.full((2,), 5.0), torch.full((2,), 6.0)]
        self.prompt = nn.Parameter(self.prompts[0], requires_grad=False)
        self.own = nn.Parameter(torch.randn(3))

    def turn(self, stage: int) -> None:
        self.mask = self.masks[stage % 2]
        self.prompt.data = self.prompts[stage % 2]


@pytest.mark.parametrize("prompt", ["model.prompt", "a_optimizer.parameters.0"])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_script_keeps_by_another_name_is_not_written_into(stage: int, prompt: str) -> None:
    def make() -> tuple[Any, ProtectedState]:
        model: Any = Curriculum()
        optimizer = {"a_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        return model, ProtectedState({"model": model} | (optimizer if "optimizer" in prompt else {}))

    (source, donor), (target, joiner) = make(), make()
    source.turn(stage)
    copied, own = donor.snapshot(), target.own.data_ptr()
    assert copied.description.moved == (tuple(sorted(("model.mask", prompt))) if stage else ())
    assert (prompt in joiner.landing(copied.description)) is (stage == 0)
    joiner.restore(copied.description, copied.tensors)
    assert joiner.digest() == donor.digest()
    assert target.own.data_ptr() == own
    for later in range(3):
        source.turn(later)
        target.turn(later)
        assert joiner.digest() == donor.digest()


def test_ties_that_came_or_went_are_healed() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3)))
        model[1].running_mean = model[0].running_mean
        return model

    source, target = make(), make()
    donor, joiner = ProtectedState({"model": source}), ProtectedState({"model": target})
    source[1].running_mean = torch.ones(2)
    source[2].running_mean = source[0].running_mean
    copied = donor.snapshot()
    joiner.restore(copied.description, copied.tensors)
    assert joiner.digest() == donor.digest()
    means = [norm.running_mean for norm in target]
    assert (means[2] is means[0], means[1] is means[0]) == (True, False)


class Odd(nn.Module):
    """Memory of every shape.

    Channels last, a view with holes, an expanded view, empty, scalar, odd dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("holes", torch.randn(4, 6)[:, ::2])
        self.register_buffer("wide", torch.randn(3, 1).expand(3, 5))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("flag", torch.rand(5) > 0.5)
        self.register_buffer("eighth", torch.randn(3).to(torch.float8_e4m3fn))
        self.register_buffer("pair", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("shorts", torch.randint(0, 60000, (3,)).to(torch.uint16))
        self.register_buffer("nans", torch.tensor([math.nan, -0.0, math.inf, 1e-45]))


def test_odd_memory_heals_bit_for_bit() -> None:
    torch.manual_seed(0)
    source, target = ({"model": Odd()} for _ in range(2))
    outside = target["model"].holes._base[:, 1::2].clone()
    heal(source, target)
    for (name, mine), theirs in zip(source["model"].named_buffers(), target["model"].buffers(), strict=True):
        assert same_bits(mine, theirs), name
    assert target["model"].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(target["model"].holes._base[:, 1::2], outside)


def test_another_order_of_dimensions_is_taken_over() -> None:
    source, target = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    source.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = target.weight
    heal({"model": source}, {"model": target})
    assert target.weight is weight
    assert weight.stride() == source.weight.stride()
    assert same_bits(weight, source.weight)


def test_views_of_one_buffer_are_parameters_like_others() -> None:
    def make() -> nn.Module:
        model = nn.Linear(3, 2)
        flat = torch.randn(8)
        model.weight.data = flat[:6].view(2, 3)
        model.bias.data = flat[6:]
        return model

    source, target = make(), make()
    heal({"model": source}, {"model": target})
    assert target.weight.untyped_storage().data_ptr() == target.bias.untyped_storage().data_ptr()


def test_swapped_data_and_replaced_state_are_noticed() -> None:
    script = script_with(torch.optim.AdamW, 0, torch.float32)
    state = ProtectedState(script)
    seen = {state.digest()}
    train(script, 1)
    seen.add(state.digest())
    weight = script["model"].embed.weight
    weight.data = weight.data.clone() + 1
    seen.add(state.digest())
    script["optimizer"].state[weight]["exp_avg"] = torch.zeros_like(weight)
    seen.add(state.digest())
    weight.data = weight.data.view(6, 8)  # the same memory in another form
    seen.add(state.digest())
    assert len(seen) == 5


def test_device_memory_passes_through_the_staging_buffer_in_order() -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (3, 0, 50, 7, 16, 16)]
    pieces: list[Any] = []
    for number, tensor in enumerate(tensors):
        pieces += [bytes([number]), tensor]
    expected = b"".join(p if isinstance(p, bytes) else p.numpy().tobytes() for p in pieces)
    assert b"".join(bytes(piece) for piece in Staging(16).through(pieces)) == expected


def test_a_snapshot_is_private_and_its_memory_is_used_again() -> None:
    script = script_with(torch.optim.AdamW, 0, torch.float32)
    train(script, 1)
    state = ProtectedState(script)
    before = state.digest()
    copied = state.snapshot()
    train(script, 1)
    assert copied.digest() == before != state.digest()
    again = state.snapshot(copied.slab)
    assert again.slab is copied.slab
    room = touched_slab(state.slab_bytes)
    assert state.snapshot(room).slab is room
    assert state.snapshot(room[:100]).slab is not room
    assert again.digest() == state.digest()
    assert again.total_bytes == state.total_bytes


# --- the digest ---------------------------------------------------------------------------------------------


def test_the_digest_sees_names_forms_and_scalars() -> None:
    class Holder:
        def __init__(self, value: object) -> None:
            self.value = value

        def state_dict(self) -> dict[str, object]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.value = state["value"]

    values = [
        0, 0.0, -0.0, False, None, "", b"", [], (), {}, [0], (0,), {"0": 0}, {0: 0}, {"~": 1},
        math.nan, math.inf, 1 << 70, 1j, {1}, frozenset({1}), deque([1], 3), deque([1]),
        torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32), torch.float32,
        np.zeros(2), np.float32(0), OrderedDict(a=1), Counter({1: 2}),
    ]  # fmt: skip
    digests = [ProtectedState({"a": Holder(value)}).digest() for value in values]
    digests.append(ProtectedState({"b": Holder(0)}).digest())
    assert len(set(digests)) == len(digests)
    for value, digest in zip(values, digests, strict=False):
        fresh = Holder(None)
        source = ProtectedState({"a": Holder(value)})
        restored = ProtectedState({"a": fresh})
        restored.restore(source.description(), source.snapshot().tensors)
        assert restored.digest() == digest
        assert type(fresh.value) is type(value)


def test_the_order_in_which_a_dict_was_filled_does_not_matter() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, other))
    group = second.param_groups[0]
    for key in reversed(list(group)):
        group[key] = group.pop(key)
    states = [ProtectedState({"m": m, "o": o}) for m, o in ((one, first), (other, second))]
    assert states[0].digest() == states[1].digest()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("~"), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


def no_tensors(*_: object) -> Any:
    raise AssertionError("there are no tensors here")


def exact(value: object) -> object:
    """A form in which equality is equality of type and bits."""
    if isinstance(value, float):
        return ("float", np.float64(value).tobytes())
    if isinstance(value, complex):
        return ("complex", np.complex128(value).tobytes())
    if isinstance(value, list | tuple):
        return (type(value), [exact(item) for item in value])
    if isinstance(value, dict):
        return ("dict", [(exact(key), exact(item)) for key, item in value.items()])
    return (type(value), value)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PLAIN)
def test_plain_data_survives_message_pack_and_json(value: object) -> None:
    tree = encode(value, "x", no_tensors)
    for codec in (msgspec.msgpack, msgspec.json):
        assert exact(decode(codec.decode(codec.encode(tree)), no_tensors)) == exact(value)


# --- refusals -----------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


class Keeps:
    """An object whose state is whatever it was given."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        return self.value

    def load_state_dict(self, value: object) -> None:
        self.value = copy.copy(value)


def linear() -> list[nn.Parameter]:
    return list(nn.Linear(2, 2).parameters())


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (lambda: torch.optim.LBFGS(linear()), "no closure"),
        (lambda: object(), "no state_dict and load_state_dict"),
        (lambda: nn.Linear, "no state_dict and load_state_dict"),
        (lambda: Keeps({"f": len}), r"thing\.f holds a builtins\.builtin_function_or_method"),
        (lambda: Keeps(Colour.RED), "Colour, which is not plain data"),
        (lambda: Keeps(torch.zeros(2, 2).to_sparse()), "sparse"),
        (lambda: nn.LazyLinear(3), "run one batch"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: Keeps(nested(40)), "nested deeper"),
    ],
)
def test_what_cannot_be_protected_is_refused_at_once(thing: Callable[[], object], message: str) -> None:
    with pytest.raises(ProtectError, match=message) as caught:
        ProtectedState({"thing": thing()})
    assert "\n" not in str(caught.value)


def resized(script: Script) -> None:
    script["model"].inner[0] = nn.Linear(6, 6, bias=False)


def widened(script: Script) -> None:
    script["model"].mask = torch.zeros(4)


def another_optimizer(script: Script) -> None:
    script["optimizer"] = torch.optim.SGD(script["model"].parameters(), lr=0.1)


def another_group(script: Script) -> None:
    script["optimizer"].add_param_group({"params": [script["model"].scale]})


def more(script: Script) -> None:
    script["scaler"] = torch.amp.GradScaler("cpu")


def retyped(script: Script) -> None:
    script["model"].inner[0].to(torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (resized, r"has the parameter model\.inner\.0\.bias, which is not here"),
        (widened, r"model\.mask was saved as float32\[3\] but is float32\[4\] here"),
        (retyped, r"model\.inner\.0\.weight was saved as float32\[6, 6\] but is float64"),
        (another_optimizer, "saved from AdamW but is SGD here"),
        (another_group, r"groups of \[5\] parameters but has \[5, 1\]"),
        (more, "holds model, optimizer; this script protects model, optimizer, scaler"),
    ],
)
def test_a_script_that_differs_is_refused_and_left_alone(
    change: Callable[[Script], None], message: str
) -> None:
    source, target = (script_with(torch.optim.AdamW, seed, torch.float32) for seed in (0, 7))
    train(source, 1)
    change(target)
    donor, joiner = ProtectedState(source), ProtectedState(target)
    before = joiner.digest()
    for attempt in (joiner.check, lambda d: joiner.restore(d, donor.snapshot().tensors)):
        with pytest.raises(RestoreError, match=message) as caught:
            attempt(donor.description())
        assert "\n" not in str(caught.value)
    assert joiner.digest() == before


def test_an_object_that_does_not_take_its_state_back_is_named() -> None:
    class Stubborn(Keeps):
        def load_state_dict(self, value: object) -> None:
            pass

    donor, joiner = ProtectedState({"x": Stubborn({"n": 1})}), ProtectedState({"x": Stubborn({"n": 2})})
    with pytest.raises(RestoreError, match=r"x\.value\.n is 1 in the saved state and 2 here"):
        joiner.restore(donor.description(), {})

    class Wrong(Keeps):
        def load_state_dict(self, value: object) -> None:
            raise KeyError("shadow")

    with pytest.raises(RestoreError, match="saved from Stubborn but is Wrong here"):
        ProtectedState({"x": Wrong({"n": 1})}).restore(donor.description(), {})
    with pytest.raises(RestoreError, match="load_state_dict of Wrong raised KeyError: 'shadow'"):
        ProtectedState({"x": Wrong(1)}).restore(ProtectedState({"x": Wrong(1)}).description(), {})


def damaged(state: ProtectedState) -> Iterator[bytes]:
    data = state.describe()
    yield data[:-1]
    yield b""
    yield data.replace(b"float32", b"float33")
    yield data.replace(b"module", b"nodule").replace(b"parameters", b"paramexers")
    description = decode_description(data)
    yield encode_description(type(description)(99, description.objects, description.tensors))
    yield encode_description(type(description)(1, description.objects, description.tensors[::-1]))
    yield encode_description(type(description)(1, description.objects, description.tensors[1:]))


def test_a_damaged_description_is_refused() -> None:
    state = ProtectedState({"model": nn.Linear(2, 2)})
    before = state.digest()
    tensors = state.snapshot().tensors
    for number, data in enumerate(damaged(state)):
        with pytest.raises(RestoreError) as caught:
            state.restore(decode_description(data), tensors)
        assert "\n" not in str(caught.value), number
    assert state.digest() == before


def test_the_digest_of_bytes_received_is_that_of_the_state() -> None:
    script = script_with(torch.optim.AdamW, 0, torch.bfloat16)
    train(script, 1)
    state = ProtectedState(script)
    copied = state.snapshot()
    assert digest_of(decode_description(state.describe()), copied.tensors) == state.digest()
    copied.tensors["model.embed.weight"][3] ^= 1
    assert copied.digest() != state.digest()


# --- on a device --------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def device_script(seed: int, device: str, **options: Any) -> Script:
    torch.manual_seed(seed)
    model = Net().to(device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), **options)}


def device_steps(script: Script, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    device = script["model"].scale.device
    for _ in range(steps):
        tokens = torch.randint(0, 8, (5,), generator=generator).to(device)
        nn.functional.cross_entropy(script["model"](tokens), tokens).backward()
        script["optimizer"].step()
        script["optimizer"].zero_grad()


@needs_cuda
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_state_on_a_device_heals_and_is_the_same_on_the_host(options: dict[str, bool]) -> None:
    source, target = (device_script(seed, "cuda", **options) for seed in (0, 7))
    device_steps(source, 3)
    donor, joiner = heal(source, target)
    assert {str(e.tensor.device) for e in donor.tensors()} == {str(e.tensor.device) for e in joiner.tensors()}
    device_steps(source, 2)
    device_steps(target, 2)
    assert donor.digest() == joiner.digest()
    if "capturable" not in options:  # which the host does not have
        host = ProtectedState(device_script(9, "cpu", **options))
        host.restore(donor.description(), donor.snapshot().tensors)
        assert host.digest() == donor.digest()
        joiner.restore(host.description(), host.snapshot().tensors)
        assert joiner.digest() == donor.digest()


@needs_cuda
def test_state_on_a_device_travels_in_chunks() -> None:
    source, target = (device_script(seed, "cuda") for seed in (0, 7))
    device_steps(source, 2)
    state = ProtectedState(source)
    donor = Donor(state, Session(1, state.digest()), 64)
    receiver = Receiver(ProtectedState(target), chunk_bytes=64)
    receiver.begin(donor.session, donor.description)
    for chunk in receiver.missing():
        buffer = receiver.buffer(donor.session, chunk.index)
        assert buffer is not None
        buffer[:] = b"".join(donor.read_views(donor.session, chunk.index) or [])
        receiver.landed(donor.session, chunk.index)
    assert receiver.finish() == state.digest()
