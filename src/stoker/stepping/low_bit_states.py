"""Adam and AdamW whose moments are kept in bf16 or in 8 bits.

What: weights, gradients and the arithmetic of an update stay in the dtype of the weights; between updates the two
moments of each parameter of two dimensions or more and 4,096 values or more are rounded, to 4 or 2.03 bytes for both in
place of 8. In bf16 they are rounded up or down at random in proportion (stochastic rounding), by a hash of seed, name,
update and the value's place: to the nearest, a second moment could not fall, as one update changes it by less than half
the distance of two bf16 numbers. In 8 bits blocks of 256 values of a row share the largest as scale, and each is
rounded to the nearest of 256 numbers that are dense near 0 (the dynamic map).
Use when: fp32 moments do not fit, or leave no room for activations: they are half of fp32 training's state, a third
under shards. It changes what is learned a little, so that the job has to allow it:
`Job(numerics=["bf16-states", "8bit-states"])`. Costs: some thirty plain operations in place of one fused kernel, over
pieces of a parameter, about 0.2 kB of memory traffic a value: with gradients of few samples that is a good part of an
update, of many it is not.
Does not combine with: optimisers other than Adam and AdamW, amsgrad, complex weights; 8 bits with a tensor-parallel
layout that cuts rows elsewhere than between blocks.
A plan does not change what is learned: which values share a scale and how each is rounded depends on its place in the
whole parameter alone, whatever part of it a process holds. For that reason it is no library's: blocks of torchao 0.18
and bitsandbytes 0.50 are cut from what a process holds.
Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, sections 2 and 3, of which
ours differs: blocks end with a row, and no second moment is rounded to 0, by whose root a first moment would be
divided. bf16: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.3 (to the nearest, at a decay
of 0.95); P. Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192 (stochastic rounding).
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stoker.errors import BadJob
from stoker.records.plan import LEAST_STATES, STATES_BLOCK, VALUES_AT_ONCE, OptimizerStates
from stoker.stepping.distributed_tensors import Runs, is_spread, local, runs_of, spread_as

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"


def has_low_bits(shape: tuple[int, ...]) -> bool:
    """Whether moments of a whole parameter of this shape are kept in fewer bits.

    >>> has_low_bits((64, 64)), has_low_bits((64, 63)), has_low_bits((8192,))
    (True, False, False)
    """
    return len(shape) > 1 and math.prod(shape) >= LEAST_STATES


class LowBitAdam(torch.optim.Optimizer):
    """Adam or, with `is_decoupled` weight decay, AdamW; see the method card above.

    State by parameter: `step`, `exp_avg` and `exp_avg_sq`, of the parameter's shape; in 8 bits these are numbers of the
    map's entries, and `exp_avg_scale` and `exp_avg_sq_scale` are of the shape [rows, blocks of a row].

    Args:
        groups: as for `torch.optim.AdamW`.
        states: `bf16` or `8bit`.
        names: of the parameters in the whole model.
        seed: of the draws by which bf16 is rounded.
    """

    def __init__(  # noqa: PLR0913 - settings of torch.optim.AdamW, and ours
        self,
        groups: list[dict[str, Any]],
        *,
        states: OptimizerStates,
        names: Mapping[str, torch.Tensor],
        seed: int,
        is_decoupled: bool,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.states, self._is_decoupled = states, is_decoupled
        self._keys = {parameter: zlib.crc32(f"{seed} {name}".encode()) for name, parameter in names.items()}
        for group in self.param_groups:
            for parameter in group["params"]:
                if states == "8bit" and has_low_bits(tuple(parameter.shape)):
                    _require_whole_blocks(parameter, next(name for name, p in names.items() if p is parameter))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the update of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in _MOMENTS:
                state |= _zeros(parameter, name, self.states)
        state["step"] += 1
        count, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        root, size = math.sqrt(1 - beta2**count), lr / (1 - beta1**count)
        key = zlib.crc32(count.to_bytes(8, "little"), self._keys.get(parameter, 0))
        for part in _parts(parameter, state, key):
            weight, gradient = part.weight, part.gradient
            if group["weight_decay"] and self._is_decoupled:
                weight.mul_(1 - lr * group["weight_decay"])
            elif group["weight_decay"]:
                gradient = gradient.add(weight, alpha=group["weight_decay"])
            mean, square = part.moments()
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            part.keep(mean, square)
            weight.addcdiv_(mean, square.sqrt_().div_(root).add_(group["eps"]), value=-size)
            part.put_back()


@dataclass
class _Part:
    """Rows of a parameter: its weights and gradient in the dtype of the arithmetic [rows, columns], and its moments.

    `stored` are views of the moments and of their scales, `draws` the numbers that bf16 is rounded by.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    stored: dict[str, torch.Tensor]
    draws: torch.Tensor | None
    target: torch.Tensor
    """The weights themselves, of which `weight` is a copy if their dtype is lower."""

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments in the dtype of the arithmetic, in memory of their own."""
        mean, square = (self._read(name) for name in _MOMENTS)
        return mean, square

    def keep(self, mean: torch.Tensor, square: torch.Tensor) -> None:
        """Round both moments to how they are stored."""
        for name, values in zip(_MOMENTS, (mean, square), strict=True):
            stored = self.stored[name]
            if (scale := self.stored.get(name + _SCALE)) is not None:
                codes, of_blocks = quantized(values, is_signed=name == _MOMENTS[0])
                stored.copy_(codes)
                scale.copy_(of_blocks)
            elif self.draws is not None and stored.dtype == torch.bfloat16:
                draws = self.draws if name == _MOMENTS[0] else self.draws >> 16
                stored.copy_(rounded_at_random(values, draws))
            else:
                stored.copy_(values)

    def put_back(self) -> None:
        """Store the weights, if they are a copy."""
        if self.weight is not self.target:
            self.target.copy_(self.weight)

    def _read(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        if (scale := self.stored.get(name + _SCALE)) is not None:
            return dequantized(stored, scale, is_signed=name == _MOMENTS[0]).to(self.weight.dtype)
        return stored.to(self.weight.dtype, copy=True)


def _parts(parameter: torch.Tensor, state: dict[str, Any], key: int) -> Iterator[_Part]:
    """The parts of what this process holds of a parameter, one after the other."""
    own, gradient = local(parameter), local(parameter.grad)  # type: ignore[arg-type]  # it has one
    if not own.numel():
        return
    rows = own.shape[0] if own.dim() > 1 else 1
    width = own.numel() // rows
    dtype = torch.float64 if own.dtype == torch.float64 else torch.float32
    tensors = {name: local(value) for name, value in state.items() if name != "step"}
    whole = all(tensor.is_contiguous() for tensor in (own, *tensors.values()))
    at_once = max(1, VALUES_AT_ONCE.get(own.device.type, VALUES_AT_ONCE["cuda"]) // width) if whole else rows
    by_row = {name: value.reshape(rows, -1) for name, value in tensors.items()}
    weights_RC, gradient_RC = own.reshape(rows, width), gradient.reshape(rows, width)
    has_draws = by_row[_MOMENTS[0]].dtype == torch.bfloat16 and has_low_bits(tuple(parameter.shape))
    places = _Places.of(parameter, own.device) if has_draws else None
    for begin in range(0, rows, at_once):
        span = slice(begin, min(rows, begin + at_once))
        target = weights_RC[span]
        yield _Part(
            weight=target if target.dtype == dtype else target.to(dtype),
            gradient=gradient_RC[span].to(dtype),
            stored={name: value[span] for name, value in by_row.items()},
            draws=None if places is None else places.draws(span, key),
            target=target,
        )
    if not whole:  # of a tensor in another order of memory the rows are a copy
        own.copy_(weights_RC.view(own.shape))
        for name, value in tensors.items():
            value.copy_(by_row[name].view(value.shape))


def _zeros(parameter: torch.Tensor, name: str, states: OptimizerStates) -> dict[str, torch.Tensor]:
    """A moment before the first update."""
    if not has_low_bits(tuple(parameter.shape)):
        return {name: torch.zeros_like(parameter)}
    if states == "bf16":
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}
    own, blocks = local(parameter), _held_blocks(parameter)
    assert blocks is not None, "checked when the optimiser was made"
    dtype = torch.float64 if own.dtype == torch.float64 else torch.float32
    scale = torch.zeros(own.shape[0], len(blocks), dtype=dtype, device=own.device)
    return {name: torch.zeros_like(parameter, dtype=torch.uint8), name + _SCALE: _spread_as(scale, parameter)}


def _scale_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Rows of a whole parameter, and blocks of a row."""
    rows = parameter.shape[0]
    return rows, math.ceil(math.prod(parameter.shape[1:]) / STATES_BLOCK)


def _spread_as(own: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The scales of what this process holds of a parameter, as a DTensor where that is one."""
    shape = torch.Size(_scale_shape(parameter))
    return spread_as(parameter, own, shape=shape, stride=(shape[1], 1)) if is_spread(parameter) else own


# The dynamic map ------------------------------------------------------------------------------------------------------


@functools.cache
def dynamic_map(*, is_signed: bool) -> tuple[float, ...]:
    """The 256 numbers in [-1, 1], or above 0 to 1, that moments over their block's largest are rounded to.

    Seven decades, each with twice as many numbers as the one below, evenly spaced; with 1, and with 0 where there is a
    sign. Without one the lowest number takes the place of 0, so that only a block of zeros is 0, by its scale.

    >>> dynamic_map(is_signed=True)[126:130], dynamic_map(is_signed=False)[-1]
    ((-5.5e-07, 0.0, 5.5e-07, 3.25e-06), 1.0)
    """
    positive = [
        10.0 ** (decade - 6) * (0.1 + 0.9 * (number + 0.5) / count)
        for decade in range(7)
        for count in (2**decade if is_signed else 2 ** (decade + 1),)
        for number in range(count)
    ]
    positive = [round(value, 12) for value in positive]
    return (
        (*(-level for level in reversed(positive)), 0.0, *positive, 1.0) if is_signed else (positive[0], *positive, 1.0)
    )


_LOWER_BITS = 13
"""Lower bits of an fp32 number, which the table of nearest entries leaves out."""


@functools.lru_cache(maxsize=8)
def _tables(is_signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001 - a part of the key
    """The map [256, fp32], and the entry nearest to the middle of all fp32 numbers of the same upper 19 bits [2^19].

    The second takes the place of a search, which takes several times as long as the rest of an update on a CPU; of its
    entries few are in use, those of numbers that are not far from 1.
    """
    numbers = torch.tensor(dynamic_map(is_signed=is_signed))
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    upper = torch.arange(2**19, dtype=torch.int64)
    values = ((upper << _LOWER_BITS) + 2 ** (_LOWER_BITS - 1)).to(torch.int32).view(torch.float32)
    return numbers.to(device), torch.bucketize(values.double(), middles).to(torch.uint8).to(device)


def quantized(values_RC: torch.Tensor, *, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the map nearest to values [rows, columns], uint8, and the scale of each block [rows, blocks].

    Of two entries about as near, to 0.1 % of the value, it may be either.
    """
    columns = values_RC.shape[1]
    blocks_RBC = _in_blocks(values_RC)
    scale_RB = blocks_RBC.abs().amax(-1)
    # Where all are 0 any entry will do, and where the largest is denormal, dividing by it is exact enough.
    safe_RB1 = torch.where(scale_RB > 0, scale_RB, 1).unsqueeze(-1)
    _, nearest = _tables(is_signed, values_RC.device)
    upper = ((blocks_RBC / safe_RB1).float().view(torch.int32) >> _LOWER_BITS).bitwise_and_(0x7FFFF)
    codes_RC = nearest.index_select(0, upper.flatten()).view(upper.shape).flatten(1)
    return codes_RC[:, :columns], scale_RB


def dequantized(codes_RC: torch.Tensor, scale_RB: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """The values of entries of the map [rows, columns], in the dtype of the scales; inverse of `quantized`."""
    numbers, _ = _tables(is_signed, codes_RC.device)
    columns = codes_RC.shape[1]
    codes_RBC = _in_blocks(codes_RC)
    values_RBC = numbers.index_select(0, codes_RBC.flatten().int()).view(codes_RBC.shape) * scale_RB.unsqueeze(-1)
    return values_RBC.flatten(1)[:, :columns]


def _in_blocks(values_RC: torch.Tensor) -> torch.Tensor:
    """Rows cut into blocks [rows, blocks, values of a block], the last one filled up with zeros."""
    rows, columns = values_RC.shape
    if columns <= STATES_BLOCK:
        return values_RC.unsqueeze(1)
    if columns % STATES_BLOCK:
        values_RC = torch.nn.functional.pad(values_RC, (0, -columns % STATES_BLOCK))
    return values_RC.reshape(rows, values_RC.shape[1] // STATES_BLOCK, STATES_BLOCK)


# Draws by place -------------------------------------------------------------------------------------------------------


def rounded_at_random(values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Values as bf16, up or down in proportion to the distance, by the lower 16 bits of int32 `draws`."""
    bits = values.float().view(torch.int32)
    return ((bits + (draws & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()


@dataclass(frozen=True)
class _Places:
    """The places of a process's values in a parameter of `width` columns: their rows and columns."""

    rows: torch.Tensor
    columns: torch.Tensor
    width: int

    @classmethod
    def of(cls, parameter: torch.Tensor, device: torch.device) -> _Places:
        """The places of what this process holds of `parameter`."""
        rows, *others = runs_of(parameter)
        width = math.prod(parameter.shape[1:])
        return cls(_indices(rows, device), _columns(tuple(others), tuple(parameter.shape[1:]), device), width)

    def draws(self, span: slice, key: int) -> torch.Tensor:
        """A random int32 for each value of these rows [rows, columns]; the finisher of MurmurHash3."""
        # Products of int32 are modulo 2^32. Shifts keep the sign, which a bijection may.
        hashed = self.rows[span, None] * _int32(self.width) + self.columns
        hashed.mul_(_int32(0x9E3779B1)).add_(_int32(key))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            hashed.bitwise_xor_(hashed >> shift).mul_(_int32(factor))
        return hashed.bitwise_xor_(hashed >> 16)


def _int32(number: int) -> int:
    """The number modulo 2^32, as int32 has it."""
    number &= 0xFFFFFFFF
    return number - 2**32 if number >= 2**31 else number


def _indices(runs: Runs, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, dtype=torch.int32, device=device) for start, stop in runs])


def _columns(runs: tuple[Runs, ...], sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The numbers of the columns that are held, of a row of these sizes."""
    columns = torch.zeros(1, dtype=torch.int32, device=device)
    for of_dim, size in zip(runs, sizes, strict=True):
        columns = (columns[:, None] * size + _indices(of_dim, device)).flatten()
    return columns


# Layouts and checkpoints ----------------------------------------------------------------------------------------------


def _held_blocks(parameter: torch.Tensor) -> torch.Tensor | None:
    """The numbers of the blocks of a row that this process holds; None where it holds parts of blocks."""
    columns = _columns(runs_of(parameter)[1:], tuple(parameter.shape[1:]), torch.device("cpu"))
    if len(columns) == math.prod(parameter.shape[1:]):
        return torch.arange(_scale_shape(parameter)[1])
    if len(columns) % STATES_BLOCK or not len(columns):
        return None
    blocks = columns.view(-1, STATES_BLOCK)
    is_whole = bool((blocks[:, 0] % STATES_BLOCK == 0).all() and (blocks[:, -1] - blocks[:, 0] == 255).all())
    return blocks[:, 0] // STATES_BLOCK if is_whole else None


def _require_whole_blocks(parameter: torch.Tensor, name: str) -> None:
    if _held_blocks(parameter) is None:
        held = math.prod(local(parameter).shape[1:])
        raise BadJob(
            f"8-bit optimiser states share a scale in blocks of {STATES_BLOCK} values of a row, and under this layout "
            f"a process holds {held} of the {math.prod(parameter.shape[1:])} values of each row of {name}",
            remedy="Use optimizer_states=bf16, or a layout that does not divide rows, such as shards alone.",
        )


def fitted(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A saved state in the form of this optimiser's: moments of other forms are rounded, or put into full precision.

    Args:
        optimizer: Adam, AdamW or LowBitAdam; a state for any other is returned as it is.
        saved: its state by number of parameter, from a checkpoint; scales may be whole.
    """
    states = optimizer.states if isinstance(optimizer, LowBitAdam) else "full"
    if states == "full" and not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return saved
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    state = dict(saved["state"])
    for number, parameter in enumerate(parameters):
        if number in state and has_low_bits(tuple(parameter.shape)):
            state[number] = _refitted(parameter, state[number], states)
    groups = saved["param_groups"]
    if states != "full":  # without settings of PyTorch's implementations, by which it would move counts of steps
        groups = [{name: group[name] for name in group if name in ("params", *optimizer.defaults)} for group in groups]
    return {**saved, "state": state, "param_groups": groups}


def _refitted(parameter: torch.Tensor, kept: dict[str, Any], states: OptimizerStates) -> dict[str, Any]:
    """One parameter's state as `fitted`."""
    result = {name: value for name, value in kept.items() if not name.removesuffix(_SCALE).startswith(_MOMENTS)}
    own = local(parameter)
    for name in _MOMENTS:
        if name not in kept:
            continue
        scale = kept.get(name + _SCALE)
        is_whole = scale is not None and is_spread(parameter) and not is_spread(scale)
        if scale is not None and is_whole and states == "8bit":
            scale = _part_of_scale(scale, parameter)
        if (scale is not None) == (states == "8bit"):
            result[name] = kept[name]
            if scale is not None:
                result[name + _SCALE] = scale
            elif (kept[name].dtype == torch.bfloat16) != (states == "bf16"):
                result[name] = kept[name].to(torch.bfloat16 if states == "bf16" else parameter.dtype)
            continue
        values_RC = local(kept[name]).reshape(own.shape[0], math.prod(own.shape[1:]))
        is_signed = name == _MOMENTS[0]
        if scale is not None:
            if is_whole:  # by value: this process may hold parts of blocks
                values_RC, scale = values_RC.reshape(-1, 1), _scale_by_value(scale, parameter).reshape(-1, 1)
            full = dequantized(values_RC, local(scale).to(values_RC.device), is_signed=is_signed)
            dtype = torch.bfloat16 if states == "bf16" else parameter.dtype
            result[name] = _distributed_like(kept[name], full.reshape(own.shape).to(dtype))
        else:
            codes, of_blocks = quantized(
                values_RC.to(torch.promote_types(values_RC.dtype, torch.float32)), is_signed=is_signed
            )
            result[name] = _distributed_like(kept[name], codes.reshape(own.shape))
            result[name + _SCALE] = _spread_as(of_blocks, parameter)
    return result


def _part_of_scale(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of whole scales."""
    rows, blocks = _indices(runs_of(parameter)[0], whole.device).long(), _held_blocks(parameter)
    assert blocks is not None, "checked when the optimiser was made"
    return _spread_as(whole[rows][:, blocks.to(whole.device)].to(local(parameter).device), parameter)


def _scale_by_value(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The scale of each value that this process holds [rows, columns]."""
    rows, *others = runs_of(parameter)
    columns = _columns(tuple(others), tuple(parameter.shape[1:]), whole.device)
    return whole[_indices(rows, whole.device).long()][:, columns.long() // STATES_BLOCK]


def _distributed_like(like: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A DTensor of this local part where `like` is one."""
    return spread_as(like, own, shape=like.shape, stride=like.stride()) if is_spread(like) else own
