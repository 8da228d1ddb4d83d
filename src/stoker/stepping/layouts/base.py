"""The interface of a layout to a Step: a model's passes and gradients over the processes of a world.

`GradientReducer` does what DistributedDataParallel does, for parameters that are divided among other processes as well,
which that does not take. Use when: replicas are combined with tensor parallel or stages. Costs: one sum over this
process's gradients an update, in messages of BUCKET_BYTES, which nothing hides. Does not combine with: shards.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from stoker.jobs import Job, Loss
from stoker.loading.batches import Pass
from stoker.loading.fields import Content
from stoker.records import Layout, Plan, Precision
from stoker.records.profile import ModelParts
from stoker.stepping.distributed_tensors import (
    all_local,
    clip_to_global_norm,
    clip_with_sparse,
    is_spread,
    local,
    norm_of,
)
from stoker.stepping.world import World, unmarked

if TYPE_CHECKING:
    from stoker.stepping.losses import TrainingObjective

LossOf = Callable[[Pass], Loss]
"""The loss of one pass, through the layout's `model`."""

PassOf = Callable[[nn.Module], Any]
"""Passes a batch through a model that it is given."""

MeasuresOf = Callable[[Any, Content, int], dict[str, Loss]]
"""The measures of a model on that many samples."""


class Strategy(abc.ABC):
    """A model parallelized over the processes of a world.

    Parameters of the module it was made from are this process's: whole ones, or DTensors. Losses and metrics call
    `model`.
    """

    model: Callable[..., Any]
    hooked_blocks: Sequence[nn.Module] = ()
    """Modules within the model that the layout has given hooks, which compiled code cannot contain."""
    exchanging: Sequence[nn.Module] = ()
    """Modules within the model whose forward passes are `Exchanging`: blocks with such are compiled in parts."""
    is_checked = True
    """Whether updates may be made; otherwise `check` comes first."""
    tied: Mapping[str, str] = MappingProxyType({})
    """Names of parameters here whose optimiser's state another stage keeps, under these first names of the model's."""

    @abc.abstractmethod
    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """Leave the gradient of the sum of losses, over all processes, in the parameters.

        A pass that does not count is made, and its loss left out. Returns sum and count over all processes, detached.
        """

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare a backward pass of one process; the last one of an update makes gradients final."""
        del is_last  # to most layouts all passes are equal

    def divide(self, parameters: Sequence[nn.Parameter], divisor: Any) -> None:
        """Divide the gradients that `accumulate` left by a number, or a tensor of no dimension."""
        torch._foreach_div_(all_local([p.grad for p in parameters if p.grad is not None]), divisor)

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The global norm of the gradients of this process [1]."""
        return norm_of(parameters)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before, over all processes."""
        return clip_to_global_norm(parameters, max_norm)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors of the model, as `state_dict` gives them here, put together over all processes."""
        return whole_tensors(tensors)

    def set_precision(self, precision: Precision) -> None:  # noqa: B027 - to most layouts it is the pass's own context
        """Make the next passes in another precision of the plan, where that is not only the pass's own context."""

    def part_of(self, content: Content) -> Content:
        """This process's part of a micro-batch, where samples themselves are divided."""
        return content

    def conditions(self) -> contextlib.AbstractContextManager[None]:
        """The context of a forward pass of such a part."""
        return contextlib.nullcontext()

    def check(self, content: Content, objective: TrainingObjective) -> None:  # noqa: B027 - most layouts have none
        """Compare passes of a few samples of a micro-batch under the layout with those of one process; collective.

        Raises:
            BadJob: they give something else.
        """

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """The result of `measure(model, content, size)`, with all parameters that the model needs.

        Every process calls it equally often, with its own part of the evaluated samples.
        """
        return measure(self.model, content, size)


class LayoutExecution(abc.ABC):
    """How layouts along one axis are executed; `stoker.layouts` has the axis's rules, costs and text.

    The file of this folder with the name of an axis has one as `EXECUTION`. It is also asked about models while a
    job is planned, so what takes long to import is imported in `parallelize`.
    """

    @abc.abstractmethod
    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """The model, in place, divided as the plan's layout says, along this axis and those that this one contains.

        Raises:
            BadJob: the model or the plan does not go with the layout.
        """

    def within_tensor_group(self, plan: Plan, model: nn.Module, world: World) -> Strategy:
        """The data parallelism along this axis of a model that a tensor group has divided."""
        return GradientReducer(model, world)

    def of_stage(
        self, plan: Plan, model: nn.Module, world: World, job: Job, *, absent: Collection[str]
    ) -> StageParallelism:
        """The stage of this process, `model`, divided in place along this axis and those that this one contains.

        `absent` are the names of parameters that other stages hold.
        """
        return ReplicatedStage(model, world)

    def model_problem(self, model: nn.Module, layout: Layout) -> str | None:
        """Why a model, which may be on the meta device, cannot be divided along this axis; None if it can."""
        return None

    def data_problem(self, job: Job, model: nn.Module, content: Content, layout: Layout) -> str | None:
        """Why a job's model, on the meta device, cannot be given such a batch under a layout; None if it can."""
        return None

    def divided_parts(
        self, parts: ModelParts, model: nn.Module, layout: Layout, call: PassOf | None = None
    ) -> ModelParts:
        """The parts of `model`, with what this axis divides of them; `call` is a pass of a batch, if there is one."""
        return parts


class SingleProcess(Strategy):
    """A world of one process, which holds everything."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        losses = [self._backward(loss_of(each), is_last=each is passes[-1]) for each in passes]
        return Loss(torch.as_tensor(sum(loss.sum for loss in losses)), sum(loss.count for loss in losses))

    def _backward(self, loss: Loss, *, is_last: bool) -> Loss:
        self.before_backward(is_last=is_last)
        return backward(loss)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Strategy.clip`."""
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            return clip_with_sparse(parameters, max_norm)
        return nn.utils.clip_grad_norm_(parameters, max_norm)


def backward(loss: Loss, scale: float = 1.0) -> Loss:
    """Add the gradient of `scale` times the loss's sum to the parameters; the loss, detached."""
    loss.sum.backward(None if scale == 1 else torch.full_like(loss.sum, scale))
    return Loss(loss.sum.detach(), loss.count)


def whole_loss(loss: Loss) -> Loss:
    """The loss with its sum as a plain tensor; of divided logits it is a DTensor."""
    total: Any = loss.sum
    # A clone: FSDP2 needs outputs that are not views.
    return Loss(total.full_tensor().clone(), loss.count) if is_spread(total) else loss


def noted(loss: Loss, world: World) -> Loss:
    """The loss, with a mark at the moment when its last gradient is ready here, before waiting for other processes.

    PyTorch runs callbacks that are queued within a backward pass at its end, in order; DistributedDataParallel and
    FSDP2 queue their waiting later than this, in hooks of the loss's inputs.
    """
    if world.mark is not unmarked and loss.sum.requires_grad:
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as FSDP2 does
        loss.sum.register_hook(lambda _: engine.queue_callback(lambda: world.mark("computed")))
    return loss


def summed(losses: Sequence[Loss], world: World, extra: torch.Tensor | None = None) -> Loss:
    """Sum and count over all passes that count, of all processes, in float64, in one message with the signals.

    The numbers `extra` (float64) are sent with them, and replaced by their sums over all processes.
    """
    world.mark("summing")
    device = losses[0].sum.device
    pairs = [
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in (loss.sum, loss.count)]
        for loss in losses
    ]
    own = torch.stack([torch.stack(pair) for pair in pairs]).sum(0)
    signals = world.signals.outgoing(own)
    total = world.total(torch.cat([own, signals] if extra is None else [own, signals, extra]))
    if extra is not None:
        extra.copy_(total[len(own) + len(signals) :])
    if world.is_all_data:
        world.signals.receive(total[len(own) : len(own) + len(signals)])
    else:
        world.share_signals(own)
    world.mark("agreed")
    return Loss(total[0].to(losses[0].sum.dtype), total[1])


class WholePass(nn.Module):
    """A pass through the model, loss and all, as the forward pass of one module: layouts wrap this module.

    Within DistributedDataParallel or FSDP2, everything that a loss does with the model is then in the wrapper's one
    forward pass: calls of submodules, several passes, weights and attributes that it reads. The output is the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        """The result of `work`."""
        return work()


_REDISTRIBUTION = logging.getLogger("torch.distributed.tensor._redistribute")

BUCKET_BYTES = 25 * 2**20
"""Gradients in one message [bytes], as in DistributedDataParallel."""


class GradientReducer(Strategy):
    """Gradients summed over the processes that share a batch, after the backward pass of the last one."""

    model: nn.Module

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model
        self._world = world

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        losses: list[Loss] = []
        for each in passes:
            loss = backward(loss_of(each), 1.0 if each.counts else 0.0)
            losses.append(loss if each.counts else Loss(torch.zeros_like(loss.sum), 0))
        self.reduce()
        return summed(losses, self._world)

    def reduce(self) -> None:
        """Add up the gradients that the backward passes left here."""
        if self._world.layout.data_size > 1 and self._world.data is not None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            sum_over(gradients_of(trained, self._world.data), self._world.data)


StagePass = Callable[[], tuple[torch.Tensor, ...]]
"""A pass through the stage, which gives tensors."""


class StageParallelism(Protocol):
    """How the model of a stage is divided among the processes of that stage."""

    def update(self) -> contextlib.AbstractContextManager[None]:
        """The context of all passes of an update, forward and backward."""
        ...

    def forward(self, work: StagePass) -> tuple[torch.Tensor, ...]:
        """The result of `work`, with all parameters that it needs."""
        ...

    def set_precision(self, precision: Precision) -> None:
        """See Strategy."""
        ...

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare a backward pass; the last one of an update leaves the sum of gradients, or `finish` does."""
        ...

    def finish(self) -> None:
        """Add up the gradients, after the last backward pass."""
        ...

    def after_evaluation(self) -> None:
        """Release the memory of a pass without a backward pass."""
        ...

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The stage's tensors put together over the processes that hold parts of it."""
        ...


class ReplicatedStage(GradientReducer):
    """A stage whose parameters are not sharded; see StageParallelism."""

    def update(self) -> contextlib.AbstractContextManager[None]:
        """See StageParallelism."""
        return contextlib.nullcontext()

    def forward(self, work: StagePass) -> tuple[torch.Tensor, ...]:
        """See StageParallelism."""
        return work()

    def before_backward(self, *, is_last: bool) -> None:
        """See StageParallelism."""

    def finish(self) -> None:
        """See StageParallelism."""
        self.reduce()

    def after_evaluation(self) -> None:
        """See StageParallelism."""


def is_check_due(number: int) -> bool:
    """Whether a costly check is made in update or evaluation `number`: 1 to 4, 8, 16 and so on."""
    return number == 3 or number & (number - 1) == 0


def gradients_of(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This process's part of the gradient of each parameter that has one anywhere in the group; zeros if not here."""
    has_one = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(has_one, group=group)
    for parameter, count in zip(parameters, has_one.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def sum_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their sums over a group, in place; a few at once, together at most BUCKET_BYTES."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(list(bucket), [total.view_as(to) for total, to in zip(sums, bucket, strict=True)])


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named tensors, divided ones put together; collective over the processes of their meshes."""
    return {name: _full(tensor) if is_spread(tensor) else tensor for name, tensor in tensors.items()}


@torch.no_grad()
def _full(tensor: Any) -> torch.Tensor:
    """A DTensor's whole tensor; without PyTorch's warning that it takes a message for each dimension of the mesh."""
    was_disabled, _REDISTRIBUTION.disabled = _REDISTRIBUTION.disabled, True
    try:
        full: torch.Tensor = tensor.full_tensor()
    finally:
        _REDISTRIBUTION.disabled = was_disabled
    return full


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of consecutive tensors of one dtype."""
    bucket: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and (held >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket
