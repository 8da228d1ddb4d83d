"""First moments that have become too small to be normal numbers, set to 0 now and then.

What: an exponential average that gets no gradient any more, as of a pixel at the border, shrinks until it is denormal
(fp32: below 1.2e-38), where rounding keeps it for good. Adam's and SGD's are set to 0 then, every 128 updates. Use
when: on a CPU; several compute with denormals through microcode, and one value in a hundred made AdamW's step a third
slower on an Intel Xeon (docs/log.md, 2026-11-23). Costs: reading and writing them once in 128 updates. Changes: a
moment by less than 1.2e-38, of which no weight hears. Second moments stay: what is divided by their roots would hear of
it where epsilon is tiny; and so does Muon's momentum, which it divides by its norm. Keyed by the number of the update,
so that a run that was interrupted and one that was not do the same; flushing in the CPU's own registers is a thread's
affair, and depends on how many there are.
Source: https://docs.pytorch.org/docs/stable/generated/torch.set_flush_denormal.html.
"""

from __future__ import annotations

import torch

from stoker.stepping.local_tensors import local

FLUSH_EVERY = 128
"""Updates between two sweeps: in fewer a moment that is halfway there hardly becomes denormal (0.9^128 = 1e-6)."""


_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""PyTorch's names of them, Adam's and SGD's."""


@torch.no_grad()
def flush_denormals(optimizer: torch.optim.Optimizer) -> None:
    """Set first moments on a CPU that are denormal to 0, in place; the smallest normal number goes with them."""
    for state in optimizer.state.values():
        for value in map(state.get, _FIRST_MOMENTS):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "cpu":
                part = local(value)
                torch.hardshrink(part, torch.finfo(part.dtype).tiny, out=part)
