"""Which operations a published whole-model measurement consisted of, counted.

Training is a forward pass, then the backward pass from the loss, into gradients that are there already; the loss itself
and the optimiser were not measured. A model of many equal layers is traced with few of them at two depths, and what the
deeper one has more is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.forecast.gpu_fusion import Call, fused
from bench.forecast.gpu_models import GPT2, OPT, Bert
from bench.forecast.gpu_models_moe import Switch
from stoker.errors import BadJob
from stoker.profiling.tracing.fake_device import answer_for_engine, pretending
from stoker.profiling.tracing.operations import operation_of, tensors_in
from stoker.records.trace import Operation, TraceSettings

_VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "expand",
    "detach",
    "alias",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "split",
    "split_with_sizes",
    "unbind",
    "device",
    "is_same_size",
    "empty",
    "empty_like",
)
_SECTOR_BYTES = 32


@dataclass(frozen=True)
class Step:
    """What one measurement did: how often each operation, by phase, eager and compiled."""

    forward: Mapping[Operation, int]
    backward: Mapping[Operation, int]
    fused_forward: Mapping[Operation, int]
    fused_backward: Mapping[Operation, int]

    @property
    def operations(self) -> Counter[Operation]:
        """Both phases together, not compiled."""
        return Counter(self.forward) + Counter(self.backward)


@dataclass
class _Recorder(TorchDispatchMode):
    """Counts the operations that run on the pretended device."""

    counts: Counter[Operation] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        answer = answer_for_engine(func)
        if answer is not None:
            return answer
        if str(given.get("device")) == "meta":
            given["device"] = torch.device("cuda", 0)
        out = func(*args, **given)
        if func.namespace == "aten" and func.overloadpacket.__name__ not in _VIEWS:
            operation = _countable(_with_strides(operation_of(func, args, given, out), args, out))
            self.counts[operation] += 1
            self.calls.append(Call(operation, tuple(tensors_in((args, given.values()))), tuple(tensors_in([out]))))
        return out


def _countable(operation: Operation) -> Operation:
    """The operation without attributes that are lists, which are no keys; here they are masks of outputs."""
    kept = tuple(pair for pair in operation.attributes if not isinstance(pair[1], list))
    return replace(operation, attributes=kept)


def _with_strides(operation: Operation, args: tuple[Any, ...], out: Any) -> Operation:
    """The operation, with what it reads across the order of its result (see `gpu_kernels.stream_bytes`)."""
    results = [one for one in tensors_in([out]) if one.dim() > 1]
    if not results or operation.flops or "norm" in operation.name or "softmax" in operation.name:
        return operation
    across, reach = 0, 0
    for tensor in tensors_in(args):
        if tensor.shape == results[0].shape and (steps := _steps_before_neighbour(tensor, results[0])) > 1:
            across += tensor.numel() * tensor.element_size()
            reach = max(reach, steps * _SECTOR_BYTES)
    if not across:
        return operation
    strided = (("strided_bytes", across), ("strided_reach_bytes", reach))
    return replace(operation, attributes=tuple(sorted((*operation.attributes, *strided))))


def _steps_before_neighbour(tensor: Tensor, result: Tensor) -> int:
    """How many elements of the result are written between two neighbours in the memory of the operand."""
    nearest = [dim for dim in range(tensor.dim()) if tensor.stride(dim) == 1 and tensor.size(dim) > 1]
    return result.stride(nearest[-1]) if nearest else 1


def step_of(
    config: Mapping[str, Any], *, is_training: bool, tokens: int, batch: int, capability: str, layers: int | None = None
) -> Step:
    """The operations of a model of `models.json` on `batch` sequences of `tokens`.

    `layers` is how many it has (None: as many as `models.json` says), of an encoder with a decoder how many each has.

    Raises:
        BadJob: an architecture that is not written down here, or a step that it cannot make.
    """
    if tokens < 1 or batch < 1:
        raise BadJob(f"A step of {batch} sequences of {tokens} tokens is empty; both are at least 1.")
    positions = _positions(config)
    if positions is not None and tokens > positions:
        raise BadJob(f"Sequences of {tokens} tokens are longer than the model's {positions} positions.")
    depth = layers or int(config.get("n_layer") or config.get("num_hidden_layers") or config["num_layers"])

    def counted(depth: int) -> tuple[Counter[Operation], ...]:
        return _counted(config, depth, is_training=is_training, tokens=tokens, batch=batch, capability=capability)

    few, more = (2, 4) if "num_experts" in config else (1, 2)
    times, left = divmod(depth - few, more - few)
    if times < 1 or left:
        return Step(*counted(depth))
    return Step(*(_extended(a, b, times) for a, b in zip(counted(few), counted(more), strict=True)))


def _positions(config: Mapping[str, Any]) -> int | None:
    """For how many tokens a model has learned a position; None where positions are relative."""
    if "num_experts" in config:
        return None
    found = config.get("n_ctx") or config.get("max_position_embeddings")
    return None if found is None else int(found)


def _extended(shallow: Counter[Operation], deep: Counter[Operation], times: int) -> Counter[Operation]:
    counts = {one: shallow[one] + times * (deep[one] - shallow[one]) for one in shallow | deep}
    return Counter({one: count for one, count in counts.items() if count > 0})


def _counted(
    config: Mapping[str, Any], layers: int, *, is_training: bool, tokens: int, batch: int, capability: str
) -> tuple[Counter[Operation], ...]:
    """Of a model of so many layers, in the order of `Step`'s fields."""
    settings = TraceSettings(target="cuda", capability=capability, micro_batch=batch)
    with pretending(settings) as pretence, pretence.mode:
        model = _model(config, layers, is_training=is_training).to(pretence.device).train(is_training)
        ids_BT = torch.ones(batch, tokens, dtype=torch.int64, device=pretence.device)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if is_training else None
        with _Recorder() as forward, torch.set_grad_enabled(is_training):
            logits = model(ids_BT)
        backward = _Recorder()
        if is_training:
            with _Recorder():  # the loss was not measured, but its backward pass was
                loss = nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids_BT.view(-1))
            with backward:
                loss.backward()
        return forward.counts, backward.counts, *fused(forward.calls, backward.calls)


def _model(config: Mapping[str, Any], layers: int, *, is_training: bool) -> nn.Module:
    architecture = "".join(config.get("architectures", ()))
    if "GPT2" in architecture:
        return GPT2(config, layers)
    if "OPT" in architecture:
        return OPT(config, layers)
    if "Bert" in architecture:
        return Bert(config, layers, is_training=is_training)
    if "Switch" in architecture:
        return Switch(config, layers)
    raise BadJob(f"The architecture {architecture!r} is not written down here; known: GPT2, OPT, Bert, Switch.")
