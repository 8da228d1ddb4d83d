"""Activation offload: the inputs of checkpointed blocks in the host's memory between the two passes.

What: what a checkpointed block keeps, its inputs, is copied to pinned memory on a stream of its own while the block
computes, and leaves the device when the next block begins. In the backward pass a block's inputs come back while the
block after it is computed again and differentiated. Nothing is computed differently: the same bits. The inputs of the
last checkpointed block stay, since the backward pass begins with it; so do inputs that need no gradient, or that the
block before had too, such as masks and an encoder's output.
Use when: inputs of blocks are what does not fit, with long samples and many blocks.
Costs: the host's memory, a power of two of bytes for each input, as PyTorch's allocator of pinned memory rounds up. A
block waits where the link takes longer for its inputs than the block computes: of a transformer of width d a block
computes about 24 d² FLOPs a token, and moves 2d bytes in bf16.
Does not combine with: selective checkpointing, compiled passes, several processes.
Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054,
section 6.1, where checkpoints go to the CPU; ours come back one block ahead, as in torchtune's `OffloadActivations`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from stoker.records.plan import LEAST_OFFLOADED_BYTES
from stoker.stepping.kept_inputs import KeptInputs, changed_in_place, in_new_containers


class ActivationOffload:
    """The way of blocks' inputs to the host and back, for the blocks of one model, which pass one after the other.

    Args:
        device: the model's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.coming: OffloadedInputs | None = None
        """Inputs on their way back. Held until the device has waited, also if the pass ends with an error before."""
        self._leaving: OffloadedInputs | None = None
        self._latest: Callable[[], OffloadedInputs | None] = lambda: None

    def __deepcopy__(self, _memo: dict[int, Any]) -> ActivationOffload:
        """Of the copy of a model, whose blocks have passed nothing yet."""
        return ActivationOffload(self.device)

    def kept(self, name: str, content: Any, *, is_last: bool) -> OffloadedInputs:
        """The inputs of the block of that name, which begins: unless it is the last, they begin to leave the device.

        Those of the block before have left it then.

        Raises:
            DoesNotFit: an input of the block before was changed in place on its way.
        """
        inputs = OffloadedInputs(self, name, content, self._latest, stay=is_last)
        if self.coming is not None:  # in a pass that was given up
            self.coming.wait()
        if self._leaving is not None:
            self._leaving.leave()
        self._latest, self._leaving = weakref.ref(inputs), None if is_last else inputs
        return inputs


class _Copied:
    """An input, while it is on the device, and its copy on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version  # noqa: SLF001 - autograd's own count of changes in place
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)


class OffloadedInputs(KeptInputs):
    """Inputs of which some are on the host.

    Args:
        offload: their way.
        name: of the block.
        content: its arguments, in any lists, tuples and dicts.
        previous: gives the inputs of the block before, while they may be needed.
        stay: none of them goes.
    """

    def __init__(
        self,
        offload: ActivationOffload,
        name: str,
        content: Any,
        previous: Callable[[], OffloadedInputs | None],
        *,
        stay: bool,
    ) -> None:
        self._offload, self._previous = offload, previous
        self._copied: list[_Copied] = []
        self._has_moved: Any = None
        if not stay:
            before = previous()
            self._had = set[int]() if before is None else before.identities()
            content = in_new_containers(content, self._copied_or_kept)
        super().__init__(name, content)
        self._move(lambda one, tensor: one.host.copy_(tensor, non_blocking=True))

    def leave(self) -> None:
        """Let the inputs go once the host has them."""
        self.wait()
        self._require_unchanged()
        for one in self._copied:
            one.tensor = None

    def _require_unchanged(self) -> None:
        for one in self._copied:
            if one.tensor is not None and one.tensor._version != one.version:  # noqa: SLF001 - as above
                raise changed_in_place(self.name)

    def come(self) -> None:
        """Begin to copy them back, if they have left."""
        if all(one.tensor is not None for one in self._copied):
            return
        for one in self._copied:  # in memory of the stream that uses them
            one.tensor = torch.empty_like(one.host, device=self._offload.device, pin_memory=False)
        self._move(_fill)
        self._offload.coming = self

    def wait(self) -> None:
        """Make the device wait for the last copy."""
        if self._has_moved is not None:
            torch.cuda.current_stream(self._offload.device).wait_event(self._has_moved)
        if self._offload.coming is self:
            self._offload.coming = None

    def again(self) -> Any:
        """As `KeptInputs`; then those of the block before begin to come back."""
        self._require_unchanged()
        self.come()
        self.wait()
        content = _filled(super().again())
        for one in self._copied:
            one.tensor = None  # the block's graph holds what it needs
        if (previous := self._previous()) is not None:
            previous.come()
        return content

    def identities(self) -> set[int]:
        """Those of the inputs that are on the device."""
        found = {id(one.tensor) for one in self._copied}
        in_new_containers(self._content, lambda tensor: found.add(id(tensor)))
        return found

    def _copied_or_kept(self, tensor: torch.Tensor) -> Any:
        is_large_result = tensor.nbytes >= LEAST_OFFLOADED_BYTES and tensor.requires_grad and not tensor.is_leaf
        if not is_large_result or tensor.device != self._offload.device or id(tensor) in self._had:
            return tensor
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return tensor  # its copy would have other strides, and other kernels might round differently
        for copied in self._copied:
            if copied.tensor is tensor:
                return copied  # a block that is given a tensor twice is given one again
        self._copied.append(_Copied(tensor))
        return self._copied[-1]

    @torch.no_grad()
    def _move(self, copy: Callable[[_Copied, torch.Tensor], Any]) -> None:
        if not self._copied:
            return
        stream = self._offload.stream
        stream.wait_stream(torch.cuda.current_stream(self._offload.device))
        with torch.cuda.stream(stream):
            for one in self._copied:
                assert one.tensor is not None, "it is on the device"
                copy(one, one.tensor)
            self._has_moved = stream.record_event()


def _fill(one: _Copied, tensor: torch.Tensor) -> None:
    tensor.copy_(one.host, non_blocking=True)
    one.version = tensor._version  # noqa: SLF001 - as above


def _filled(content: Any) -> Any:
    """`content` with tensors that need a gradient in the place of `_Copied`."""
    if isinstance(content, _Copied):
        assert content.tensor is not None, "it is back"
        return content.tensor if content.tensor.requires_grad else content.tensor.requires_grad_()
    if type(content) in {list, tuple}:
        return type(content)(map(_filled, content))
    return {key: _filled(item) for key, item in content.items()} if type(content) is dict else content
