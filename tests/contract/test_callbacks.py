"""Heartbeats of real training loops: torch's here, Lightning's and Hugging Face's where these are installed.

python -m venv v && v/bin/pip install -e . pytest pytest-timeout torch lightning transformers accelerate
v/bin/python -m pytest tests/contract/test_callbacks.py
"""

from __future__ import annotations

import pickle
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bootseer.callbacks

Heartbeats = list[tuple[int, dict[str, Any]]]


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> Heartbeats:
    seen: Heartbeats = []
    rank = ModuleType("_bootseer_rank")
    rank.heartbeat = lambda step, metrics: seen.append((step, metrics))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "_bootseer_rank", rank)
    return seen


def test_an_optimizer_and_a_module(heartbeats: Heartbeats) -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = bootseer.callbacks.torch_hook(optimizer, lambda: {"loss": 0.5}, first_step=10)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert heartbeats == [(11, {"loss": 0.5}), (12, {"loss": 0.5})]
    heartbeats.clear()
    bootseer.callbacks.torch_hook(model)
    model(torch.ones(1, 2))
    model.eval()
    model(torch.ones(1, 2))
    assert heartbeats == [(1, {})]
    with pytest.raises(TypeError, match="not int"):
        bootseer.callbacks.torch_hook(3)


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(heartbeats: Heartbeats, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    callback = bootseer.callbacks.LightningHeartbeat(every_steps=1)
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, logger=False
    )
    trainer.fit(Model(), data, data)
    steps = [step for step, _ in heartbeats]
    assert steps == sorted(steps) and set(range(1, 9)) <= set(steps)
    assert len(heartbeats) > 8, "evaluation counts too"
    told = [metrics["loss"] for _, metrics in heartbeats if "loss" in metrics]
    assert told and all(isinstance(loss, float) for loss in told), "each once"


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_trainer_of_hugging_face(heartbeats: Heartbeats, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            found = self.layer(x)
            return {"loss": (found.squeeze(-1) - labels).square().mean(), "logits": found}

    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = bootseer.callbacks.TrainerHeartbeat()
    trainer = transformers.Trainer(Model(), args, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train()
    steps = [step for step, _ in heartbeats]
    assert steps == sorted(steps) and set(range(1, 9)) <= set(steps)
    assert len(heartbeats) > 8, "evaluation counts too"
    assert {"loss", "grad_norm", "learning_rate"} <= {name for _, metrics in heartbeats for name in metrics}
    assert all(isinstance(value, float | str) for _, metrics in heartbeats for value in metrics.values())
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
