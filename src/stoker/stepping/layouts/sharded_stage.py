"""A pipeline's stage whose parameters are sharded over the processes that share a batch; see `sharded.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker.stepping.layouts.sharded import Sharded


class ShardedStage(Sharded):
    """See `stoker.stepping.layouts.pipeline.Carrier`: several micro-batches are on their way at once."""

    _is_new_update = True

    def forward(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See Carrier."""
        if self._is_new_update:
            self._order.begin_update()
            self._is_new_update = False
        with self._order.forward_pass():
            out: torch.Tensor = self._root(work)
        return out

    def before_backward(self, *, is_last: bool) -> None:
        """See Carrier."""
        self._add_up_now(is_last=is_last)

    def finish(self) -> None:
        """See Carrier."""
        self._settle(self._world.total(self._settling()))
        self._used.clear()
        self._is_new_update = True

    def after_evaluation(self) -> None:
        """See Carrier."""
        for part in self._parts:
            part.reshard()
        self._is_new_update = True
