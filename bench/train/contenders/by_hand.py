"""Loops written by hand: the plain one, and the one with the best settings known before Stoker was tuned.

The tuned one's settings were found by measuring each on two cores with AVX-512-bf16, and are fixed here: images in
channels_last under bf16 autocast; text under bf16 autocast; the MLP in fp32, where autocast costs more than it gives.
All have fused AdamW, data gathered from tensors, and memory that stays with the process once it has it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.train.cases import WEIGHT_DECAY, Case, loss_of
from bench.train.material import InOrder, Material
from bench.train.pacing import Pacer

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Numbers of malloc's parameters, from glibc's malloc.h."""


def run(material: Material, pacer: Pacer, *, is_tuned: bool) -> None:
    """Train until stopped."""
    case = material.case
    if is_tuned:
        keep_memory()
    model = material.model()
    channels_last = is_tuned and case.architecture == "resnet9"
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=WEIGHT_DECAY, fused=is_tuned or None)
    precision = autocasting(case) if is_tuned else contextlib.nullcontext
    for inputs, targets in _gathered(material, channels_last=channels_last) if is_tuned else _loaded(material):
        with precision():
            loss = loss_of(case, model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pacer.updated(len(inputs), loss.item)


def autocasting(case: Case) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What the forward pass runs under: bf16 autocast where it gives anything."""
    if case.architecture == "mlp":
        return contextlib.nullcontext
    return lambda: torch.autocast("cpu", torch.bfloat16)


def keep_memory() -> None:
    """Never map single tensors from the system, nor give memory back to it: pages are had once."""
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, -1)


def _gathered(material: Material, *, channels_last: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    for rows in material.batches():
        yield material.inputs[rows].to(memory_format=memory_format), material.targets[rows]


def _loaded(material: Material) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    loader = DataLoader(
        TensorDataset(material.inputs, material.targets), batch_size=material.case.batch, sampler=InOrder(material)
    )
    while True:
        yield from loader
