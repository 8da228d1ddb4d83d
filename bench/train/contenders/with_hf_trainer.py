"""The Trainer of Hugging Face's transformers, its reports and checkpoints off.

Two of its defaults change what is learned and are set to what everybody does: gradients are not clipped, and the
learning rate stays. Its optimiser stays its own choice, which is AdamW in the fused implementation.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.train.cases import WEIGHT_DECAY, loss_of
from bench.train.material import InOrder, Material
from bench.train.pacing import Pacer


class _Items(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, material: Material) -> None:
        self._inputs, self._targets = material.inputs, material.targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index], "labels": self._targets[index]}


class _WithLoss(nn.Module):
    """The model as the Trainer takes it: gives its loss with its output."""

    def __init__(self, material: Material) -> None:
        super().__init__()
        self.model = material.model()
        self.loss = torch.zeros(())
        self._case = material.case

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(inputs)
        loss = loss_of(self._case, logits, labels)
        self.loss = loss.detach()
        return {"loss": loss, "logits": logits}


class _Trainer(Trainer):
    """Takes samples in everybody's order."""

    def __init__(self, *, order: Sampler[int], **settings: Any) -> None:
        self._order = order
        super().__init__(**settings)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self._order


class _Pace(TrainerCallback):
    def __init__(self, model: _WithLoss, batch: int, pacer: Pacer) -> None:
        self._model, self._batch, self._pacer = model, batch, pacer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pacer.updated(self._batch, self._model.loss.item)


def run(material: Material, pacer: Pacer, *, bf16: bool) -> None:
    """Train until stopped."""
    case, model = material.case, _WithLoss(material)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch,
            num_train_epochs=10_000,
            learning_rate=case.lr,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=bf16,
        )
        pace = _Pace(model, case.batch, pacer)
        _Trainer(
            order=InOrder(material), model=model, args=arguments, train_dataset=_Items(material), callbacks=[pace]
        ).train()
