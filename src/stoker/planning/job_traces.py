"""Traces of a job's updates: each made once, those of other micro-batches derived, those of equal blocks widened."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from importlib.metadata import packages_distributions, version

import torch
from torch import nn

from stoker.errors import RunFailed
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.job_description import describe_settings
from stoker.loading.fields import map_tensors
from stoker.planning.model.trace_extrapolation import NotDerivable, derived, expanded
from stoker.planning.resolved_job import ResolvedJob
from stoker.profiling.tracing.repetition import trace_with_repetition
from stoker.records import Coupling, Trace, TraceSettings, digest
from stoker.store import cache_root, trace_cache

TRACE_LAYOUT = 2
"""Raised when what a trace says of the same job changes."""

_SIZES = (2, 4)
"""Micro-batches that are traced; one sample is no size to conclude from, since a dimension of one broadcasts."""


class TraceBook:
    """`book(settings)` is the trace of one update of the whole model."""

    def __init__(self, prepared: ResolvedJob, coupling: Coupling) -> None:
        self._prepared, self._coupling = prepared, coupling
        self._cache = trace_cache(cache_root())
        self._identity = _identity(prepared)
        self._short: dict[TraceSettings, Trace] = {}
        self._whole: dict[TraceSettings, Trace] = {}

    def __call__(self, settings: TraceSettings) -> Trace:
        """The trace under these settings.

        Raises:
            BadJob: the model cannot be traced; operation and line are named.
        """
        if settings not in self._whole:
            self._whole[settings] = expanded(self._derived(settings))
        return self._whole[settings]

    def _derived(self, settings: TraceSettings) -> Trace:
        """From two small micro-batches where that is exact, else traced as it is."""
        sizes = self._sizes(settings)
        if settings.micro_batch in sizes or len(sizes) < 2:
            return self._traced(settings)
        small, large = (self._traced(dataclasses.replace(settings, micro_batch=size)) for size in sizes)
        try:
            return derived(small, large, settings.micro_batch)
        except NotDerivable:
            return self._traced(settings)

    def _sizes(self, settings: TraceSettings) -> tuple[int, ...]:
        if self._coupling.kind != "separable" or isinstance(self._prepared.job.batch, TokenBatch):
            return ()  # of batches stated in tokens, small micro-batches have the longest samples
        return tuple(size for size in _SIZES if size * settings.parts <= self._prepared.job.batch)

    def _traced(self, settings: TraceSettings) -> Trace:
        """A trace as it is made or kept: of repeated blocks, only a few are in it."""
        if settings.target == "cuda" and settings.capability != "8.0" and _runs_alike(settings):
            same = self._traced(dataclasses.replace(settings, capability="8.0"))
            return dataclasses.replace(same, settings=settings)
        if settings in self._short:
            return self._short[settings]
        key = (
            None
            if self._identity is None
            else digest([self._identity, settings, self._coupling.kind, self._coupling.group])
        )
        found = None if key is None else self._cache.read(key)
        if found is None or found.is_fallback:
            prepared = self._prepared
            found = trace_with_repetition(prepared.job, prepared.data, self._coupling, settings)
            if key is not None and not found.is_fallback:  # the next process may be able to pretend the target
                with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next planning seconds
                    self._cache.write(found, key)
        self._short[settings] = found
        return found


def _runs_alike(settings: TraceSettings) -> bool:
    """Whether a GPU runs the kernels of one of capability 8.0: newer ones do, and in fp32 all do."""
    return settings.precision == "fp32" or float(settings.capability or 0) > 8


def _identity(prepared: ResolvedJob) -> str | None:
    """What traces of a job depend on, as a digest; None for a job without a file, whose code nobody can compare.

    The job file, its local imports and its parameters; the model as it prints itself, with names, shapes and dtypes of
    parameters and buffers; shapes and dtypes of a sample; the versions of what runs them.
    """
    entry = prepared.entry
    if entry is None:
        return None
    sample: list[str] = []
    train = prepared.data.train
    map_tensors(train.fetch(train.alike(1, prepared.job.batch), 0), lambda tensor: sample.append(_kind(tensor)))
    state = [(name, _kind(tensor)) for name, tensor in prepared.model.state_dict().items()]
    model = [type(prepared.model).__qualname__, repr(prepared.model), state]
    return digest([
        entry.text_digest, entry.parameters, describe_settings(prepared.job), model, sample, versions_of(prepared.model)
    ])  # fmt: skip


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


_distributions = functools.cache(packages_distributions)
"""Which package a module is from: every installed file is looked at, which takes a quarter of a second."""


def versions_of(model: nn.Module) -> list[str]:
    """Versions of Stoker, PyTorch, and the packages that the model's modules come from."""
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "stoker"})
    known = _distributions() if packages else {}
    found = [f"{name} {version(known[name][0])}" for name in packages if name in known]
    return [version("stoker"), torch.__version__, f"layout {TRACE_LAYOUT}", *found]
