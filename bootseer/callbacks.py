"""Heartbeats for training loops that are not one's own: PyTorch, Lightning, Hugging Face's Trainer.

    bootseer.callbacks.torch_hook(optimizer)                                 # or a module
    lightning.Trainer(callbacks=[bootseer.callbacks.LightningHeartbeat()])
    transformers.Trainer(..., callbacks=[bootseer.callbacks.TrainerHeartbeat()])

Each says the step's number; loss, norm of the gradients and learning rate as they were logged, as plain numbers.
Evaluation and prediction count too: nothing stands still while they go on. Nothing is imported before a class is
asked for, and torch never.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from bootseer.heartbeat import Metric, heartbeat

Metrics = Mapping[str, Any]
MOST_METRICS = 16
_made: dict[str, type] = {}


def plain_metrics(found: Metrics) -> dict[str, Metric]:
    """Those that are numbers or short texts; a tensor of one element as its number.

    That waits for a device: not to be called at every step.
    """
    metrics: dict[str, Metric] = {}
    for name, value in list(found.items())[:MOST_METRICS]:
        try:
            plain = value.item() if hasattr(value, "item") else value
        except (RuntimeError, ValueError):
            continue  # of many elements, or of none that can be read
        if isinstance(plain, bool | int | float | str) and name != "step":  # which the heartbeat has
            metrics[str(name)] = plain if isinstance(plain, str) else float(plain)
    return metrics


def torch_hook(target: Any, metrics: Callable[[], Mapping[str, Metric]] | None = None, first_step: int = 0) -> Any:
    """A heartbeat after each step of an optimizer, or after each forward pass of a module in training.

    Args: metrics: gives plain numbers, asked at each; first_step: the number before the first one, where training
    goes on from a checkpoint.
    Returns: a handle with `remove()`. Raises: TypeError for what is neither.
    """
    step = first_step

    def beat() -> None:
        nonlocal step
        step += 1
        heartbeat(step, **({} if metrics is None else metrics()))

    def after_step(*_: Any) -> None:
        beat()

    def after_forward(module: Any, *_: Any) -> None:
        if module.training:
            beat()

    if hasattr(target, "register_step_post_hook"):
        return target.register_step_post_hook(after_step)
    if hasattr(target, "register_forward_hook"):
        return target.register_forward_hook(after_forward)
    raise TypeError(f"torch_hook takes an optimizer or a module of torch, not {type(target).__name__}")


def __getattr__(name: str) -> type:
    """LightningHeartbeat, TrainerHeartbeat: made of the library's base class when they are first asked for."""
    make = {"LightningHeartbeat": _make_lightning, "TrainerHeartbeat": _make_trainer}.get(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _made:
        made = make()
        made.__qualname__ = made.__name__ = name  # by which it can be pickled
        made.__module__ = __name__
        _made[name] = made
    return _made[name]


def _make_lightning() -> type:
    # Of the one that the script uses: callbacks of the other are none to its trainer.
    old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = import_module("pytorch_lightning" if old else "lightning.pytorch").Callback

    class LightningHeartbeat(base):  # type: ignore[misc]
        """A heartbeat after each batch; what was logged with `self.log` is told with it."""

        def __init__(self, every_steps: int = 50) -> None:
            """Args: every_steps: what was logged is read anew after so many."""
            self._every_steps = every_steps
            self._batches = 0

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            is_due = self._batches % self._every_steps == 0
            self._batches += 1
            # Once: what is repeated would look like so many measurements.
            heartbeat(trainer.global_step, **(plain_metrics(trainer.callback_metrics) if is_due else {}))

        def _beat(self, trainer: Any, *_: Any, **__: Any) -> None:
            heartbeat(trainer.global_step)

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _beat
        on_save_checkpoint = _beat

    return LightningHeartbeat


def _make_trainer() -> type:
    base: Any = import_module("transformers").TrainerCallback

    class TrainerHeartbeat(base):  # type: ignore[misc]
        """A heartbeat after each step; what the Trainer logs (loss, grad_norm, learning_rate) is told with it."""

        def __init__(self) -> None:
            self._metrics: dict[str, Metric] = {}

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Metrics | None = None, **_: Any) -> None:
            self._metrics = plain_metrics(logs or {})

        def _beat(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            metrics, self._metrics = self._metrics, {}  # once: repeated, they would look like more measurements
            heartbeat(state.global_step, **metrics)

        on_step_end = on_prediction_step = on_evaluate = on_save = _beat

    return TrainerHeartbeat
