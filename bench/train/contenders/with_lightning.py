"""Lightning's Trainer, its progress bar, logger and checkpoints off."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.train.cases import WEIGHT_DECAY, loss_of
from bench.train.material import InOrder, Material
from bench.train.pacing import Pacer


class _Module(pl.LightningModule):
    def __init__(self, material: Material, pacer: Pacer) -> None:
        super().__init__()
        self.model = material.model()
        self._case, self._pacer = material.case, pacer

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return loss_of(self._case, self.model(inputs), targets)

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        self._pacer.updated(len(batch[0]), outputs["loss"].item)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self._case.lr, weight_decay=WEIGHT_DECAY)


def run(material: Material, pacer: Pacer, *, bf16: bool) -> None:
    """Train until stopped."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = DataLoader(
        TensorDataset(material.inputs, material.targets), batch_size=material.case.batch, sampler=InOrder(material)
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="bf16-mixed" if bf16 else "32-true",
    )
    trainer.fit(_Module(material, pacer), loader)
