"""Traces of a job's updates: each made once, those of other micro-batches derived, those of equal blocks widened."""

from __future__ import annotations

import contextlib
import dataclasses
from importlib.metadata import version

import torch

from stoker import planning, profiling
from stoker.errors import RunFailed
from stoker.flow.preparation import Prepared
from stoker.jobs.describe import describe_settings
from stoker.records import Coupling, Trace, TraceSettings, digest
from stoker.store import TraceCache, cache_root

_SIZES = (2, 4)
"""Micro-batches that are traced; one sample is no size to conclude from, since a dimension of one broadcasts."""


class TraceBook:
    """`book(settings)` is the trace of one update of the whole model."""

    def __init__(self, prepared: Prepared, coupling: Coupling) -> None:
        self._prepared, self._coupling = prepared, coupling
        self._cache = TraceCache(cache_root() / "traces")
        self._identity = _identity(prepared)
        self._short: dict[TraceSettings, Trace] = {}
        self._whole: dict[TraceSettings, Trace] = {}

    def __call__(self, settings: TraceSettings) -> Trace:
        """The trace under these settings.

        Raises:
            BadJob: the model cannot be traced; operation and line are named.
        """
        if settings not in self._whole:
            self._whole[settings] = planning.expanded(self._derived(settings))
        return self._whole[settings]

    def _derived(self, settings: TraceSettings) -> Trace:
        """From two small micro-batches where that is exact, else traced as it is."""
        sizes = self._sizes(settings)
        if settings.micro_batch in sizes or len(sizes) < 2:
            return self._traced(settings)
        small, large = (self._traced(dataclasses.replace(settings, micro_batch=size)) for size in sizes)
        try:
            return planning.derived(small, large, settings.micro_batch)
        except planning.NotDerivable:
            return self._traced(settings)

    def _sizes(self, settings: TraceSettings) -> tuple[int, ...]:
        if self._coupling.kind != "separable":
            return ()
        return tuple(size for size in _SIZES if size * settings.parts <= self._prepared.job.batch)

    def _traced(self, settings: TraceSettings) -> Trace:
        """A trace as it is made or kept: of repeated blocks, only a few are in it."""
        if settings.capability == "9.0":  # runs the kernels of 8.0
            same = self._traced(dataclasses.replace(settings, capability="8.0"))
            return dataclasses.replace(same, settings=settings)
        if settings in self._short:
            return self._short[settings]
        key = None if self._identity is None else digest([self._identity, settings, self._coupling])
        found = None if key is None else self._cache.read(key)
        if found is None:
            prepared = self._prepared
            found = profiling.trace_with_repetition(prepared.job, prepared.data, self._coupling, settings)
            if key is not None:
                with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next planning seconds
                    self._cache.write(key, found)
        self._short[settings] = found
        return found


def _identity(prepared: Prepared) -> str | None:
    """What traces of a job depend on, as a digest; None for a job without a file, whose code nobody can compare."""
    entry = prepared.entry
    if entry is None:
        return None
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in prepared.model.named_parameters()]
    return digest(
        [entry.digest, entry.parameters, describe_settings(prepared.job), shapes, torch.__version__, version("stoker")]
    )
