"""Evaluation: the loss and the metrics of the weights worth keeping, over all of a set, in order.

Stateful metrics, such as those of torchmetrics, are copies of the job's objects: reset for each evaluation, updated
with each batch, computed once at the end. Several processes each see their part; then all gather the states, reduce
them as the metric says (sums, means, concatenation), and compute the same.
Use when: a metric is no mean over samples: F1, AUROC, a correlation, results per class.
Costs: the metric's state; a curve or an exact AUROC keeps all outputs. Does not combine with: pipeline stages, of which
only the last sees outputs; several processes and metrics without torchmetrics' declared states.
Source: `torchmetrics.Metric._sync_dist` (1.9) reduces in the same way; here all states go together, empty ones too.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch

from stoker.activity import doing
from stoker.errors import BadJob, RunFailed, first_line
from stoker.jobs import Job
from stoker.jobs.early_stopping import LOWER_IS_BETTER
from stoker.jobs.metrics import Named, is_stateful, metric_name
from stoker.loading.batches import Batch, Split, in_order
from stoker.loading.fields import Content
from stoker.loading.lengths import ignored_target
from stoker.loading.order import Indices
from stoker.loading.samples import Samples
from stoker.loading.sampling import targets_at_hand
from stoker.records.codec import JSON
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.loss_checks import is_by_label
from stoker.stepping.losses import Compared
from stoker.stepping.step import Step
from stoker.stepping.step_failures import evaluating, ran_out_of_memory
from stoker.stepping.world import World, gather_bytes, gather_json
from stoker.training.recovery import nothing_changed

CHECKED = 16
"""Samples of each held-out set that are evaluated before training, in a process alone."""


_SURE = (BadJob, TypeError, AttributeError, NameError, ImportError, NotImplementedError)
"""Errors of a metric's `compute` that more samples, or a trained model, do not mend; see `_is_sure`."""


def check_held_out(step: Step, held_out: Mapping[str, Samples], size: int) -> list[str]:
    """Evaluate a few samples of each set, with every metric, so that a set that cannot be evaluated is known at once.

    Results are not used, and nothing that training goes on from is changed. Where targets are numbers in memory, the
    least and the greatest are among the samples. Several processes take whole batches of `size` samples each, and so
    does a process alone if the few samples fail: a model may be written for one size. Every process calls this.

    Args:
        step: as it begins.
        held_out: the sets by split.
        size: number of samples evaluated at once, later on.

    Returns:
        What may fail in an evaluation, as text: a metric may need more samples than these, or another model's outputs.

    Raises:
        BadJob: targets do not fit the model's output, or a metric cannot take them, or computes no number.
        Exception: whatever the model, the loss, a metric or a dataset raises, with a note of the split.
    """
    doubts: list[str] = []
    for split, samples in held_out.items():
        most = min(size, len(samples))
        few = min(most, CHECKED) if step.world.layout.world_size == 1 else most
        failed: tuple[str, Exception] | None = None
        with doing(f"evaluating a batch of {samples.name}"), evaluating(split), nothing_changed(step):
            for tried in dict.fromkeys((few, most)):
                try:
                    failed = _evaluate_batch(step, samples, tried)
                except Exception:
                    if tried == most:
                        raise
                    continue
                if failed is None:
                    break
            if failed is not None and _is_sure(failed[1]):
                raise failed[1]
        if failed is not None:
            name, problem = failed
            doubts.append(
                f"metric {name}'s compute() raised {type(problem).__name__}: {first_line(problem)} for {most} samples "
                f"of {split}; if it does so for all of them, the first evaluation fails"
            )
    return doubts


def _is_sure(problem: Exception) -> bool:
    """Whether `compute` raises this for more samples too. Many metrics have None until they have seen enough."""
    return isinstance(problem, _SURE) and "NoneType" not in str(problem)


def _evaluate_batch(step: Step, samples: Samples, size: int) -> tuple[str, Exception] | None:
    """Evaluate one batch, of `size` samples in each process at most; a metric that has no result for it, and why."""
    layout = step.world.layout
    part, stateful = Split(layout.sample_part(step.world.rank), layout.sample_parts), stateful_metrics(step)
    whole = min(size * part.parts, len(samples))
    indices = _with_extremes(np.arange(whole, dtype=np.int64), samples, step.job)[np.array(part.held(whole))]

    def observe(compared: Compared, _content: Content) -> None:
        output, target = compared()
        if stateful is not None:
            with torch.autocast(step.device.type, enabled=False):
                stateful.update(output, target)

    with step.evaluation() as measure, step.objective.observed_by(None if stateful is None else observe):
        pipeline = step.pipeline(samples, augmented=False)
        batch = Batch(samples.fetch(indices, 0), indices, 0, pipeline, part, whole)
        measure(batch.cut(0, batch.size), batch.size)
    return None if stateful is None or not batch.size else stateful.uncomputable()


def _with_extremes(indices: Indices, samples: Samples, job: Job) -> Indices:
    """`indices`, the last two of which are of the least and the greatest target, where targets are at hand."""
    targets = targets_at_hand(samples, job)
    if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iuf":
        return indices
    extremes = np.array([targets.argmin(), targets.argmax()], dtype=np.int64)[: len(indices)]
    return np.concatenate([indices[: len(indices) - len(extremes)], extremes])


class EvaluationWatcher(Protocol):
    """Sees every batch of an evaluation."""

    def see(self, output: Any, target: Any, content: Content, indices: Indices) -> None:
        """See samples that this process counts, `indices` [B] of the set; `content` has them ready for the model."""
        ...

    def miss(self, problem: Exception) -> None:
        """A batch has no output to see, because of `problem`; its loss may still count."""
        ...


def evaluate(
    step: Step,
    samples: Samples,
    size: int,
    beat: Callable[[], None] | None = None,
    watcher: EvaluationWatcher | None = None,
    *,
    padded_together: int | None = None,
) -> dict[str, float]:
    """The loss and every metric over `samples`, `size` of them at once: sums divided once by their counts.

    Several processes take a part each, and all return the result. `padded_together` samples of all of them are collated
    together, whatever the plan (None: as many as a batch has). `beat` is called after each pass, as a sign of life
    for the watchdog; `watcher` sees the samples that are evaluated in this process.

    Raises:
        RunFailed: a metric counted nothing.
        BadJob: a stateful metric computes something else than numbers, or cannot be reduced over processes.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    world = step.world
    if world.layout.cuts_samples:
        watcher = None  # each process has parts of samples
    part = Split(world.layout.sample_part(world.rank), world.layout.sample_parts)
    stateful = stateful_metrics(step)
    shown: list[tuple[Indices, bool]] = []
    size, collated = _sizes(step, size, padded_together or step.job.batch_size, part.parts)

    def observe(compared: Compared, content: Content) -> None:
        indices, counts_here = shown[-1]
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
            watcher.see(output, target, content, indices)

    is_observed = stateful is not None or watcher is not None
    of = 0 if samples.data_class == "stream" else math.ceil(len(samples) / size / part.parts)
    with (
        doing(f"evaluating {samples.name}", of=of) as activity,
        step.evaluation() as measure,
        step.objective.observed_by(observe if is_observed else None),
    ):
        batches = in_order(samples, step.pipeline(samples, augmented=False), collated, part)
        for batch, one in ((held, one) for held in batches for one in held.passes(size)):
            shown[:] = [(batch.indices[one.start : one.stop], one.counts)]
            for name, measured in measure(batch.cut(one.start, one.stop), one.size).items():
                sums[name] = sums.get(name, 0.0) + float(measured.sum) * one.counts
                counts[name] = counts.get(name, 0.0) + float(measured.count) * one.counts
            activity.step += 1
            if beat is not None:
                beat()
        if world.layout.data_size > 1:
            both = torch.tensor([list(sums.values()), list(counts.values())], dtype=torch.float64, device=step.device)
            total_sums, total_counts = world.total(both).tolist()
            sums, counts = dict(zip(sums, total_sums, strict=True)), dict(zip(sums, total_counts, strict=True))
    if empty := [name for name, count in counts.items() if count == 0]:
        raise RunFailed(f"{empty[0]} counted nothing in {len(samples)} samples of {samples.name}")
    whole = {name: sums[name] / counts[name] for name in sums}
    return whole if stateful is None else whole | stateful.computed(world)


def _sizes(step: Step, size: int, together: int, parts: int) -> tuple[int, int]:
    """Samples that pass at once, and of `together` those that are collated, in each of so many processes.

    What is collated, and padded, together is as many samples under any plan; and norms without running statistics have
    a coupling group at once, by which they normalise in an evaluation, too.
    """
    group = step.coupling.group
    if group is not None and any(norm.running_mean is None for norm in batch_norms(step.model)):
        size = min(size, group)
    return size, size if step.job.fields.collate is None else max(size, math.ceil(together / parts))


def is_better(name: str, value: float, than: float | None, *, lower: bool = False) -> bool:
    """Whether `value` of the measure `name` is better than another; anything is better than None or NaN.

    Of two values that are no numbers the later counts as better, so that a run without any keeps its last weights and
    not its first. Lower is better for the loss, for errors by name, and with `lower`.
    """
    if than is None or math.isnan(than):
        return True
    return value < than if lower or name in LOWER_IS_BETTER else value > than


_STATES = "_reductions"
"""Attribute of a torchmetrics metric with the reduction of each state, since its first release."""

MOST_STATE_BYTES = 8 * 2**30
"""Largest state of one metric that is taken from another process [bytes]; a curve keeps all outputs."""


def stateful_metrics(step: Step) -> StatefulMetrics | None:
    """The job's stateful metrics, reset; None if it has none.

    Raises:
        BadJob: each process has a part of the model alone.
    """
    if not any(map(is_stateful, step.job.metrics)):
        return None
    if step.world.layout.cuts_model:
        raise BadJob(
            "metrics that keep a state see outputs, which only the last of several stages has",
            remedy="Use a layout without stages, or a metric of values per sample.",
        )
    return StatefulMetrics(step.job, step.device)


class StatefulMetrics:
    """Copies of a job's stateful metrics, reset, on the computing device."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._metrics: dict[str, Any] = {}
        self._ignored = ignored_target(job.objective.loss)
        self._of_probabilities: dict[str, bool] = {}
        """Whether each of these metrics has a probability for every label, rather than one distribution of classes."""
        for metric in filter(is_stateful, job.metrics):
            given: Any = copy.deepcopy(metric.metric if isinstance(metric, Named) else metric)
            placed = given.to(device) if hasattr(given, "to") else given
            for part in placed.modules() if hasattr(placed, "modules") else ():
                if hasattr(part, _STATES):
                    part.sync_on_compute = False  # states are gathered here
            placed.reset()
            self._metrics[metric_name(metric)] = placed
            if isinstance(metric, Named) and metric.of_probabilities:
                parts = placed.modules() if hasattr(placed, "modules") else (placed,)
                has_labels = any(getattr(part, "num_labels", None) for part in parts)  # as torchmetrics' Multilabel…
                self._of_probabilities[metric_name(metric)] = has_labels or is_by_label(job.objective.loss)

    def update(self, output: Any, target: Any) -> None:
        """Update all of them with a batch.

        Raises:
            BadJob: a metric cannot take it.
        """
        for name, metric in self._metrics.items():
            try:
                seen = output
                if (by_label := self._of_probabilities.get(name)) is not None:
                    # Of scores [B, classes, ...]; or of one logit a sample, or of labels [B, labels, ...].
                    is_flags = output.shape == getattr(target, "shape", None) and not target.is_floating_point()
                    is_single = output.dim() < 2 or output.shape[1] == 1
                    seen = output.sigmoid() if by_label or is_flags or is_single else output.softmax(1)
                metric.update(seen, target)
            except (TypeError, ValueError, RuntimeError, IndexError) as problem:
                is_known = self._ignored is not None and isinstance(target, torch.Tensor)
                has_ignored = is_known and bool((target == self._ignored).any())
                padding = f", {self._ignored} where there is none: leave that out (torchmetrics: ignore_index)"
                raise BadJob(
                    f"metric {name} raised {type(problem).__name__}: {str(problem).strip()}",
                    remedy=f"It is given the model's output and the target{padding if has_ignored else ''}.",
                ) from problem

    def computed(self, world: World) -> dict[str, float]:
        """Results over all processes: `name`, or `name[i]` of a vector, or the names that a metric gives.

        Raises:
            BadJob: a result is something else than numbers, or a state cannot be gathered.
        """
        results: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if world.layout.data_size > 1:
                share_states(metric, name, world)
            results |= numbers_in(metric.compute(), name)
        return results

    def uncomputable(self) -> tuple[str, Exception] | None:
        """The first metric whose result cannot be computed from what this process has seen, and why; None: all can."""
        for name, metric in self._metrics.items():
            try:
                with warnings.catch_warnings(action="ignore"):  # of few samples there is much to warn of
                    numbers_in(metric.compute(), name)
            except Exception as problem:  # noqa: BLE001 - whatever a user's metric raises
                return name, problem
        return None


def numbers_in(value: Any, name: str) -> dict[str, float]:
    """A result as numbers by name.

    >>> numbers_in(torch.tensor([0.5, 1.0]), "f1")
    {'f1[0]': 0.5, 'f1[1]': 1.0}

    Raises:
        BadJob: it is a matrix, or not a number.
    """
    if isinstance(value, Mapping):
        return {key: number for inner, item in value.items() for key, number in numbers_in(item, str(inner)).items()}
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1:
        return {f"{name}[{index}]": float(number) for index, number in enumerate(value.tolist())}
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return {name: float(value)}
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise BadJob(
        f"metric {name} computed {shape}; results are numbers, vectors, or dicts of them",
        remedy="The report shows a confusion matrix of classifiers without being asked.",
    )


def share_states(metric: Any, name: str, world: World) -> None:
    """Put the states of all processes, reduced, into this one's metric; every process calls this.

    Raises:
        BadJob: the metric does not declare how its states are reduced.
    """
    modules = metric.modules() if hasattr(metric, "modules") else [metric]
    parts = [module for module in modules if hasattr(module, _STATES)]
    if not parts:
        raise BadJob(
            f"metric {name} does not say how its states of several processes become one",
            remedy="Use one of torchmetrics', or evaluate in one process.",
        )
    mine = [{key: getattr(part, key) for key in getattr(part, _STATES)} for part in parts]
    counts = [getattr(part, "_update_count", 0) for part in parts]
    everyone = [(world.data_rank, mine, counts)]
    if world.layout.world_size > 1:
        skeleton, tensors = _pack_states(mine)
        gathered = gather_json([world.data_rank, skeleton, counts], world.device)
        parcels = gather_bytes(safetensors.torch.save(tensors), world.device, most_bytes=MOST_STATE_BYTES)
        everyone = [
            (rank, _unpack_states(states, safetensors.torch.load(parcel)), seen)
            for (rank, states, seen), parcel in zip(gathered, parcels, strict=True)
        ]
    # Processes that share a part of the batch, as in tensor parallel, have seen the same: one of them counts.
    by_part = {rank: (states, seen) for rank, states, seen in reversed(everyone)}
    counted = [by_part[rank] for rank in sorted(by_part)]
    for index, part in enumerate(parts):
        for key, reduction in getattr(part, _STATES).items():
            setattr(part, key, _reduced([states[index][key] for states, _ in counted], reduction, part.device))
        part._update_count = max(seen[index] for _, seen in counted)  # noqa: SLF001 - an empty part would warn
        part._computed = None  # noqa: SLF001 - what it may have computed of its own part


def _pack_states(states: Any) -> tuple[JSON, dict[str, torch.Tensor]]:
    """States as JSON with numbers in the place of tensors, and the tensors by number."""
    tensors: dict[str, torch.Tensor] = {}

    def numbered(state: Any) -> JSON:
        if isinstance(state, torch.Tensor):
            tensors[str(len(tensors))] = state.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": str(len(tensors) - 1)}
        return [numbered(item) for item in state] if isinstance(state, list) else {"value": state}

    return [{key: numbered(state) for key, state in part.items()} for part in states], tensors


def _unpack_states(states: JSON, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The inverse of `_pack_states`."""

    def put_back(state: JSON) -> Any:
        if isinstance(state, list):
            return [put_back(item) for item in state]
        return tensors[state["tensor"]] if "tensor" in state else state["value"]

    return [{key: put_back(state) for key, state in part.items()} for part in states]


def _reduced(states: list[Any], reduction: Any, device: torch.device) -> Any:
    """One state from those of all processes."""
    if isinstance(states[0], list):
        return [tensor.to(device) for state in states for tensor in state]
    if not isinstance(states[0], torch.Tensor):
        return states[0]
    stacked = torch.stack(states).to(device)
    return stacked if reduction is None else reduction(stacked)
