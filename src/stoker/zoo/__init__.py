"""Reference models: the ones that examples, tests and benchmarks train, and that the field starts from."""

from stoker.zoo.airbench import Airbench, Whitening
from stoker.zoo.convolutional import VGG16, ResNet, ResNet9
from stoker.zoo.encoder import Encoder
from stoker.zoo.gpt import GPT
from stoker.zoo.llama import Llama
from stoker.zoo.mlp import MLP
from stoker.zoo.recurrent import RecurrentClassifier, RecurrentLM
from stoker.zoo.vit import ViT

__all__ = [
    "GPT",
    "MLP",
    "VGG16",
    "Airbench",
    "Encoder",
    "Llama",
    "RecurrentClassifier",
    "RecurrentLM",
    "ResNet",
    "ResNet9",
    "ViT",
    "Whitening",
]
