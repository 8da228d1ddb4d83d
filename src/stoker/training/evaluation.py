"""Evaluating the weights worth keeping on all of a set, in order.

Metrics that keep a state, such as those of torchmetrics: shown each batch once, computed once at the end.

What: copies of the job's objects, reset for each evaluation. Several processes each see their part; then all have the
states of all, reduced as the metric says (sums, means, what is laid end to end), and compute the same.
Use when: a metric is no mean over samples: F1, AUROC, a correlation, results for each class.
Costs: what the metric keeps; a curve or an exact AUROC keeps all outputs. Does not combine with: stages, of which only
the last sees outputs; metrics without torchmetrics' declared states, where there are several processes.
Source: `torchmetrics.Metric._sync_dist` (1.9) reduces alike; here states go together, empty ones included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import safetensors.torch
import torch

from stoker.errors import BadJob, RunFailed
from stoker.jobs import Job
from stoker.jobs.early_stopping import LOWER_IS_BETTER
from stoker.jobs.metrics import Named, is_stateful, metric_name
from stoker.loading.batches import Batch, Split, in_order
from stoker.loading.fields import Content
from stoker.loading.samples import Samples
from stoker.records.codec import JSON
from stoker.stepping.losses import Compared
from stoker.stepping.step import Step
from stoker.stepping.step_failures import ran_out_of_memory
from stoker.stepping.world import World, gather_bytes, gather_json


class EvaluationWatcher(Protocol):
    """Looks on while a set is evaluated."""

    def see(self, output: Any, target: Any, content: Content, batch: Batch) -> None:
        """Take in a batch of samples that count here, which `content` is, ready for the model."""
        ...

    def miss(self, problem: Exception) -> None:
        """Hear why there is no output to see of a batch; its loss may be there all the same."""
        ...


def evaluate(
    step: Step,
    samples: Samples,
    size: int,
    beat: Callable[[], None] | None = None,
    watcher: EvaluationWatcher | None = None,
) -> dict[str, float]:
    """The loss and every metric over `samples`, evaluated in batches of `size`: sums divided once by their counts.

    Metrics that keep a state are copied, see every sample once, and compute what they compute at the end.
    Several processes take a part each, and all have the result.
    `beat` is called after each batch, for whoever watches whether something goes on; `watcher` sees the samples that
    are evaluated here.

    Raises:
        RunFailed: a metric counted nothing.
        BadJob: a metric with a state gives something else than numbers, or cannot be had from several processes.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    world = step.world
    part = Split(world.data_rank, world.layout.data_size)
    stateful = stateful_metrics(step)
    shown: list[tuple[Batch, bool]] = []

    def observe(compared: Compared, content: Content) -> None:
        batch, counts_here = shown[-1]
        try:
            output, target = compared()  # also where nothing counts: processes that share a model meet in it
        except Exception as problem:
            if watcher is None or stateful is not None or ran_out_of_memory(problem):
                raise
            watcher.miss(problem)
            return
        if counts_here and stateful is not None:
            with torch.autocast(step.device.type, enabled=False):
                stateful.update(output, target)
        if counts_here and watcher is not None:
            watcher.see(output, target, content, batch)

    is_observed = stateful is not None or watcher is not None
    with step.evaluation() as measure, step.objective.observed_by(observe if is_observed else None):
        for batch in in_order(samples, step.pipeline(samples, augmented=False), size, part):
            counts_here = all(one.counts for one in batch.passes(size))
            shown[:] = [(batch, counts_here)]
            for name, found in measure(batch.cut(0, batch.size), batch.size).items():
                sums[name] = sums.get(name, 0.0) + float(found.sum) * counts_here
                counts[name] = counts.get(name, 0.0) + float(found.count) * counts_here
            if beat is not None:
                beat()
        if part.parts > 1:
            both = torch.tensor([list(sums.values()), list(counts.values())], dtype=torch.float64, device=step.device)
            total_sums, total_counts = world.total(both).tolist()
            sums, counts = dict(zip(sums, total_sums, strict=True)), dict(zip(sums, total_counts, strict=True))
    if empty := [name for name, count in counts.items() if count == 0]:
        raise RunFailed(f"{empty[0]} counted nothing in {len(samples)} samples of {samples.name}")
    whole = {name: sums[name] / counts[name] for name in sums}
    return whole if stateful is None else whole | stateful.computed(world)


def evaluation_batch(step: Step) -> int:
    """Samples evaluated at once: the plan's micro-batch, which is one group where the loss needs whole groups."""
    return step.plan.micro_batch


def is_better(name: str, value: float, than: float | None, *, lower: bool = False) -> bool:
    """Whether `value` of the measure `name` is better; any number is better than none, or than NaN.

    Lower is better of the loss, of errors by name, and where `lower` says so.
    """
    if than is None or math.isnan(than):
        return than is None or not math.isnan(value)
    return value < than if lower or name in LOWER_IS_BETTER else value > than


_STATES = "_reductions"
"""Where a metric of torchmetrics says how each of its states is reduced; there since its first release."""

MOST_STATE_BYTES = 8 * 2**30
"""Most that the states of one metric may take in another process [bytes]; a curve keeps all outputs."""


def stateful_metrics(step: Step) -> StatefulMetrics | None:
    """The step's metrics with a state, fresh; None if the job has none.

    Raises:
        BadJob: the layout has stages.
    """
    if not any(map(is_stateful, step.job.metrics)):
        return None
    if step.world.layout.stages > 1:
        raise BadJob("metrics that keep a state see outputs, which only the last of several stages has",
                     remedy="Use a layout without stages, or a metric of values per sample.")  # fmt: skip
    return StatefulMetrics(step.job, step.device)


class StatefulMetrics:
    """Fresh copies of a job's metrics with a state, on the device that computes."""

    def __init__(self, job: Job, device: torch.device) -> None:
        meant = [one for one in job.metrics if is_stateful(one)]
        self._metrics = {metric_name(one): _fresh(one, device) for one in meant}
        self._of_probabilities = {metric_name(one) for one in meant if isinstance(one, Named) and one.of_probabilities}

    def update(self, output: Any, target: Any) -> None:
        """Show all of them a batch.

        Raises:
            BadJob: one cannot take it.
        """
        for name, metric in self._metrics.items():
            try:
                metric.update(_probabilities(output) if name in self._of_probabilities else output, target)
            except (TypeError, ValueError, RuntimeError, IndexError) as problem:
                raise BadJob(f"metric {name} raised {type(problem).__name__}: {str(problem).strip()}",
                             remedy="It is given the model's output and the target.") from problem  # fmt: skip

    def computed(self, world: World) -> dict[str, float]:
        """What all of them found, in all processes: `name`, or `name[i]` of a vector, or the names they give.

        Raises:
            BadJob: one found something else than numbers, or its state cannot be gathered.
        """
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if world.layout.data_size > 1:
                share_states(metric, name, world)
            found |= numbers_in(metric.compute(), name)
        return found


def numbers_in(value: Any, name: str) -> dict[str, float]:
    """A result as numbers by name.

    >>> numbers_in(torch.tensor([0.5, 1.0]), "f1")
    {'f1[0]': 0.5, 'f1[1]': 1.0}

    Raises:
        BadJob: it is a matrix, or no number.
    """
    if isinstance(value, Mapping):
        return {key: number for inner, one in value.items() for key, number in numbers_in(one, str(inner)).items()}
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1:
        return {f"{name}[{at}]": float(one) for at, one in enumerate(value.tolist())}
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return {name: float(value)}
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise BadJob(
        f"metric {name} computed {shape}; results are numbers, vectors, or dicts of them",
        remedy="The report shows a confusion matrix of classifiers without being asked.",
    )


def share_states(metric: Any, name: str, world: World) -> None:
    """Put the reduced states of all processes into this one's metric; each of them calls this.

    Raises:
        BadJob: the metric does not say how its states are reduced.
    """
    parts = [one for one in (metric.modules() if hasattr(metric, "modules") else [metric]) if hasattr(one, _STATES)]
    if not parts:
        raise BadJob(f"metric {name} does not say how its states of several processes become one",
                     remedy="Use one of torchmetrics', or evaluate in one process.")  # fmt: skip
    mine = [{key: getattr(part, key) for key in getattr(part, _STATES)} for part in parts]
    counts = [getattr(part, "_update_count", 0) for part in parts]
    everyone = [(world.data_rank, mine, counts)]
    if world.layout.world_size > 1:
        skeleton, tensors = _pack_states(mine)
        told = gather_json([world.data_rank, skeleton, counts], world.device)
        parcels = gather_bytes(safetensors.torch.save(tensors), world.device, most_bytes=MOST_STATE_BYTES)
        everyone = [(rank, _unpack_states(states, safetensors.torch.load(parcel)), seen)
                    for (rank, states, seen), parcel in zip(told, parcels, strict=True)]  # fmt: skip
    # Processes that share a part of the batch, as in tensor parallel, have seen the same: one of them speaks.
    by_part = {rank: (states, seen) for rank, states, seen in reversed(everyone)}
    told = [by_part[rank] for rank in sorted(by_part)]
    for at, part in enumerate(parts):
        for key, reduction in getattr(part, _STATES).items():
            setattr(part, key, _reduced([states[at][key] for states, _ in told], reduction, part.device))
        part._update_count = max(seen[at] for _, seen in told)  # noqa: SLF001 - else an empty part warns of no update
        part._computed = None  # noqa: SLF001 - what it may have computed of its own part


def _fresh(metric: Any, device: torch.device) -> Any:
    given: Any = copy.deepcopy(metric.metric if isinstance(metric, Named) else metric)
    placed = given.to(device) if hasattr(given, "to") else given
    for part in placed.modules() if hasattr(placed, "modules") else ():
        if hasattr(part, _STATES):
            part.sync_on_compute = False  # states are gathered here
    placed.reset()
    return placed


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Of scores [B, classes, ...], or of one logit a sample."""
    return scores.softmax(1) if scores.dim() > 1 and scores.shape[1] > 1 else scores.sigmoid()


def _pack_states(states: Any) -> tuple[JSON, dict[str, torch.Tensor]]:
    """States as JSON with numbers in the place of tensors, and the tensors by number."""
    tensors: dict[str, torch.Tensor] = {}

    def numbered(state: Any) -> JSON:
        if isinstance(state, torch.Tensor):
            tensors[str(len(tensors))] = state.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": str(len(tensors) - 1)}
        return [numbered(one) for one in state] if isinstance(state, list) else {"value": state}

    return [{key: numbered(state) for key, state in part.items()} for part in states], tensors


def _unpack_states(states: JSON, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """States that `_apart` took to pieces."""

    def put_back(state: JSON) -> Any:
        if isinstance(state, list):
            return [put_back(one) for one in state]
        return tensors[state["tensor"]] if "tensor" in state else state["value"]

    return [{key: put_back(state) for key, state in part.items()} for part in states]


def _reduced(states: list[Any], reduction: Any, device: torch.device) -> Any:
    """One state of those of all processes."""
    if isinstance(states[0], list):
        return [one.to(device) for state in states for one in state]
    if not isinstance(states[0], torch.Tensor):
        return states[0]
    stacked = torch.stack(states).to(device)
    return stacked if reduction is None else reduction(stacked)
