"""Whether the parts of a batch, passed one after the other, do what the whole batch does at once."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn

from stoker.loading.batches import Batch
from stoker.stepping.batch_norm import GroupedBatchNorm
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.probe import CouplingProbe, Value, fresh, gap
from stoker.stepping.random_draws import RandomDraws

_ROUNDS_FOR_EACH = 3
"""Parts are compared once for so many rounds of the probe: a comparison costs as much as three rounds."""
_GRADIENT_ROUNDING = 10
"""Gradients may differ by so many times the tolerance of losses: they are sums over many more terms."""


@dataclass(frozen=True)
class Agreement:
    """How far parts and whole are apart.

    `largest` is the largest relative difference of sums, counts, gradients and state (NaN: nothing could be compared);
    `problem` says what differs, None where nothing does; `cause` is to blame, None where it is the loss.
    """

    largest: float
    problem: str | None = None
    cause: str | None = None


@dataclass(frozen=True)
class _Pass:
    """What a pass over samples gave, and the model it went through."""

    value: Value
    gradient: list[torch.Tensor]
    model: nn.Module


def compare_parts(probe: CouplingProbe) -> Agreement:
    """Compare the loss, its gradient and the state left behind of whole batches with those of their two parts."""
    differences: list[float] = []
    with RandomDraws(silenced=True):
        if not probe.is_same_with(seed=1, first=None if probe.drawn else probe.first):
            return Agreement(math.nan)
        for model, quad in itertools.islice(probe.quads(), max(1, probe.rounds // _ROUNDS_FOR_EACH)):
            found = _compare(probe, model, probe.pool.batch(quad.first, quad.second), max(1, len(quad.first) - 1))
            if found.problem is not None:
                return found
            differences.append(found.largest)
    return Agreement(max((each for each in differences if math.isfinite(each)), default=math.nan))


def compare_large(probe: CouplingProbe, size: int) -> Agreement:
    """Compare a batch of `size` samples, most of them copies of one, with its halves: what limits count shows there."""
    rows = next(itertools.islice(probe.pool.quads((size, size), probe.job.seed), 2, None)).first
    rows[: size - size // 8] = rows[0]
    batch, half = probe.pool.batch(rows), size // 2
    with RandomDraws(silenced=True):
        try:
            whole, first, second = (
                probe.value_of(probe.fresh(probe.model), batch, start, stop)
                for start, stop in ((0, size), (0, half), (half, size))
            )
        except Exception:  # noqa: BLE001 - memory, or a size that is not the model's
            return Agreement(math.nan)
    sums = gap(whole, first + second, whole)
    if not sums > probe.tolerance:
        return Agreement(sums)
    problem = f"the sums or counts of two halves of a batch of {size} differ from the whole's by {sums:.1e} of it"
    return Agreement(sums, problem, "something in the model or the loss that shows in larger batches only")


def compare_groups(probe: CouplingProbe) -> Agreement:
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


def _compare(probe: CouplingProbe, model: nn.Module, batch: Batch, at: int) -> Agreement:
    """Compare `batch` with its parts before and after sample `at`."""
    whole = _pass(probe, probe.fresh(model), batch, 0, batch.size)
    if not math.isfinite(whole.value.sum):
        return Agreement(math.nan)
    try:
        first = _pass(probe, probe.fresh(model), batch, 0, at)
        second = _pass(probe, first.model, batch, at, batch.size)
        second_alone = probe.value_of(probe.fresh(model), batch, at, batch.size)
    except Exception as error:  # noqa: BLE001 - whatever the model raises for a size that is not its own
        cause = f"the model or the loss: it takes only batches of {batch.size} samples"
        return Agreement(math.nan, f"smaller ones raise {type(error).__name__}: {error}", cause)
    sums = gap(whole.value, first.value + second_alone, whole.value)
    if not sums <= probe.tolerance:  # nor where a part's sum is not finite
        return Agreement(sums, f"the sums or counts of two parts differ from the whole's by {sums:.1e} of it")
    memory = gap(second.value, second_alone, second_alone)
    if memory > probe.tolerance:
        problem = f"what one part leaves in the model moves the next one's loss by {memory:.1e} of it"
        hidden = next(iter(probe.carried.places.values()), None)
        return Agreement(memory, problem, "the model: a pass changes it" if hidden is None else _changed(hidden))
    gradients = _gradient_difference(whole, first, second)
    if gradients > _GRADIENT_ROUNDING * probe.tolerance:
        problem = f"the gradients of two parts differ from the whole's by {gradients:.1e} of it"
        return Agreement(gradients, problem, "the gradient of the model or of the loss")
    moved, state = _state_difference(whole.model, second.model)
    if state > probe.tolerance:
        return Agreement(state, f"two parts leave it {state:.1e} off the whole's", _changed(moved))
    if (hidden := probe.hidden_difference(whole.model, second.model)) is not None:
        return Agreement(math.nan, "two parts leave another value in it than the whole does", _changed(hidden))
    finite = [difference for difference in (sums, memory, gradients, state) if math.isfinite(difference)]
    return Agreement(max(finite, default=0.0))


def _changed(what: str) -> str:
    return f"{what}, which every pass changes"


def _pass(probe: CouplingProbe, model: nn.Module, batch: Batch, start: int, stop: int) -> _Pass:
    value, gradient = probe.gradient_of(model, batch, start, stop)
    return _Pass(value, gradient, model)


def _gradient_difference(whole: _Pass, first: _Pass, second: _Pass) -> float:
    """The norm of the difference over the norm of the whole's gradient, over all parameters together."""
    apart = [w - a - b for w, a, b in zip(whole.gradient, first.gradient, second.gradient, strict=True)]
    return _norm(apart) / max(_norm(whole.gradient), 1e-12)


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(as_real(tensor).double().square().sum()) for tensor in tensors))


def _state_difference(one: nn.Module, other: nn.Module) -> tuple[str, float]:
    """The buffer that differs most between two models after their passes, and by how much relative to its size."""
    theirs = dict(other.named_buffers())
    worst, largest = "", 0.0
    for name, buffer in one.named_buffers():
        that = theirs.get(name)
        if that is None or that.shape != buffer.shape:
            return f"the buffer {name!r}", math.inf
        mine, its = as_real(buffer.detach()).double(), as_real(that.detach()).double()
        difference = float((mine - its).abs().max() / mine.abs().max().clamp_min(1e-12)) if mine.numel() else 0.0
        if difference > largest:
            owner = type(one.get_submodule(name.rpartition(".")[0])).__name__
            worst, largest = f"the buffer {name!r} of {owner}", difference
    return worst, largest
