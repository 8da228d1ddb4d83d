"""Random draws of processes that work on different parts of one sample: each has its own.

Generators are seeded before every micro-batch, alike in all processes that hold the same samples. Where they work on
different heads, tokens or layers, the same draws would fall on different things: dropout would then drop the same
places in each of them, which is another law than one process's. There draws are keyed by the process as well.
"""

from __future__ import annotations

import torch
from torch import nn

from stoker.loading import extended, seed_torch

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def may_draw(module: nn.Module) -> bool:
    """Whether a module drops anything: a layer in it does, or it has an attribute called dropout above zero."""
    return any(
        isinstance(value, int | float) and value > 0
        for one in module.modules()
        for name, value in vars(one).items()
        if (name == "p" and isinstance(one, DROPOUTS)) or "dropout" in name
    )


def draw_from_here(place: int, device: torch.device) -> None:
    """Key all further draws of a micro-batch by `place` too."""
    seed_torch(extended(torch.initial_seed(), place), device)


class OwnDraws:
    """Other generators than the process's, between `begin` and `end`; outside of them these run on as they did.

    Args:
        place: of the process among those that pass the same samples.
        number: of this object in its process.
        device: the process's.
    """

    def __init__(self, place: int, number: int, device: torch.device) -> None:
        self._place, self._number, self._device = place, number, device
        self._kept: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """Set generators aside, if they are not yet."""
        if self._kept is None:
            self._kept = [one.get_state() for one in torch_generators(self._device)]
            seed_torch(extended(torch.initial_seed(), self._place, self._number), self._device)

    def end(self) -> None:
        """Put them back, if they are set aside."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for generator, state in zip(torch_generators(self._device), kept, strict=True):
                generator.set_state(state)

    def throughout(self, module: nn.Module) -> None:
        """Begin and end with each of a module's passes in training."""
        module.register_forward_pre_hook(lambda this, _: self.begin() if this.training else None)
        module.register_forward_hook(lambda *_: self.end(), always_call=True)


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """PyTorch's own for the CPU, and the device's."""
    own = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *own]
