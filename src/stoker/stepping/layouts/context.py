"""Context parallel: processes hold parts of each sample's tokens, and shards of the model.

What: the tokens of each sample are cut into as many parts as there are processes, in order. All that a model does to
each token by itself is done where the token is; `scaled_dot_product_attention` gathers keys and values
(`stepping/layouts/context_attention.py`), and positions are those of the part. Losses and gradients are sums over the
processes, as over replicas; the state is sharded over them as over `shards` (`stepping/layouts/sharded.py`).
Use when: activations of a sample do not fit on a device, or a batch has fewer samples than there are devices. Costs: in
each attention layer, keys and values of all tokens in each process, their gather forward and the sum of their gradients
backward; causal attention also sends queries and results, so that all do the same work.
Does not combine with: tensor parallel, stages, experts, compiled plans; models in which tokens meet outside of
`scaled_dot_product_attention` (convolutions over time, recurrences, masks of one's own, batch statistics), which are
refused (`stepping/layouts/context_locality.py`), as are losses and metrics that are no sum over tokens. Dropout draws
differ from one process's: the same law. The report shows no single samples.
Before the first update, short samples are passed by one process's way and by parts: results of all calls, losses,
metrics and gradients must be equal.
Source: A. Grattafiori et al., arXiv:2407.21783, section 3.3.2; D. Li et al., arXiv:2310.03294.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.loading.batches import Pass
from stoker.loading.fields import Content, map_tensors, tensors_of
from stoker.loading.lengths import ignored_target
from stoker.loading.order import generators_kept
from stoker.records import Layout, Plan, Precision
from stoker.stepping.buffers import Buffers
from stoker.stepping.distributed_tensors import local
from stoker.stepping.layouts.base import LayoutExecution, LossOf, MeasuresOf, Strategy
from stoker.stepping.layouts.context_locality import (
    ATTENTION,
    TOKENS,
    Modules,
    Positions,
    Recorder,
    Site,
    TokenFollower,
    has_values,
    is_counting,
    name_of,
    num_tokens,
    shortest,
    site_of,
)
from stoker.stepping.model import meta_model, on_meta
from stoker.stepping.precision import products_in
from stoker.stepping.random_draws import RandomDraws, seed_stage_draws
from stoker.stepping.world import World, gather_json

if TYPE_CHECKING:
    from stoker.stepping.losses import TrainingObjective

_REMEDY = "Use a layout of shards or replicas, or change the model."
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of a result or a gradient, relative to the largest of its numbers, that is rounding."""
_ROUNDING_ELSE = 5e-2


class ContextExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def __init__(self) -> None:
        self._followers: WeakKeyDictionary[nn.Module, dict[str, TokenFollower]] = WeakKeyDictionary()

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; shards and replicas are within it."""
        from stoker.stepping.layouts.sharded import Sharded  # noqa: PLC0415 - FSDP2 takes long to import

        outline = on_meta(meta_model(job))
        return ContextParallel(Sharded(model, world, precision=plan.precision), outline, world, job, plan.precision)

    def data_problem(self, job: Job, model: nn.Module, content: Content, layout: Layout) -> str | None:
        """As `LayoutExecution.data_problem`."""
        forms = map_tensors(content, lambda tensor: (tensor.dtype, tensor.shape))
        known, key = self._followers.setdefault(model, {}), repr((job.fields, forms))
        if key not in known:
            known[key] = TokenFollower(job.fields.call, model, content)
        found = known[key].sites(layout.context)
        return found if isinstance(found, str) else None


EXECUTION = ContextExecution()


class ContextParallel(Strategy):
    """See `stoker.stepping.layouts.base.Strategy`.

    Args:
        inner: the data parallelism of the model over all processes.
        outline: the model on the meta device.
        world: the processes.
        job: whose fields say what goes into the model.
        precision: of the plan.
    """

    model: nn.Module

    def __init__(self, inner: Any, outline: nn.Module, world: World, job: Job, precision: Precision) -> None:
        assert world.mesh is not None
        self.model = inner.model
        self.hooked_blocks = inner.hooked_blocks
        self.is_checked = False
        self._inner, self._world, self._precision = inner, world, precision
        self._outline = outline
        self._call, self._fields = job.fields.call, job.fields
        self._ignored = ignored_target(job.objective.loss)
        self._group: dist.ProcessGroup = world.mesh["context"].get_group()
        self._positions = Positions(part=self._group.rank())
        self._known: dict[int, frozenset[Site]] = {}  # by the number of tokens of a sample
        self._passes = _DividedPass(self._group, self._positions)

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        loss: Loss = self._inner.accumulate(passes, loss_of)
        return loss

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Strategy.whole`."""
        whole: dict[str, torch.Tensor] = self._inner.whole(tensors)
        return whole

    def set_precision(self, precision: Precision) -> None:
        """As `Strategy.set_precision`."""
        self._precision = precision
        self._inner.set_precision(precision)

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Strategy.measures`, of this process's part of the tokens."""
        results: dict[str, Loss] = self._inner.measures(self.part_of(content), size, measure)
        return results

    def part_of(self, content: Content) -> Content:
        """As `Strategy.part_of`: this process's tokens of each sample.

        Raises:
            BadJob: the tokens or the model cannot be divided.
        """
        from stoker.stepping.layouts.context_attention import prepare_masks  # noqa: PLC0415 - DTensor takes seconds

        length = self._num_tokens(content)
        if length not in self._known:
            self._known[length] = self._sites(content)
        self._positions.sites, self._positions.length = self._known[length], length // self._group.size()
        if self._world.device.type == "cuda":
            prepare_masks(self._group.rank(), self._group.size(), self._positions.length)
        if self.model.training:
            seed_stage_draws(self._group.rank(), self._world.device)
        return self._cut(content)

    def conditions(self) -> contextlib.AbstractContextManager[None]:
        """As `Strategy.conditions`: attention and positions are those of a part."""
        return self._passes.on()

    def check(self, content: Content, objective: TrainingObjective) -> None:
        """As `Strategy.check`: of two short samples, all that is computed of parts is what is computed of the whole.

        Collective. Where no target of the batch counts, nothing would be compared: the next batch is checked then.

        Raises:
            BadJob: it is not.
        """
        size, parts = 2, self._group.size()
        tokens = min(self._num_tokens(content), shortest(parts))
        rows, begin, num_counted = self._window(content, tokens)
        counted = torch.tensor(num_counted, device=self._world.device)
        dist.all_reduce(counted)
        if not counted:
            return
        self.is_checked = True
        rows = rows[torch.arange(size) % len(rows)]
        short = map_tensors(content, lambda tensor: tensor[rows.to(tensor.device), begin : begin + tokens])
        buffers, precision, device = Buffers(self.model), self._precision, self._world.device
        if buffers.are_there:
            buffers.keep()
        if precision == "bf16":  # whose rounding would hide differences
            self.set_precision("fp32")
        try:
            with generators_kept():
                part = self.part_of(short)  # masks for GPUs cannot be made within dispatch modes
                with (
                    RandomDraws(silenced=True),
                    torch.autocast(device.type, enabled=False),
                    products_in("fp32", device),
                ):
                    problem = self._compared(short, part, objective, size)
        finally:
            self._passes.is_whole = False
            if precision == "bf16":
                self.set_precision(precision)
            if buffers.are_there:
                buffers.restore()
        if problem is not None:
            raise BadJob(f"{self._world.layout.in_words()}: {problem}", remedy=_REMEDY)

    def _window(self, content: Content, tokens: int) -> tuple[torch.Tensor, int, int]:
        """Samples, those with most targets that count first; where so many tokens of them begin; how many count there.

        The loss and its gradient are compared, and of targets that the loss ignores these are 0.
        """
        length = self._num_tokens(content)
        target = self._fields.target_of(content)
        is_known = isinstance(target, torch.Tensor) and isinstance(self._ignored, int)
        if not is_known:
            return torch.arange(next(iter(tensors_of(content))).shape[0]), 0, 1
        counts = (target != self._ignored).flatten(2).any(-1) if target.dim() > 2 else target != self._ignored
        ends = [*range(tokens, length, tokens), length]  # of windows; the last ends with the samples
        each = [counts[:, end - tokens : end].sum(-1) for end in ends]
        in_windows = torch.stack(each, 1).cpu()  # [samples, windows]
        window = int(in_windows.sum(0).argmax())
        rows = in_windows[:, window].argsort(descending=True, stable=True)
        return rows, ends[window] - tokens, int(in_windows[rows[:2], window].sum())

    def _num_tokens(self, content: Content) -> int:
        length = num_tokens(content)
        if isinstance(length, str):
            raise BadJob(f"{self._world.layout.in_words()}: {length}", remedy=_REMEDY)
        return length

    def _sites(self, content: Content) -> frozenset[Site]:
        with self._passes.paused():  # an evaluation is within its conditions already
            found = TokenFollower(self._call, self._outline, content).sites(self._group.size())
        if isinstance(found, str):
            raise BadJob(f"{self._world.layout.in_words()}: {found}", remedy=_REMEDY)
        return found

    def _cut(self, content: Content) -> Content:
        part, length = self._group.rank(), self._positions.length
        return map_tensors(content, lambda tensor: tensor.narrow(TOKENS, part * length, length).contiguous())

    def _compared(self, whole: Content, part: Content, objective: TrainingObjective, size: int) -> str | None:
        """Why parts of short samples give something else than the whole; None, in all processes, if they do not."""
        compared = _Results(self._group)
        modules, measured = Modules(), []
        for content, is_whole in ((whole, True), (part, False)):
            record = compared.keep if is_whole else compared.compare
            self._passes.is_whole = is_whole
            with torch.no_grad(), modules.followed(self.model), self._passes.on(modules, record):
                measured.append(self._inner.measures(content, size, objective.measures))
        differing = self._measures_differ(
            measured[0], measured[1], compared.rounding
        )  # collective, whatever was found before
        problem = self._of_first(compared.problem or differing)
        return problem or self._of_first(self._gradients_differ(whole, part, objective, size))

    def _measures_differ(self, whole: dict[str, Loss], part: dict[str, Loss], rounding: float) -> str | None:
        differing: list[str] = []
        for name, one in whole.items():
            expected, own = ([float(each.sum), float(each.count)] for each in (one, part[name]))
            sums = torch.tensor(own, dtype=torch.float64, device=self._world.device)
            dist.all_reduce(sums, group=self._group)
            if not all(_is_near(a, b, rounding) for a, b in zip(sums.tolist(), expected, strict=True)):
                differing.append(
                    f"{name} is no sum over tokens: parts have {sums.tolist()} (sum, count), the whole {expected}"
                )
        return next(iter(differing), None)

    def _gradients_differ(self, whole: Content, part: Content, objective: TrainingObjective, size: int) -> str | None:
        parameters = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        kept = [p.grad for _, p in parameters]
        gradients: list[list[torch.Tensor | None]] = []
        for content, is_whole in ((whole, True), (part, False)):
            self._passes.is_whole = is_whole  # within the backward pass, too
            for _, parameter in parameters:
                parameter.grad = None

            def loss_of(_: Pass, content: Content = content) -> Loss:
                with self._passes.on():
                    return objective.loss(self.model, content, size)

            self._inner.accumulate([Pass(0, size, 0)], loss_of)
            gradients.append([None if p.grad is None else local(p.grad).clone() for _, p in parameters])
        for (_, parameter), gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        parts = self._group.size()
        rounding = _rounding(next(iter(parameters))[1].dtype)
        own = [g.abs().max().double() for g in gradients[0] if g is not None and g.numel()]
        largest = torch.stack(own).max() if own else torch.zeros((), dtype=torch.float64, device=self._world.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # some hold parts without any
        scale = float(largest) / parts
        for (name, _), one, two in zip(parameters, *gradients, strict=True):
            if (one is None) != (two is None):
                return f"{name} has a gradient of samples and none of their parts, or the other way round"
            if one is not None and two is not None and one.numel():
                difference = float((one / parts - two).abs().max())
                share = difference / max(scale, 1e-30)
                if not share <= rounding:
                    return f"the gradient of {name} from parts of samples differs by {share:.1e} of the largest"
        return None

    def _of_first(self, problem: str | None) -> str | None:
        """A problem of any process of the world, in all of them."""
        found = gather_json(problem, self._world.device)
        return next((str(each) for each in found if each is not None), None)


class _DividedPass:
    """Makes attention and positions within a block those of a part of the tokens."""

    is_whole = False
    """Leaves them as they are, for passes of whole samples."""
    is_paused = False

    def __init__(self, group: dist.ProcessGroup, positions: Positions) -> None:
        self.group, self.positions = group, positions

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block, inside of `on` too, all calls are as they are."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    @contextlib.contextmanager
    def on(self, modules: Modules | None = None, record: Recorder | None = None) -> Iterator[None]:
        """Within the block. `record` is given the results of calls, with their modules."""
        before = functional.scaled_dot_product_attention
        mode = _PartMode(self, before, modules, record)
        functional.scaled_dot_product_attention = mode.attention
        try:
            with mode:
                yield
        finally:
            functional.scaled_dot_product_attention = before


class _PartMode(TorchFunctionMode):
    """See `_DividedPass`."""

    def __init__(
        self,
        owner: _DividedPass,
        before: Callable[..., torch.Tensor],
        modules: Modules | None,
        record: Recorder | None,
    ) -> None:
        super().__init__()
        self._owner, self._before, self._modules, self._record = owner, before, modules, record
        self._is_whole, self._positions = owner.is_whole, owner.positions
        self._is_within = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = kwargs or {}
        if self._is_within or self._owner.is_paused:
            return func(*args, **kwargs)
        if func is ATTENTION:  # imported by its name, so that it was not replaced
            return self.attention(*args, **kwargs)
        if not self._is_whole and is_counting(func) and site_of(sys._getframe(1)) in self._positions.sites:  # noqa: SLF001 - the only way to the caller
            args, kwargs = self._positions.shifted(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(func, sys._getframe(1), result)  # noqa: SLF001 - as above
        return result

    def attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`scaled_dot_product_attention` over all parts."""
        if self._owner.is_paused or self._is_within:
            return self._before(*args, **kwargs)
        self._is_within = True
        functional.scaled_dot_product_attention = self._before  # PyTorch's causal masks look for it by this name
        try:
            result = self._before(*args, **kwargs) if self._is_whole else self._divided(*args, **kwargs)
            self._note(ATTENTION, None, result)
            return result
        finally:
            functional.scaled_dot_product_attention = self.attention
            self._is_within = False

    def _divided(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - PyTorch's own signature
        **named: Any,
    ) -> torch.Tensor:
        from stoker.stepping.layouts.context_attention import attention_over  # noqa: PLC0415 - DTensor takes seconds

        length = self._positions.length
        if attn_mask is not None or query.shape[-2] != length or key.shape[-2] != length:
            what = (
                "with a mask of its own" if attn_mask is not None else f"of {query.shape[-2]} to {key.shape[-2]} tokens"
            )
            raise BadJob(
                f"attention {what} cannot be divided: each process has {length} tokens of each sample", remedy=_REMEDY
            )
        return attention_over(
            self._owner.group, self._before, query, key, value, is_causal=is_causal, dropout_p=dropout_p, **named
        )

    def _note(self, func: Any, frame: Any, result: Any) -> None:
        """Show the result of a call of the model's own to the recorder."""
        if self._record is None or self._modules is None or not self._modules.stack:
            return
        if _is_of_shards(frame):
            return
        name = name_of(func)
        if has_values(name) and tensors_of(result):
            self._record(name, self._modules.innermost, result)


def _is_of_shards(frame: Any) -> bool:
    """Whether a call is one of `fully_shard`'s, in a hook of a module."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_MOST_FRAMES = 6


class _Results:
    """Results of a pass of whole samples, and what of a pass of parts differs from them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.problem: str | None = None
        self.rounding = _ROUNDING[torch.float64]
        self._part, self._parts = group.rank(), group.size()
        self._kept: list[tuple[str, list[torch.Tensor]]] = []
        self._next = 0

    def keep(self, name: str, _module: str, result: Any) -> None:
        """Keep the result of a call of whole samples."""
        tensors = tensors_of(result)
        for tensor in tensors:
            if tensor.is_floating_point():
                self.rounding = max(self.rounding, _rounding(tensor.dtype))
        self._kept.append((name, [tensor.detach().clone() for tensor in tensors]))

    def compare(self, name: str, module: str, result: Any) -> None:
        """Compare the result of the next call of parts with that of the whole."""
        if self.problem is not None:
            return
        tensors = tensors_of(result)
        if self._next >= len(self._kept):
            self.problem = f"{name} in {module} is called for parts of samples alone"
            return
        expected, whole = self._kept[self._next]
        self._next += 1
        if (expected, len(whole)) != (name, len(tensors)):
            self.problem = f"{name} in {module} is called for parts of samples, and {expected} for whole ones"
        elif not all(self._is_part(one, two.detach()) for one, two in zip(whole, tensors, strict=True)):
            self.problem = f"{name} in {module} gives something else for a part of a sample's tokens than for all"

    def _is_part(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether a result is what the whole's is, or this process's part of it along one dimension.

        Whole numbers may differ, such as a part's first position: what follows from them shows in other results.
        """
        if not (whole.is_floating_point() or whole.is_complex()):
            return True
        if whole.shape == part.shape:
            return self._are_near(whole, part)
        dims = [dim for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=False)) if a != b]
        if whole.dim() != part.dim() or len(dims) != 1 or whole.shape[dims[0]] != self._parts * part.shape[dims[0]]:
            return False
        dim, size = dims[0], part.shape[dims[0]]
        for outer in range(1, size + 1):  # rows of several samples, one after the other
            if size % outer == 0:
                pieces = whole.unflatten(dim, (outer, self._parts, size // outer)).select(dim + 1, self._part)
                if self._are_near(pieces.flatten(dim, dim + 1), part):
                    return True
        return False

    def _are_near(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        scale = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
        return torch.allclose(one, two, rtol=0.0, atol=self.rounding * max(scale, 1e-30), equal_nan=True)


def _rounding(dtype: torch.dtype) -> float:
    return _ROUNDING.get(dtype, _ROUNDING_ELSE)


def _is_near(one: float, two: float, rounding: float) -> bool:
    return abs(one - two) <= rounding * max(abs(two), 1e-30)
