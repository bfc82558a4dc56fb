"""Callbacks over base classes with the contract of Lightning and transformers; the real ones: tests/contract."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import bootseer.callbacks

Heartbeats = list[tuple[int, dict[str, Any]]]


class Base:
    """What both libraries' classes are: all methods there, and nothing done."""

    def on_train_batch_end(self, *args: Any) -> None: ...
    def on_step_end(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> Heartbeats:
    seen: Heartbeats = []
    rank = ModuleType("_bootseer_rank")
    rank.heartbeat = lambda step, metrics: seen.append((step, metrics))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "_bootseer_rank", rank)
    monkeypatch.setattr(bootseer.callbacks, "_made", {})
    return seen


class Number:
    """As a tensor of one element."""

    def item(self) -> float:
        return 0.25


class Many:
    def item(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


def test_only_plain_numbers_and_texts_are_reported() -> None:
    found = {"loss": Number(), "all": Many(), "name": "x", "flag": True, "list": [1], "step": 3, "none": None}
    assert bootseer.callbacks.plain_metrics(found) == {"loss": 0.25, "name": "x", "flag": 1.0}
    assert len(bootseer.callbacks.plain_metrics({str(number): 1 for number in range(99)})) == 16


def test_a_trainer_of_transformers(heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("transformers")
    library.TrainerCallback = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", library)
    callback = bootseer.callbacks.TrainerHeartbeat()
    assert isinstance(callback, Base)
    state = SimpleNamespace(global_step=1)
    callback.on_step_end("args", state, "control", model=None)
    callback.on_log("args", state, "control", logs={"loss": 0.5, "grad_norm": Number()})
    state.global_step = 2
    callback.on_step_end("args", state, "control", model=None)
    callback.on_prediction_step("args", state, "control")
    assert heartbeats == [(1, {}), (2, {"loss": 0.5, "grad_norm": 0.25}), (2, {})], "each once"
    assert type(pickle.loads(pickle.dumps(callback))) is bootseer.callbacks.TrainerHeartbeat


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_of_lightning(heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    library = ModuleType(name)
    library.Callback = Base  # type: ignore[attr-defined]
    for each in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, each, raising=False)
    monkeypatch.setitem(sys.modules, name, library)
    if name.startswith("lightning."):
        monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    callback = bootseer.callbacks.LightningHeartbeat(every_steps=2)
    trainer = SimpleNamespace(global_step=1, callback_metrics={"loss": Number()})
    callback.on_train_batch_end(trainer, "module", "outputs", "batch", 0)
    trainer.global_step, trainer.callback_metrics = 2, {"loss": 9.0}
    callback.on_train_batch_end(trainer, "module", "outputs", "batch", 1)
    callback.on_validation_batch_end(trainer, "module", "outputs", "batch", 0, dataloader_idx=0)
    callback.on_train_batch_end(trainer, "module", "outputs", "batch", 2)
    assert [(step, metrics.get("loss")) for step, metrics in heartbeats] == [
        (1, 0.25),
        (2, None),
        (2, None),
        (2, 9.0),
    ]


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        bootseer.callbacks.Other  # noqa: B018


def test_importing_it_loads_no_framework() -> None:
    code = "import sys, bootseer.callbacks; print({'torch', 'transformers', 'lightning'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
