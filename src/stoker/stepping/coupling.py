"""Do the samples of a batch influence each other's losses? Found by a probe, explained by module.

Samples are separable where three things hold, whatever the samples: each half of a batch adds its own share to the loss
(the mixed difference vanishes); a batch's sum, count and gradient are those of its parts together; and the state that a
pass leaves behind (buffers, and what is hidden in Python) is the same whether the batch passes whole or in parts, and
moves no loss. The first sees through random draws, which have equal keys; for the others they are silenced.

The sections: the verdict; the comparison of parts with the whole batch; the module, augmentation or loss to blame.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.activity import doing
from stoker.errors import BadJob, listed_in_part
from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch
from stoker.loading.batches import Batch
from stoker.loading.fields import not_by_sample, tensors_of
from stoker.loading.lengths import IGNORED_TARGET
from stoker.loading.order import Indices
from stoker.loading.samples import Samples
from stoker.records import NOT_COMPARED, Coupling, CouplingKind
from stoker.stepping.batch_norm import GroupedBatchNorm, batch_norms
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.foreign_models import require_aligned
from stoker.stepping.probe import (
    ROUNDING,
    CouplingProbe,
    Value,
    Where,
    first_probe,
    fresh,
    gap,
    threads_restored,
    working_probe,
)
from stoker.stepping.random_draws import RandomDraws

_SHARE_OF_PROBE = 0.15
_COLLATED = 8
"""Samples of a batch that is compared with one of a sample less."""
_SHARED = "its draws do not grow with the batch, and the loss depends on them: each part would have a draw of its own"


def find_coupling(job: Job, samples: Samples) -> Coupling:
    """How the samples of an optimiser batch are coupled in this job; see `Coupling`.

    Not seen: a coupling that shows in none of the batches tried, such as a capacity that only rare batches exceed.
    `evidence` says how many were tried.

    Raises:
        BadJob: the model or the loss cannot be evaluated on these samples.
    """
    if (known := _declared(job) or _alone(job, samples) or _put_together(job, samples)) is not None:
        return known
    began_s = time.process_time()
    with doing("comparing samples", is_long=True), threads_restored():
        probe = working_probe(job, samples)
        notices = _require_usable(job, probe, len(samples))
        is_repeatable, probe = probe.repeated()
        coupling = _probed(job, probe, is_repeatable=is_repeatable, began_s=began_s)
    return replace(coupling, unsaved=probe.carried.unsaved, notices=notices)


def at_first(job: Job, samples: Samples) -> Coupling:
    """The coupling to assume, with probable mistakes, and what checkpoints will not hold; by a few losses.

    Checked is what `find_coupling` begins with: the model and the loss take the job's samples, labels and
    values of the loss belong to their samples, and the last batch of an epoch can be taken.

    Raises:
        BadJob: one of them fails. An error of the model itself is passed on.
    """
    if _declared(job) is not None or _alone(job, samples) is not None:
        return unprobed(job)
    if (known := _put_together(job, samples)) is not None:
        return known
    with threads_restored():
        probe = first_probe(job, samples)
        notices = _require_usable(job, probe, len(samples))
        probe = replace(probe, tolerance=ROUNDING[probe.dtype])
        unsaved = probe.repeated()[1].carried.unsaved if probe.may_hand_on else ()
    return replace(unprobed(job), notices=notices, unsaved=unsaved)


def unprobed(job: Job) -> Coupling:
    """The coupling to assume until `find_coupling` was asked: what is legal under it is legal under any other."""
    return _declared(job) or Coupling(
        kind="whole_group",
        group=job.coupling_group or job.batch_size,
        causes=("assumption, until they are compared",),
        evidence=NOT_COMPARED,
    )


def _declared(job: Job) -> Coupling | None:
    """The coupling that the job states itself; None if it states none."""
    if job.step is not None:
        return _coupled(job, "whole_group", ("the job's own step",), "declared: step=…, which is atomic and never cut")
    if job.objective.scope == "batch":
        return _coupled(job, "whole_group", ("the loss",), 'declared: scope="batch"')
    return None


def _alone(job: Job, samples: Samples) -> Coupling | None:
    return _separable("an update sees one sample") if job.batch_size == 1 or len(samples) < 2 else None


def _put_together(job: Job, samples: Samples) -> Coupling | None:
    """The coupling of a job whose collate function makes batches that cannot be cut, as of graphs; None of others."""
    most = min(_COLLATED, samples.num_at_hand)
    if job.fields.collate is None or most < 2:
        return None
    few, more = (samples.fetch(np.arange(count, dtype=np.int64), 0) for count in (most - 1, most))
    if not (places := not_by_sample(few, most - 1, more, most)):
        return None
    have = f"{listed_in_part(places)} {'has' if len(places) == 1 else 'have'} not one row for each sample"
    if job.coupling_group is not None and job.coupling_group < job.batch_size:
        raise BadJob(
            f"Job(coupling_group={job.coupling_group}) cuts batches of {job.batch_size} into groups, and those of the "
            f"collate function cannot be cut: {have}",
            remedy=f"Leave it out, or give batch={job.coupling_group} as well.",
        )
    return _coupled(job, "whole_group", ("the collate function",), f"its batches cannot be cut: {have}")


def _require_usable(job: Job, probe: CouplingProbe, num_samples: int) -> tuple[str, ...]:
    """Check what any plan of the job needs; probable mistakes, as text."""
    _, quad = next(probe.quads())
    require_aligned(job, probe.model, probe.pool.batch(quad.first).cut(0, len(quad.first)))
    probe.require_by_sample()
    _require_last_batch(job, probe, num_samples)
    return probe.notices


def _probed(job: Job, probe: CouplingProbe, *, is_repeatable: bool, began_s: float) -> Coupling:
    """The coupling by comparisons of losses; `began_s` is the CPU time of this process when probing began [s]."""
    if probe.moving is not None:
        return _coupled(
            job, "whole_group", (probe.moving,), "parts of a batch would change it more often than the whole"
        )
    if not is_repeatable:
        cause = "the model or the loss: it draws from generators of its own, or keeps hidden state"
        return _coupled(
            job, "whole_group", (cause,), "the same batch, seed and weights give another loss when repeated"
        )
    norms, compared_s = _statistics(probe), time.process_time()
    largest, where = probe.largest_mixed_difference()
    compared_s = time.process_time() - compared_s
    evidence = f"replacing half of a batch moves the other half's loss by {largest:.1e} of it ({probe.describe()})"
    if norms and largest > probe.tolerance:
        thawed, (_, probe) = probe, probe.with_frozen(norms).repeated()
        largest, where = probe.largest_mixed_difference()
        if largest <= probe.tolerance and where is not None:
            return _by_batch_norm(job, thawed, probe, where, evidence)
    if where is None:
        return _coupled(job, "whole_group", ("the loss",), f"it is finite in none of {probe.describe()}")
    if largest > probe.tolerance:
        return _coupled(job, "whole_group", (*_counted(norms), *coupling_causes(probe, where)), evidence)
    parts = compare_parts(probe)
    if parts.problem is not None:
        cause = parts.cause or loss_cause(probe, where)
        return _coupled(job, "whole_group", (cause,), f"{parts.problem} ({probe.describe()})")
    if (shared := probe.shared_draw()) is not None:
        return _coupled(job, "whole_group", (shared,), f"{_SHARED} ({probe.describe()})")
    compared = f"mixed difference at most {largest:.1e} of the loss; {_adds_up(parts)}"
    size = _affordable(probe, job.batch_size, compared_s, time.process_time() - began_s)
    if size <= sum(probe.sizes) or math.isnan(parts.largest):
        return replace(_separable(f"{compared} ({probe.describe()})"), tried=sum(probe.sizes))
    large = compare_large(probe, size)
    if large.problem is not None:
        return _coupled(job, "whole_group", (str(large.cause),), large.problem)
    if math.isnan(large.largest):
        return replace(_separable(f"{compared} ({probe.describe()})"), tried=sum(probe.sizes))
    return replace(_separable(f"{compared} ({probe.describe()}, and a batch of {size})"), tried=size)


def _affordable(probe: CouplingProbe, batch: int, compared_s: float, spent_s: float) -> int:
    """Size of the largest batch, up to the job's, whose comparison with its halves is cheap for the probe [samples].

    Estimated from CPU times: that of one loss of few samples, and `compared_s` of all losses of the rounds [s].
    """
    (few, few_s), many = probe.few, sum(probe.sizes)
    if many <= few:
        return many
    many_s = compared_s / (4 * probe.rounds)
    each_s = max(1e-9, many_s / (4 * many), (many_s - few_s) / (many - few))
    fixed_s = max(0.0, many_s - many * each_s)
    return min(batch, max(2 * many, int((_SHARE_OF_PROBE * spent_s - 3 * fixed_s) / (2 * each_s))))


def coupling_by_types(job: Job, model: nn.Module, why: str) -> Coupling:
    """The coupling by module types, for a model that cannot be run: batch normalisation couples, other types do not.

    `model` may be on the meta device; `why` it was not probed goes into the evidence. The job is probed where it is
    trained.
    """
    if (declared := _declared(job)) is not None:
        return declared
    norms = batch_norms(model)
    evidence = f"by the types of its modules only, not probed: {why}"
    return _coupled(job, "batch_norm", _counted(norms), evidence) if norms else _separable(evidence)


def _by_batch_norm(job: Job, probe: CouplingProbe, frozen: CouplingProbe, where: Where, evidence: str) -> Coupling:
    """The coupling of a job that is separable but for its batch statistics."""
    names = _counted(_statistics(probe))
    parts = compare_parts(frozen)
    if parts.problem is not None:
        cause = parts.cause or loss_cause(frozen, where)
        return _coupled(job, "whole_group", (*names, cause), f"{evidence}; {parts.problem}")
    if job.coupling_group is not None and job.coupling_group < job.batch_size:
        if (shared := frozen.shared_draw()) is not None:
            return _coupled(job, "whole_group", (*names, shared), f"{evidence}; {_SHARED}")
        groups = compare_groups(probe)
        if groups.problem is not None:
            return _coupled(job, "whole_group", names, f"{evidence}; {groups.problem}")
    return _coupled(job, "batch_norm", names, f"{evidence}; without batch statistics {_adds_up(parts)}")


def _require_last_batch(job: Job, probe: CouplingProbe, num_samples: int) -> None:
    """Refuse a job whose epoch ends in a batch, or in a group of one sample, that the model cannot take."""
    if isinstance(job.batch, TokenBatch):
        return  # separability is not known yet; coupled samples are refused later
    group = job.coupling_group or job.batch_size
    whole, rest = divmod(num_samples, job.batch_size)
    has_single = group > 1 and 1 in {job.batch_size % group if whole else 0, rest % group}
    if has_single and _statistics(probe):
        tried = 1
    elif rest and sum(probe.sizes) == job.batch_size:
        tried = rest
    else:
        return
    row = next(probe.quads())[1].first[:1]
    try:
        probe.value(probe.model, *[row] * tried)
    except (RuntimeError, ValueError) as error:
        groups = f" and groups of {group}" if has_single else ""
        where = f"{num_samples} samples in batches of {job.batch_size}{groups}"
        raise BadJob(
            f"{where} leave {tried} at the end of an epoch, which the model does not take: {error}",
            remedy="Choose another batch (or coupling_group), or leave samples out, so that the last are enough.",
        ) from error


def _statistics(probe: CouplingProbe) -> list[nn.Module]:
    """The modules that normalise by batch statistics in training."""
    return [module for module in batch_norms(probe.model) if module.training]


def _separable(evidence: str) -> Coupling:
    return Coupling(kind="separable", group=None, causes=(), evidence=evidence)


def _coupled(job: Job, kind: CouplingKind, causes: tuple[str, ...], evidence: str) -> Coupling:
    if isinstance(job.batch, TokenBatch):
        raise BadJob(
            f"Job(batch={job.batch!r}) makes batches of different numbers of samples, and those of this job influence "
            f"one another through {', '.join(causes)} ({evidence})",
            remedy="Give the batch as a number of samples, or take layers that treat each sample by itself.",
        )
    return Coupling(kind=kind, group=job.coupling_group or job.batch_size, causes=causes, evidence=evidence)


def _adds_up(parts: Agreement) -> str:
    if math.isnan(parts.largest):
        return "parts were not compared with the whole: random draws could not be silenced, or its loss was not finite"
    return f"sums, counts, gradients and state of parts agree with the whole's to {parts.largest:.1e}"


def _counted(modules: list[nn.Module]) -> tuple[str, ...]:
    """Counts of modules that can be frozen, by type: `5 BatchNorm2d`."""
    kinds = [type(module).__name__ for module in modules if getattr(module, "running_mean", None) is not None]
    return tuple(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


_ROUNDS_FOR_EACH = 2
"""Rounds of the probe for each comparison of parts, which costs as much as two rounds."""
_MEDLEY = 4
"""Samples of a batch of contrasts, as a multiple of those of a round; for a slow model as many."""
_FACTOR = 2.0**20
"""Of a loss whose gradient is compared: a power of two, which rounds nothing, and large, so that any clipping shows."""
_GRADIENT_ROUNDING = 10
"""Tolerance of gradients as a multiple of that of losses: they are sums over many more terms."""


@dataclass(frozen=True)
class Agreement:
    """The difference between parts and whole.

    `largest` is the largest relative difference of sums, counts, gradients and state (NaN: nothing could be compared);
    `problem` says what differs, None where nothing does; `cause` is None where it is the loss.
    """

    largest: float
    problem: str | None = None
    cause: str | None = None
    is_of_backward: bool = False
    """Whether the backward pass alone is to blame, whatever the forward pass draws."""


@dataclass(frozen=True)
class _Pass:
    """The results of a pass over samples, and the model it went through."""

    value: Value
    gradient: list[torch.Tensor]
    model: nn.Module


def compare_parts(probe: CouplingProbe) -> Agreement:
    """Compare the loss, its gradient and the state left behind of whole batches with those of their two parts.

    The batches are those of the first rounds, and some that hold one sample of every class as far as they have room.
    Watching every operation to silence draws costs more than the operations of a recurrent layer: where no pass was
    seen to draw, it is done only if the parts do not agree without.
    """
    if (hooked := _hooked_after_accumulation(probe.model)) is not None:
        return hooked
    if not probe.drawn:
        agreement = _compare_rounds(probe, with_factor=True)
        if agreement.problem is None or agreement.is_of_backward:
            return agreement
    elif (nonlinear := _compare_multiple(probe)) is not None:
        return nonlinear
    with RandomDraws(silenced=True):
        return _compare_rounds(probe)


def _compare_rounds(probe: CouplingProbe, *, with_factor: bool = False) -> Agreement:
    """The first problem in a few rounds, or the largest difference in them; NaN if the loss depends on the seed.

    Optionally the first batch is compared with a multiple of its loss, too.
    """
    differences: list[float] = []
    if not probe.is_same_with(seed=1, first=None if probe.drawn else probe.first):
        return Agreement(math.nan)
    rounds, cut = max(1, probe.rounds // _ROUNDS_FOR_EACH), max(1, min(probe.sizes) - 1)
    quads = itertools.islice(probe.quads(), rounds)
    num_rows = sum(probe.sizes)
    most = num_rows if probe.is_slow else _MEDLEY * num_rows
    size = min(probe.job.batch_size, most)
    medleys = itertools.islice(probe.pool.medleys(size, cut, num_rows), rounds * most // size)
    batches = [(model, probe.pool.batch(quad.first, quad.second)) for model, quad in quads]
    batches += [(probe.model, probe.pool.batch(rows)) for rows in medleys]
    for turn, (model, batch) in enumerate(batches):
        agreement = _compare_cut(probe, model, batch, cut, with_factor=with_factor and turn == 0)
        if agreement.problem is not None:
            return agreement
        differences.append(agreement.largest)
    return Agreement(max(filter(math.isfinite, differences), default=math.nan))


def compare_large(probe: CouplingProbe, size: int) -> Agreement:
    """Compare a batch of `size` samples, most of them copies of one, with its halves: capacities overflow there."""
    rows = next(itertools.islice(probe.pool.quads((size, size), probe.job.seed), 1, None)).first.copy()
    rows[: size - size // 8] = rows[0]
    batch, half = probe.pool.batch(rows), size // 2
    with RandomDraws(silenced=True) if probe.drawn else contextlib.nullcontext():
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
    """Compare two groups in one micro-batch, with separate batch statistics, with the two one after the other."""
    group = max(2, *probe.sizes)
    quad = next(probe.pool.quads((group, group), probe.job.seed))
    batch = probe.pool.batch(quad.first, quad.second)
    together, separate = fresh(probe.model), fresh(probe.model)
    if together is probe.model:
        return Agreement(math.nan, "the model cannot be copied, so groups in one micro-batch could not be tried")
    with RandomDraws(silenced=True):
        GroupedBatchNorm(together, group).micro_batch = batch.size
        try:
            whole = probe.value_of(together, batch, 0, batch.size)
        except (RuntimeError, ValueError) as error:
            return Agreement(math.nan, f"groups cannot be separated in one micro-batch ({error})")
        parts = probe.value_of(separate, batch, 0, group) + probe.value_of(separate, batch, group, batch.size)
    largest = gap(whole, parts, whole)
    moved, state = _state_difference(together, separate)
    if largest > probe.tolerance:
        return Agreement(
            largest, "groups in one micro-batch are not what they are alone (are samples the first dimension?)"
        )
    if state > probe.tolerance:
        return Agreement(state, f"the order of groups matters to {moved} (is a layer passed twice?)")
    return Agreement(max(largest, state))


def _compare_cut(
    probe: CouplingProbe, model: nn.Module, batch: Batch, cut: int, *, with_factor: bool = False
) -> Agreement:
    """Compare `batch` with its parts before and after sample `cut`; optionally with a multiple of its loss before."""
    try:
        whole = _pass(probe, probe.fresh(model), batch, 0, batch.size)
    except Exception as error:  # noqa: BLE001 - whatever a user's hook or function raises; losses alone were computed
        return _failed_backward(error)
    if not math.isfinite(whole.value.sum):
        return Agreement(math.nan)
    norm = _norm(whole.gradient)
    if with_factor and (nonlinear := _nonlinear_backward(probe, model, batch, whole.gradient, norm)) is not None:
        return nonlinear
    try:
        first = _pass(probe, probe.fresh(model), batch, 0, cut)
        _subtract(whole.gradient, first.gradient)
        second = _pass(probe, first.model, batch, cut, batch.size)
        _subtract(whole.gradient, second.gradient)
        second_alone = probe.value_of(probe.fresh(model), batch, cut, batch.size)
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
    gradients = _norm(whole.gradient) / max(norm, 1e-12)
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


def _hooked_after_accumulation(model: nn.Module) -> Agreement | None:
    """The problem of a hook that is called once the gradients of a micro-batch are added; None without one."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and getattr(parameter, "_post_accumulate_grad_hooks", None):
            problem = f"{name} has a hook after accumulation, which each micro-batch would call"
            return Agreement(math.nan, problem, f"the hook of {name}")
    return None


def _compare_multiple(probe: CouplingProbe) -> Agreement | None:
    """`_nonlinear_backward` of a first round in which draws are not silenced: both passes have the same ones."""
    model, quad = next(probe.quads())
    batch = probe.pool.batch(quad.first, quad.second)
    try:
        whole = _pass(probe, probe.fresh(model), batch, 0, batch.size)
    except Exception as error:  # noqa: BLE001 - as in `_compare_cut`
        return _failed_backward(error)
    if not math.isfinite(whole.value.sum):
        return None
    return _nonlinear_backward(probe, model, batch, whole.gradient, _norm(whole.gradient))


def _failed_backward(error: Exception) -> Agreement:
    return Agreement(math.nan, f"it raises {type(error).__name__}: {error}", "the backward pass", is_of_backward=True)


def _nonlinear_backward(
    probe: CouplingProbe, model: nn.Module, batch: Batch, gradient: list[torch.Tensor], norm: float
) -> Agreement | None:
    """The problem of a backward pass that is not proportional to the loss; None for one that is, as all of calculus.

    A batch in one piece passes the gradient of its mean backward, micro-batches pass those of their sums: a gradient
    that is clipped, normalised or refused on the way, or gets noise, is another one. Only hooks and functions of the
    user's own do so.

    Args:
        probe: computes the gradient of a multiple.
        model: the weights.
        batch: the samples.
        gradient: that of the loss's sum, by trainable parameter.
        norm: its norm.
    """
    try:
        _, scaled = probe.gradient_of(probe.fresh(model), batch, 0, batch.size, factor=_FACTOR)
    except Exception as error:  # noqa: BLE001 - as of the loss itself
        problem = f"of {_FACTOR:g} times the loss it raises {type(error).__name__}: {error}"
        cause = "the backward pass: a hook or function refuses large gradients"
        return Agreement(math.nan, problem, cause, is_of_backward=True)
    scaled.reverse()
    difference = math.hypot(*(_norm([own - scaled.pop() / _FACTOR]) for own in gradient)) / max(norm, 1e-12)
    if not math.isfinite(difference) or difference <= _GRADIENT_ROUNDING * probe.tolerance:
        return None
    problem = f"the gradient of {_FACTOR:g} times the loss differs from {_FACTOR:g} gradients by {difference:.1e} of it"
    cause = "the backward pass: a hook or function clips or normalises gradients within it, or adds to them"
    return Agreement(difference, problem, cause, is_of_backward=True)


def _changed(what: str) -> str:
    return f"{what}, which every pass changes"


def _pass(probe: CouplingProbe, model: nn.Module, batch: Batch, start: int, stop: int) -> _Pass:
    value, gradient = probe.gradient_of(model, batch, start, stop)
    return _Pass(value, gradient, model)


def _subtract(gradient: list[torch.Tensor], part: list[torch.Tensor]) -> None:
    """Subtract a part's gradient, which is dropped: of a large model three in float64 are more than an update takes.

    Not in place: two parameters may have one tensor as their gradient.
    """
    part.reverse()
    for index, tensor in enumerate(gradient):
        gradient[index] = tensor - part.pop()


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(as_real(tensor).double().square().sum()) for tensor in tensors))


def _state_difference(one: nn.Module, other: nn.Module) -> tuple[str, float]:
    """The buffer that differs most between two models after their passes, and by how much relative to its size."""
    others = dict(other.named_buffers())
    worst, largest = "", 0.0
    for name, buffer in one.named_buffers():
        counterpart = others.get(name)
        if counterpart is None or counterpart.shape != buffer.shape:
            return f"the buffer {name!r}", math.inf
        a, b = as_real(buffer.detach()).double(), as_real(counterpart.detach()).double()
        difference = float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) if a.numel() else 0.0
        if difference > largest:
            owner = type(one.get_submodule(name.rpartition(".")[0])).__name__
            worst, largest = f"the buffer {name!r} of {owner}", difference
    return worst, largest


Halves = tuple[Indices, Indices]

_CONSISTENT = 1e-6
"""Relative tolerance for the weights of three groups to agree, for a scalar to be their weighted mean."""


@dataclass(frozen=True)
class _Call:
    """One call of a module: the rows of its inputs and of its output that belong to one half of the batch."""

    name: str
    inputs: list[torch.Tensor]
    output: list[torch.Tensor]


def coupling_causes(probe: CouplingProbe, where: Where) -> tuple[str, ...]:
    """The causes of a coupling: a module that mixes samples, the augmentation, or the loss.

    A module mixes samples if its input for one half stays when the other half is replaced, while its output moves; the
    innermost one is named. The augmentation does if the model gets other inputs for that half.
    """
    model, quad = where
    exchanges = [
        ((quad.first, quad.second), (quad.other_first, quad.second), 1),
        ((quad.first, quad.other_second), (quad.other_first, quad.other_second), 1),
        ((quad.first, quad.second), (quad.first, quad.other_second), 0),
        ((quad.other_first, quad.second), (quad.other_first, quad.other_second), 0),
    ]
    for one, two, kept in exchanges:  # two batches that share the half `kept`
        for before, after in zip(_calls(probe, model, one, kept), _calls(probe, model, two, kept), strict=False):
            stays = before.name == after.name and not _moved(before.inputs, after.inputs, probe)
            if stays and _moved(before.output, after.output, probe):
                kind = type(model.get_submodule(before.name)).__name__
                return (f"{kind} {before.name!r}" if before.name else f"the model ({kind})",)
        batches = [(probe.pool.batch(*halves), halves) for halves in (one, two)]
        inputs = [_half(batch.cut(0, batch.size), halves, kept) for batch, halves in batches]
        if _moved(inputs[0], inputs[1], probe):
            return ("the augmentation or preparation of inputs",)
    return (loss_cause(probe, where),)


def loss_cause(probe: CouplingProbe, where: Where) -> str:
    """The loss as a cause; a mean over tokens is recognised by how means of groups combine."""
    if probe.form() != "scalar":
        return "the loss"
    model, quad = where
    ordinary = next(itertools.islice(probe.pool.quads(probe.sizes, probe.job.seed), 1, None))
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


def _weights(
    probe: CouplingProbe, model: nn.Module, groups: tuple[Indices, Indices, Indices]
) -> tuple[float, ...] | None:
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


def _valid_targets(probe: CouplingProbe, rows: Indices) -> float:
    """Number of target entries of these samples that are not ignored; 0 where targets are not classes."""
    batch = probe.pool.batch(rows)
    target = probe.objective.fields.target_of(batch.cut(0, batch.size))
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return 0
    return float((target != IGNORED_TARGET).sum())


def _calls(probe: CouplingProbe, model: nn.Module, halves: Halves, half: int) -> list[_Call]:
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
    """The rows of half 0 or 1 of every floating tensor whose first dimension is the batch (or a multiple)."""
    rows: list[torch.Tensor] = []
    first, size = len(halves[0]), sum(map(len, halves))
    for tensor in tensors_of(values):
        if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] % size == 0:
            border = tensor.shape[0] // size * first
            rows.append((tensor[border:] if half else tensor[:border]).detach().clone())
    return rows


def _moved(one: list[torch.Tensor], other: list[torch.Tensor], probe: CouplingProbe) -> bool:
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return True
    return any(
        bool((a - b).abs().max() > probe.tolerance * a.abs().max())
        for a, b in zip(one, other, strict=True)
        if a.numel()
    )
