"""Loops tuned by hand for a GPU: bf16 autocast, tf32 for the rest, fused AdamW, data on the device, compiled.

Compiled whole is how nanoGPT does it; each block by itself with the loss, how torchtitan does; with CUDA graphs, what
helps small models. Images are in channels_last, and cuDNN chooses among its kernels by trying them.

Source: github.com/karpathy/nanoGPT, train.py; github.com/pytorch/torchtitan, torchtitan/models/llama3/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from bench.train.cases import WEIGHT_DECAY, loss_of
from bench.train.contenders.gpu_memory import share_device
from bench.train.material import Material
from bench.train.models import Bottleneck
from bench.train.pacing import Pacer


def run(material: Material, pacer: Pacer, *, compiled: Literal["none", "whole", "blocks", "graphs"]) -> None:
    """Train until stopped."""
    case, device = material.case, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    share_device(pacer, device)
    model = material.model().to(device)
    if not case.is_text:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=WEIGHT_DECAY, fused=True)

    def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(case, logits, targets)

    if compiled == "blocks":
        criterion = torch.compile(criterion)
        compile_blocks(model)

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return criterion(model(inputs), targets)

    if compiled in ("whole", "graphs"):
        forward = torch.compile(forward, mode="reduce-overhead" if compiled == "graphs" else "default")
    for inputs, targets in _on_device(material, device):
        if compiled == "graphs":
            torch.compiler.cudagraph_mark_step_begin()  # the last update's outputs may be overwritten
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pacer.updated(len(inputs), loss.item)


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each of the repeated blocks by itself, for its own shapes."""
    for block in blocks_of(model):
        # Not `block.compile()`, which silently does nothing for an nn.Sequential.
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)  # type: ignore[method-assign]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: a transformer's, a ResNet-50's; of another model its convolutions with what follows each."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if stacks:
        return list(stacks[0])
    bottlenecks: list[nn.Module] = [module for module in model.modules() if isinstance(module, Bottleneck)]
    convolutions = (m for m in model.modules() if isinstance(m, nn.Sequential) and isinstance(m[0], nn.Conv2d))
    return bottlenecks or list(convolutions)


def _on_device(material: Material, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches gathered on the device, where the whole data set lies; images in channels_last."""
    layout = torch.preserve_format if material.case.is_text else torch.channels_last
    inputs = material.inputs.to(device).contiguous(memory_format=_contiguous(layout))
    targets, order = material.targets.to(device), material.order.to(device)
    while True:
        for epoch in order:
            for rows in epoch.split(material.case.batch):
                yield inputs[rows].contiguous(memory_format=_contiguous(layout)), targets[rows]


def _contiguous(layout: torch.memory_format) -> torch.memory_format:
    return torch.contiguous_format if layout == torch.preserve_format else layout
