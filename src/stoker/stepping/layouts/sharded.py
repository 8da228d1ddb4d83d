"""Fully sharded data parallel: processes hold parts of parameters, gradients and optimiser state, and of every batch.

What: PyTorch's FSDP2. A block's parameters are gathered before it computes and let go of after, its gradients are added
up to the parts that each process holds. With replicas, parts are held once per replica, and summed over replicas last.
In precision bf16 fp32 parameters are gathered in bf16, and their gradients summed in fp32 (`stepping/bf16_weights.py`).
Use when: the state does not fit on each device. Costs: every pass gathers all parameters, twice where `reshard` lets
them go between forward and backward, and adds up gradients in parts; without it, gradients stay whole until the last
pass of an update. Does not combine with: blocks that some processes pass through and others do not (see `_BlockOrder`);
a block's weights read outside its forward pass; Muon, whose matrices are whole; a job's own step; closure optimisers.
Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from stoker.errors import BadJob
from stoker.jobs import Loss
from stoker.layouts.shards import shard_dim
from stoker.loading.batches import Pass
from stoker.loading.fields import Content, map_tensors
from stoker.records import Precision
from stoker.stepping.activation_checkpointing import repeated_blocks
from stoker.stepping.bf16_weights import Bf16Weights
from stoker.stepping.distributed_tensors import local
from stoker.stepping.layouts.base import (
    LossOf,
    MeasuresOf,
    StagePass,
    Strategy,
    WholePass,
    backward,
    is_check_due,
    summed,
    whole_tensors,
)
from stoker.stepping.world import World

Along = Callable[[nn.Parameter], Shard | None]
"""Which dimension of a parameter is sharded; None is its first."""


def along_even_dimension(shards: int) -> Along:
    """The dimension along which `shards` processes divide this process's part of a parameter, as `shard_dim` says."""
    return lambda parameter: Shard(dim) if (dim := shard_dim(local(parameter).shape, shards)) else None


class Sharded(Strategy):
    """See `stoker.stepping.layouts.base.Strategy`; the parameters of `model` become DTensors, in place.

    Args:
        model: on its device; its matrices may be DTensors already, over the tensor dimension of the same mesh.
        world: over whose replicas and shards it is spread.
        precision: in bf16 fp32 parameters are gathered, and computed with, in bf16.
        along: the dimension of a parameter to shard; by default its first, if that has enough rows.
        experts: modules whose parameters are divided over the mesh's dimension of experts already, and are sharded over
            the others alone.

    Raises:
        BadJob: parameters that are gathered together have several dtypes.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        precision: Precision = "fp32",
        along: Along | None = None,
        experts: Sequence[nn.Module] = (),
    ) -> None:
        self.model = model
        self._world = world
        self._bf16 = Bf16Weights(model)
        self._scalars = [p for p in model.parameters() if p.dim() == 0]  # FSDP2 divides by rows, and takes no scalars
        self._root = WholePass(model)
        self.hooked_blocks = blocks = separate_blocks(model)
        self.exchanging = experts
        self._parts = _fully_sharded(self._root, blocks, world, set(self._scalars), along, experts)
        self._gather_for(precision)
        self._order = _BlockOrder(model, blocks, world)
        self._gathers_once = not world.layout.reshard
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained_scalars = [p for p in self._scalars if p.requires_grad]
        self._used: set[str] = set()
        self._watch_use()

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        self._used.clear()
        self._order.begin_update()
        try:
            losses = [self._pass(each, loss_of, is_last=each is passes[-1]) for each in passes]
        except Exception:
            root: Any = self._root
            if hasattr(root, "reset_iter_state"):  # since PyTorch 2.13: FSDP2 can go on after an error within a pass
                root.reset_iter_state()
            raise
        settling = self._settling()
        loss = summed(losses, self._world, settling)
        self._settle(settling)
        return loss

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Strategy.whole`."""
        self._order.require_equal_before()
        return whole_tensors(tensors)

    def set_precision(self, precision: Precision) -> None:
        """As `Strategy.set_precision`: what parameters are gathered in, between two passes."""
        self._gather_for(precision)
        self._watch_gathered()

    def _gather_for(self, precision: Precision) -> None:
        self._bf16.is_on = self._world.layout.gathered_in(precision) is not None
        for part in self._parts:
            dtypes = {p.dtype for _, _, p in _own_parameters(part) if p.requires_grad}
            is_bf16 = self._bf16.is_on and dtypes <= {torch.float32}
            _gather_as(part, _IN_BF16 if is_bf16 else _AS_STORED)

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Strategy.measures`."""
        results: list[dict[str, Loss]] = []
        with self._order.evaluation():
            self._root(lambda: results.append(measure(self.model, content, size)))
        for part in self._parts:
            part.reshard()  # otherwise done in the backward pass
        return results[0]

    def _pass(self, one: Pass, loss_of: LossOf, *, is_last: bool) -> Loss:
        """Make a pass, forward and backward."""
        self._add_up_now(is_last=is_last)
        losses: list[Loss] = []

        def work() -> torch.Tensor:
            losses.append(loss_of(one))
            return losses[0].sum

        with self._order.forward_pass():
            total = self._root(work)
        loss = backward(Loss(total, losses[0].count), 1.0 if one.counts else 0.0)
        return loss if one.counts else Loss(torch.zeros_like(loss.sum), 0)

    def _add_up_now(self, *, is_last: bool) -> None:
        """Say whether the next backward pass adds up gradients.

        Where memory is short, each pass does so over the shards; over replicas the last one alone.
        """
        root: Any = self._root
        if self._gathers_once:
            root.set_requires_gradient_sync(is_last)
        else:
            root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)

    def _settling(self) -> torch.Tensor:
        """Numbers to sum over processes: the order of blocks, whether each parameter was used, scalars' gradients."""
        device = next(iter(self._trained.values())).device
        uses = torch.tensor([name in self._used for name in self._trained], dtype=torch.float64, device=device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained_scalars]
        order = torch.tensor(self._order.to_sum(), dtype=torch.float64, device=device)
        return torch.cat([order, uses, *(gradient.detach().double().reshape(1) for gradient in gradients)])

    def _settle(self, total: torch.Tensor) -> None:
        """Give scalars their gradients' sums, and forget those of parameters that no process used in this batch.

        FSDP2 gives such parameters zeros, by which an optimiser would move them.

        Raises:
            BadJob: the processes did not pass through the same blocks.
        """
        order, total = total[: _BlockOrder.NUM_SUMS], total[_BlockOrder.NUM_SUMS :]
        self._order.require_equal(order)
        for parameter, gradient in zip(self._trained_scalars, total[len(self._trained) :], strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        if len(self._used) < len(self._trained):  # otherwise the device need not be waited for
            for parameter, count in zip(self._trained.values(), total.tolist(), strict=False):
                if count == 0:
                    parameter.grad = None
                elif parameter.grad is None:  # of experts in no shards, which other processes have
                    parameter.grad = torch.zeros_like(parameter)

    def _watch_use(self) -> None:
        """Record in `_used` the parameters that get a gradient, by hooks set in the next pass, once gathered."""
        names = {id(p): name for name, p in self._trained.items()}
        for scalar in self._trained_scalars:
            _call_with_gradient(scalar, functools.partial(self._used.add, names[id(scalar)]))
        self._watch_gathered()

    def _watch_gathered(self) -> None:
        names = {id(p): name for name, p in self._trained.items()}
        for part in self._parts:
            places = [(module, own, names[id(p)]) for module, own, p in _own_parameters(part) if id(p) in names]
            self._watch_once_gathered(part, places)

    def _watch_once_gathered(self, part: Any, places: list[tuple[nn.Module, str, str]]) -> None:
        def watch(*_: Any) -> None:
            handle.remove()
            gathered = {id(getattr(module, own)): (getattr(module, own), name) for module, own, name in places}
            for parameter, name in gathered.values():
                _call_with_gradient(parameter, functools.partial(self._used.add, name))

        handle = part.register_forward_pre_hook(watch)  # after FSDP2's own, which gathers


_PASS_END = 0
"""Follows the numbers of a pass's blocks, which count from 1."""


class _BlockOrder:
    """Refuses models whose blocks are not gathered in the same order by all processes that share a batch.

    A gather does not check whose weights it gets: where each process skips equally many blocks, weights of different
    blocks are put together without an error, and otherwise processes wait for each other until the timeout.

    1. In updates and evaluations 1 to 4, 8, 16 and so on each process announces the next block before it is gathered:
       a small sum over the processes for each block. All processes refuse a difference at once.
    2. In every update the order is compared after its passes, by two numbers in a message that is sent anyway. That
       finds all orders that differ, except those whose processes wait for each other within the passes.
    """

    NUM_SUMS = 2

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], world: World) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self._names = ["the end of its pass", *(names[id(block)] for block in blocks)]
        self._world = world
        self._model = type(model).__name__
        self._num_updates = self._num_evaluations = 0
        self._is_within_pass = self._compares = False
        self._order: list[int] = []  # of the passes of this update, or of an evaluation
        self._begin = 0  # of this pass in it
        self._unread: tuple[Any, torch.Tensor, list[int]] | None = None
        for number, block in enumerate(blocks, 1):
            block.register_forward_pre_hook(functools.partial(self._enter, number), prepend=True)  # before FSDP2's

    def begin_update(self) -> None:
        """Begin the order of another update."""
        self._order = []
        self._num_updates += 1
        self._compares = is_check_due(self._num_updates)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around the forward pass of an evaluation."""
        self.require_equal_before()
        self._order = []
        self._num_evaluations += 1
        self._compares = is_check_due(self._num_evaluations)
        with self.forward_pass():
            yield

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around a forward pass; blocks recomputed in a backward pass are gathered by that one."""
        self._begin, self._is_within_pass = len(self._order), True
        try:
            yield
            self._next(_PASS_END)
        finally:
            self._is_within_pass = False

    def to_sum(self) -> list[float]:
        """A digest of the order below 2^20, and its square: their sums over 8,192 processes are exact."""
        digest = _digest(self._order)
        return [digest, digest * digest]

    def require_equal(self, sums: torch.Tensor) -> None:
        """Raise BadJob, in all processes, unless all passed through the same blocks.

        A GPU is not waited for: there the check is made after the next update's passes.

        Args:
            sums: of `to_sum` over the processes [2].
        """
        self.require_equal_before()
        if sums.device.type == "cpu":
            self._require(sums.tolist(), self._order)
            return
        on_host = torch.empty(self.NUM_SUMS, dtype=sums.dtype, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._unread = copied, on_host, self._order

    def require_equal_before(self) -> None:
        """As `require_equal`, of an earlier update that has not been checked yet."""
        if self._unread is not None:
            (copied, sums, order), self._unread = self._unread, None
            copied.synchronize()
            self._require(sums.tolist(), order)

    def _require(self, sums: list[float], order: list[int]) -> None:
        size, digest = self._world.layout.data_size, _digest(order)
        if sums != [size * digest, size * digest * digest]:  # then in no process: equal means no variance
            for number in order:
                self._compare(number)

    def _enter(self, number: int, *_: Any) -> None:
        if not self._is_within_pass:
            return
        if self._world.layout.reshard or number not in self._order[self._begin :]:  # otherwise it is gathered already
            self._next(number)

    def _next(self, number: int) -> None:
        self._order.append(number)
        if self._compares:
            self._compare(number)

    def _compare(self, number: int) -> None:
        """Raise BadJob where other processes that share a batch are at another block."""
        # An explicit dtype: the default differs within passes and after them.
        numbers = torch.zeros(self._world.layout.data_size, dtype=torch.float64, device=self._world.device)
        numbers[self._world.data_rank] = number
        numbers = self._world.total(numbers)
        by_number: dict[int, list[int]] = {}
        for rank, other in zip(dist.get_process_group_ranks(self._world.data), numbers.tolist(), strict=True):
            by_number.setdefault(int(other), []).append(rank)
        if len(by_number) > 1:
            groups: list[str] = []
            for other, ranks in by_number.items():
                named = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")
                groups.append(f"{'ranks' if len(ranks) > 1 else 'rank'} {named} at {self._names[other]}")
            where = "; ".join(groups)
            raise BadJob(
                f"the processes do not pass through the same blocks of {self._model}, whose weights they hold in "
                f"shards: {where}",
                remedy="Skip the same blocks in all processes (by a generator seeded with the update's number, say), "
                "or use a layout of replicas.",
            )


def _digest(order: Sequence[int]) -> int:
    return zlib.crc32(repr(order).encode()) & (2**20 - 1)


def separate_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that can be gathered separately: the repeated ones, if none shares a parameter with others."""
    blocks = repeated_blocks(model)
    inside: set[int] = set()
    for block in blocks:
        own = {id(p) for p in block.parameters()}
        if own & inside:
            return []
        inside |= own
    within = {id(module) for block in blocks for module in block.modules()}
    outside = {
        id(p) for module in model.modules() if id(module) not in within for p in module.parameters(recurse=False)
    }
    return [] if inside & outside else blocks


def _fully_sharded(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    world: World,
    left: set[nn.Parameter],
    along: Along | None,
    experts: Sequence[nn.Module],
) -> list[Any]:
    """Shard experts, each block, and the rest with the root, in place; the modules that gather, the root last."""
    assert world.mesh is not None
    for parameter in root.parameters():
        if not parameter.is_contiguous():  # channels-last weights; convolutions still take inputs of that format
            parameter.data = parameter.data.contiguous()
    layout = world.layout
    mesh = world.mesh["shards"] if layout.replicas == 1 else world.mesh["replicas", "shards"]
    parts: list[Any] = []
    if experts or layout.context > 1:  # whose processes hold shards, too
        sharing = tuple(axis.name for axis in layout.mesh if axis.shares_batch)
        mesh = world.mesh[sharing]._flatten("data")  # noqa: SLF001 - both axes in one, as `join` has made it
    if experts:
        if layout.shards > 1:
            parts = [*experts]
        else:
            left = left | {parameter for module in experts for parameter in module.parameters()}
    for part in parts:
        fully_shard(
            part,
            mesh=world.mesh["shards"],
            reshard_after_forward=layout.reshard,
            shard_placement_fn=along_even_dimension(layout.shards),
        )
    along = along or along_even_dimension(mesh.size(-1))
    settings: dict[str, Any] = {"mesh": mesh, "ignored_params": left, "shard_placement_fn": along}
    for block in blocks:
        block.register_forward_hook(_without_views)
        fully_shard(block, reshard_after_forward=layout.reshard, **settings)
    # The root's own parameters are needed again as soon as the backward pass begins.
    fully_shard(root, reshard_after_forward=False, **settings)
    parts += [*blocks, root]
    for part in parts:
        _require_one_dtype(part)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # otherwise an average, or an operation gloo lacks
        if hasattr(part, "set_reduce_scatter_unused_params"):
            part.set_reduce_scatter_unused_params(True, recurse=False)
    return parts


_AS_STORED = MixedPrecisionPolicy(cast_forward_inputs=False)
_IN_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def _gather_as(part: Any, policy: MixedPrecisionPolicy) -> None:
    """Let FSDP2 gather the parameters of `part`, none of which is gathered now, as another policy says.

    It has no public way to change the policy of a module: what it made for the last one, at the first gather, is made
    again at the next.
    """
    state = part._get_fsdp_state()  # noqa: SLF001 - see above
    state._mp_policy = policy  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001 - of PyTorch 2.12, 2.11
    for group in groups:
        if group is None:  # all its parameters are within other parts
            continue
        group.mp_policy = policy
        for parameter in group.fsdp_params:
            parameter.mp_policy, parameter.all_gather_outputs = policy, []
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param  # noqa: SLF001
        group._init_mp_dtypes()  # noqa: SLF001


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """A block's output, copied where it is a view: FSDP2's hooks on a view are lost if it is changed in place."""
    if not torch.is_grad_enabled():
        return output
    return map_tensors(output, lambda tensor: tensor if tensor._base is None else tensor.clone())  # noqa: SLF001 - no public way


def _own_parameters(part: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Module, name in it and parameter, for all parameters that are gathered with `part`."""
    for name, parameter in part.named_parameters(recurse=False):
        yield part, name, parameter
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _require_one_dtype(part: nn.Module) -> None:
    trained = {str(p.dtype): name for module, name, p in _own_parameters(part) if p.requires_grad}
    if len(trained) > 1:
        (one, first), (other, second), *_ = trained.items()
        raise BadJob(
            f"parameters that are sharded together have several dtypes: {first} is {one}, {second} is {other}",
            remedy="Use a layout of replicas, or give the model's trained parameters one dtype.",
        )


def _call_with_gradient(parameter: nn.Parameter, function: Callable[[], None]) -> None:
    """Call `function` whenever the parameter has got a gradient."""
    parameter.register_post_accumulate_grad_hook(lambda _: function())


class ShardedStage(Sharded):
    """A sharded stage of a pipeline, see StageParallelism: several micro-batches are in flight at once."""

    _is_new_update = True

    def update(self) -> contextlib.AbstractContextManager[None]:
        """See StageParallelism."""
        return contextlib.nullcontext()

    def forward(self, work: StagePass) -> tuple[torch.Tensor, ...]:
        """See StageParallelism."""
        if self._is_new_update:
            self._order.begin_update()
            self._is_new_update = False
        with self._order.forward_pass():
            out: tuple[torch.Tensor, ...] = self._root(work)
        return out

    def before_backward(self, *, is_last: bool) -> None:
        """See StageParallelism."""
        self._add_up_now(is_last=is_last)

    def finish(self) -> None:
        """See StageParallelism."""
        self._settle(self._world.total(self._settling()))
        self._used.clear()
        self._is_new_update = True

    def after_evaluation(self) -> None:
        """See StageParallelism."""
        for part in self._parts:
            part.reshard()
        self._is_new_update = True
