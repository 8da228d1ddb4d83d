"""Activation checkpointing: blocks keep only their inputs, and compute the rest again in the backward pass.

The repeated blocks of a model, found here, are also the unit of compilation, sharding and pipeline stages.

What: the first `count` of a model's repeated blocks go through `torch.utils.checkpoint` (not reentrant). Random draws
are repeated, and buffers that a pass changes, such as running statistics, are changed once: same mathematics. Autocast
keeps no casts of these blocks' weights.
Under selective checkpointing they keep what products, convolutions and attention gave as well, which are most of a
pass's time and a third to a half of its memory; only the operations in between are recomputed.
Use when: activations are most of the memory. Costs: a second forward pass of those blocks, about a third of a step;
selective: their norms and functions, a twentieth to a tenth.
Does not combine with: blocks that hide state in Python, whose inputs are changed in place later, or that begin to
change a large buffer in place after their first pass; each is refused when it happens.
Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174,
section 3; https://docs.pytorch.org/docs/stable/checkpoint.html. Selective: V. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, section 5, and the policy of TorchTitan, arXiv:2410.06511.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.checkpoint import checkpoint as checkpointed

from stoker.errors import BadJob, DoesNotFit
from stoker.loading.fields import map_tensors, tensors_of
from stoker.records.plan import Checkpointing
from stoker.stepping.activation_offload import ActivationOffload
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.kept_inputs import NOT_CHECKPOINTED, KeptInputs, changes_in_place
from stoker.stepping.uncompiled import is_uncompiled, uncompiled
from stoker.stepping.without_compiler import without_compiler

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_LEAST_OF_A_KIND = 3
"""Fewer blocks of a kind are not worth separate compilation: kernels cannot be fused across their borders."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the class that `model` repeats most, in the order of registration; empty if it repeats none.

    A block is a member of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`; it has parameters, and is not one of
    PyTorch's single layers. Which class it is:

    1. that of the longest run of equal members (of one class, with parameters of the same shapes), runs that lie within
       a block of another run left out: the layers of a transformer rather than the experts in each;
    2. where no two neighbours are equal, the class whose members, two at least, hold the most parameters: the stages of
       a convolutional network;
    3. where there are none either, as in 1 among the attributes of any module: the blocks in a stage of a RegNet.

    All outermost blocks of that class count, those of other widths too: all bottlenecks of a ResNet, encoder and
    decoder layers of a T5.
    """
    families = [_blocks_of(container) for container in model.modules() if isinstance(container, _CONTAINERS)]
    if equal := _equal_blocks(families):
        return equal
    kinds = dict.fromkeys(type(block) for family in families for block in family)
    of_kinds = (_outermost(families, kind) for kind in kinds)
    if largest := max((blocks for blocks in of_kinds if len(blocks) > 1), key=_num_parameters, default=None):
        return largest
    return _equal_blocks(list(map(_blocks_of, model.modules())))


def separately_compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, if there are on average three or more of each kind; else none.

    Blocks of one kind have one class and parameters of the same shapes: they share compiled code.
    """
    blocks = repeated_blocks(model)
    return blocks if len(blocks) >= _LEAST_OF_A_KIND * len({_signature(block) for block in blocks}) else []


def _equal_blocks(families: list[list[nn.Module]]) -> list[nn.Module]:
    """All blocks of the class of the longest run of equal neighbours, runs within a block of another run left out."""
    neighbours = [list(run) for family in families for _, run in itertools.groupby(family, key=_signature)]
    runs = [run for run in neighbours if len(run) > 1]

    def is_outermost(run: list[nn.Module]) -> bool:
        around = (block for other in runs if other is not run for block in other)
        return not any(inner is run[0] for block in around for inner in block.modules() if inner is not block)

    longest = max(filter(is_outermost, runs), key=lambda run: (len(run), _num_parameters(run)), default=None)
    return [] if longest is None else _outermost(families, type(longest[0]))


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    """Children that can be blocks: they have parameters and a forward pass, and are no single layers of PyTorch."""
    blocks: list[nn.Module] = []
    for child in container.children():
        is_layer = type(child).__module__.startswith("torch.nn") and next(child.children(), None) is None
        # A list or dict of modules has no forward pass of its own: its owner passes through it.
        has_forward = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if has_forward and not is_layer and next(child.parameters(), None) is not None:
            blocks.append(child)
    return blocks


def _signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _outermost(families: list[list[nn.Module]], kind: type[nn.Module]) -> list[nn.Module]:
    """Each block of that class once, without those inside another one."""
    kept: list[nn.Module] = []
    inside: set[int] = set()
    for block in itertools.chain.from_iterable(families):  # a module comes before what is in it
        if type(block) is not kind:
            continue
        if id(block) not in inside:
            kept.append(block)
        inside.update(map(id, block.modules()))
    return kept


def _num_parameters(blocks: list[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


_ATEN = torch.ops.aten
_KEPT = frozenset(
    getattr(_ATEN, name)
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
"""Operations whose results selective checkpointing keeps, attention's where it drops nothing."""
_SMALL = 4096
"""Elements up to which a buffer is copied before every pass even if it never changed so far: a counter may start."""


def num_blocks(model: nn.Module) -> int:
    """Number of blocks that can be checkpointed, the largest `checkpointed_blocks` of a plan [blocks]."""
    return len(repeated_blocks(model))


def checkpoint(
    model: nn.Module,
    count: int,
    conditions: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    checkpointing: Checkpointing = "full",
    offloaded_from: torch.device | None = None,
) -> None:
    """Checkpoint the first `count` of `repeated_blocks(model)`, in place; names and identity of modules stay.

    Args:
        model: its blocks' `forward` is wrapped; a copy of the model is checkpointed as well.
        count: number of blocks; 0 changes nothing.
        conditions: the context of the second forward pass, besides autocast, which PyTorch restores itself.
        checkpointing: `selective` keeps what products, convolutions and attention give.
        offloaded_from: the GPU from which inputs go to the host; None: they stay on it.

    Raises:
        BadJob: the model has fewer blocks.
    """
    if count == 0:
        return
    blocks = repeated_blocks(model)
    if count > len(blocks):
        have = f"{len(blocks)} repeated blocks" if blocks else "no repeated blocks"
        raise BadJob(
            f"the plan checkpoints {count} blocks, but {type(model).__name__} has {have}",
            remedy=f"Use a plan with checkpointed_blocks of 0 to {len(blocks)}." if blocks else NOT_CHECKPOINTED,
        )
    names = {id(module): name for name, module in model.named_modules()}
    offload = None if offloaded_from is None else ActivationOffload(offloaded_from)
    for number, block in enumerate(blocks[:count], start=1):
        block.forward = Checkpointed(
            block,
            block.forward,
            names[id(block)],
            conditions,
            is_selective=checkpointing == "selective",
            offload=offload,
            is_last=number == count,
        )


def not_repeatable(problem: CheckpointError) -> DoesNotFit:
    """The error to raise for PyTorch's error about a second pass unlike the first one."""
    return DoesNotFit(
        "a checkpointed block did something else in its second forward pass than in its first (does it keep a "
        f"cache, or other state hidden in Python?): {str(problem).splitlines()[0]}",
        remedy=NOT_CHECKPOINTED,
    )


@dataclass(eq=False)
class Checkpointed:
    """A block's forward pass that keeps its inputs alone wherever gradients are recorded.

    Raises:
        DoesNotFit: where a large buffer is changed in place for the first time after the first pass; in the backward
            pass, where an input has been changed in place, or the second pass changes a buffer that the first did not.
    """

    block: nn.Module
    forward: Callable[..., Any]
    name: str
    conditions: Callable[[], contextlib.AbstractContextManager[Any]]
    is_selective: bool = False
    offload: ActivationOffload | None = None
    is_last: bool = False
    changing: frozenset[str] | None = field(default=None, init=False)
    """Names of the block's buffers, except batch norms', that a pass has changed; None before the first pass."""

    def must_keep(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a copy of `buffer` is needed before a pass, since the pass may change it."""
        return self.changing is None or name in self.changing or buffer.numel() <= _SMALL

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        is_frozen = not any(parameter.requires_grad for parameter in self.block.parameters())
        if is_frozen and not any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            return self.forward(*args, **kwargs)  # a frozen block before the first trained layer keeps nothing anyway
        if torch.compiler.is_compiling():  # the compiler repeats operations, not passes: nothing happens twice
            if self.is_selective:
                return selectively_checkpointed(self.forward, *args, **kwargs)
            return checkpointed(self.forward, *args, use_reentrant=False, **kwargs)
        # Inputs go in as one object, so that PyTorch keeps them as they are.
        if self.offload is None:
            kept = KeptInputs(self.name, (args, kwargs))
        else:
            kept = self.offload.kept(self.name, (args, kwargs), is_last=self.is_last)
        contexts = _eager_contexts if self.is_selective else noop_context_fn
        with without_cached_casts():
            return checkpointed(_Passes(self, args, kwargs), kept, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Within the context autocast casts weights each time: kept casts would outlive the activations that are not.

    PyTorch passes the second time with the same setting.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def selectively_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward pass as the compiler captures it, by contexts that it knows."""
    return checkpointed(forward, *args, use_reentrant=False, context_fn=_compiled_contexts, **kwargs)


def _compiled_contexts() -> Any:
    return create_selective_checkpoint_contexts(
        [getattr(operation, name) for operation in _KEPT for name in operation.overloads()]
    )


def _eager_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of the first and of the second forward pass."""
    kept: list[_KeptResult] = []
    return _Keeping(kept), _Reusing(kept)


def _is_kept(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation's result is kept: not that of attention that drops.

    That draws within, on a GPU; left out of the second pass, all draws after it would be others than in the first.
    """
    if operation.overloadpacket not in _KEPT:
        return False
    names = (argument.name for argument in operation._schema.arguments)  # noqa: SLF001 - the only place of the names
    return not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")


class _KeptResult(NamedTuple):
    """What an operation of the first pass gave; `versions` count the changes in place."""

    operation: Any
    result: Any
    versions: list[int]


class _Keeping(TorchDispatchMode):
    """Notes the results of the operations that are kept."""

    def __init__(self, kept: list[_KeptResult]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            # Detached: the result itself gets the graph, which holds this pass. Below autograd, a view counts its
            # base's changes in place only with this key.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
                detached = map_tensors(result, torch.Tensor.detach)
            self._kept.append(_KeptResult(func, detached, changes_in_place(detached)))
        return result


class _Reusing(TorchDispatchMode):
    """Gives the noted results in their order; one that was changed in place since is computed again.

    PyTorch's own context refuses such a result, as that of a linear layer before an activation in place.
    """

    def __init__(self, kept: list[_KeptResult]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._next = kept, iter(kept)

    def __enter__(self) -> Self:
        self._next = iter(self._kept)  # a graph that is retained goes through it again
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(func, args, kwargs or {}):
            kept = next(self._next, None)
            if kept is None or kept.operation is not func:
                raise CheckpointError(f"the second pass computes {func}, which the first did not at that place")
            if changes_in_place(kept.result) == kept.versions:
                return kept.result
        return func(*args, **(kwargs or {}))


without_compiler(_Keeping.__torch_dispatch__)
without_compiler(_Reusing.__torch_dispatch__)


class _Passes:
    """A block's forward pass over one input, and the second one, which must leave no trace."""

    def __init__(self, block: Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._device = next((p.device.type for p in block.block.parameters()), "cpu")
        self._is_autocast = True
        self._is_uncompiled = is_uncompiled()  # another number of tensors is kept where it is compiled
        self._before: dict[str, torch.Tensor] = {}

    def __call__(self, kept: KeptInputs) -> Any:
        """The block's output for its inputs, and in the second pass for the inputs that were kept."""
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            return self._first_pass(args, kwargs)
        args, kwargs = kept.again()
        autocast = contextlib.nullcontext() if self._is_autocast else torch.autocast(self._device, enabled=False)
        compiled = uncompiled() if self._is_uncompiled else contextlib.nullcontext()
        with self._block.conditions(), autocast, compiled, _buffers_untouched(self._block, self._before):
            return self._block.forward(*args, **kwargs)

    def _first_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first pass; keeps copies of the buffers that it changes, since the second one must begin with those."""
        block = self._block
        self._is_autocast = torch.is_autocast_enabled(self._device)
        of_norms = _buffers_of_norms(block.block)
        held = {name: buffer for name, buffer in block.block.named_buffers() if name not in of_norms}
        copies = {name: buffer.clone() for name, buffer in held.items() if block.must_keep(name, buffer)}
        versions = _versions_of(held)
        output = block.forward(*args, **kwargs)
        changed = _changed(block.block, held, versions)
        for name in changed - copies.keys():
            if held[name]._version != versions[name]:  # noqa: SLF001 - autograd's own count of changes
                raise _changed_unexpectedly(block, name, "changed in place for the first time after the first pass")
            copies[name] = held[name].clone()  # replaced by a new tensor: the old one has the old values
        block.changing = (block.changing or frozenset()) | changed
        self._before = {name: copies[name] for name in block.changing & held.keys()}
        return output


@contextlib.contextmanager
def _buffers_untouched(block: Checkpointed, before: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within the context, changing buffers are copies: of their values before the first pass, or of running statistics.

    In training a batch norm only writes its statistics, so that theirs need not be the earlier ones.

    Raises:
        DoesNotFit: another buffer was changed.
    """
    module = block.block
    held = dict(module.named_buffers())
    copied = before.keys() | _buffers_of_norms(module)
    others = {name: buffer for name, buffer in held.items() if name not in copied}
    versions, changed = _versions_of(others), set[str]()
    try:
        for name in copied:
            _put(module, name, (before[name] if name in before else held[name]).clone())
        yield
    finally:
        changed = _changed(module, others, versions)
        for name, buffer in held.items():
            _put(module, name, buffer)
        if changed:  # raised even where PyTorch ends the pass early, which it does by an exception
            raise _changed_unexpectedly(block, min(changed), "changed by the second forward pass and not by the first")


def _versions_of(buffers: dict[str, torch.Tensor]) -> dict[str, int]:
    """Autograd's count of in-place changes of each."""
    return {name: buffer._version for name, buffer in buffers.items()}  # noqa: SLF001 - autograd's own count


def _changed(module: nn.Module, held: dict[str, torch.Tensor], versions: dict[str, int]) -> set[str]:
    """Names of the buffers in `held` that were changed in place since, or replaced."""
    now, counts = dict(module.named_buffers()), _versions_of(held)
    return {name for name, buffer in held.items() if now.get(name) is not buffer or counts[name] != versions[name]}


def _changed_unexpectedly(block: Checkpointed, name: str, how: str) -> DoesNotFit:
    return DoesNotFit(
        f"buffer {name!r} of the checkpointed block {block.name!r} was {how}: the block cannot be computed again from "
        "what it began with",
        remedy=NOT_CHECKPOINTED,
    )


def _buffers_of_norms(block: nn.Module) -> set[str]:
    """Names of the running statistics that a pass of `block` updates."""
    norms = {id(module) for module in batch_norms(block) if module.training}
    return {
        f"{name}.{buffer}" if name else buffer
        for name, module in block.named_modules()
        if id(module) in norms
        for buffer, _ in module.named_buffers(recurse=False)
    }


def _put(block: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Make `buffer` the block's buffer of that dotted name."""
    owner, _, own = name.rpartition(".")
    setattr(block.get_submodule(owner), own, buffer)
