"""Heartbeats for the training loops of libraries: PyTorch, Lightning, Hugging Face's Trainer.

    bootseer.callbacks.torch_hook(optimizer)                                 # or a module
    lightning.Trainer(callbacks=[bootseer.callbacks.LightningHeartbeat()])
    transformers.Trainer(..., callbacks=[bootseer.callbacks.TrainerHeartbeat()])

Each heartbeat has the step's number, and loss, gradient norm and learning rate as plain numbers, as logged.
Evaluation and prediction count too, so they are not reported as a hang. A library is imported when its class is
first used, torch never.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from bootseer.heartbeat import Metric, heartbeat

Metrics = Mapping[str, Any]
MAX_METRICS = 16
_made: dict[str, type] = {}


def plain_metrics(found: Metrics) -> dict[str, Metric]:
    """Return the metrics that are numbers or short texts; a tensor of one element becomes a number.

    A tensor on a device blocks: do not call this at every step.
    """
    metrics: dict[str, Metric] = {}
    for name, value in list(found.items())[:MAX_METRICS]:
        try:
            plain = value.item() if hasattr(value, "item") else value
        except (RuntimeError, ValueError):
            continue  # many elements, or none that can be read
        if isinstance(plain, bool | int | float | str) and name != "step":  # the heartbeat has it already
            metrics[str(name)] = plain if isinstance(plain, str) else float(plain)
    return metrics


def torch_hook(target: Any, metrics: Callable[[], Mapping[str, Metric]] | None = None, first_step: int = 0) -> Any:
    """Send a heartbeat after each step of an optimizer, or after each forward pass of a module in training.

    Args: metrics: returns plain numbers, called at each heartbeat; first_step: the number before the first step,
    if training resumes from a checkpoint.
    Returns: a handle with `remove()`. Raises: TypeError for other objects.
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
    """Create LightningHeartbeat or TrainerHeartbeat from the library's base class at first use."""
    make = {"LightningHeartbeat": _make_lightning, "TrainerHeartbeat": _make_trainer}.get(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _made:
        made = make()
        made.__qualname__ = made.__name__ = name  # needed for pickling
        made.__module__ = __name__
        _made[name] = made
    return _made[name]


def _make_lightning() -> type:
    # From the package that the script uses: its trainer does not accept callbacks of the other one.
    old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = import_module("pytorch_lightning" if old else "lightning.pytorch").Callback

    class LightningHeartbeat(base):  # type: ignore[misc]
        """Callback that sends a heartbeat after each batch, with the metrics logged by `self.log`."""

        def __init__(self, every_steps: int = 50) -> None:
            """Args: every_steps: interval at which logged metrics are read again."""
            self._every_steps = every_steps
            self._batches = 0

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            is_due = self._batches % self._every_steps == 0
            self._batches += 1
            # Only once: repeated values would count as new measurements.
            heartbeat(trainer.global_step, **(plain_metrics(trainer.callback_metrics) if is_due else {}))

        def _beat(self, trainer: Any, *_: Any, **__: Any) -> None:
            heartbeat(trainer.global_step)

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _beat
        on_save_checkpoint = _beat

    return LightningHeartbeat


def _make_trainer() -> type:
    base: Any = import_module("transformers").TrainerCallback

    class TrainerHeartbeat(base):  # type: ignore[misc]
        """Callback that sends a heartbeat after each step, with the Trainer's loss, grad_norm, learning_rate."""

        def __init__(self) -> None:
            self._metrics: dict[str, Metric] = {}

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Metrics | None = None, **_: Any) -> None:
            self._metrics = plain_metrics(logs or {})

        def _beat(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            metrics, self._metrics = self._metrics, {}  # once: repeated values would count as new measurements
            heartbeat(state.global_step, **metrics)

        on_step_end = on_prediction_step = on_evaluate = on_save = _beat

    return TrainerHeartbeat
