"""A model of which this process holds one stage: its own forward pass, from the stage's first block to its last.

Names of modules and weights stay the whole model's. What belongs to other stages keeps its place without its weights:
blocks before the stage hand on what they are given, the stage's first block takes what the stage before has found, and
the first block of the next stage ends the pass. The code between blocks runs as it is, so that what it computes of the
samples themselves (masks, rotations of positions) is there in every stage; what it computes with weights that are
elsewhere is not a number, and would show in the result if anything else than the next block used it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.loading import map_tensors
from stoker.stepping.layouts.draws import draw_from_here
from stoker.stepping.layouts.stages import Cut


class StageEnd(BaseException):
    """A pass has come to the end of this stage, with these activations; no error, and not to be caught as one."""

    def __init__(self, activations: torch.Tensor) -> None:
        super().__init__("the end of a pipeline's stage")
        self.activations = activations


class StageModel:
    """Stage number `stage` of `model`, which loses all other stages' weights, in place.

    Args:
        model: whole, on its device.
        cut: where it is cut.
        stage: this process's, from 0.
        receive: what the stage before sends for inputs of that kind.
    """

    def __init__(
        self, model: nn.Module, cut: Cut, stage: int, receive: Callable[[Hashable | None], torch.Tensor]
    ) -> None:
        self.model = model
        self.received: torch.Tensor | None = None
        self.kind: Hashable | None = None
        self._cut, self._stage, self._receive = cut, stage, receive
        self._device = next(model.parameters()).device
        self._blocks = [model.get_submodule(name) for name in cut.blocks]
        self._missing: list[torch.Tensor] = []
        self._again: torch.Tensor | None = None
        self._take_away_weights()
        self._is_changed = False

    @property
    def is_last(self) -> bool:
        """Whether passes end with the model's output."""
        return self._stage == len(self._cut.spans) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in the last stage.

        Raises:
            StageEnd: in any other stage, with what the next one needs.
        """
        if not self._is_changed:  # after all that is put around blocks, or into them, is there
            self._change_blocks()
        self.received = None
        self.kind = _shapes_in(args, kwargs)
        output = self.model(*args, **kwargs)
        if not self.is_last:
            raise self._unlike("its blocks are not called one after the other, each once")
        return output

    @contextlib.contextmanager
    def with_zeros(self) -> Iterator[None]:
        """Within the block the last pass is made again, with zeros for the weights that are elsewhere."""
        self._again = self.received
        for missing in self._missing:
            missing.zero_()
        try:
            yield
        finally:
            self._again = None
            for missing in self._missing:
                missing.fill_(math.nan if missing.is_floating_point() else 0)

    def _take_away_weights(self) -> None:
        """Put NaN, of no memory, in the place of other stages' parameters; their buffers leave the state."""
        for name, owner in self._cut.owners.items():
            if owner == self._stage:
                continue
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            held = getattr(module, leaf, None)
            if isinstance(held, nn.Parameter):
                delattr(module, leaf)
                missing = torch.full((), math.nan if held.is_floating_point() else 0, dtype=held.dtype,
                                     device=held.device)  # fmt: skip
                setattr(module, leaf, missing.expand(held.shape))
                self._missing.append(missing)
            elif isinstance(held, torch.Tensor):
                delattr(module, leaf)
                module.register_buffer(leaf, held, persistent=False)

    def _change_blocks(self) -> None:
        """Let the first block take what is received, and other stages' blocks do nothing, or end the pass."""
        self._is_changed = True
        own = self._cut.spans[self._stage]
        if self._stage > 0:
            self._blocks[own.start].register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        for block in self._blocks[: own.start]:
            block.forward = _hand_on
        if not self.is_last:
            self._blocks[own.stop].forward = _end

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the stage before found, in the place of the first argument."""
        if self.received is not None:
            raise self._unlike(f"{self._cut.blocks[self._cut.spans[self._stage].start]} is called twice in a pass")
        given = self._receive(self.kind) if self._again is None else self._again.detach().clone()
        self.received = given.requires_grad_(torch.is_grad_enabled())
        if block.training:
            draw_from_here(self._stage, self._device)
        if args:
            return (self.received, *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: self.received}

    def _unlike(self, why: str) -> BadJob:
        return BadJob(
            f"{type(self.model).__name__} cannot be cut into {len(self._cut.spans)} stages: {why}",
            remedy="Use another layout, such as shards.",
        )


def _shapes_in(*given: Any) -> Hashable | None:
    """The shapes of all tensors that a model is given, however deep in dicts and tuples; None where none is seen."""
    shapes: list[tuple[int, ...]] = []
    map_tensors(given, lambda tensor: shapes.append(tuple(tensor.shape)))
    return tuple(shapes) or None


def _hand_on(*args: Any, **kwargs: Any) -> Any:
    """A block's first argument."""
    return args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))


def _end(*args: Any, **kwargs: Any) -> Any:
    """End the pass with a block's first argument."""
    raise StageEnd(_hand_on(*args, **kwargs))
