"""What couples samples, by name: the module that mixes them, the augmentation, or the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.loading import map_tensors
from stoker.loading.order import Indices
from stoker.stepping.losses import IGNORED_TARGET
from stoker.stepping.probing import Probe, Where, fresh
from stoker.stepping.randomness import RandomDraws

Halves = tuple[Indices, Indices]

_CONSISTENT = 1e-6
"""How well the weights of three groups must agree with each other [relative] for a scalar to be their weighted mean."""


@dataclass(frozen=True)
class _Call:
    """One call of a module: the rows of its inputs and of its output that belong to one half of the batch."""

    name: str
    inputs: list[torch.Tensor]
    output: list[torch.Tensor]


def culprits(probe: Probe, where: Where) -> tuple[str, ...]:
    """Who mixes samples: a module, the augmentation, or the loss.

    A module does whose input for one half stays when the other half is replaced, while its output moves; the innermost
    one is named. The augmentation does if the model is handed other inputs for that half.
    """
    model, quad = where
    exchanges = [
        ((quad.first, quad.second), (quad.other_first, quad.second), 1),
        ((quad.first, quad.other_second), (quad.other_first, quad.other_second), 1),
        ((quad.first, quad.second), (quad.first, quad.other_second), 0),
        ((quad.other_first, quad.second), (quad.other_first, quad.other_second), 0),
    ]
    for one, two, kept in exchanges:
        if found := _mixer(probe, model, one, two, kept):
            return (found,)
    return (loss_cause(probe, where),)


def _mixer(probe: Probe, model: nn.Module, one: Halves, two: Halves, kept: int) -> str | None:
    """What moves the half `kept` between two batches that share it."""
    for before, after in zip(_calls(probe, model, one, kept), _calls(probe, model, two, kept), strict=False):
        stays = before.name == after.name and not _moved(before.inputs, after.inputs, probe)
        if stays and _moved(before.output, after.output, probe):
            kind = type(model.get_submodule(before.name)).__name__
            return f"{kind} {before.name!r}" if before.name else f"the model ({kind})"
    batches = [probe.pool.batch(*halves) for halves in (one, two)]
    inputs = [_half(batch.cut(0, batch.size), halves, kept) for batch, halves in zip(batches, (one, two), strict=True)]
    return "the augmentation or preparation of inputs" if _moved(inputs[0], inputs[1], probe) else None


def loss_cause(probe: Probe, where: Where) -> str:
    """What to say of the loss when it is the cause; a mean over tokens is recognised by how means of groups combine."""
    if probe.form() != "scalar":
        return "the loss"
    model, quad = where
    ordinary = next(itertools.islice(probe.pool.quads(probe.sizes, probe.job.seed), 2, None))
    groups = (quad.first, ordinary.second, quad.other_first)
    with RandomDraws(silenced=True):
        weights = _weights(probe, model, groups)
    if weights is None:
        return "the loss: its scalar is not a mean over samples"
    valid = [_valid_targets(probe, rows) for rows in groups]
    if all(valid) and np.allclose(np.array(weights) * valid[0], valid, rtol=_CONSISTENT):
        low, high = min(valid), max(valid)
        return (
            f"the loss: its scalar is a mean over valid tokens, of which groups of equal size have {low:g} to {high:g}"
        )
    low, high = min(weights), max(weights)
    return (
        "the loss: its scalar is a mean over something of which samples have different amounts, such as valid tokens "
        f"(groups of equal size weigh {low / high:.2g} to 1)"
    )


def _weights(probe: Probe, model: nn.Module, groups: tuple[Indices, Indices, Indices]) -> tuple[float, ...] | None:
    """The weights of three groups if a batch's loss is the weighted mean of its groups' losses, the first as 1.

    From v(A + B) = (a v(A) + b v(B)) / (a + b) each pair gives a / b; three pairs must agree.
    """

    def mean(*rows: Indices) -> float:
        return probe.value(model, *rows).mean

    def ratio(a: Indices, b: Indices) -> float:
        both = mean(a, b)
        return (mean(b) - both) / (both - mean(a))

    a, b, c = groups
    try:
        ab, bc, ac = ratio(a, b), ratio(b, c), ratio(a, c)
    except (ArithmeticError, RuntimeError, ValueError):
        return None
    consistent = min(ab, bc, ac) > 0 and abs(ab * bc / ac - 1) < _CONSISTENT
    return (1.0, 1 / ab, 1 / ac) if consistent else None


def _valid_targets(probe: Probe, rows: Indices) -> float:
    """Entries of the targets of these samples that are not marked to be ignored; 0 where targets are no classes."""
    batch = probe.pool.batch(rows)
    target = probe.objective.fields.target_of(batch.cut(0, batch.size))
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return 0
    return float((target != IGNORED_TARGET).sum())


def _calls(probe: Probe, model: nn.Module, halves: Halves, half: int) -> list[_Call]:
    """Every module's calls during the loss of a batch, in the order in which they end; rows of one half."""
    calls: list[_Call] = []
    copied = fresh(model)

    def noting(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(_Call(name, _half((args, kwargs), halves, half), _half(output, halves, half)))

        return hook

    handles = [m.register_forward_hook(noting(name), with_kwargs=True) for name, m in copied.named_modules()]
    batch = probe.pool.batch(*halves)
    probe.value_of(copied, batch, 0, batch.size)
    for handle in handles:
        handle.remove()
    return calls


def _half(values: Any, halves: Halves, half: int) -> list[torch.Tensor]:
    """Of every floating tensor whose first dimension is the batch (or a multiple): the rows of half 0 or 1."""
    found: list[torch.Tensor] = []
    first, size = len(halves[0]), sum(map(len, halves))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] % size == 0:
            at = tensor.shape[0] // size * first
            found.append((tensor[at:] if half else tensor[:at]).detach().clone())
        return tensor

    map_tensors(values, note)
    return found


def _moved(one: list[torch.Tensor], other: list[torch.Tensor], probe: Probe) -> bool:
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return True
    return any(
        bool((a - b).abs().max() > probe.tolerance * a.abs().max())
        for a, b in zip(one, other, strict=True)
        if a.numel()
    )
