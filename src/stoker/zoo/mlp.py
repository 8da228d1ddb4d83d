"""Multi-layer perceptron: linear layers with ReLU between them.

Shapes: B samples, F input features, K classes; D_0 = F, D_1, …, D_n = K the widths.
Parameters: sum over layers of (D_i + 1) * D_{i+1}.
FLOPs to train on one sample: 6 * sum(D_i * D_{i+1}) - 2 * D_0 * D_1. The matrix products alone, a multiply and an add
counted as two: forward once, backward once for the weights and once for the inputs, which the first layer spares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from stoker.errors import BadJob


class MLP(nn.Module):
    """x_B... of F features in all to logits_BK; initialised as PyTorch's linear layers are.

    Args:
        inputs: F, features of a sample, counted after flattening.
        hidden: widths of the hidden layers; none makes it linear.
        classes: K.
        dropout: share of each hidden layer's outputs set to zero in training.

    Raises:
        BadJob: a width is not positive, or `dropout` not in [0, 1).
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int] = (256, 128), classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = (inputs, *hidden, classes)
        if min(widths) < 1 or not 0 <= dropout < 1:
            raise BadJob(f"MLP takes widths >= 1 and 0 <= dropout < 1, got widths {widths} and dropout {dropout}")
        layers: list[nn.Module] = [nn.Flatten(1)]
        for width, following in pairwise(widths[:-1]):
            layers += [nn.Linear(width, following), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-2], classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of samples [B, ...]."""
        logits_BK: torch.Tensor = self.layers(x)
        return logits_BK
