"""Named ranges over the parts of updates: in PyTorch's profiler everywhere, on CUDA as NVTX ranges for Nsight Systems.

`data` is waiting for a batch; `forward` model and loss; `backward` what follows up to the next forward pass, or the
gradient's end; `gradient` what is neither: bringing the batch to the device, augmentation, passes that were captured;
`update` clipping, the optimiser and the average of weights.

PyTorch's public `record_function` is an operation, which would be captured with a pass. The private one that Inductor's
own code uses is none; where a version lacks it, the public one stands in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from stoker.stepping import Step

_profiler: Any = torch._C._profiler  # noqa: SLF001 - see above
_named: Callable[[str], AbstractContextManager[Any]] = getattr(_profiler, "_RecordFunctionFast", record_function)


class Ranges:
    """One range at a time; entering one leaves the last."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._open: AbstractContextManager[Any] | None = None

    def enter(self, name: str) -> None:
        """From now on, `name`."""
        self.leave()
        self._open = _named(name)
        self._open.__enter__()
        if self._is_cuda:
            torch.cuda.nvtx.range_push(name)

    def leave(self) -> None:
        """From now on, none."""
        if self._open is None:
            return
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()
        self._open.__exit__(None, None, None)
        self._open = None


@contextmanager
def ranges_over(step: Step, ranges: Ranges) -> Iterator[None]:
    """Name the parts of every update of `step` within the block; nothing else of it changes."""

    def around(run: Callable[..., Any], first: str, then: str | None) -> Callable[..., Any]:
        @functools.wraps(run)
        def named(*args: Any, **settings: Any) -> Any:
            ranges.enter(first)
            result = run(*args, **settings)
            if then is None:
                ranges.leave()
            else:
                ranges.enter(then)
            return result

        return named

    # On the instances, and so for this run alone; the classes keep what they have.
    over = ((step, "update", "update", None), (step, "gradients", "gradient", "update"),
            (step.objective, "loss", "forward", "backward"))  # fmt: skip
    for owner, method, first, then in over:
        setattr(owner, method, around(getattr(owner, method), first, then))
    try:
        yield
    finally:
        for owner, method, _, _ in over:
            delattr(owner, method)
        ranges.leave()
