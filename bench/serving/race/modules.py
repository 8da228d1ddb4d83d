"""The models of the race as PyTorch modules: what is exported, and what eager PyTorch serves."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from bench.compress import minilm
from stoker.zoo.convolutional import ResNet9

_SEED, _WIDTH = 0, 32


def module_named(name: str) -> nn.Module:
    """`cnn`, a ResNet-9 of width 32 for 32 × 32 images, untrained but with settled statistics; or `minilm`.

    Both in evaluation mode. Weights of the CNN come from a seed: the race is about time. `bench.serving.race.accepted`
    puts learned ones in their place, which is what a compressed form has to be accepted of.
    """
    return minilm.load() if name == "minilm" else untrained_cnn()


def with_weights(name: str, weights: Path) -> nn.Module:
    """The same with the weights of its artifact, a safetensors file."""
    module = minilm.MiniLM() if name == "minilm" else ResNet9(width=_WIDTH, in_channels=3)
    module.load_state_dict(load_file(weights))
    return module.eval()


def untrained_cnn() -> nn.Module:
    """A ResNet-9 of width 32 for three channels, its statistics those of random images."""
    torch.manual_seed(_SEED)
    model = ResNet9(width=_WIDTH, in_channels=3)
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(64, 3, 32, 32))
    return model.eval()
