"""From optimiser settings to PyTorch's optimisers; their implementations, learning rates and denormal moments.

Denormal moments. What: an exponential average without further gradients, as of a pixel at the border, shrinks until it
is denormal (fp32: below 1.2e-38), where rounding keeps it for good. First moments of Adam and SGD are set to 0 then,
every 128 updates. Use when: on a CPU; several compute with denormals through microcode, and one value in a hundred made
AdamW's step a third slower on an Intel Xeon (docs/log.md, 2026-11-23). Costs: reading and writing them once in 128
updates. Changes: a moment by less than 1.2e-38, which no weight shows. Second moments stay: with a tiny epsilon the
division by their roots would show it; and so does Muon's momentum, which is divided by its norm. Keyed by the number of
the update, so that interrupted and uninterrupted runs are equal; flushing in the CPU's own registers is a setting of
each thread, and depends on their number.
Source: https://docs.pytorch.org/docs/stable/generated/torch.set_flush_denormal.html.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import inspect
import math
import re
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn

from stoker.errors import BadJob, first_line, nearest
from stoker.jobs import SGD, Adam, AdamW, Job, Muon, Optimizer
from stoker.jobs.optimizers import Adagrad, Group, ScheduleFreeAdamW, ScheduleFreeSGD, group_name
from stoker.records import Layout, Plan
from stoker.stepping import muon, schedule_free
from stoker.stepping.distributed_tensors import is_spread, local
from stoker.stepping.fused_update import kernel_of
from stoker.stepping.low_bit_states import LowBitAdam, fitted
from stoker.stepping.own_step import own_optimizers, require_the_models
from stoker.stepping.without_compiler import without_compiler

_FUSED = (SGD, Adam, AdamW, Adagrad, Muon)
"""Optimisers with a fused kernel in PyTorch; for Muon, that of its rest."""
_TAKES_NONE = re.compile("[Ss]parse|dense gradients")
"""In the message of a step to which gradients of a layout are given that it does not take."""
_OURS = (ScheduleFreeSGD, ScheduleFreeAdamW)
"""Optimisers with one implementation, over lists of tensors."""
LISTS = ("foreach", "fused")
"""PyTorch's names of implementations over lists of tensors, as settings of a group; None is its own choice."""

for _method in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
    without_compiler(getattr(torch.optim.Optimizer, _method))


def _without_graph_breaks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser, whose step from now on does not tell PyTorch's compiler where to end a graph.

    It would import the compiler to do so, which takes a second of every start.
    Source: `_use_grad_for_differentiable` in torch/optim/optimizer.py; steps that are not made by it stay as they are.
    """
    marking: Any = getattr(type(optimizer).step, "__wrapped__", None)  # within the hooks
    if getattr(getattr(marking, "__code__", None), "co_name", "") == "_use_grad":
        step: Any = torch.optim.Optimizer.profile_hook_step(torch.no_grad()(marking.__wrapped__))
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def build_optimizer(
    job: Job, model: nn.Module, plan: Plan, named: Mapping[str, nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """The job's optimiser over the model's trainable parameters, in the plan's implementation.

    `named` are parameters in the place of the model's, by their names.

    Raises:
        BadJob: a group matches no parameter, its predicate raises, a user's function returns no optimiser or one of
            parameters outside the model, one of Stoker's own would have complex weights, or one takes no sparse
            gradients, or no others.
    """
    named = dict(model.named_parameters()) if named is None else named
    optimizer = _made(job, model, plan, {name: p for name, p in named.items() if p.requires_grad})
    if job.step is None:
        _require_layouts(optimizer, model)
    suit_layout(optimizer, plan.layout, is_ours=isinstance(job.optimizer, Optimizer))
    return optimizer


def _require_layouts(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse PyTorch's and our optimisers that take no sparse gradients, or no dense ones, where there are such.

    Found out by a step of stand-ins of one element. Assumed is that gradients are sparse where a module says so.

    Raises:
        BadJob: the optimiser raises in such a step that it does not take them.
    """
    whose = {
        parameter: name or "the model"
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True  # as of `nn.Embedding`
        for parameter in module.parameters(recurse=False)
    }
    judged = optimizer.rest if isinstance(optimizer, muon.MuonOptimizer) and optimizer.rest else optimizer
    is_real = all(type(parameter) is nn.Parameter for parameter in whose)  # and not of a trace
    is_known = type(judged).__module__.startswith(("torch.optim", "stoker."))
    if not (whose and is_real and is_known) or needs_closure(judged):
        return
    for is_sparse in (True, False):
        trial = copy.copy(judged)
        trial.state = defaultdict(dict)
        trial.param_groups = [
            {
                **group,
                "params": [_stand_in(p, is_sparse=is_sparse) for p in group["params"] if (p in whose) is is_sparse],
            }
            for group in judged.param_groups
        ]
        try:
            with warnings.catch_warnings(action="ignore"):
                _without_graph_breaks(trial).step()
        except Exception as error:
            message = first_line(error)
            if not _TAKES_NONE.search(message):
                continue  # of one element, or of what was not copied
            names = ", ".join(dict.fromkeys(whose.values()))
            raise BadJob(
                f"gradients of {names} are sparse, and the optimiser takes {'no such' if is_sparse else 'only such'} "
                f"gradients: {message}",
                remedy="Make them dense by sparse=False; or use SGD without weight decay or Adagrad; or SparseAdam for "
                "these weights and another optimiser for the others, in a step of your own: Job(step=…).",
            ) from error


def _stand_in(parameter: torch.Tensor, *, is_sparse: bool) -> nn.Parameter:
    """A parameter of one element of as many dimensions, with a gradient."""
    stand_in = nn.Parameter(torch.zeros([1] * parameter.dim(), dtype=parameter.dtype))
    stand_in.grad = torch.zeros_like(stand_in).to_sparse(1) if is_sparse else torch.zeros_like(stand_in)
    return stand_in


def suit_layout(optimizer: torch.optim.Optimizer, layout: Layout, *, is_ours: bool) -> None:
    """Leave implementations over lists where PyTorch's step has them for the layout's DTensors.

    A tensor group mixes DTensors with plain tensors, which no list can: each parameter is updated by itself. Under
    shards alone lists are of DTensors, for which SGD and Adagrad have no fused kernel: they get PyTorch's default.
    Where `fused_update` calls a kernel on a process's own parts (`is_ours`), nothing changes.
    """
    if not layout.divides_tensors or (is_ours and kernel_of(optimizer) is not None):
        return
    is_mixed = any(axis.divides_tensors and not axis.shares_batch for axis in layout.divided)
    for group in optimizer.param_groups:
        if is_mixed:
            group.update({name: False for name in LISTS if name in group})
        elif group.get("fused") and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
            group.update(dict.fromkeys(LISTS))


class _WatchedGroup(dict[str, Any]):
    """A parameter group for one step, which notes whether the step sets the learning rate before it reads it."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.group, self.is_set_first = group, False
        self._is_touched = False

    def __getitem__(self, key: str) -> Any:
        self._is_touched |= key == "lr"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        self._is_touched |= key == "lr"
        return super().get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" and not self._is_touched:
            self.is_set_first = self._is_touched = True
        super().__setitem__(key, value)


class ScheduledRates:
    """Lets an optimiser of the user's step at the rates of the job's schedule, which are set before each update.

    One that leaves another rate for its next step is refused, in that step, if it reads the rate there: the schedule
    has set it again since. One that sets its rates at the beginning of each step, as for a warm-up of its own, never
    uses the schedule's, and may do so where these stay the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_watched = False
        self._overridden: list[float] | None = None
        """The schedule's rates, where the optimiser sets its own."""

    def __call__(self, *closure: Callable[[], torch.Tensor]) -> None:
        """Step, with its closure if it takes one.

        Raises:
            BadJob: it changes a learning rate that the schedule sets.
        """
        scheduled = self._rates()
        if self._overridden not in (None, scheduled):
            raise BadJob(
                f"the optimiser sets its learning rates in each step, and the job's schedule sets others: "
                f"{scheduled[0]:g} now",
                remedy="Leave the rates to one of them: without Job(schedule=…), or without setting group['lr'].",
            )
        with self._watching() as watched:
            self._optimizer.step(*closure)  # type: ignore[arg-type]  # closures give tensors, as PyTorch's own do
        if self._overridden is not None or (left := self._rates()) == scheduled:
            return
        if self._is_watched:
            if not (watched and all(group.is_set_first for group in watched)):
                before, after = next(pair for pair in zip(scheduled, left, strict=False) if pair[0] != pair[1])
                raise BadJob(
                    f"the optimiser changes a learning rate within its step, from {before:g} to {after:g}, and the "
                    "job's schedule, which sets the rates before each update, has undone that",
                    remedy="Say how the rate changes in Job(schedule=…), a function of progress, and step no scheduler "
                    "of torch.optim.lr_scheduler.",
                )
            self._overridden = scheduled
        self._is_watched = True

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[list[_WatchedGroup]]:
        """Once a rate was changed: its groups for one step, which then are the optimiser's own again."""
        groups, watched = self._optimizer.param_groups, list[_WatchedGroup]()
        if self._is_watched and self._overridden is None:
            watched = [_WatchedGroup(group) for group in groups]
            groups[:] = watched
        try:
            yield watched
        finally:
            for index, group in enumerate(groups):  # of which the step may have added some
                if isinstance(group, _WatchedGroup):
                    group.group.update(group)
                    groups[index] = group.group


def _made(job: Job, model: nn.Module, plan: Plan, trainable: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """As `build_optimizer`, in implementations for plain tensors."""
    if isinstance(job.optimizer, Optimizer):
        if isinstance(job.optimizer, (*_OURS, Muon)):
            remedy = "Use stoker.AdamW or SGD, or use separate parameters for its real and imaginary parts."
            _require_real(type(job.optimizer).__name__, trainable, remedy)
        elif plan.optimizer_implementation == "fused":
            _require_real("a fused optimiser", trainable, 'Set optimizer_implementation of the plan to "foreach".')
        if plan.optimizer_states != "full" and isinstance(job.optimizer, Adam | AdamW):
            _require_real(f"{plan.optimizer_states} optimizer_states", trainable, "Use full ones.")
            settings = job.optimizer.settings()
            del settings["amsgrad"]
            return LowBitAdam(
                parameter_groups(job.optimizer, trainable),
                states=plan.optimizer_states,
                names=trainable,
                seed=job.seed,
                is_decoupled=isinstance(job.optimizer, AdamW),
                **settings,
            )
        chosen = _arguments_of(plan, job.optimizer)
        if isinstance(job.optimizer, Muon):
            matrices, others = muon.divided(model, job.optimizer)
            groups, rest = parameter_groups(job.optimizer, matrices), job.optimizer.rest
            rest_optimizer = None
            if others:
                made = _class_of(rest)(parameter_groups(rest, others), **rest.settings(), **chosen)
                rest_optimizer = _without_graph_breaks(made)
            products_in = muon.products_dtype(plan.precision, matrices.values())
            return muon.MuonOptimizer(groups, rest_optimizer, products_in=products_in, **job.optimizer.settings())
        groups = parameter_groups(job.optimizer, trainable)
        return _without_graph_breaks(_class_of(job.optimizer)(groups, **job.optimizer.settings(), **chosen))
    if job.optimizer is None:
        raise BadJob(
            f"the job's recipe {job.recipe!r} has not set its optimiser yet",
            remedy="Pass it through stoker.recipes.resolved(job) first.",
        )
    if job.step is not None:
        return _with_rates(own_optimizers(job, model))
    parameters = list(trainable.values())
    try:
        optimizer = job.optimizer(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        raise BadJob(
            f"Job(optimizer=…) is called with a list of the parameters to train, and asks it for {error.name!r}",
            remedy="Take the list itself: lambda parameters: torch.optim.SGD(parameters, lr=0.1). For settings by name "
            'there are groups: stoker.AdamW(lr=1e-3, groups={"*bias": {"weight_decay": 0.0}}).',
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadJob(
            f"Job(optimizer=…) made a {type(optimizer).__name__}, wanted a torch.optim.Optimizer",
            remedy="Groups of one optimiser have rates of their own; several optimisers need an update of your own, "
            "Job(step=…).",
        )
    remedy = (
        "Make the optimiser of the parameters that Job(optimizer=…) is called with: the model that was given to the "
        "job is copied. Parameters of other modules, make them part of Job(model=…), as an attribute or in an "
        "nn.ModuleDict, and write the loss as loss(model, batch), which finds them there."
    )
    require_the_models(optimizer, trainable.values(), remedy)
    return _with_rates(optimizer)


def _with_rates(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser, each of whose groups has a learning rate for the schedule to set; raises BadJob otherwise."""
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), Real | torch.Tensor):
            given = f"has the learning rate {group['lr']!r}" if "lr" in group else "has no learning rate"
            raise BadJob(
                f"Job(optimizer=…) made a {type(optimizer).__name__} of which a parameter group {given}",
                remedy="The schedule sets the rate in each group's 'lr': give it a number there. An optimiser that "
                "finds its own rate multiplies it by that number, which may be 1.",
            )
    return optimizer


def _class_of(settings: Optimizer) -> type[torch.optim.Optimizer]:
    """The class of an optimiser: ours, or PyTorch's, after which its settings are named."""
    is_ours = isinstance(settings, _OURS)
    chosen: type[torch.optim.Optimizer] = (
        schedule_free.ScheduleFreeOptimizer if is_ours else getattr(torch.optim, type(settings).__name__)
    )
    return chosen


def _require_real(what: str, named: dict[str, nn.Parameter], remedy: str) -> None:
    """Refuse complex weights: squares and transposes assume real ones, and fused kernels lack them."""
    if complex_ones := [name for name, parameter in named.items() if parameter.is_complex()]:
        raise BadJob(f"{what} is for real weights, and {complex_ones[0]} is complex", remedy=remedy)


def _arguments_of(plan: Plan, settings: Optimizer) -> dict[str, Any]:
    """Arguments of PyTorch's optimisers for the plan's implementation.

    Raises:
        BadJob: this optimiser has no such implementation.
    """
    implementation, name = plan.optimizer_implementation, type(settings).__name__
    if implementation == "default":
        return {}
    if isinstance(settings, _OURS) or (implementation == "fused" and not isinstance(settings, _FUSED)):
        raise BadJob(
            f"the plan asks for a {implementation} implementation, and {name} has none",
            remedy='Set optimizer_implementation of the plan to "default".',
        )
    return {implementation: True}


def parameter_groups(settings: Optimizer, named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters by the first group of `settings.groups` that they belong to; the rest first.

    Raises:
        BadJob: a group is left without parameters, or its predicate raises.
    """
    members: dict[Group, list[nn.Parameter]] = {group: [] for group in settings.groups}
    rest: list[nn.Parameter] = []
    for name, parameter in named.items():
        group = group_of(settings, name, parameter)
        (rest if group is None else members[group]).append(parameter)
    for group, parameters in members.items():
        if not parameters:
            hint = nearest(group, named) if isinstance(group, str) else f"It was asked about {', '.join(named)}."
            raise BadJob(f"optimiser group {group_name(group)} matches no parameter that is left. {hint}")
    groups = [{"params": rest}] if rest else []
    return groups + [{"params": parameters, **settings.groups[group]} for group, parameters in members.items()]


def group_of(settings: Optimizer, name: str, parameter: nn.Parameter) -> Group | None:
    """The first group that a parameter belongs to, None if none.

    Raises:
        BadJob: a predicate raises.
    """
    for group in settings.groups:
        try:
            belongs = fnmatch.fnmatchcase(name, group) if isinstance(group, str) else group(name, parameter)
        except Exception as error:
            raise BadJob(
                f"optimiser group {group_name(group)} raised {type(error).__name__} for {name}: {error}",
                remedy="It may look at the name, the shape, the dtype and other attributes of a parameter, and not at "
                "its values: planning may make the optimiser without any.",
            ) from error
        if belongs:
            return group
    return None


def implementations(job: Job, model: nn.Module, device_kind: str) -> tuple[str, ...]:
    """Implementations of the job's optimiser, for the weights of `model`, that a plan may choose among on this device.

    PyTorch's fused kernels are for real weights and dense gradients; Adagrad's came to GPUs with PyTorch 2.12.
    """
    if not isinstance(job.optimizer, Optimizer) or isinstance(job.optimizer, _OURS):
        return ("default",)
    is_real = all(p.is_floating_point() for p in model.parameters() if p.requires_grad)
    is_dense = not any(getattr(module, "sparse", False) is True for module in model.modules())  # as of `nn.Embedding`
    is_missing = device_kind == "cuda" and isinstance(job.optimizer, Adagrad) and torch.__version__ < "2.12"
    if isinstance(job.optimizer, _FUSED) and is_real and is_dense and not is_missing:
        return ("fused", "default") if device_kind in ("cpu", "cuda") else ("default",)
    return ("foreach", "default")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` must be given a function that recomputes the loss, as in L-BFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def use_implementation(
    optimizer: torch.optim.Optimizer,
    implementation: Literal["default", "foreach", "fused"],
    *,
    is_ours: bool = False,
) -> str | None:
    """Switch an existing optimiser to another of PyTorch's implementations, from its next step on.

    Its settings and state stay; the state moves to the device of its parameters and gets their strides.

    Args:
        optimizer: it.
        implementation: "default" leaves those of a user's optimiser as they are.
        is_ours: `build_optimizer` made it from a job's settings, so that "default" is what PyTorch chooses.

    Returns:
        None if it was switched; else the reason why not.
    """
    default: dict[str, bool | None] = {"foreach": None, "fused": None} if is_ours else {}
    chosen: dict[str, dict[str, bool | None]] = {
        "default": default,
        "foreach": {"foreach": True, "fused": False},
        "fused": {"foreach": False, "fused": True},
    }
    judged = optimizer.rest if isinstance(optimizer, muon.MuonOptimizer) and optimizer.rest else optimizer
    problem = None if implementation == "default" else _has_none(judged, implementation)
    for group in optimizer.param_groups:
        group.update(
            {} if problem else {name: value for name, value in chosen[implementation].items() if name in group}
        )
    if optimizer.state:
        load_state(optimizer, optimizer.state_dict())  # moves the state to where the implementation expects it
    return problem


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state, of which each tensor keeps its dtype: PyTorch rounds those but counts of steps to the parameter's.

    Tensors of a parameter's shape get its strides, since fused kernels go through memory. Those within lists or dicts
    of a user's optimiser are as PyTorch loads them. Moments of fewer bits, or of more, become those of this optimiser.
    """
    saved = fitted(optimizer, saved)
    optimizer.load_state_dict(saved)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in enumerate(parameters):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if not (isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor)):
                continue
            if loaded.dtype != value.dtype and name != "step":
                loaded = optimizer.state[parameter][name] = value.to(loaded.device)
            if loaded.shape == parameter.shape and loaded.stride() != parameter.stride() and not is_spread(parameter):
                optimizer.state[parameter][name] = torch.empty_like(parameter, dtype=loaded.dtype).copy_(loaded)


def _has_none(optimizer: torch.optim.Optimizer, implementation: str) -> str | None:
    """Why an optimiser cannot be computed by that implementation, if so."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim") or implementation not in optimizer.defaults:
        return f"{name} has no {implementation} implementation"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return f"{name} was made differentiable or capturable, and stays as it is"
    if not all(p.is_floating_point() for group in groups for p in group["params"]):
        return f"{name} has parameters that are not real numbers, for which there is no {implementation} implementation"
    return None


FLUSH_EVERY = 128
"""Updates between two sweeps: in fewer a moment that is halfway there hardly becomes denormal (0.9^128 = 1e-6)."""


_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""PyTorch's names of them, Adam's and SGD's."""


@torch.no_grad()
def flush_denormals(optimizer: torch.optim.Optimizer) -> None:
    """Set first moments on a CPU that are denormal to 0, in place; the smallest normal number goes with them."""
    for state in optimizer.state.values():
        for value in map(state.get, _FIRST_MOMENTS):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "cpu":
                part = local(value)
                torch.hardshrink(part, torch.finfo(part.dtype).tiny, out=part)


def factor_at(schedule: Callable[[float], float], progress: float) -> float:
    """The factor of the learning rates at `progress`, the share of the run in [0, 1] [1].

    Raises:
        BadJob: it is negative, which climbs the loss, or not finite.
    """
    factor = schedule(progress)
    if not 0 <= factor < math.inf:
        raise BadJob(
            f"the schedule gives {factor} at {100 * progress:.4g} % of the run, wanted a factor of the learning rate, "
            "0 or more",
            remedy="A schedule takes the share of the run that is done, from 0 to 1: lambda progress: 1 - progress.",
        )
    return factor
