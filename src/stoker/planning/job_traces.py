"""Traces of a job's updates: each made once, other micro-batches extrapolated, repeated blocks expanded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import torch
from torch import nn

from stoker.errors import RunFailed
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.code_digest import reached_digest
from stoker.jobs.job_description import describe_settings
from stoker.loading.fields import tensors_of
from stoker.planning.model.trace_extrapolation import Derivation, NotDerivable, expanded
from stoker.planning.resolved_job import ResolvedJob
from stoker.profiling.tracing.fake_device import can_pretend_cuda
from stoker.profiling.tracing.repetition import Tracers, traces_with_repetition
from stoker.profiling.tracing.update import FETCHED
from stoker.records import Coupling, Trace, TraceSettings, digest
from stoker.store import cache_root, trace_cache

TRACE_LAYOUT = 13
"""Version of traces in the cache; raised when the trace of the same job changes."""

_SIZES = (2, 4)
"""Micro-batches that are traced [samples]. Not 1: a dimension of one broadcasts."""


def with_same_kernels(settings: TraceSettings) -> TraceSettings:
    """The settings under which the same operations are traced: of GPUs those of the oldest with the same kernels.

    GPUs newer than compute capability 8.0 run its kernels, and fp8 came with 8.9; in fp32 all GPUs do.
    """
    if settings.target == "cuda" and settings.precision == "fp8":
        return dataclasses.replace(settings, capability="8.9")
    has_kernels_of_8 = settings.precision == "fp32" or float(settings.capability or 0) > 8
    is_other = settings.target == "cuda" and has_kernels_of_8
    return dataclasses.replace(settings, capability="8.0") if is_other else settings


class TraceBook:
    """`book(settings)` is the trace of one update of the whole model."""

    def __init__(self, prepared: ResolvedJob, coupling: Coupling) -> None:
        self._prepared, self._coupling = prepared, coupling
        self._cache = trace_cache(cache_root())
        self._identity = _identity(prepared)
        self._short: dict[TraceSettings, Trace] = {}
        self._whole: dict[TraceSettings, Trace] = {}
        self._derivations: dict[TraceSettings, Derivation | None] = {}
        self._not_derived: set[int] = set()
        self._shapes_of: dict[int, list[str]] = {}
        self._tracers: Tracers = {}

    def __call__(self, settings: TraceSettings) -> Trace:
        """The trace under these settings.

        Raises:
            BadJob: the model cannot be traced; operation and line are named.
        """
        if settings not in self._whole:
            same = with_same_kernels(settings)
            whole = self._made(same) if same == settings else self(same)
            self._whole[settings] = dataclasses.replace(whole, settings=settings)
        return self._whole[settings]

    def _made(self, settings: TraceSettings) -> Trace:
        """Extrapolated from two small micro-batches where that is exact, else traced as it is; with all blocks."""
        job = self._prepared.job
        sizes = [size for size in _SIZES if size * settings.parts <= job.batch_size]
        # In batches stated in tokens, small micro-batches have the longest samples.
        is_uniform = self._coupling.kind == "separable" and not isinstance(job.batch, TokenBatch)
        both = [dataclasses.replace(settings, micro_batch=size) for size in sizes]
        is_derivable = is_uniform and len(both) == len(_SIZES) and settings.micro_batch not in self._not_derived
        if not is_derivable or settings in both:
            return expanded(self._traced(settings))
        # On a CPU, batches are storages in the midst of the state: each trace has its own order.
        if settings.target == "cuda" and can_pretend_cuda():
            self._make(both)
        derivation = self._derivation(*both)
        if derivation is not None:
            try:
                return derivation.at(settings.micro_batch)
            except NotDerivable:  # nor under other settings: small ones need not be traced for it then
                self._not_derived.add(settings.micro_batch)
        return expanded(self._traced(settings))

    def _derivation(self, small: TraceSettings, large: TraceSettings) -> Derivation | None:
        """What other micro-batches are derived by; None if they cannot be.

        Blocks left out are put in before sizes are derived: once for all micro-batches.
        """
        if small not in self._derivations:
            wholes = self(small), self(large)
            self._derivations[small] = None
            with contextlib.suppress(NotDerivable):
                self._derivations[small] = Derivation(*wholes)
        return self._derivations[small]

    def _traced(self, settings: TraceSettings) -> Trace:
        """A trace as it is made or cached, with only a few of the repeated blocks."""
        self._make([settings])
        return self._short[settings]

    def _make(self, every: Sequence[TraceSettings]) -> None:
        """Make, or read, those of the traces that are not known; the settings differ in the micro-batch alone."""
        keys = {settings: self._key(settings) for settings in every if settings not in self._short}
        for settings, key in keys.items():
            cached = None if key is None else self._cache.read(key)
            if cached is not None and not cached.is_fallback:
                self._short[settings] = cached
        missing = [settings for settings in keys if settings not in self._short]
        if not missing:
            return
        prepared = self._prepared
        traces = traces_with_repetition(prepared.job, prepared.data, self._coupling, missing, self._tracers)
        for settings, trace in zip(missing, traces, strict=True):
            key = keys[settings]
            if key is not None and not trace.is_fallback:  # the next process may be able to pretend the target
                with contextlib.suppress(RunFailed):  # an unwritable cache costs the next planning seconds
                    self._cache.write(trace, key)
            self._short[settings] = trace

    def _key(self, settings: TraceSettings) -> str | None:
        """The key of a trace in the cache; None for a job without a file."""
        if self._identity is None:
            return None
        shapes, coupling = self._shapes(settings.micro_batch), self._coupling
        return digest([self._identity, shapes, settings, coupling.kind, coupling.group])

    def _shapes(self, micro_batch: int) -> list[str]:
        """Shapes and dtypes of the samples that a trace of so many is made of."""
        if micro_batch not in self._shapes_of:
            train = self._prepared.data.train
            fetched = train.fetch(train.representative(FETCHED, micro_batch), 0)
            self._shapes_of[micro_batch] = list(map(_kind, tensors_of(fetched)))
        return self._shapes_of[micro_batch]


def _identity(prepared: ResolvedJob) -> str | None:
    """Digest of what traces of a job depend on; None for a job without a file, whose code cannot be compared.

    The job file, its local imports and its parameters; code elsewhere that they reach; the model's `repr`, with names,
    shapes and dtypes of parameters and buffers; versions of the packages that run them.
    """
    entry = prepared.entry
    if entry is None:
        return None
    state = [(name, _kind(tensor)) for name, tensor in prepared.model.state_dict().items()]
    model = [type(prepared.model).__qualname__, repr(prepared.model), state]
    return digest(
        [
            entry.digest,
            code_digest(prepared),
            entry.parameters,
            describe_settings(prepared.job),
            model,
            versions_of(prepared.model),
        ]
    )


def code_digest(prepared: ResolvedJob) -> str:
    """Digest of the code that model, loss and transforms reach by name, in whatever folder it is; not of packages.

    A package that is installed to be edited, as by `pip install -e`, is not one: its version stays while it changes.
    """
    job, model = prepared.job, prepared.model
    made_by = None if isinstance(job.model, nn.Module) else job.model
    called = (made_by, job.step, job.objective.loss, getattr(job.fields, "collate", None), *job.augment)
    types = dict.fromkeys(type(module) for module in model.modules())
    return reached_digest([*types, *(part for one in called for part in (one, type(one)))])


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


_distributions = functools.cache(packages_distributions)
"""The package of each module. Cached: reading all installed files takes a third of a second."""


def _version(package: str) -> str | None:
    """Version of the installed package of the top-level module `package`; None for the user's own modules."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if not {"site-packages", "dist-packages"} & set(Path(file).parts):
        return None
    with contextlib.suppress(PackageNotFoundError):  # most are installed under the name they are imported by
        return version(package)
    names = _distributions().get(package)
    return version(names[0]) if names else None


def versions_of(model: nn.Module) -> list[str]:
    """Versions of Stoker, PyTorch, and the packages that the model's modules come from."""
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "stoker"})
    versions = [f"{name} {number}" for name in packages if (number := _version(name)) is not None]
    return [version("stoker"), torch.__version__, f"layout {TRACE_LAYOUT}", *versions]
