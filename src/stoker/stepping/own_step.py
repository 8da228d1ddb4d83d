"""A job's own step: an update that the user wrote, for what is not one loss and one optimiser.

What: `step(model, optimizers, batch)` makes a whole update of one optimiser batch and returns its losses.
Use when: generators and discriminators, actors and critics, several losses in turns.
Costs: the step is atomic. It is never cut into micro-batches, nor repeated in pieces; where it does not fit the device,
no plan does. Its changes stay, even where its loss is not finite.
Does not combine with: what Stoker otherwise does between loss and update (`clip_norm`, a penalty, label smoothing,
`coupling_group`), which such a step does itself.

Random draws are keyed by seed and update, gradients are forgotten after every update, and the state of model and
optimisers is all that is kept, so that a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.loading.batches import Batch
from stoker.loading.fields import Content
from stoker.records import Plan
from stoker.stepping.activation_checkpointing import not_repeatable
from stoker.stepping.precision import products_in
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.update_rule import UpdateRule

_NAMED = 4
"""Names listed in a message."""

OwnStepFunction = Callable[[nn.Module, Any, Content], Any]


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimisers as one: their groups one after the other, their states together.

    `given` is what the job's function made: an optimiser, or a list, tuple or dict of them. `state_dict` has the form
    of a single optimiser's; each part loads its own share of it.
    """

    def __init__(self, given: Any, parts: list[torch.optim.Optimizer]) -> None:
        self.given, self.parts = given, parts  # not super().__init__(): there are no groups of its own
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups of all parts, which are theirs to change."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of every parameter; of one that several parts step, the first part's."""
        return {parameter: values for part in reversed(self.parts) for parameter, values in part.state.items()}

    def step(self, closure: Any = None) -> Any:
        """Let every part make a step."""
        first, *others = self.parts
        loss = first.step(closure)
        for part in others:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as PyTorch has it
        """Forget the gradients of all parts."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of all parts, parameters numbered through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for part in self.parts:
            own = part.state_dict()
            state |= {first + number: values for number, values in own["state"].items()}
            groups += [group | {"params": [first + n for n in group["params"]]} for group in own["param_groups"]]
            first += _num_parameters(part)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every part its share.

        Raises:
            ValueError: it is of other optimisers.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"it has {len(groups)} parameter groups, the job's optimisers {len(self.param_groups)}")
        first = 0
        for part in self.parts:
            mine, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            last = first + _num_parameters(part)
            part.load_state_dict(
                {
                    "state": {number - first: v for number, v in state_dict["state"].items() if first <= number < last},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in mine],
                }
            )
            first = last


def own_optimizers(job: Job, model: nn.Module) -> CombinedOptimizer:
    """The optimisers that `Job(optimizer=…)` makes for a model with a step of its own.

    Raises:
        BadJob: it makes something else than optimisers of the model's parameters.
    """
    given = cast("Callable[[Any], Any]", job.optimizer)(model)
    parts = list(given.values()) if isinstance(given, Mapping) else given
    parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    expected = "wanted a torch.optim.Optimizer, or a list or dict of them"
    if not parts:
        raise BadJob(f"Job(optimizer=…) made no optimiser, {expected}")
    for part in parts:
        if not isinstance(part, torch.optim.Optimizer):
            raise BadJob(f"Job(optimizer=…) made a {type(part).__name__}, {expected}")
        remedy = "With step=…, Job(optimizer=…) is called with the model: take the parameters from it."
        require_the_models(part, model.parameters(), remedy)
    return CombinedOptimizer(given, parts)


def require_the_models(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], remedy: str) -> None:
    """Raise BadJob for an optimiser of tensors other than `parameters`, those of the model to train."""
    own = set(map(id, parameters))
    if others := [parameter for parameter in parameters_of(optimizer) if id(parameter) not in own]:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in others[:3])
        raise BadJob(
            f"{type(optimizer).__name__} steps {len(others)} parameters that are not the model's (of shape {shapes}"
            f"{', …' if len(others) > 3 else ''}), which no checkpoint would hold",
            remedy=remedy,
        )


class OwnStep(UpdateRule):
    """Runs a job's own step, and looks at its first update.

    Args:
        function: the user's.
        model: what it trains.
        optimizer: made for that model; it is handed to the step as the job's function gave it.
        plan: how it is executed; the whole batch at once.
        whole: the content of a batch, with generators seeded for its update.
        conditions: the context that the step runs in, such as autocast.
    """

    def __init__(
        self,
        function: OwnStepFunction,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        whole: Callable[[Batch, int], Content],
        conditions: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._function, self._model, self._optimizer, self._whole = function, model, optimizer, whole
        self._device, self._precision, self._conditions = torch.device(plan.device), plan.precision, conditions
        self._given = optimizer.given if isinstance(optimizer, CombinedOptimizer) else optimizer
        self._parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
        self._is_checked = False
        self._changes_rates = False
        self.values: dict[str, torch.Tensor] = {}
        """The scalars that the last step returned, by name."""

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """Make the update; the loss it returned (of a dict the entry `loss`, or the first), a detached scalar.

        Raises:
            BadJob: it returned no loss, trained nothing in its first update, or has changed a learning rate for the
                next update, which the schedule has set again since.
            NotFinite: on a CPU, its loss is not finite; the update has been made.
        """
        self.is_moving = True
        content = self._whole(batch, update)
        with self._watching_rates():
            if self._is_checked or all(group["lr"] == 0 for group in self._optimizer.param_groups):
                loss = self._run(content)
            else:
                loss = self._run_first(content)
                self._is_checked = True
        if self._device.type == "cpu" and not math.isfinite(loss):
            raise NotFinite(
                f"the loss that the job's own step returned is {float(loss)} at update {update + 1}",
                remedy="The update has been made; the last checkpoint is intact. Lower the learning rate, or let the "
                "step clip its gradients.",
            )
        return loss

    def gradients(self, batch: Batch, update: int) -> torch.Tensor:
        """Leave in the parameters the gradients that their first steps would use; nothing else changes.

        Returns:
            The loss, a detached scalar.
        """
        content = self._whole(batch, update)
        tensors = [*self._model.parameters(), *self._model.buffers()]
        before = [tensor.detach().clone() for tensor in tensors]
        state = copy.deepcopy(self._optimizer.state_dict())
        gradients: dict[nn.Parameter, torch.Tensor] = {}

        def keep(part: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            for parameter in parameters_of(part):
                if parameter.grad is not None:
                    gradients.setdefault(parameter, parameter.grad.detach().clone())

        with ExitStack() as hooks:
            for part in self._parts:
                hooks.callback(part.register_step_post_hook(keep).remove)
            loss = self._run(content)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        self._optimizer.load_state_dict(state)
        for parameter in self._model.parameters():
            parameter.grad = gradients.get(parameter)
        return loss

    @contextmanager
    def _watching_rates(self) -> Iterator[None]:
        """Notice rates that the step changes; in the update after, refuse a change that the schedule has undone.

        A step that sets the rates itself, before its optimisers step, may do so.
        """
        scheduled = [float(group["lr"]) for group in self._optimizer.param_groups]
        used: dict[int, float] = {}

        def note(part: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            for group in part.param_groups:
                used.setdefault(id(group), float(group["lr"]))

        with ExitStack() as hooks:
            for part in self._parts if self._changes_rates else ():
                hooks.callback(part.register_step_pre_hook(note).remove)
            yield
        for rate, group in zip(scheduled, self._optimizer.param_groups, strict=True):
            left = float(group["lr"])
            if left != rate and used.get(id(group)) == rate:
                raise BadJob(
                    f"the job's own step changes a learning rate for the next update, from {rate:g} to {left:g}, and "
                    "the schedule, which sets the rates before each update, has undone that",
                    remedy="Say how the rate changes in Job(schedule=…), a function of progress, and step no scheduler "
                    "of torch.optim.lr_scheduler.",
                )
            self._changes_rates |= left != rate

    def _run(self, content: Content) -> torch.Tensor:
        with products_in(self._precision, self._device), self._conditions():
            if torch.is_autocast_enabled(self._device.type):
                # Autocast's cached weights would outlive a step of the optimiser within the update.
                torch.set_autocast_cache_enabled(False)
            try:
                returned = self._function(self._model, self._given, content)
            except CheckpointError as problem:
                raise not_repeatable(problem) from problem
        self.values = _values(returned)
        return self.values.get("loss", next(iter(self.values.values())))

    def _run_first(self, content: Content) -> torch.Tensor:
        """The first update that can train anything, and its checks."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        stepped: list[torch.optim.Optimizer] = []

        def watch(part: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            stepped.append(part)
            parameters = parameters_of(part)
            if all(parameter.grad is None for parameter in parameters):
                raise BadJob(
                    f"in the first update {type(part).__name__} makes a step, and none of its parameters has a "
                    f"gradient: {self._names(parameters)}",
                    remedy="In the job's own step, call backward() on a loss of these parameters before the "
                    "optimiser's step(); zero_grad() belongs before backward(), and what comes before a detach() has "
                    "no part in the loss.",
                )

        with ExitStack() as hooks:
            for part in self._parts:
                hooks.callback(part.register_step_post_hook(watch).remove)
            loss = self._run(content)
        # Counted, not compared: in a traced step any comparison of values holds.
        if not any(int((now != then).sum()) for now, then in zip(trained, before, strict=True)):
            how = f"stepped {len(stepped)} optimisers" if stepped else "stepped no optimiser"
            raise BadJob(
                f"the job's own step {how} in its first update, and changed none of the {len(trained)} trainable "
                f"parameters ({self._names(trained)})",
                remedy="Let it call backward() on a loss of these parameters, then step() of the optimiser it gets.",
            )
        return loss

    def _names(self, parameters: list[nn.Parameter]) -> str:
        ids = set(map(id, parameters))
        names = [name for name, parameter in self._model.named_parameters() if id(parameter) in ids]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more


def _values(returned: Any) -> dict[str, torch.Tensor]:
    """The result of a step as named, detached scalars.

    Raises:
        BadJob: it is not a loss, or one of its values is not a scalar.
    """
    if isinstance(returned, Loss):
        returned = returned.sum / returned.count
    named = returned if isinstance(returned, Mapping) else {"loss": returned}
    values: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor | int | float) or (isinstance(value, torch.Tensor) and value.numel() > 1):
            shown = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            raise BadJob(
                f"the job's own step returned a value of {shown} as {name!r}",
                remedy="Return a scalar loss, stoker.Loss(sum, count), or a dict of scalars by name.",
            )
        values[str(name)] = torch.as_tensor(value).detach().float().reshape(())
    if not values:
        raise BadJob("the job's own step returned an empty dict", remedy='Return its losses: {"loss": …}.')
    return values


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """An optimiser's parameters, in the order of its numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _num_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
