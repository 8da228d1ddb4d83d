"""What a checkpointed block keeps between its two passes: its inputs, which nothing may change in the meantime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker.errors import DoesNotFit
from stoker.loading.fields import tensors_of

NOT_CHECKPOINTED = "Use a plan with checkpointed_blocks 0."
"""The remedy for what cannot be checkpointed."""


class KeptInputs:
    """The inputs of one pass of a block.

    Args:
        name: of the block.
        content: its arguments, in any lists, tuples and dicts.
    """

    def __init__(self, name: str, content: Any) -> None:
        self.name = name
        self._content = in_new_containers(content, lambda tensor: tensor)
        self._changes = changes_in_place(self._content)

    def again(self) -> Any:
        """The arguments for the second pass.

        Raises:
            DoesNotFit: one was changed in place after the first.
        """
        if changes_in_place(self._content) != self._changes:
            raise changed_in_place(self.name)
        return self._content


def changed_in_place(name: str) -> DoesNotFit:
    """The error for a block of that name, one of whose inputs was changed."""
    return DoesNotFit(
        f"an input of the checkpointed block {name!r} was changed in place after the block had read it, so that it "
        "cannot be computed again",
        remedy=f"{NOT_CHECKPOINTED} Or take the operation that is not in place (`x = x + y` for `x += y`).",
    )


def in_new_containers(content: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`content` in new lists, tuples and dicts, its tensors replaced by what `change` gives; other objects stay.

    A list may grow from block to block, as in a DenseNet.
    """
    if isinstance(content, torch.Tensor):
        return change(content)
    if type(content) in {list, tuple}:
        return type(content)(in_new_containers(item, change) for item in content)
    return {key: in_new_containers(item, change) for key, item in content.items()} if type(content) is dict else content


def changes_in_place(content: Any) -> list[int]:
    """How often each tensor in `content` has been changed in place."""
    return [tensor._version for tensor in tensors_of(content)]  # noqa: SLF001 - autograd's own count
