"""Schedule-free SGD and AdamW: an average of the weights in place of a rate that falls.

What: gradients are taken at y, between the weights z that move by them and their average x. The model holds y, the
    optimiser z, and x = y + (1 - 1/beta) (z - y) is computed for evaluation and checkpoints.
Use when: the length of the run is not known beforehand, or no schedule shall be chosen.
Costs: one tensor of state for each weight (SGD), two (AdamW): as much as with momentum. x is a copy of the weights for
    as long as an evaluation, or the copy for a checkpoint, takes.
Does not combine with: schedules that fall, another `average`, `sync`, a step of the job's own.
Source: A. Defazio et al., "The Road Less Scheduled" (2024), https://arxiv.org/abs/2405.15682, algorithm 1; the updates
    in terms of y and z, and the weights of the average, are those of https://github.com/facebookresearch/schedule_free.
    There the counts are an optimiser's group's; here each parameter's, with whose state they are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stoker.stepping.batch_norm import batch_norms, statistics_of
from stoker.stepping.distributed_tensors import all_local, local

Group = dict[str, Any]


class ScheduleFreeOptimizer(torch.optim.Optimizer):
    """Schedule-free descent over parameters that hold y; see `stoker.jobs.optimizers.ScheduleFree`.

    Args:
        groups: parameter groups.
        lr: learning rate; a warm-up may change it between updates.
        beta: how far y is on the way from z to x.
        weight_decay: decoupled, at y.
        beta2: decay of the second moment; None: gradients are not normalised (SGD).
        eps: added to the root of the second moment.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        lr: float,
        beta: float,
        weight_decay: float = 0.0,
        beta2: float | None = None,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "beta2": beta2, "eps": eps}
        super().__init__([dict(group) for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move y and z of all parameters that have gradients."""
        assert closure is None
        for group in self.param_groups:
            for parameters in self._of_one_age(group):
                self._move(group, parameters)

    def _of_one_age(self, group: Group) -> list[list[torch.Tensor]]:
        """The group's parameters that have gradients, by their counts of steps and weights."""
        by_age: dict[tuple[int, float, float], list[torch.Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "largest_rate": 0.0, "sum_of_weights": 0.0, "z": parameter.detach().clone()}
                if group["beta2"] is not None:
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
            by_age.setdefault((state["step"], state["largest_rate"], state["sum_of_weights"]), []).append(parameter)
        return list(by_age.values())

    def _move(self, group: Group, parameters: list[torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        largest = max(float(group["lr"]), states[0]["largest_rate"])
        weight = largest**2
        total = states[0]["sum_of_weights"] + weight
        share = float(weight / total) if total else 0.0  # of this update in the average
        for state in states:
            state["step"] += 1
            state["largest_rate"], state["sum_of_weights"] = largest, total
        y, z = all_local(parameters), all_local(state["z"] for state in states)
        direction = all_local(p.grad for p in parameters if p.grad is not None)
        if group["beta2"] is not None:
            direction = _normalized(group, direction, states)
        if group["weight_decay"]:
            direction = [gradient.clone() for gradient in direction]  # gradients may be read after the step
            torch._foreach_add_(direction, y, alpha=group["weight_decay"])
        torch._foreach_lerp_(y, z, share)
        torch._foreach_add_(y, direction, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
        torch._foreach_add_(z, direction, alpha=-group["lr"])


class ScheduleFreeAverage:
    """The average x of a schedule-free optimiser, computed at each access.

    `statistics` are running statistics at x, by name; the model's are used until they are set.
    """

    has_own_weights = False
    """It takes no memory of its own between updates."""

    def __init__(self, model: nn.Module, optimizer: ScheduleFreeOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.statistics: dict[str, torch.Tensor] = {}

    @property
    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """The averaged weights and all buffers, by name; new tensors."""
        weights = {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}
        beta_of = {id(p): group["beta"] for group in self._optimizer.param_groups for p in group["params"]}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            state = self._optimizer.state.get(parameter, {})
            if "z" in state:
                local(weights[name]).lerp_(local(state["z"]), 1 - 1 / beta_of[id(parameter)])
        return weights | {name: tensor.clone() for name, tensor in self.statistics.items()}

    @property
    def needs_statistics(self) -> bool:
        """Whether running statistics have to be measured at x: always, the model's were gathered at y."""
        return True

    def update(self, update: int) -> None:
        """Does nothing: y and z are the whole state."""

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Restore running statistics; y and z are the model's and the optimiser's."""
        names = statistics_of(self._model, batch_norms(self._model))
        self.statistics = {name: weights[name].detach().clone() for name in names if name in weights}

    def take_strides(self) -> None:
        """Nothing to do: statistics have one dimension."""


def _normalized(group: Group, gradients: list[torch.Tensor], states: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """The gradients over the root of their second moment, which is bias-corrected."""
    moments, beta2 = all_local(state["exp_avg_sq"] for state in states), group["beta2"]
    torch._foreach_mul_(moments, beta2)
    torch._foreach_addcmul_(moments, gradients, gradients, value=1 - beta2)
    roots = [moment.clone() for moment in moments]
    torch._foreach_div_(roots, 1 - beta2 ** states[0]["step"])
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_reciprocal_(roots)
    torch._foreach_mul_(roots, gradients)
    return roots
