"""A pruned network, rebuilt from the whole one and the record of the channels kept: no pickle, no code of its own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.records.compression import Cut, KeptChannels


def rebuild_pruned(model: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the model with only the channels that `cut` keeps; weights that two layers share stay shared.

    Raises:
        BadJob: the cut was made from another model.
    """
    small = copy.deepcopy(model)
    tensors: dict[str, torch.Tensor] = dict(small.named_parameters(remove_duplicate=False))
    tensors |= dict(small.named_buffers(remove_duplicate=False))
    made: dict[tuple[int, tuple[KeptChannels, ...]], torch.Tensor] = {}
    parts_of: dict[str, list[KeptChannels]] = {}
    for part in cut.kept:
        parts_of.setdefault(part.tensor, []).append(part)
    for name, parts in parts_of.items():
        whole = tensors.get(name)
        if whole is None or tuple(whole.shape) != parts[0].shape:
            problem = "is not there" if whole is None else f"has shape {list(whole.shape)}"
            raise BadJob(
                f"the pruned model was cut out of another one: {name}, of shape {list(parts[0].shape)}, {problem}",
                remedy="Use the job that the pruning was made with.",
            )
        key = (id(whole), tuple(dataclasses.replace(part, tensor="") for part in parts))
        if key not in made:
            made[key] = _selected(whole, parts)
        path, _, leaf = name.rpartition(".")
        setattr(small.get_submodule(path), leaf, made[key])
    for layer in cut.layers:
        for attribute, size in layer.sizes.items():
            setattr(small.get_submodule(layer.layer), attribute, size)
    return small


def silenced(model: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the whole model in which every weight that `cut` removes is zero."""
    quiet = copy.deepcopy(model)
    parameters = dict(quiet.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for part in cut.kept:
            if (parameter := parameters.get(part.tensor)) is not None:
                gone = torch.ones(part.shape[part.dim], dtype=torch.bool)
                gone[list(part.kept)] = False
                parameter.index_fill_(part.dim, gone.nonzero().flatten().to(parameter.device), 0.0)
    return quiet


def _selected(whole: torch.Tensor, parts: Sequence[KeptChannels]) -> torch.Tensor:
    chosen = whole.detach()
    for part in parts:
        chosen = chosen.index_select(part.dim, torch.tensor(part.kept, device=whole.device))
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(chosen.contiguous(), requires_grad=whole.requires_grad)
    return chosen.contiguous()
