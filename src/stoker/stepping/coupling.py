"""Do the samples of a batch influence each other's losses? Found by a probe, explained by module.

With f the loss sum of a batch made of two halves, samples are separable only if the mixed difference
f(A, B) + f(A', B') - f(A', B) - f(A, B') vanishes for any halves: then each half adds its own share. All four batches
have one shape and one seed, so that dropout draws the same masks and cannot hide or fake a coupling. Halves are real
samples; some rounds fill one with copies of a single sample, which overflows a capacity that random samples may not
reach. The probe runs in float64, where rounding is nine orders below any coupling that matters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from stoker.jobs import Job, Loss
from stoker.loading import Fields, Pipeline, Samples, Stream, key_of, seed_generators
from stoker.loading.order import Indices, KeyedPermutation
from stoker.records import Coupling
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.losses import Objective, is_scalar
from stoker.stepping.model import build_model, without_dropout

_ROUNDS = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest mixed difference, relative to the losses, that counts as none."""


def find_coupling(job: Job, samples: Samples) -> Coupling:
    """How the samples of an optimiser batch are coupled in this job; see `Coupling`.

    Raises:
        BadJob: the model or the loss cannot be evaluated on these samples.
    """
    group = job.coupling_group or job.batch
    if job.loss_scope == "batch":
        return Coupling(kind="whole_group", group=group, causes=("the loss",), evidence='declared: loss_scope="batch"')
    if job.batch == 1 or len(samples) < 2:
        return Coupling(kind="separable", group=None, causes=(), evidence="an update sees one sample")
    probe = _working_probe(job, samples)
    largest = probe.largest_mixed_difference()
    if largest <= probe.tolerance:
        return _separable_or_not_additive(probe, largest, group)
    evidence = f"replacing half of a batch moves the other half's loss by {largest:.1e} of it ({probe.describe()})"
    norms = batch_norms(probe.model)
    if norms and probe.with_frozen(norms).largest_mixed_difference() <= probe.tolerance:
        causes = tuple(probe.names_of(norms))
        return Coupling(kind="batch_norm", group=group, causes=causes, evidence=evidence)
    causes = (*probe.names_of(norms), *probe.with_frozen(norms).culprits())
    return Coupling(kind="whole_group", group=group, causes=causes, evidence=evidence)


def _separable_or_not_additive(probe: _Probe, largest: float, group: int) -> Coupling:
    evidence = f"mixed difference at most {largest:.1e} of the loss ({probe.describe()})"
    gap = probe.additivity_gap()
    if gap is None:
        return Coupling(kind="separable", group=None, causes=(), evidence=f"{evidence}; the model draws at random")
    if gap <= probe.tolerance:
        return Coupling(kind="separable", group=None, causes=(), evidence=f"{evidence}; halves add up to {gap:.1e}")
    causes = (probe.loss_cause(),)
    evidence = f"the sums or counts of two halves differ from the whole's by {gap:.1e} of it ({probe.describe()})"
    return Coupling(kind="whole_group", group=group, causes=causes, evidence=evidence)


@dataclass(frozen=True)
class _Probe:
    """A copy of the job's model, and losses of chosen samples on it."""

    job: Job
    samples: Samples
    model: nn.Module
    dtype: torch.dtype
    half: int

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.dtype]

    def describe(self) -> str:
        return f"{_ROUNDS} rounds of {2 * self.half} samples, {str(self.dtype).removeprefix('torch.')}"

    def loss(self, indices: Indices, seed: int = 0) -> tuple[float, float]:
        """(sum, count) of the batch of these samples; generators and buffers are the same at every call."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        seed_generators(key_of(Stream.PROBE, seed))
        prepared = self._pipeline()(self.samples.fetch(indices, 0), 0, indices)
        with torch.no_grad():
            loss: Loss = Objective(self.job).loss(self.model, prepared, len(indices))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        return float(loss.sum), float(loss.count)

    def largest_mixed_difference(self) -> float:
        """The largest mixed difference over all rounds, relative to the losses in it."""
        found = 0.0
        for a, b, other_a, other_b in self._halves():
            quads = [np.concatenate(pair) for pair in ((a, b), (other_a, other_b), (other_a, b), (a, other_b))]
            losses = [self.loss(indices) for indices in quads]
            for which in (0, 1):
                w, x, y, z = (loss[which] for loss in losses)
                found = max(found, abs(w + x - y - z) / max(abs(w), abs(x), abs(y), abs(z), 1e-12))
        return found

    def additivity_gap(self) -> float | None:
        """How far sums and counts of two halves are from the whole's, relatively; None if the model draws at random."""
        quiet = self.replaced(without_dropout(copy.deepcopy(self.model)))
        gap = 0.0
        for a, b, _, _ in self._halves():
            whole = np.concatenate((a, b))
            if quiet.loss(whole, seed=0) != quiet.loss(whole, seed=1):
                return None
            parts, together = (quiet.loss(a), quiet.loss(b)), quiet.loss(whole)
            for which in (0, 1):
                added = parts[0][which] + parts[1][which]
                gap = max(gap, abs(added - together[which]) / max(abs(together[which]), 1e-12))
        return gap

    def culprits(self) -> tuple[str, ...]:
        """The first module whose output for one half moves when the other half is replaced; else the loss."""
        for a, b, other_a, _ in self._halves():
            rows = [self._rows_of_second_half(np.concatenate((first, b))) for first in (a, other_a)]
            for name in rows[0]:
                one, two = rows[0][name], rows[1].get(name)
                scale = float(one.abs().max()) if one.numel() else 0.0
                is_moved = two is None or one.shape != two.shape or bool((one - two).abs().max() > self.tolerance * scale)
                if scale and is_moved:
                    return (f"{name} ({type(self.model.get_submodule(name)).__name__})",)
        return (self.loss_cause(),)

    def loss_cause(self) -> str:
        """What to call the loss when it is the cause."""
        indices = np.arange(min(2, len(self.samples)))
        prepared = self._pipeline()(self.samples.fetch(indices, 0), 0, indices)
        with torch.no_grad():
            if is_scalar(self.job, self.model, prepared, len(indices)):
                return "the loss: its scalar is not a mean over samples"
        return "the loss"

    def with_frozen(self, modules: list[nn.Module]) -> _Probe:
        """The same probe with these modules of the model in evaluation mode."""
        names = {name for name, module in self.model.named_modules() if any(module is m for m in modules)}
        frozen = copy.deepcopy(self.model)
        for name, module in frozen.named_modules():
            if name in names:
                module.eval()
        return self.replaced(frozen)

    def names_of(self, modules: list[nn.Module]) -> list[str]:
        """Counts of modules by type: `5 BatchNorm2d`."""
        kinds = [type(module).__name__ for module in modules]
        return [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]

    def replaced(self, model: nn.Module) -> _Probe:
        return _Probe(self.job, self.samples, model, self.dtype, self.half)

    def _pipeline(self) -> Pipeline:
        fields = Fields(self.job.inputs, self.job.target)
        device = torch.device("cpu")
        return Pipeline(device, fields, self.samples.prepare, self.job.augment, self.job.seed, dtype=self.dtype)

    def _halves(self) -> Iterator[tuple[Indices, Indices, Indices, Indices]]:
        """(A, B, A', B') for every round: first ordinary samples, then halves of one repeated sample."""
        order = KeyedPermutation(len(self.samples), key_of(Stream.PROBE, self.job.seed))
        for turn in range(_ROUNDS):
            places = (np.arange(4 * self.half, dtype=np.int64) + 4 * self.half * turn) % len(self.samples)
            a, b, other_a, other_b = np.split(order(places), 4)
            if turn >= _ROUNDS // 2:
                other_a, other_b = np.repeat(other_a[:1], self.half), np.repeat(other_b[:1], self.half)
            yield a, b, other_a, other_b

    def _rows_of_second_half(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Every module's output rows that belong to the second half of the batch, in call order."""
        rows: dict[str, torch.Tensor] = {}
        handles = [
            module.register_forward_hook(_keeping_rows(rows, name, len(indices)))
            for name, module in self.model.named_modules()
            if name
        ]
        try:
            self.loss(indices)
        finally:
            for handle in handles:
                handle.remove()
        return rows


def _keeping_rows(rows: dict[str, torch.Tensor], name: str, size: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        is_batch = isinstance(output, torch.Tensor) and output.dim() > 0 and output.shape[0] % size == 0
        if is_batch and isinstance(output, torch.Tensor) and output.is_floating_point() and name not in rows:
            rows[name] = output[output.shape[0] // 2 :].detach().clone()

    return hook


def _working_probe(job: Job, samples: Samples) -> _Probe:
    """A probe in float64 of as many samples as are quick; in fp32, or of the real batch, where the model insists."""
    model = build_model(job)
    small, real = min(2, max(1, job.batch // 2)), max(1, job.batch // 2)
    for dtype, half in ((torch.float64, small), (torch.float32, small), (torch.float64, real)):
        probe = _Probe(job, samples, copy.deepcopy(model).to(dtype), dtype, half)
        try:
            started = time.perf_counter()
            probe.loss(np.arange(2 * half, dtype=np.int64) % len(samples))
        except Exception:  # noqa: BLE001, S112: the last attempt below shows what is wrong
            continue
        is_quick = half == small and time.perf_counter() - started < 0.05
        return _Probe(job, samples, probe.model, dtype, min(real, 16) if is_quick else half)
    probe = _Probe(job, samples, model, torch.float32, real)
    probe.loss(np.arange(2 * real, dtype=np.int64) % len(samples))
    return probe
