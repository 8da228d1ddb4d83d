"""What jobs ask for that tensor groups and stages do not go with. Nothing here needs a process: planning asks too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from stoker.jobs import Job, Muon, Optimizer
from stoker.jobs.metrics import is_stateful
from stoker.records import Layout
from stoker.stepping.losses import measure_name, takes_model

_Term = tuple[bool, str]
"""Whether it is asked for, and what it is."""


def problem_with_job(job: Job, layout: Layout) -> str | None:
    """Why the job's matrices stay whole, or its model in one piece; None where the layout goes with it."""
    if layout.tensor > 1 and layout.stages > 1:
        return f"a layout has a tensor group or stages, not both, as {layout.in_words()}"
    terms = _of_tensor(job) if layout.tensor > 1 else _of_stages(job) if layout.stages > 1 else ()
    found = next((what for is_asked, what in terms if is_asked), None)
    return None if found is None else f"a layout of {layout.in_words()} does not go with {found}"


def _of_tensor(job: Job) -> Iterable[_Term]:
    yield job.penalty is not None, "Job(penalty=…), which would see parts of matrices"
    optimizer = job.optimizer
    needs_all = isinstance(optimizer, Optimizer) and not optimizer.is_elementwise
    yield needs_all, f"{type(optimizer).__name__}, which needs whole matrices"


def _of_stages(job: Job) -> Iterable[_Term]:
    of_model = [one for one in (job.loss, *job.metrics) if callable(one) and takes_model(_function(one))]
    names = ", ".join(map(measure_name, of_model))
    yield bool(of_model), f"{names}, which takes the model: no stage has all of it"
    yield job.penalty is not None, "Job(penalty=…): no stage has all weights"
    stateful = [measure_name(one) for one in job.metrics if is_stateful(one)]
    yield bool(stateful), f"{', '.join(stateful)}, which sees outputs: only the last stage has them"
    yield isinstance(job.optimizer, Muon), "Muon, which tells hidden matrices from the others by the whole model"


def _function(given: Any) -> Callable[..., Any]:
    return given.forward if isinstance(given, nn.Module) else given
