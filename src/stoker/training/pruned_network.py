"""A pruned network made again from the whole one and the record of what was kept: no pickle, no code of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.records.compression import Cut, KeptChannels


def rebuild_pruned(model: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the model with only the channels that `cut` keeps; weights that two layers share stay shared.

    Raises:
        BadJob: the model is not the one that the cut was made of.
    """
    small = copy.deepcopy(model)
    tensors = _tensors(small)
    made: dict[tuple[int, tuple[KeptChannels, ...]], torch.Tensor] = {}
    for name, parts in _by_tensor(cut).items():
        whole = tensors.get(name)
        if whole is None or tuple(whole.shape) != parts[0].shape:
            found = "is not there" if whole is None else f"has shape {list(whole.shape)}"
            raise BadJob(
                f"the pruned model was cut out of another one: {name}, of shape {list(parts[0].shape)}, {found}",
                remedy="Use the job that the pruning was made with.",
            )
        key = (id(whole), tuple(_without_name(part) for part in parts))
        made[key] = made[key] if key in made else _selected(whole, parts)
        _put(small, name, made[key])
    for layer in cut.layers:
        for attribute, size in layer.sizes.items():
            setattr(small.get_submodule(layer.layer), attribute, size)
    return small


def silenced(model: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the whole model in which every weight that `cut` takes away is zero."""
    quiet = copy.deepcopy(model)
    parameters = dict(quiet.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for part in cut.kept:
            if (parameter := parameters.get(part.tensor)) is not None:
                gone = torch.ones(part.shape[part.dim], dtype=torch.bool)
                gone[list(part.kept)] = False
                parameter.index_fill_(part.dim, gone.nonzero().flatten().to(parameter.device), 0.0)
    return quiet


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name they have."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _by_tensor(cut: Cut) -> dict[str, list[KeptChannels]]:
    found: dict[str, list[KeptChannels]] = {}
    for part in cut.kept:
        found.setdefault(part.tensor, []).append(part)
    return found


def _without_name(part: KeptChannels) -> KeptChannels:
    return KeptChannels(tensor="", shape=part.shape, dim=part.dim, kept=part.kept)


def _selected(whole: torch.Tensor, parts: Sequence[KeptChannels]) -> torch.Tensor:
    chosen = whole.detach()
    for part in parts:
        chosen = chosen.index_select(part.dim, torch.tensor(part.kept, device=whole.device))
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(chosen.contiguous(), requires_grad=whole.requires_grad)
    return chosen.contiguous()


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
