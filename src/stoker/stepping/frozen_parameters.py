"""Parameters that are frozen, for good or until their update has come; settings in `stoker.jobs.freezing`.

What: a model is made with every parameter trainable that ever will be, since memory, layouts and the probe have to hold
for the end of a run; parameters that thaw later are frozen again before each update that comes too early. That depends
on the number of the update alone, so that a resumed or rolled-back run needs no state for it. Use when:
`Job(freeze=…)`. Costs: nothing; a single process skips the gradients of frozen parameters, several processes compute
and drop them, since their sums wait for every parameter.
"""

from __future__ import annotations

import bisect
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn

from stoker.errors import BadJob, nearest
from stoker.jobs import Job
from stoker.jobs.freezing import Freeze
from stoker.jobs.run_length import Extent
from stoker.stepping.batch_norm import batch_norms
from stoker.units import format_count

_NAMED_AT_MOST = 8
_NEXT_TO_ALL = 0.99


def freeze_for_good(model: nn.Module, freeze: Freeze) -> nn.Module:
    """`model` with the never trained parameters frozen, in place, and their batch norms in evaluation mode on request.

    Raises:
        BadJob: a pattern matches no parameter, or all are frozen at first.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in (*freeze.durations, *freeze.but):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            few = [*names[: _NAMED_AT_MOST - 1], names[-1]] if len(names) > _NAMED_AT_MOST else names
            raise BadJob(
                f"Job(freeze=…): {pattern!r} matches none of the {len(names)} parameters of {type(model).__name__}",
                remedy=f"Patterns are of whole names, such as 'encoder.*'. {nearest(pattern, few)}",
            )
    releases = _releases(model, freeze.release)
    if all(release for parameter, release in releases if parameter.requires_grad):
        raise BadJob(
            f"Job(freeze=…) leaves nothing of {type(model).__name__} to train at first",
            remedy="Let at least the last layer be trained from the first update on.",
        )
    frozen = [parameter for parameter, release in releases if math.isinf(release)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    if freeze.statistics == "kept":
        if norms := getattr(model, "keras_norms", None):
            raise BadJob(
                f"Job(freeze=…): {norms[0]!r} is a batch norm of Keras, which would go on moving its statistics",
                remedy="Set `layer.trainable = False` where the model is made, or freeze with statistics='moving'.",
            )
        known = set(map(id, frozen))
        for norm, parameters in _governed(model):
            if all(id(parameter) in known for parameter in parameters):
                norm.eval()
    return model


def with_all_unfrozen(job: Job) -> Job:
    """The job as it is at the end, with all temporary freezes over: it is measured and has to fit in that state."""
    return replace(job, freeze=job.freeze.at_the_end) if _is_gradual(job.freeze) else job


def with_freeze_in_updates(job: Job, extent: Extent) -> Job:
    """The job with the time until parameters thaw in updates of a run of that shape."""
    return replace(job, freeze=job.freeze.in_updates(extent)) if _is_gradual(job.freeze) else job


def describe_trained_share(job: Job, model: nn.Module) -> str | None:
    """The trained share of a model, which may be on the meta device, as text; None where it is (nearly) all."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    later = ""
    if _is_gradual(job.freeze):
        dates = [f"{pattern} after {duration}" for pattern, duration in job.freeze.durations.items() if duration]
        later = f"; of these are trained {', '.join(dates)}"
    if trained > _NEXT_TO_ALL * whole and not later:
        return None
    share = f"{format_count(trained)} of {format_count(whole)} parameters are trained ({100 * trained / whole:.3g} %)"
    return f"{share}{later}"


def thawing_updates(job: Job, model: nn.Module) -> dict[str, float]:
    """The first update that trains each parameter, by all its names; empty where nothing thaws during training.

    To be asked of the whole model: a stage of a pipeline has a tied parameter under some of its names.

    Raises:
        BadJob: durations are not in updates yet.
    """
    if not _is_gradual(job.freeze):
        return {}
    for pattern, duration in job.freeze.durations.items():
        if duration is not None and duration.unit != "updates":
            raise BadJob(
                f"Job(freeze=…): {pattern!r} is frozen for {duration}, and its updates were not counted",
                remedy="Give it in updates; `stoker train` counts epochs and samples itself.",
            )
    releases = {id(parameter): release for parameter, release in _releases(model, job.freeze.release)}
    return {name: releases[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


class GradualUnfreezing:
    """The part of a model that is frozen at first, which may be none; made from the model with nothing frozen yet.

    Args:
        job: what is frozen.
        model: its parameters may be this process's parts of them.
        optimizer: is made ready for parameters that thaw.
        updates: the `thawing_updates` of the whole model.
        is_alone: there are no other processes that wait for gradients.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        updates: Mapping[str, float],
        *,
        is_alone: bool,
    ) -> None:
        self._is_alone = is_alone
        self._frozen: list[nn.Parameter] = []
        self._releases: list[tuple[nn.Parameter, float]] = []
        self._norms: list[tuple[nn.Module, float]] = []
        if _is_gradual(job.freeze):
            self._read(job.freeze, model, updates)
        self._dates = sorted({release for _, release in self._releases})
        self._num_thawed = None if self._dates else 0
        if self._dates and type(optimizer) is torch.optim.SGD:
            self._divide(optimizer)

    def _read(self, freeze: Freeze, model: nn.Module, updates: Mapping[str, float]) -> None:
        """Note when each parameter and each batch norm thaws."""
        releases = _releases(model, updates.__getitem__)
        self._releases = [(p, release) for p, release in releases if p.requires_grad and release]
        known = {id(parameter): release for parameter, release in self._releases}
        self._norms = [
            (norm, max(known[id(parameter)] for parameter in parameters))
            for norm, parameters in (_governed(model) if freeze.statistics == "kept" else ())
            if norm.training and all(id(parameter) in known for parameter in parameters)
        ]

    def at(self, update: int) -> bool:
        """Freeze and thaw for update number `update` (from 0); whether anything changed."""
        num_thawed = bisect.bisect_right(self._dates, update)
        if num_thawed == self._num_thawed:
            return False
        self._num_thawed = num_thawed
        self._frozen = [parameter for parameter, release in self._releases if release > update]
        if self._is_alone:
            for parameter, release in self._releases:
                parameter.requires_grad_(release <= update)
        for norm, release in self._norms:
            norm.train(release <= update)
        return True

    def forget_gradients(self) -> None:
        """Drop the gradients that several processes computed for parameters that are frozen now."""
        if not self._is_alone:
            for parameter in self._frozen:
                parameter.grad = None

    def _divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Make parameters that thaw together a group of `optimizer`: a fused SGD's kernel takes all momenta or none."""
        known = {id(parameter): release for parameter, release in self._releases}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            together: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                together.setdefault(known.get(id(parameter), 0.0), []).append(parameter)
            groups += [{**group, "params": together[release]} for release in sorted(together)]
        optimizer.param_groups[:] = groups


def _is_gradual(freeze: object) -> TypeGuard[Freeze]:
    return isinstance(freeze, Freeze) and freeze.is_gradual


def _releases(model: nn.Module, release_of: Callable[[str], float]) -> list[tuple[nn.Parameter, float]]:
    """Each parameter with the update that thaws it; of several names that share one, the latest counts."""
    releases: dict[nn.Parameter, float] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        releases[parameter] = max(releases.get(parameter, 0.0), release_of(name))
    return list(releases.items())


def _governed(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Batch norms, each with the parameters it is frozen with: its own, or those of the module around it."""
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    for norm in batch_norms(model):
        name, parameters = names[id(norm)], list(norm.parameters())
        while not parameters and name:
            name = name.rpartition(".")[0]
            parameters = list(modules[name].parameters())
        if parameters:
            yield norm, parameters
