"""Do the samples of a batch influence each other's losses? Found by a probe, explained by module.

Samples are separable where three things hold, whatever the samples: each half of a batch adds its own share to the loss
(the mixed difference vanishes); a batch's sum, count and gradient are those of its parts together; and the state that a
pass leaves behind (buffers, and what is hidden in Python) is the same whether the batch passes whole or in parts, and
moves no loss. The first sees through random draws, which are keyed alike; for the others they are silenced.

What couples samples, by name: the module that mixes them, the augmentation, or the loss.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch
from stoker.loading.fields import map_tensors
from stoker.loading.order import Indices
from stoker.loading.samples import Samples
from stoker.records import Coupling, CouplingKind
from stoker.stepping.accumulation_check import Agreement, compare_groups, compare_large, compare_parts
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.foreign_models import require_aligned
from stoker.stepping.losses import IGNORED_TARGET
from stoker.stepping.probe import CouplingProbe, Where, fresh, working_probe
from stoker.stepping.random_draws import RandomDraws

_SHARE_OF_PROBE = 0.1
_SHARED = "its draws do not grow with the batch, and the loss depends on them: each part would have a draw of its own"


def find_coupling(job: Job, samples: Samples) -> Coupling:
    """How the samples of an optimiser batch are coupled in this job; see `Coupling`.

    What it cannot see: a coupling that none of the batches it tries brings out, such as a capacity that only rare
    batches exceed. `evidence` says how many it tried.

    Raises:
        BadJob: the model or the loss cannot be evaluated on these samples.
    """
    if job.step is not None:
        return _by_own_step(job)
    if job.loss_scope == "batch":
        return _coupled(job, "whole_group", ("the loss",), 'declared: loss_scope="batch"')
    if job.batch == 1 or len(samples) < 2:
        return _separable("an update sees one sample")
    began_s = time.process_time()
    probe = working_probe(job, samples)
    _, quad = next(probe.quads())
    require_aligned(job, probe.model, probe.pool.batch(quad.first).cut(0, len(quad.first)))
    probe.require_by_sample()
    is_repeatable, probe = probe.repeated()
    found = _probed(job, probe, len(samples), is_repeatable=is_repeatable, began_s=began_s)
    return replace(found, unsaved=probe.carried.unsaved, notices=() if probe.notice is None else (probe.notice,))


def _probed(job: Job, probe: CouplingProbe, num_samples: int, *, is_repeatable: bool, began_s: float) -> Coupling:
    """What comparisons of losses show; the CPU time of this process was `began_s` when probing began [s]."""
    if not is_repeatable:
        cause = "the model or the loss: it draws from generators of its own, or keeps hidden state"
        return _coupled(
            job, "whole_group", (cause,), "the same batch, seed and weights give another loss when repeated"
        )
    _require_last_batch(job, probe, num_samples)
    norms, compared_s = _statistics(probe), time.process_time()
    largest, where = probe.largest_mixed_difference()
    compared_s = time.process_time() - compared_s
    evidence = _moves(probe, largest)
    if norms and largest > probe.tolerance:
        thawed, probe = probe, probe.with_frozen(norms)
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
    size = _affordable(probe, job.batch, compared_s, time.process_time() - began_s)
    if size <= sum(probe.sizes) or math.isnan(parts.largest):
        return replace(_separable(f"{compared} ({probe.describe()})"), tried=sum(probe.sizes))
    large = compare_large(probe, size)
    if large.problem is not None:
        return _coupled(job, "whole_group", (str(large.cause),), large.problem)
    if math.isnan(large.largest):
        return replace(_separable(f"{compared} ({probe.describe()})"), tried=sum(probe.sizes))
    return replace(_separable(f"{compared} ({probe.describe()}, and a batch of {size})"), tried=size)


def _affordable(probe: CouplingProbe, batch: int, compared_s: float, spent_s: float) -> int:
    """The largest batch, up to the job's, that is compared with its halves in a share of what the probe took [samples].

    Estimated from CPU times: that of one loss of few samples, and `compared_s` of all losses of the rounds [s].
    """
    (few, few_s), many = probe.few, sum(probe.sizes)
    if many <= few:
        return many
    many_s = compared_s / (4 * probe.rounds)
    each_s = max(1e-9, (many_s - few_s) / (many - few))
    fixed_s = max(0.0, many_s - many * each_s)
    return min(batch, max(many, int((_SHARE_OF_PROBE * spent_s - 3 * fixed_s) / (2 * each_s))))


def coupling_by_types(job: Job, model: nn.Module, why: str) -> Coupling:
    """What the types of a model's modules tell, where it cannot be run: batch normalisation couples, else nothing seen.

    `model` may be an outline; `why` it was not probed goes into the evidence. The probe is made where it is trained.
    """
    if job.step is not None:
        return _by_own_step(job)
    if job.loss_scope == "batch":
        return _coupled(job, "whole_group", ("the loss",), 'declared: loss_scope="batch"')
    norms = batch_norms(model)
    evidence = f"by the types of its modules only, not probed: {why}"
    return _coupled(job, "batch_norm", _counted(norms), evidence) if norms else _separable(evidence)


def _by_own_step(job: Job) -> Coupling:
    return _coupled(job, "whole_group", ("the job's own step",), "declared: step=…, which is atomic and never cut")


def _by_batch_norm(job: Job, probe: CouplingProbe, frozen: CouplingProbe, where: Where, evidence: str) -> Coupling:
    """The coupling of a job that is separable but for its batch statistics."""
    names = _counted(_statistics(probe))
    parts = compare_parts(frozen)
    if parts.problem is not None:
        cause = parts.cause or loss_cause(frozen, where)
        return _coupled(job, "whole_group", (*names, cause), f"{evidence}; {parts.problem}")
    if job.coupling_group is not None and job.coupling_group < job.batch:
        if (shared := frozen.shared_draw()) is not None:
            return _coupled(job, "whole_group", (*names, shared), f"{evidence}; {_SHARED}")
        groups = compare_groups(probe)
        if groups.problem is not None:
            return _coupled(job, "whole_group", names, f"{evidence}; {groups.problem}")
    return _coupled(job, "batch_norm", names, f"{evidence}; without batch statistics {_adds_up(parts)}")


def _require_last_batch(job: Job, probe: CouplingProbe, num_samples: int) -> None:
    """Refuse a job whose epoch ends in a batch, or in a group of one sample, that the model cannot take."""
    if isinstance(job.batch, TokenBatch):
        return  # that samples are separable is yet to be found; of coupled ones the batch is refused
    group = job.coupling_group or job.batch
    whole, rest = divmod(num_samples, job.batch)
    has_single = group > 1 and 1 in {job.batch % group if whole else 0, rest % group}
    tried = 1 if has_single and _statistics(probe) else rest if sum(probe.sizes) == job.batch else 0
    if tried == 0:
        return
    row = next(probe.quads())[1].first[:1]
    try:
        probe.value(probe.model, *[row] * tried)
    except (RuntimeError, ValueError) as error:
        where = f"{num_samples} samples in batches of {job.batch}" + (f" and groups of {group}" if has_single else "")
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
    batch: int = job.batch
    if isinstance(batch, TokenBatch):
        raise BadJob(
            f"Job(batch={batch!r}) makes batches of different numbers of samples, and those of this job influence one "
            f"another through {', '.join(causes)} ({evidence})",
            remedy="Give the batch as a number of samples, or take layers that treat each sample by itself.",
        )
    return Coupling(kind=kind, group=job.coupling_group or job.batch, causes=causes, evidence=evidence)


def _moves(probe: CouplingProbe, largest: float) -> str:
    return f"replacing half of a batch moves the other half's loss by {largest:.1e} of it ({probe.describe()})"


def _adds_up(parts: Agreement) -> str:
    if math.isnan(parts.largest):
        return "parts were not compared with the whole: random draws could not be silenced, or its loss was not finite"
    return f"sums, counts, gradients and state of parts agree with the whole's to {parts.largest:.1e}"


def _counted(modules: list[nn.Module]) -> tuple[str, ...]:
    """Modules that can be frozen, by type: `5 BatchNorm2d`."""
    kinds = [type(module).__name__ for module in modules if getattr(module, "running_mean", None) is not None]
    return tuple(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


Halves = tuple[Indices, Indices]

_CONSISTENT = 1e-6
"""How well the weights of three groups must agree with each other [relative] for a scalar to be their weighted mean."""


@dataclass(frozen=True)
class _Call:
    """One call of a module: the rows of its inputs and of its output that belong to one half of the batch."""

    name: str
    inputs: list[torch.Tensor]
    output: list[torch.Tensor]


def coupling_causes(probe: CouplingProbe, where: Where) -> tuple[str, ...]:
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


def _mixer(probe: CouplingProbe, model: nn.Module, one: Halves, two: Halves, kept: int) -> str | None:
    """What moves the half `kept` between two batches that share it."""
    for before, after in zip(_calls(probe, model, one, kept), _calls(probe, model, two, kept), strict=False):
        stays = before.name == after.name and not _moved(before.inputs, after.inputs, probe)
        if stays and _moved(before.output, after.output, probe):
            kind = type(model.get_submodule(before.name)).__name__
            return f"{kind} {before.name!r}" if before.name else f"the model ({kind})"
    batches = [probe.pool.batch(*halves) for halves in (one, two)]
    inputs = [_half(batch.cut(0, batch.size), halves, kept) for batch, halves in zip(batches, (one, two), strict=True)]
    return "the augmentation or preparation of inputs" if _moved(inputs[0], inputs[1], probe) else None


def loss_cause(probe: CouplingProbe, where: Where) -> str:
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
    """Entries of the targets of these samples that are not marked to be ignored; 0 where targets are no classes."""
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


def _moved(one: list[torch.Tensor], other: list[torch.Tensor], probe: CouplingProbe) -> bool:
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return True
    return any(
        bool((a - b).abs().max() > probe.tolerance * a.abs().max())
        for a, b in zip(one, other, strict=True)
        if a.numel()
    )
