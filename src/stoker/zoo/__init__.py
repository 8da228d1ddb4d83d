"""Small reference models: the ones that examples, tests and benchmarks train."""

from stoker.zoo.airbench import Airbench
from stoker.zoo.gpt import GPT
from stoker.zoo.llama import Llama
from stoker.zoo.mlp import MLP
from stoker.zoo.resnet9 import ResNet9
from stoker.zoo.whitening import Whitening

__all__ = ["GPT", "MLP", "Airbench", "Llama", "ResNet9", "Whitening"]
