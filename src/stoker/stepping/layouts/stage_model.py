"""The forward pass of one pipeline stage.

`StageModel` is a model of which this process holds one stage. Names of modules and weights stay the whole model's.
Modules of other stages stay without their weights. The code between blocks runs in every stage, so that values computed
from the samples alone (masks, rotations of positions) exist everywhere; a module of an earlier stage returns what that
stage has passed on (`stoker.stepping.layouts.stage_flow` says what), and the first block of the next stage ends the
pass. Everything else that other stages compute or hold is NaN, and shows in the result if anything uses it. A
comparison can hide that, and a pass with other values can take another way than the one that was followed, so some
passes are rehearsed with zeros and with noise in its place (`StageModel.rehearsal`): the output must be the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.loading.fields import tensors_of
from stoker.stepping.layouts.pipeline_cut import PipelineCut
from stoker.stepping.layouts.stage_flow import (
    Key,
    PartCall,
    StageFlow,
    StageFollower,
    outline_of,
    parts_of,
    with_tensors,
)
from stoker.stepping.random_draws import seed_stage_draws

Values = Literal["nan", "zeros", "noise"]
"""Values in place of what other stages compute, or hold."""


class StageEnd(BaseException):
    """Raised at the end of this stage, with the tensors that it made for later ones; not an error."""

    def __init__(self, made: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the end of a pipeline's stage")
        self.made = made


@dataclass(frozen=True)
class _PresentPass:
    """The pass that is under way: its flow, how often each part was called, and what this stage made for later ones."""

    flow: StageFlow
    counts: Counter[str] = field(default_factory=Counter)
    made: dict[Key, torch.Tensor] = field(default_factory=dict)
    stand_ins: list[torch.Tensor] = field(default_factory=list)


class StageModel:
    """The stages of `model` that process number `place` of a pipeline holds; it loses all other weights, in place.

    Args:
        model: whole, on its device.
        cut: where it is cut.
        place: of this process in the pipeline, from 0.
        receive: returns a tensor that the stage before passes on, by its key, for inputs of that kind.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: PipelineCut,
        place: int,
        receive: Callable[[Key, Hashable | None], torch.Tensor],
    ) -> None:
        self.model = model
        self.stage = place
        """The stage that passes go through, one of this process's."""
        self.received: dict[Key, torch.Tensor] = {}
        self.kind: Hashable | None = None
        self.flow = StageFlow({}, ())
        self._cut, self._place, self._receive = cut, place, receive
        self._device = next(model.parameters()).device
        self._follower = StageFollower(outline_of(model), cut.blocks)
        self._flows: dict[Hashable, StageFlow] = {}
        self._parts = parts_of(model, [model.get_submodule(name) for name in cut.blocks])
        self._begins = {cut.blocks[span.start]: stage for stage, span in enumerate(cut.spans)}
        self._pass: _PresentPass | None = None
        self._now: PartCall | None = None
        self._missing: list[torch.Tensor] = []
        self.absent: set[str] = set()
        """Names of the parameters that other processes hold."""
        self._again: Mapping[Key, torch.Tensor] | None = None
        self._values: Values = "nan"
        self._held = {name for name, part in self._parts.items() if next(part.parameters(), None) is not None}
        self._take_away_weights()
        model.register_load_state_dict_post_hook(self._forget_others)
        self._is_changed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in the last stage.

        Raises:
            StageEnd: in any other stage, with the tensors that it passes on.
            BadJob: the model cannot be cut so.
        """
        if not self._is_changed:  # at the first call, after all wrappers of blocks have been installed
            self._change_parts()
        if self._again is None:
            self._follow(args, kwargs)
        given: Mapping[Key, torch.Tensor] = {}
        if self.stage > 0:
            keys = self.flow.passed[self.stage - 1]
            given = {key: self._receive(key, self.kind) for key in keys} if self._again is None else self._again
        self.received = {key: self._as_input(tensor) for key, tensor in given.items()}
        self._pass = _PresentPass(self.flow)
        try:
            return self.model(*args, **kwargs)
        finally:
            self._pass = self._now = None

    def passed_on(self, made: Sequence[torch.Tensor]) -> dict[Key, torch.Tensor]:
        """What the last pass gives to the next stage, of what the stage made and what it received."""
        own = iter(made)
        return {key: self.received[key] if key in self.received else next(own) for key in self.flow.passed[self.stage]}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers that its state has in some stage, by name."""
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self._cut.owners}

    def owns(self, name: str) -> bool:
        """Whether an entry of the state is kept in this process."""
        return self._cut.owners[name] == self._place

    @contextlib.contextmanager
    def rehearsal(self, values: Values, received: Mapping[Key, torch.Tensor]) -> Iterator[None]:
        """Within the context, passes leave the model unchanged and use `values` for what other stages have.

        Args:
            values: in place of absent weights, and of what other stages compute and do not pass on to this one.
            received: the input from the stage before, of the pass that is repeated.
        """
        kept = [(module, dict(vars(module)), dict(module._buffers)) for module in self.model.modules()]  # noqa: SLF001 - no public way to exchange a buffer
        clones = {id(buffer): buffer.clone() for buffer in self.model.buffers()}
        self._again, self._values = received, values
        try:
            for module, _, buffers in kept:
                copies = {name: None if buffer is None else clones[id(buffer)] for name, buffer in buffers.items()}
                module._buffers.update(copies)  # noqa: SLF001 - as above
            for missing in self._missing:
                _fill(missing, values)
            yield
        finally:
            for module, attributes, buffers in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.update(buffers)  # noqa: SLF001 - as above
            self._again, self._values = None, "nan"
            for missing in self._missing:
                _fill(missing, "nan")

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find what stages pass on for such inputs, unless that is known and does not depend on numbers in them."""
        forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of((args, kwargs))]
        self.kind = (self.model.training, *forms) if forms else None
        flow = None if self.kind is None else self._flows.get(self.kind)
        if flow is None:
            followed = self._follower.follow(lambda outline: outline(*args, **kwargs), self.model)
            flow = followed.flow(self._cut.first_blocks, self._cut.homes)
            if flow.reads_inputs:
                self.kind = None
            else:
                self._flows[self.kind] = flow
        self.flow = flow

    def _as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor if self._again is None else tensor.detach().clone()
        return tensor.requires_grad_(torch.is_grad_enabled() and is_differentiable(tensor))

    def _take_away_weights(self) -> None:
        """Replace other stages' parameters by NaN in almost no memory; their buffers leave the state."""
        for name, owner in self._cut.owners.items():
            if owner == self._place:
                continue
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            held = getattr(module, leaf, None)
            if isinstance(held, nn.Parameter):
                delattr(module, leaf)
                # Elements share memory along the diagonals, so that noise differs along each dimension.
                length = 1 + sum(max(size - 1, 0) for size in held.shape)
                missing = _fill(torch.empty(length, dtype=held.dtype, device=held.device), "nan")
                setattr(module, leaf, missing.as_strided(held.shape, (1,) * held.dim()))
                self._missing.append(missing)
                self.absent.add(name)
            elif isinstance(held, torch.Tensor):
                delattr(module, leaf)
                module.register_buffer(leaf, held, persistent=False)

    def _forget_others(self, _model: nn.Module, keys: Any) -> None:
        """Allow loading weights with entries of other stages: batch norm adds a counter that a dict lacks."""
        owner = self._cut.owners.get
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if owner(name, self._place) == self._place]

    def _change_parts(self) -> None:
        """Let parts be executed in their stage alone, and elsewhere return what that stage passes on."""
        self._is_changed = True
        for name, part in self._parts.items():
            part.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True, with_kwargs=True)
            part.register_forward_hook(functools.partial(self._leave, name))
            homes = {home for entry, home in self._cut.homes.items() if entry.startswith(f"{name}.")}
            if len(self._cut.spans) > self._cut.processes or homes != {self._place} or name not in self._held:
                part.forward = functools.partial(self._forward, part.forward)

    def _enter(self, name: str, part: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Begin a part's call; the first block of the next stage ends the pass."""
        if self._pass is None or self._now is not None:
            return
        stage = self._begins.get(name)
        if stage == self.stage + 1:
            keys = self.flow.passed[self.stage]
            raise StageEnd(tuple(self._pass.made[key] for key in keys if key not in self.received))
        number = self._pass.counts[name]
        self._pass.counts[name] += 1
        self._now = self.flow.calls.get((name, number))
        if self._now is None and name in self._held:
            raise self._unlike(f"{name} is called where it was not when a pass was followed without values")
        if stage == self.stage and stage > 0 and part.training:
            seed_stage_draws(stage, self._device)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A part's result: its own in its stage, in later ones what they received, or what stands in for it."""
        call = self._now
        if call is None or call.home == self.stage:
            return forward(*args, **kwargs)
        assert self._pass is not None
        inputs, places, stand_ins = tensors_of((args, kwargs)), itertools.count(), self._pass.stand_ins

        def result(like: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if place in call.same:
                return inputs[call.same[place]]
            key = call.name, call.number, place
            if key in self.received:
                received = self.received[key]
                return received.clone() if place in call.rewritten else received
            for tensor in inputs:  # which nothing reads, either: its memory is there
                if tensor.shape == like.shape and any(tensor is other for other in stand_ins):
                    return tensor
            stand_ins.append(_fill(torch.empty_like(like, device=self._device), self._values))
            return stand_ins[-1]

        return with_tensors(call.output, result)

    def _leave(self, name: str, _part: nn.Module, _args: Any, output: Any) -> None:
        """End a part's call; keep what later stages read."""
        call = self._now
        if call is None or call.name != name:
            return
        self._now = None
        if call.home != self.stage or self._pass is None or not call.readers:
            return
        tensors = tensors_of(output)
        for place, last in call.readers.items():
            if last > self.stage:
                tensor = tensors[place].clone() if place in call.rewritten else tensors[place]
                self._pass.made[call.name, call.number, place] = tensor

    def _unlike(self, why: str) -> BadJob:
        return BadJob(
            f"{type(self.model).__name__} cannot be cut into {len(self._cut.spans)} stages: {why}",
            remedy="Call the blocks one after the other, each once in every pass, or use another layout, such as "
            "shards.",
        )


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a stage that receives such a tensor sends its gradient back."""
    return tensor.is_floating_point() or tensor.is_complex()


def _fill(tensor: torch.Tensor, values: Values) -> torch.Tensor:
    """The tensor, filled; noise comes from a generator of its own, and is different each time."""
    if values == "zeros" or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.zero_()
    if values == "nan":
        return tensor.fill_(math.nan)
    return tensor.copy_(torch.randn(tensor.shape, generator=_NOISE, dtype=torch.float32))


_NOISE = torch.Generator().manual_seed(0)
