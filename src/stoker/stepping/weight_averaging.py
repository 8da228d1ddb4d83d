"""The weights that a run evaluates and saves: the model's own, or an average (EMA, SWA) of them, as the job says."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import EMA, Job
from stoker.jobs.averages import SWA
from stoker.loading.batches import Batch
from stoker.records import Coupling, Plan
from stoker.stepping.distributed_tensors import all_local
from stoker.stepping.layouts.base import Strategy
from stoker.stepping.schedule_free import ScheduleFreeAverage, ScheduleFreeOptimizer

if TYPE_CHECKING:
    from stoker.stepping.diloco import OuterOptimizer


class ExponentialAverage:
    """A second set of weights that follows the model's, on the same devices; see `stoker.jobs.EMA`."""

    has_own_weights = True
    """It takes memory of its own."""

    def __init__(self, settings: EMA, model: nn.Module) -> None:
        self.settings = settings
        self._model = model
        self._live = model.state_dict(keep_vars=True)
        self.weights = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # a module may have two names
        self._averaged = [name for name, held in self.weights.items() if _has_a_mean(held) and name not in buffers]
        self._copied = [name for name in self.weights if name not in self._averaged]

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Move towards the model's weights after update number `update` (from 0)."""
        decay = min(self.settings.decay, (1 + update) / (10 + update))
        averages = [self.weights[name] for name in self._averaged]
        live = [self._live[name].detach() for name in self._averaged]
        torch._foreach_lerp_(all_local(averages), all_local(live), 1 - decay)
        buffers = dict(self._model.named_buffers(remove_duplicate=False))  # a model may replace the tensor of a buffer
        for name in self._copied:
            self.weights[name].copy_(buffers.get(name, self._live[name]))

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Restore saved averages."""
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)

    def take_strides(self) -> None:
        """Lie in memory as the model's weights do, whose memory format has changed."""
        _take_strides(self.weights, self._model)


class EqualAverage:
    """The mean of the weights at some points of a run; see `stoker.SWA`. Until the first, the model's own weights.

    `count` is the number of averaged points; restoring sets it too. `statistics` are running statistics of batch norms
    at the mean, by name; the model's are used until they are set.
    """

    has_own_weights = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mean = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.count = 0
        self.statistics: dict[str, torch.Tensor] = {}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The mean, with the model's buffers of the last point, and its own statistics."""
        if not self.count:
            return self._model.state_dict()
        return self._mean | self.statistics

    @property
    def needs_statistics(self) -> bool:
        """Whether running statistics have to be measured at the mean, which differs from the model."""
        return self.count > 0

    def update(self, update: int) -> None:
        """Does nothing: the caller of `take` chooses the points."""

    @torch.no_grad()
    def take(self) -> None:
        """Add the model's present weights to the mean."""
        self.count += 1
        live = self._model.state_dict()
        averaged = [name for name, mean in self._mean.items() if name in self._trained and _has_a_mean(mean)]
        means = all_local(self._mean[name] for name in averaged)
        torch._foreach_lerp_(means, all_local(live[name].detach() for name in averaged), 1 / self.count)
        for name in self._mean.keys() - set(averaged):
            self._mean[name].copy_(live[name])

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Restore a saved mean."""
        for name, tensor in weights.items():
            self._mean[name].copy_(tensor)

    def take_strides(self) -> None:
        """As `ExponentialAverage.take_strides`."""
        _take_strides(self._mean, self._model)


@torch.no_grad()
def _take_strides(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Give tensors the strides of the model's, as those have that are made, or restored, from now on."""
    for name, live in model.state_dict().items():
        if weights[name].stride() != live.stride():
            weights[name] = torch.empty_like(live).copy_(weights[name])


def _has_a_mean(tensor: torch.Tensor) -> bool:
    """Whether it holds real or complex numbers, not integers."""
    return tensor.is_floating_point() or tensor.is_complex()


KeptAverage = ExponentialAverage | EqualAverage | ScheduleFreeAverage


def average_of(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, coupling: Coupling, plan: Plan
) -> KeptAverage | None:
    """Averaged weights (EMA, SWA or schedule-free) to evaluate and save instead of the model's, or None.

    Raises:
        BadJob: they need running statistics of their own, and no process holds the whole model.
    """
    if isinstance(job.average, EMA):
        return ExponentialAverage(job.average, model)
    average: KeptAverage | None = None
    if isinstance(job.average, SWA):
        average = EqualAverage(model)
    elif isinstance(optimizer, ScheduleFreeOptimizer):
        average = ScheduleFreeAverage(model, optimizer)
    if average is not None and coupling.kind == "batch_norm" and not plan.layout.is_replicated:
        raise BadJob(
            "the averaged weights need running statistics of their own for each batch norm, which takes whole models; "
            f"{plan.layout.in_words()} hold parts of one",
            remedy="Use a layout of replicas, another norm, or stoker.EMA in place of this average.",
        )
    return average


class SavedWeights(abc.ABC):
    """The weights that a run evaluates and saves, which follow the model's."""

    average: KeptAverage | None = None
    """An average, which checkpoints hold besides the model."""
    outer: OuterOptimizer | None = None
    """What sites share, which checkpoints hold besides the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @abc.abstractmethod
    def follow(self, batch: Batch, update: int, loss: torch.Tensor) -> None:
        """Follow the model's weights after update number `update` (from 0) on `batch`, whose mean loss was `loss`."""

    @abc.abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights and buffers, by name."""

    @abc.abstractmethod
    def begin_at_model(self) -> None:
        """Begin at the model's weights."""

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Within the context, the model has these weights and buffers."""
        live = {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}
        self._model.load_state_dict(self.weights())
        try:
            yield
        finally:
            self._model.load_state_dict(live)

    def whole(self, strategy: Strategy) -> dict[str, torch.Tensor]:
        """The model's weights and buffers, or those that sites share, put together over all processes; collective."""
        return strategy.whole(self._model.state_dict())

    def settle(self) -> None:  # noqa: B027 - only sites have something to do
        """End training."""


class ModelWeights(SavedWeights):
    """The model's own weights."""

    def follow(self, batch: Batch, update: int, loss: torch.Tensor) -> None:
        """They are the model's."""

    def weights(self) -> dict[str, torch.Tensor]:
        """As `SavedWeights`."""
        return self._model.state_dict()

    def begin_at_model(self) -> None:
        """They are the model's."""

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has them."""
        yield


class AveragedWeights(SavedWeights):
    """An average of the model's weights."""

    def __init__(self, model: nn.Module, average: KeptAverage) -> None:
        super().__init__(model)
        self.average = self._average = average

    def follow(self, batch: Batch, update: int, loss: torch.Tensor) -> None:
        """As `SavedWeights`."""
        del batch, loss
        self._average.update(update)

    def weights(self) -> dict[str, torch.Tensor]:
        """As `SavedWeights`."""
        return self._average.weights

    def begin_at_model(self) -> None:
        """As `SavedWeights`."""
        self._average.load(self._model.state_dict())
