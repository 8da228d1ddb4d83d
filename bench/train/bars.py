"""What was promised of training speed before it was measured: how many times as fast Stoker must be."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bars:
    """Least ratios of Stoker's rate to that of others.

    `bf16` is to the best of Lightning, Accelerate and HF Trainer with their bf16 on; `default` to the best of those and
    Keras as they come; `by_hand` to the loop tuned by hand; `single` to some contenders by name.
    """

    bf16: float
    default: float
    by_hand: float
    single: dict[str, float] = field(default_factory=dict)


BARS: dict[str, Bars] = {
    "resnet9_w32": Bars(1.25, 2.2, 0.97),
    "resnet9_w16": Bars(1.25, 2.5, 0.97),
    "gpt": Bars(1.03, 1.6, 0.97),
    "lstm": Bars(1.25, 2.4, 0.97),
    "mlp": Bars(1.4, 1.0, 1.2, {"lightning": 2.4}),
}
"""By case."""

GPU_BAR = 1.0
"""To the best of the compiled loops tuned by hand, on a GPU."""
