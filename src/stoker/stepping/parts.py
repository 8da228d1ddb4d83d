"""Whether the parts of a batch, passed one after the other, do what the whole batch does at once."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn

from stoker.loading import Batch
from stoker.stepping.batch_norm import GroupedBatchNorm
from stoker.stepping.probing import Probe, Value, fresh, gap
from stoker.stepping.randomness import RandomDraws

_COMPARED = 3
_GRADIENT_ROUNDING = 10
"""Gradients may differ by so many times the tolerance of losses: they are sums over many more terms."""


@dataclass(frozen=True)
class Agreement:
    """How far parts and whole are apart.

    `largest` is the largest relative difference of sums, counts, gradients and state (NaN: nothing could be compared);
    `problem` says what differs, None where nothing does; `is_loss` whether it is the loss that does not add up.
    """

    largest: float
    problem: str | None = None
    is_loss: bool = False


@dataclass(frozen=True)
class _Pass:
    """What a pass over samples gave, and the model it went through."""

    value: Value
    gradient: list[torch.Tensor]
    model: nn.Module


def compare_parts(probe: Probe) -> Agreement:
    """Compare the loss, its gradient and the state left behind of whole batches with those of their two parts."""
    largest = 0.0
    with RandomDraws(silenced=True):
        if not _is_quiet(probe):
            return Agreement(math.nan)
        for model, quad in itertools.islice(probe.quads(), _COMPARED):
            found = _compare(probe, model, probe.pool.batch(quad.first, quad.second), max(1, len(quad.first) - 1))
            if found.problem is not None:
                return found
            largest = max(largest, found.largest)
    return Agreement(largest)


def compare_groups(probe: Probe) -> Agreement:
    """Compare two groups in one micro-batch, their batch statistics apart, with the two one after the other."""
    group = max(2, *probe.sizes)
    quad = next(probe.pool.quads((group, group), probe.job.seed))
    batch = probe.pool.batch(quad.first, quad.second)
    together, apart = fresh(probe.model), fresh(probe.model)
    if together is probe.model:
        return Agreement(math.nan, "the model cannot be copied, so groups in one micro-batch could not be tried")
    with RandomDraws(silenced=True):
        GroupedBatchNorm(together, group).micro_batch = batch.size
        try:
            whole = probe.value_of(together, batch, 0, batch.size)
        except (RuntimeError, ValueError) as error:
            return Agreement(math.nan, f"groups cannot be told apart in one micro-batch ({error})")
        parts = probe.value_of(apart, batch, 0, group) + probe.value_of(apart, batch, group, batch.size)
    largest = gap(whole, parts, whole)
    moved, state = _state_difference(together, apart)
    if largest > probe.tolerance:
        return Agreement(
            largest, "groups in one micro-batch are not what they are alone (are samples the first dimension?)"
        )
    if state > probe.tolerance:
        return Agreement(state, f"the order of groups matters to {moved} (is a layer passed twice?)")
    return Agreement(max(largest, state))


def _is_quiet(probe: Probe) -> bool:
    """Whether another seed gives the same loss, now that random draws are silenced."""
    model, quad = next(probe.quads())
    one, two = (probe.value(model, quad.first, quad.second, seed=seed) for seed in (0, 1))
    return not gap(one, two, one) > probe.tolerance


def _compare(probe: Probe, model: nn.Module, batch: Batch, at: int) -> Agreement:
    """Compare `batch` with its parts before and after sample `at`."""
    whole = _pass(probe, fresh(model), batch, 0, batch.size)
    try:
        first = _pass(probe, fresh(model), batch, 0, at)
        second = _pass(probe, first.model, batch, at, batch.size)
        second_alone = _pass(probe, fresh(model), batch, at, batch.size)
    except Exception as error:  # noqa: BLE001 - whatever the model raises for a size that is not its own
        return Agreement(math.nan, f"the model or the loss takes only batches of {batch.size} samples ({error})")
    sums = gap(whole.value, first.value + second_alone.value, whole.value)
    if sums > probe.tolerance:
        return Agreement(
            sums, f"the sums or counts of two parts differ from the whole's by {sums:.1e} of it", is_loss=True
        )
    memory = gap(second.value, second_alone.value, second_alone.value)
    if memory > probe.tolerance:
        return Agreement(
            memory, f"what an earlier part leaves in the model moves a later one's loss by {memory:.1e} of it"
        )
    gradients = _gradient_difference(whole, first, second)
    if gradients > _GRADIENT_ROUNDING * probe.tolerance:
        return Agreement(gradients, f"the gradients of two parts differ from the whole's by {gradients:.1e} of it")
    moved, state = _state_difference(whole.model, second.model)
    if state > probe.tolerance:
        return Agreement(state, f"every pass updates {moved}, so that two parts leave it {state:.1e} off the whole's")
    finite = [difference for difference in (sums, memory, gradients, state) if math.isfinite(difference)]
    return Agreement(max(finite, default=0.0))


def _pass(probe: Probe, model: nn.Module, batch: Batch, start: int, stop: int) -> _Pass:
    value, gradient = probe.gradient_of(model, batch, start, stop)
    return _Pass(value, gradient, model)


def _gradient_difference(whole: _Pass, first: _Pass, second: _Pass) -> float:
    """The norm of the difference over the norm of the whole's gradient, over all parameters together."""
    apart = [w - a - b for w, a, b in zip(whole.gradient, first.gradient, second.gradient, strict=True)]
    return _norm(apart) / max(_norm(whole.gradient), 1e-12)


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _state_difference(one: nn.Module, other: nn.Module) -> tuple[str, float]:
    """The buffer that differs most between two models after their passes, and by how much relative to its size."""
    theirs = dict(other.named_buffers())
    worst, largest = "", 0.0
    for name, buffer in one.named_buffers():
        that = theirs.get(name)
        if that is None or that.shape != buffer.shape:
            return name, math.inf
        mine, its = buffer.detach().double(), that.detach().double()
        difference = float((mine - its).abs().max() / mine.abs().max().clamp_min(1e-12)) if mine.numel() else 0.0
        if difference > largest:
            worst, largest = f"{name} of {type(one.get_submodule(name.rpartition('.')[0])).__name__}", difference
    return worst, largest
