"""Making a job's model, and telling two models apart."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading import Stream, key_of, seed_generators


def build_model(job: Job) -> nn.Module:
    """The job's model with its initial weights, in training mode: made anew, or a copy of the module given.

    Raises:
        BadJob: the function does not return a module, or the module has nothing to train.
    """
    if isinstance(job.model, nn.Module):
        model = copy.deepcopy(job.model)
    else:
        with torch.random.fork_rng(devices=[]):
            seed_generators(key_of(Stream.INITIAL_WEIGHTS, job.seed))
            model = job.model()
    if not isinstance(model, nn.Module):
        raise BadJob(f"Job(model=…) made a {type(model).__name__}, wanted a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadJob(f"{type(model).__name__} has no parameter to train")
    return model.train()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 (hex) of a model's parameters and buffers: names, types, shapes and bytes."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return state.hexdigest()


def num_parameters(model: nn.Module) -> int:
    """Scalars in all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def dropouts(model: nn.Module) -> list[nn.Module]:
    """The model's dropout modules that drop anything."""
    return [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]  # noqa: SLF001


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model with its dropout modules and attention dropout set to drop nothing (changed in place)."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # nn.MultiheadAttention, nn.LSTM and the like
            module.dropout = 0.0  # type: ignore[assignment]
    return model
