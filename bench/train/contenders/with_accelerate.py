"""Accelerate: a loop as its documentation writes it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from bench.train.cases import WEIGHT_DECAY, loss_of
from bench.train.material import InOrder, Material
from bench.train.pacing import Pacer


def run(material: Material, pacer: Pacer, *, bf16: bool) -> None:
    """Train until stopped."""
    case = material.case
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
    model = material.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=WEIGHT_DECAY)
    loader = DataLoader(
        TensorDataset(material.inputs, material.targets), batch_size=case.batch, sampler=InOrder(material)
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = loss_of(case, model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            pacer.updated(len(inputs), loss.item)
