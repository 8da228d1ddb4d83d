"""The probe: losses of chosen batches on throw-away copies of a job's model, compared with each other.

Everything is computed on the CPU in float64, where rounding is nine orders below any coupling that matters; in fp32
where the model insists. Weights are the initial ones and, because layers that begin as zero hide what comes before
them, the initial ones with noise added. Batches are put together row by row from a pool of the job's samples.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading.batches import Batch, InputPipeline
from stoker.loading.fields import Content, take, tensors_of
from stoker.loading.order import (
    Indices,
    KeyedPermutation,
    RandomStream,
    key_of,
    python_generators,
    seed_generators,
)
from stoker.loading.samples import BadSample, Samples
from stoker.loading.sampling import targets_at_hand
from stoker.stepping.buffers import have_changed, marks_of
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.loss_checks import counted_as_positive, counted_as_wrong, normalised_twice, require_scalar
from stoker.stepping.losses import LossForm, TrainingObjective
from stoker.stepping.model import build_model, default_dtype, in_dtype, is_double, num_parameters
from stoker.stepping.model_copies import copied
from stoker.stepping.python_state import is_shared, python_state, tallies
from stoker.stepping.random_draws import HAS_ENDS, RandomDraws

_MOST_IN_MEMORY, _MOST_FETCHED, _MOST_BYTES = 512, 64, 2**28
_MOST_COMPARED, _FEW_VALUES = 2**20, 64
"""Numbers of a tensor among which values are counted, and distinct values that are few."""
_MOST_TARGETS = 2**22
"""Targets among which rare ones are looked for: sorting these takes half a second."""


@dataclass(frozen=True)
class HalvesAndSubstitutes:
    """Rows of a pool for two halves of a batch, and for other samples to put in their place."""

    first: Indices
    second: Indices
    other_first: Indices
    other_second: Indices


@dataclass(frozen=True)
class ProbeSamples:
    """Samples that were fetched and collated together, still raw; `pipeline` prepares batches of them."""

    content: Content
    indices: Indices
    pipeline: InputPipeline
    _known: dict[tuple[tuple[int, int], int], list[HalvesAndSubstitutes]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def batch(self, *rows: Indices) -> Batch:
        """The batch of these rows, one after the other."""
        chosen = np.concatenate(rows)
        return Batch(take(self.content, chosen.tolist(), len(self)), self.indices[chosen], 0, self.pipeline)

    def quads(self, sizes: tuple[int, int], seed: int) -> Iterator[HalvesAndSubstitutes]:
        """Rows for an endless series of comparisons of halves of these sizes; they are to be read only.

        In every second one the halves are the contrasts of one tensor, or they and their substitutes are samples as
        drawn. In the others the substitutes are copies of one sample, which overflow a capacity that samples seldom
        reach.
        """
        known = self._known.setdefault((sizes, seed), [])
        for turn in itertools.count():
            if turn == len(known):
                known.append(self._quad(sizes, seed, turn))
            yield known[turn]

    def _quad(self, sizes: tuple[int, int], seed: int, turn: int) -> HalvesAndSubstitutes:
        contrasts, each = self.contrasts, min(sizes)
        picked = [self._rows(size, seed, turn, place) for place, size in enumerate((*sizes, *sizes))]
        again, tensor = divmod(turn // 2, max(1, len(contrasts)))
        pairs = contrasts[tensor][again * each : (again + 1) * each] if contrasts else ()
        if turn % 2:
            picked[2:] = [np.repeat(picked[2][:1], size) for size in sizes]
        elif pairs:
            low, high = np.array(pairs, np.int64).T
            picked = [np.resize(rows, size) for rows, size in zip((low, high, high, low), 2 * sizes, strict=True)]
        for place in (0, 1):
            if np.array_equal(picked[place], picked[place + 2]):
                picked[place + 2] = (picked[place + 2] + 1) % len(self)
        for rows in picked:
            rows.flags.writeable = False  # the same ones are compared again and again
        return HalvesAndSubstitutes(*picked)

    def medleys(self, size: int, same: int, at_least: int) -> Iterator[Indices]:
        """Batches of up to `size` rows that hold `same` copies of one sample and then one for each contrast.

        The last one has only the rest of these, but `at_least` rows. A mean that weighs samples by something of which
        few have more or less is another in parts of such a batch than in the whole.
        """
        by_turns = itertools.chain.from_iterable(itertools.zip_longest(*self.contrasts))
        pairs = [pair for pair in by_turns if pair is not None]
        highs = list(dict.fromkeys(high for _, high in pairs))
        for start in range(0, len(highs), size - same):
            chunk = np.array(highs[start : start + size - same], np.int64)
            rows = np.resize(chunk, max(len(chunk), at_least - same))
            yield np.concatenate([np.repeat(np.int64(pairs[0][0]), same), rows])

    def _rows(self, size: int, seed: int, turn: int, place: int) -> Indices:
        order = KeyedPermutation(len(self), key_of(RandomStream.PROBE, seed, turn, place))
        return order(np.arange(size, dtype=np.int64) % len(self))

    @cached_property
    def contrasts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each tensor, pairs of the rows that hold a value of it least and most often.

        The values are all there are, the rarest first, where these are few, such as labels; else the lowest and the
        highest, such as padding. Tensors of fewest numbers come first: labels and weights before inputs.
        """
        flats = [
            tensor.reshape(len(self), -1)
            for tensor in reversed(tensors_of(self.content))  # of equally many numbers, the last is the target
            if tensor.dim() > 0 and tensor.shape[0] == len(self) and tensor.numel() and not tensor.is_complex()
        ]
        by_tensor = [_contrasts(flat) for flat in sorted(flats, key=torch.numel)]
        return tuple(filter(None, by_tensor))


def _contrasts(flat: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Pairs of different rows of a tensor [B, ...] that hold a value least and most often, each pair once."""
    values = torch.stack([flat.min(), flat.max()])
    if flat.numel() <= _MOST_COMPARED:
        found, counts = flat.unique(return_counts=True)
        values = found[counts.argsort(stable=True)] if len(found) <= _FEW_VALUES else values
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    for value in values:
        times = (flat == value).sum(1)
        low, high = int(times.argmin()), int(times.argmax())
        if low != high:
            pairs.setdefault(frozenset((low, high)), (low, high))
    return tuple(pairs.values())


def probe_samples(job: Job, samples: Samples, dtype: torch.dtype, *, at_most: int = _MOST_IN_MEMORY) -> ProbeSamples:
    """A pool of up to 512 of the job's samples, the same ones every time; with the rarest targets where it is whole.

    Raises:
        BadJob: a sample cannot be fetched, or samples do not collate.
    """
    order = KeyedPermutation(samples.num_at_hand, key_of(RandomStream.PROBE, job.seed))
    try:
        num_bytes = sum(tensor.nbytes for tensor in tensors_of(samples.fetch(order(np.arange(1, dtype=np.int64)), 0)))
        most = min(samples.num_at_hand, at_most, _MOST_IN_MEMORY if samples.is_in_memory else _MOST_FETCHED)
        indices = order(np.arange(min(most, max(2, _MOST_BYTES // max(1, num_bytes))), dtype=np.int64))
        if at_most == _MOST_IN_MEMORY:
            indices = _with_rare_targets(indices, samples, job)
        content = samples.fetch(indices, 0)
        for tensor in tensors_of(content):
            _require_computable(tensor)
    except BadSample as problem:
        raise BadJob(str(problem)) from problem
    fields = job.fields
    pipeline = InputPipeline(torch.device("cpu"), fields, samples.prepare, job.augment, job.seed, dtype=dtype)
    return ProbeSamples(content, indices, pipeline)


def _with_rare_targets(indices: Indices, samples: Samples, job: Job) -> Indices:
    """`indices` with a sample of each class that they lack, up to a quarter of them, where classes are known unread."""
    targets = targets_at_hand(samples, job)
    if targets is None or len(targets) > _MOST_TARGETS:
        return indices
    classes, firsts, counts = np.unique(targets, return_index=True, return_counts=True)
    if targets.dtype.kind == "f" and len(classes) > _FEW_VALUES:  # amounts
        return indices
    firsts = firsts[np.argsort(counts, kind="stable")]
    lacking = firsts[~np.isin(targets[firsts], targets[indices])][: len(indices) // 4]
    return np.concatenate([indices[: len(indices) - len(lacking)], lacking])


def _require_computable(tensor: torch.Tensor) -> None:
    """Refuse a type that PyTorch stores, and has next to no operations for."""
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise BadJob(
            f"samples hold {str(tensor.dtype).removeprefix('torch.')}, with which PyTorch does not compute",
            remedy="Give int32, int64 or floats: .astype('int32') or .to(torch.int32) in the dataset.",
        )


ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest difference [relative to the losses compared] that counts as rounding, by the coarsest type in use."""
_HALF, _ROUNDS = 2, 4
_HALF_IF_SLOW, _ROUNDS_IF_SLOW = 1, 2
_SLOW_S, _VERY_SLOW_S = 0.2, 2.0
_HALF_AT_FIRST = 4
_LIGHT = 10**10
"""Parameters times numbers in a sample, an upper estimate of its multiplications, up to which one thread is enough."""
_NOISE = 0.05
_SEEDS = 9
_PYTHONS = "draws of Python or NumPy"


Where = tuple[nn.Module, HalvesAndSubstitutes]
"""The weights and the samples of a comparison."""


@dataclass(frozen=True)
class Value:
    """A loss's sum and count, as plain numbers."""

    sum: float
    count: float

    def __add__(self, other: Value) -> Value:
        """Both together."""
        return Value(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """Mean loss, the sum over the count [1]; NaN where nothing was counted."""
        return self.sum / self.count if self.count else math.nan


def gap(one: Value, other: Value, *scale: Value) -> float:
    """The larger of the differences of sums and of counts, relative to the largest of `scale` [1]; NaN: not finite."""
    sums = abs(one.sum - other.sum) / max(1e-12, *(abs(value.sum) for value in scale))
    counts = abs(one.count - other.count) / max(1e-12, *(abs(value.count) for value in scale))
    return float(np.maximum(sums, counts))


@dataclass(frozen=True)
class Draws:
    """Number of draws of a pass by operation of PyTorch, and the states of Python's and NumPy's generators after it."""

    elements: Mapping[str, int]
    generators: tuple[object, ...]

    @property
    def are_pythons(self) -> bool:
        """Whether it drew from the generators of Python or NumPy."""
        seed_generators(key_of(RandomStream.PROBE, 0))
        return self.generators != python_generators()


@dataclass(frozen=True)
class CarriedPythonState:
    """Python state that one pass hands to the next: its places as text, and those that no checkpoint holds."""

    places: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()


@dataclass(frozen=True)
class CouplingProbe:
    """A job's model and samples, ready to compute losses; halves of its batches have `sizes` samples."""

    job: Job
    samples: Samples
    objective: TrainingObjective
    pool: ProbeSamples
    models: tuple[nn.Module, nn.Module]
    dtype: torch.dtype
    sizes: tuple[int, int]
    rounds: int
    tolerance: float = 0.0
    drawn: frozenset[str] = frozenset()
    differentiates: bool = False
    """Whether the loss takes derivatives itself, by its inputs or by the weights, so that every pass needs a graph."""
    first: Value | None = None
    """The loss of the first round's samples, once it is known."""
    drew: Draws | None = None
    """The draws of that pass."""
    leaves_no_trace: bool = False
    """Whether a pass was seen to change nothing in the model, so that the next one needs no fresh copy."""
    notices: tuple[str, ...] = ()
    """A probable mistake in how the model's output fits the loss."""
    few: tuple[int, float] = (0, 0.0)
    """A number of samples, and the CPU time of one loss of them [s]."""
    may_hand_on: bool = False
    """Whether a pass was seen to leave tensors that no checkpoint holds, and that the next may read."""
    carried: CarriedPythonState = field(default_factory=CarriedPythonState)
    moving: str | None = None
    """A parameter that each pass changes, as text; copies of the model share it."""

    @property
    def model(self) -> nn.Module:
        """The model with noise in its weights."""
        return self.models[0]

    @property
    def is_slow(self) -> bool:
        """Whether one loss takes long, and probably much memory, so that rounds are few and small."""
        return self.rounds <= _ROUNDS_IF_SLOW

    def describe(self) -> str:
        """The amount of probing: `4 rounds of 4 samples, float64`."""
        return f"{self.rounds} rounds of {sum(self.sizes)} samples, {str(self.dtype).removeprefix('torch.')}"

    def quads(self) -> Iterator[Where]:
        """The weights and samples of every round: two with the noisy weights, two with the initial ones, and so on."""
        quads = self.pool.quads(self.sizes, self.job.seed)
        for turn, quad in enumerate(itertools.islice(quads, self.rounds)):
            yield self.models[turn // 2 % 2], quad

    def value(self, model: nn.Module, *rows: Indices, seed: int = 0) -> Value:
        """The loss of the batch of these rows, on `model` as it is now."""
        return self.value_of(self.fresh(model), self.pool.batch(*rows), 0, sum(map(len, rows)), seed=seed)

    def fresh(self, model: nn.Module) -> nn.Module:
        """A copy of `model` for a pass or several; `model` itself where passes leave no trace."""
        return model if self.leaves_no_trace else fresh(model)

    def value_of(self, model: nn.Module, batch: Batch, start: int, stop: int, *, seed: int = 0) -> Value:
        """The loss of samples start..stop of `batch` on `model` itself, which keeps the changes of the pass."""
        with torch.set_grad_enabled(self.differentiates):
            total, count = self._loss(model, batch, start, stop, seed)
        return Value(float(total.detach()), count)

    def gradient_of(
        self, model: nn.Module, batch: Batch, start: int, stop: int, *, factor: float = 1.0
    ) -> tuple[Value, list[torch.Tensor]]:
        """The loss of samples start..stop of `batch`, and the gradient of `factor` times its sum, by parameter."""
        total, count = self._loss(model, batch, start, stop, seed=0)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        above = torch.full_like(total, factor)
        gradients = torch.autograd.grad(total, trainable, above, materialize_grads=True, allow_unused=True)
        return Value(float(total.detach()), count), [gradient.detach() for gradient in gradients]

    def mixed_difference(self, model: nn.Module, quad: HalvesAndSubstitutes) -> float:
        """f(A, B) + f(A', B') - f(A', B) - f(A, B') relative to the largest of the four [1]; NaN if one is not finite.

        With f the sum, and likewise the count, of a batch of two halves. It vanishes for all halves only where each
        adds its own share. All four have one shape and one seed, so that dropout draws the same masks in each.
        """
        ab = self.value(model, quad.first, quad.second)
        other_ab = self.value(model, quad.other_first, quad.other_second)
        other_a = self.value(model, quad.other_first, quad.second)
        other_b = self.value(model, quad.first, quad.other_second)
        return gap(ab + other_ab, other_a + other_b, ab, other_ab, other_a, other_b)

    def largest_mixed_difference(self) -> tuple[float, Where | None]:
        """The first one over the tolerance, else the largest one, and where it was; (0, None) if none was finite."""
        largest, where = 0.0, None
        for model, quad in self.quads():
            difference = self.mixed_difference(model, quad)
            if difference >= largest:  # never so for NaN
                largest, where = difference, (model, quad)
            if largest > self.tolerance:
                break
        return largest, where

    def repeated(self) -> tuple[bool, CouplingProbe]:
        """Whether the same batch, seed and state give the same loss again; and the probe with its carried Python state.

        State is carried if a pass changes it in the same way from the same state, and if from the changed state the
        same batch changes it again, or has another loss. Mere records, such as the last activations or a time, are not.
        """
        model, quad = next(self.quads())
        batch, loss = self.pool.batch(quad.first, quad.second), self.objective.loss_object
        before, copy_, weights = python_state(model, loss), fresh(model), marks_of(model.parameters())
        value = self.value_of(copy_, batch, 0, batch.size)
        has_moved = any(have_changed(weights, marks_of(model.parameters())))
        moving = self._moving_parameter(model, batch) if has_moved else None
        first = value if self.first is None else self.first
        is_same = not gap(first, value, first) > self.tolerance
        after = python_state(copy_, loss)
        buffers = self._unsaved_buffers(model, copy_, batch, value)
        now, initial = dict(copy_.named_buffers()), dict(model.named_buffers())
        if not (changed := after.changed_since(before)):
            is_same_set = copy_ is not model and now.keys() == initial.keys()
            is_traceless = is_same_set and all(_is_equal(now[name], initial[name]) for name in initial)
            carried = CarriedPythonState(unsaved=buffers)
            is_traceless = is_traceless and moving is None
            return is_same, replace(self, leaves_no_trace=is_traceless, carried=carried, moving=moving)
        twin = fresh(model)
        self.value_of(twin, batch, 0, batch.size)
        at_twin = python_state(twin, loss)
        with torch.no_grad():
            for name in now.keys() & initial.keys():
                if now[name].shape == initial[name].shape:  # not a table that the first pass has made longer
                    now[name].copy_(initial[name])
        next_value = self.value_of(copy_, batch, 0, batch.size)
        again = python_state(copy_, loss)
        is_moving = gap(value, next_value, value) > self.tolerance
        not_copied = {place for place in changed if is_shared(place[0]) or twin is model}
        steady = (changed - not_copied) - at_twin.changed_since(after)
        each_time = again.changed_since(at_twin) & at_twin.changed_since(after) & not_copied
        handed_on = each_time | (steady if is_moving else steady & again.changed_since(after))
        counts = {place for place in changed if after.is_plain(place)}  # all, since one may be kept in another
        if handed_on and counts == handed_on and all(map(after.is_count, counts)) and self._reads_none(model, counts):
            handed_on = set()
        texts = {place: after.in_words(place) for place in sorted(handed_on)}
        unsaved = tuple(text for place, text in texts.items() if not after.is_plain(place))
        return is_same, replace(self, carried=CarriedPythonState(texts, (*unsaved, *buffers)), moving=moving)

    def _reads_none(self, model: nn.Module, places: set[tuple[str, str]]) -> bool:
        """Whether passes, in training and in evaluation, only add to the numbers at these places."""
        batch = self.pool.batch(next(self.quads())[1].first)
        for is_training in (True, False):
            if (twin := fresh(model)) is model:
                return False
            with tallies(twin, places) as uses:
                try:
                    if is_training:
                        self.gradient_of(twin, batch, 0, batch.size)
                    else:
                        self.value_of(twin.eval(), batch, 0, batch.size)
                except Exception:  # noqa: BLE001 - whatever a user's code raises for what is no number
                    return False
            if uses:
                return False
        return True

    def _moving_parameter(self, model: nn.Module, batch: Batch) -> str | None:
        """The first parameter that another pass of a batch changes again, as text; not one that is normalised."""
        weights = marks_of(model.parameters())
        self.value_of(fresh(model), batch, 0, batch.size)
        changed = zip(model.named_parameters(), have_changed(weights, marks_of(model.parameters())), strict=True)
        return next((f"the parameter {name!r}, which each pass changes" for (name, _), moves in changed if moves), None)

    def _unsaved_buffers(self, model: nn.Module, passed: nn.Module, batch: Batch, value: Value) -> tuple[str, ...]:
        """The buffers without a place in `state_dict()` that a pass hands to the next, as text.

        `passed` is `model` after a pass of `batch`, whose loss is `value`. A table that is filled once, such as that of
        a rotary embedding, does not change again and moves no loss.
        """
        kept, now = set(model.state_dict(keep_vars=True)), dict(passed.named_buffers())
        initial = {name: buffer for name, buffer in model.named_buffers() if name not in kept}
        changed = [name for name, buffer in initial.items() if name in now and not _is_equal(now[name], buffer)]
        if passed is model or not changed:
            return ()

        def is_handed_on(name: str) -> bool:
            twin, (path, _, own) = fresh(model), name.rpartition(".")
            setattr(twin.get_submodule(path), own, now[name].detach().clone())
            is_moving = gap(value, self.value_of(twin, batch, 0, batch.size), value) > self.tolerance
            return is_moving or not _is_equal(twin.get_buffer(name), now[name])

        kind = type(model).__name__
        return tuple(f"the buffer {name!r} of {kind} (persistent=False)" for name in changed if is_handed_on(name))

    def hidden_difference(self, one: nn.Module, other: nn.Module) -> str | None:
        """The first carried Python state that differs between two models, or is outside them, as text."""
        if not self.carried.places:
            return None
        changed = python_state(one).changed_since(python_state(other))
        places = self.carried.places.items()
        return next((text for place, text in places if place in changed or is_shared(place[0])), None)

    def is_same_with(self, *, seed: int, first: Value | None = None) -> bool:
        """Whether a batch's loss under seed 0 (`first`, if known) is the same under `seed`."""
        model, quad = next(self.quads())
        one = self.value(model, quad.first, quad.second) if first is None else first
        return not gap(one, self.value(model, quad.first, quad.second, seed=seed), one) > self.tolerance

    def shared_draw(self) -> str | None:
        """A random draw that all samples of a batch share and that moves their loss, as text; None if there is none.

        Draws for each sample grow with the batch. Of those that do not, PyTorch's are set to either end of their range,
        and Python's and NumPy's are drawn again; layers that draw with probability 0 pass.
        """
        if self.drew is None or not (self.drawn or self.drew.are_pythons):
            return None
        model, quad = next(self.quads())
        few, many = len(quad.first), sum(self.sizes)
        try:
            fewer = self._draws(model, quad.first)
        except Exception:  # noqa: BLE001 - such as batch statistics of one sample
            few, many, fewer = many, 2 * many, None
        if fewer is not None and not _unscaled(fewer, self.drew, few, many):
            return None
        row = quad.first[:1]  # copies of one sample draw equally often, whatever the number depends on
        drew = [self._draws(model, np.repeat(row, count)) for count in (few, many)]
        operations = _unscaled(drew[0], drew[1], few, many)
        moving = [name for name in operations if name != _PYTHONS and self._is_moved_by(name, quad.first)]
        if moving:
            return f"a random draw that a batch shares ({moving[0]}{self._drawing(model, row, few, many, moving[0])})"
        with RandomDraws(silenced=True):
            if _PYTHONS in operations and not all(self.is_same_with(seed=seed) for seed in range(1, _SEEDS)):
                return "a random draw from Python's or NumPy's generator that a batch shares"
        return None

    def _draws(self, model: nn.Module, rows: Indices) -> Draws:
        with RandomDraws() as draws:
            self.value(model, rows)
        return Draws(dict(draws.elements), python_generators())

    def _is_moved_by(self, operation: str, rows: Indices) -> bool:
        """Whether the loss depends on the draws of an operation."""
        if operation.removesuffix("_").removesuffix("_like") not in HAS_ENDS:
            return True
        model = self.model
        plain, values = self.value(model, rows), []
        for end in (0, 1):
            with RandomDraws(pushed=(operation,), end=end):
                values.append(self.value(model, rows))
        return not all(gap(plain, value, plain) <= self.tolerance for value in values)

    def _drawing(self, model: nn.Module, row: Indices, few: int, many: int, operation: str) -> str:
        """` in Drop '1'`: the innermost module that draws so; empty where it is the loss."""
        counts: list[dict[str, int]] = []
        for count in (few, many):
            copied, drawn = fresh(model), dict[str, int]()
            with RandomDraws() as draws:
                handles = [
                    handle
                    for name, module in copied.named_modules()
                    for handle in (
                        module.register_forward_pre_hook(_noting(drawn, name, draws.elements, operation, -1)),
                        module.register_forward_hook(_noting(drawn, name, draws.elements, operation, 1)),
                    )
                ]
                self.value_of(copied, self.pool.batch(np.repeat(row, count)), 0, count)
            for handle in handles:
                handle.remove()
            counts.append(drawn)
        names = [name for name, number in counts[0].items() if number * many != counts[1].get(name, 0) * few]
        if not names:
            return ""
        innermost = max(names, key=lambda name: (len(name.split(".")) if name else 0, name))
        kind = type(model.get_submodule(innermost)).__name__
        return f" in {kind} {innermost!r}" if innermost else f" in {kind}"

    def form(self) -> LossForm:
        """The form of the loss function's result."""
        quad = next(self.quads())[1]
        batch = self.pool.batch(quad.first, quad.second)
        with torch.set_grad_enabled(self.differentiates), default_dtype(self.dtype):
            return self.objective.form(fresh(self.model), batch.cut(0, batch.size))

    def require_by_sample(self) -> None:
        """As `TrainingObjective.require_by_sample`, of a few samples."""
        model, quad = next(self.quads())
        batch = self.pool.batch(quad.first, quad.second)
        seed_generators(key_of(RandomStream.PROBE, 0))
        with torch.set_grad_enabled(self.differentiates), default_dtype(self.dtype):
            self.objective.require_by_sample(fresh(model), batch.cut(0, batch.size))

    def with_frozen(self, modules: list[nn.Module]) -> CouplingProbe:
        """The same probe with these modules of `model` in evaluation mode."""
        names = {name for name, module in self.model.named_modules() if any(module is norm for norm in modules)}
        return replace(self, models=(_frozen(self.models[0], names), _frozen(self.models[1], names)), first=None)

    def loss_with_graph(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        """The sum of a batch's loss with its graph, and its count."""
        with torch.enable_grad():
            return self._loss(model, batch, 0, batch.size, 0)

    def _loss(self, model: nn.Module, batch: Batch, start: int, stop: int, seed: int) -> tuple[torch.Tensor, float]:
        seed_generators(key_of(RandomStream.PROBE, seed))
        content = batch.cut(start, stop)
        with default_dtype(self.dtype):
            loss = require_scalar(self.objective.loss(model, content, stop - start), "loss")
        return loss.sum, float(loss.count)


@contextlib.contextmanager
def threads_restored() -> Iterator[None]:
    """Afterwards PyTorch has its threads again, of which a probe of a light model takes one.

    On a busy machine threads wait for each other at every operation: a loss of 12 ms on one takes up to 250 ms on two.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _take_threads(model: nn.Module, pool: ProbeSamples) -> None:
    """Leave the process one thread if a loss of few samples is little work."""
    sizes = (tensor.numel() // len(pool) for tensor in tensors_of(pool.content))
    if num_parameters(model) * max(sizes, default=0) <= _LIGHT:
        torch.set_num_threads(1)


def first_probe(job: Job, samples: Samples) -> CouplingProbe:
    """A probe of the initial weights, in the type they are trained in, that has computed a loss of few samples.

    Raises:
        BadJob: as of `working_probe`, which is asked where that loss fails.
    """
    model = build_model(job)
    dtype = torch.float64 if is_double(model) else torch.float32
    half = min(_HALF_AT_FIRST, job.batch_size // 2)
    with contextlib.suppress(Exception):  # what is wrong shows when every way has been tried
        pool = probe_samples(job, samples, dtype, at_most=4 * half)
        _take_threads(model, pool)
        objective = TrainingObjective(job, dtype=dtype)
        models = (in_dtype(model, dtype),) * 2
        probe = CouplingProbe(job, samples, objective, pool, models, dtype, (half, half), rounds=1)
        return _with_graph(probe)[0]
    return working_probe(job, samples)


def working_probe(job: Job, samples: Samples) -> CouplingProbe:
    """A probe of as many samples as are fast; in fp32, or of the real batch, where the model insists.

    Raises:
        BadJob: the samples or the loss cannot be used. An error of the model at every attempt is passed on.
    """
    model = build_model(job)
    few = (min(_HALF_IF_SLOW, job.batch_size // 2),) * 2
    real = (job.batch_size // 2, job.batch_size - job.batch_size // 2)
    for dtype, sizes in ((torch.float64, few), (torch.float32, few), (torch.float64, real)):
        with contextlib.suppress(Exception):  # the last attempt, below, shows what is wrong
            return _calibrated(_sized_by_speed(_probe(job, samples, model, dtype, sizes), model))
    return _calibrated(_warm(_probe(job, samples, model, torch.float32, real))[0])


def _sized_by_speed(probe: CouplingProbe, model: nn.Module) -> CouplingProbe:
    """The probe with more samples and rounds where one loss is fast, in fp32 where it is very slow."""
    probe, seconds = _warm(probe)
    half = min(_HALF, probe.job.batch_size // 2)
    if seconds > _VERY_SLOW_S and probe.dtype is torch.float64:
        slow = _probe(probe.job, probe.samples, model, torch.float32, probe.sizes)
        probe = replace(slow, differentiates=probe.differentiates, few=probe.few, notices=probe.notices)
    if seconds > _SLOW_S:
        return replace(probe, rounds=_ROUNDS_IF_SLOW)
    return probe if sum(probe.sizes) == probe.job.batch_size else replace(probe, sizes=(half, half))


def _warm(probe: CouplingProbe) -> tuple[CouplingProbe, float]:
    """The probe with a graph if its loss needs one, and the time of one loss after the first call [s]."""
    model, quad = next(probe.quads())
    with_graph, value = _with_graph(probe)
    for tried in (probe, with_graph):
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        try:
            again = tried.value(model, quad.first, quad.second)
        except Exception:  # "does not require grad", wherever the loss takes a derivative
            if tried is with_graph:
                raise
            continue
        cpu_s = time.process_time() - cpu_started_s
        seconds = min(cpu_s, time.perf_counter() - started_s)  # of one thread, waiting not counted; or of several
        if tried is with_graph or not gap(value, again, value) > ROUNDING[torch.float32]:
            break
    return replace(
        tried, few=(sum(probe.sizes), cpu_s), notices=with_graph.notices, may_hand_on=with_graph.may_hand_on
    ), seconds


def _with_graph(probe: CouplingProbe) -> tuple[CouplingProbe, Value]:
    """The probe with a graph and its notices, and the loss of the first round's samples."""
    model, quad = next(probe.quads())
    with_graph = replace(probe, differentiates=True)
    watched, outputs = fresh(model), list[Any]()
    handle = watched.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    batch = probe.pool.batch(quad.first, quad.second)
    total, count = with_graph.loss_with_graph(watched, batch)
    handle.remove()
    notices: list[str | None] = [probe.objective.left_out(batch.cut(0, batch.size))]
    if outputs:
        target = probe.job.fields.target_of(batch.cut(0, batch.size))
        notices.append(normalised_twice(probe.job.objective.loss, outputs[-1]))
        notices.append(counted_as_positive(probe.job, outputs[-1]))
        notices.append(counted_as_wrong(probe.job, outputs[-1], target))
    with contextlib.suppress(Exception):  # a model of one size of batch
        notices.append(_added_up(with_graph, model, quad))
    if (strange := _not_the_models(total, watched)) and len(strange) < _MOST_STRANGE:
        # An input of which derivatives are taken is of the batch, or another tensor in each pass.
        for tensor in tensors_of(batch.cut(0, batch.size)):
            strange.pop(id(tensor), None)
        again = _not_the_models(with_graph.loss_with_graph(watched, batch)[0], watched)
        notices.append(_untrained(watched, [leaf for place, leaf in strange.items() if again.get(place) is leaf]))
    kept = set(watched.state_dict(keep_vars=True))
    has_buffers = any(name not in kept for name, _ in watched.named_buffers())
    may_hand_on = has_buffers or python_state(watched, probe.objective.loss_object).has_tensors
    found = replace(with_graph, notices=tuple(filter(None, notices)), may_hand_on=may_hand_on)
    return found, Value(float(total.detach()), count)


def _added_up(probe: CouplingProbe, model: nn.Module, quad: HalvesAndSubstitutes) -> str | None:
    """A notice of a scalar that is in proportion to the sum over a batch, where sets are held out; else None."""
    is_evaluated = bool(probe.job.validation) or probe.job.test is not None
    if not (is_evaluated and callable(probe.job.objective.loss) and min(probe.sizes) and probe.form() == "scalar"):
        return None
    with RandomDraws(silenced=True):
        batches = ((quad.first, quad.second), (quad.first,), (quad.second,))
        whole, first, second = (probe.value(model, *rows).mean for rows in batches)
    is_sum = math.isfinite(whole) and math.isclose(whole, first + second, rel_tol=ROUNDING[torch.float32])
    if not (first and second and is_sum):
        return None
    return (
        "the loss is the sum over a batch, or a share of it: updates follow it as it is, and losses of valid and test "
        "are means over batches, which depend on how many samples these have. For a loss per sample return "
        "stoker.Loss(sum, number of samples), which has the gradients of a mean"
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


_MOST_STRANGE = 10_000
"""Tensors outside the model up to which they are compared with those of another pass."""


def _not_the_models(total: torch.Tensor, model: nn.Module) -> dict[int, torch.Tensor]:
    """Tensors that a loss has gradients for and that are no parameters of the model, by id."""
    own = set(map(id, model.parameters()))
    found: dict[int, torch.Tensor] = {}
    seen, left = set[Any](), [total.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [function for function, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            found[id(leaf)] = leaf
    return found


def _untrained(model: nn.Module, leaves: list[torch.Tensor]) -> str | None:
    """A notice of tensors that the loss depends on, that want gradients, and that the optimiser does not get."""
    if not leaves:
        return None
    num, shapes = len(leaves), ", ".join(str(list(leaf.shape)) for leaf in leaves[:3])
    return (
        f"the loss has gradients for {num} tensors that are no parameters of {type(model).__name__} (of shape {shapes}"
        f"{', …' if num > 3 else ''}): they are not trained, and not saved. Modules belong into an nn.ModuleList or "
        "nn.ModuleDict, not a list or dict, tensors into an nn.Parameter of the model; of what is not to be trained "
        "call requires_grad_(False)"
    )


def fresh(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters of `model` and nothing else; the model itself where it cannot be copied."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    with contextlib.suppress(Exception):  # a generator, a lock or a result of a pass among the model's attributes
        return copied(model, shared)
    return model


def _probe(job: Job, samples: Samples, model: nn.Module, dtype: torch.dtype, sizes: tuple[int, int]) -> CouplingProbe:
    """A probe of copies of `model`, which has the job's initial weights."""
    pool = probe_samples(job, samples, dtype)
    _take_threads(model, pool)

    def another() -> nn.Module:
        try:
            return copied(model)
        except Exception:  # noqa: BLE001 - as in `fresh`
            return build_model(job)

    initial, noisy = (in_dtype(another(), dtype) for _ in range(2))
    _add_noise(noisy, key_of(RandomStream.PROBE, job.seed))
    objective = TrainingObjective(job, dtype=dtype)
    return CouplingProbe(job, samples, objective, pool, (noisy, initial), dtype, sizes, _ROUNDS)


def _calibrated(probe: CouplingProbe) -> CouplingProbe:
    """The probe with its tolerance and its random draws; with the initial weights alone if noise breaks the loss."""
    _, quad = next(probe.quads())
    with RandomDraws() as draws:
        value: Value | None = probe.value(probe.model, quad.first, quad.second)
    drew = Draws(dict(draws.elements), python_generators())
    assert value is not None
    if not np.isfinite(value.sum):
        probe, value = replace(probe, models=(probe.models[1], probe.models[1])), None
    coarse = probe.dtype is torch.float32 or draws.coarsest > torch.finfo(torch.float64).eps
    tolerance = ROUNDING[torch.float32 if coarse else torch.float64]
    return replace(probe, tolerance=tolerance, drawn=frozenset(draws.drawn), first=value, drew=drew)


def _unscaled(fewer: Draws, more: Draws, few: int, many: int) -> list[str]:
    """Names of the draws whose number did not grow in proportion from `few` samples to `many`."""
    names = [name for name, number in fewer.elements.items() if number * many != more.elements.get(name, 0) * few]
    return [*names, _PYTHONS] if fewer.generators == more.generators and fewer.are_pythons else names


def _noting(drawn: dict[str, int], name: str, elements: Mapping[str, int], operation: str, sign: int) -> Any:
    """A hook that counts the draws within a module: subtracts the total before it, and adds the total after it."""

    def hook(*_: Any) -> None:
        drawn[name] = drawn.get(name, 0) + sign * elements.get(operation, 0)

    return hook


def _add_noise(model: nn.Module, seed: int) -> None:
    """Add noise to the trainable weights: 5 % of each tensor's own spread, or of 1 / sqrt(fan) where that is more."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
        real = [as_real(p) for p in trained]
        for parameter in filter(torch.is_floating_point, real):
            fan = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            spread = max(float(parameter.std(correction=0)), fan**-0.5)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(_NOISE * spread * noise.to(parameter.dtype))


def _frozen(model: nn.Module, names: set[str]) -> nn.Module:
    frozen = fresh(model)
    for name, module in frozen.named_modules():
        if name in names:
            module.eval()
    return frozen
