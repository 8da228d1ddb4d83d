"""The same models in Keras 3, with the weights of the PyTorch modules. Keras's own image layout, channels last.

Shapes: B samples, T bytes, V vocabulary, D width, H heads, E = D / H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from bench.train.cases import Architecture, Case

Weights = dict[str, np.ndarray]
"""A PyTorch module's state, by name."""


def keras_model(case: Case, weights: Weights) -> keras.Model:
    """The case's model; the initial weights are those of the PyTorch module."""
    builders: dict[Architecture, Callable[[Case, Weights], keras.Model]] = {
        "resnet9": _resnet9,
        "gpt": _gpt,
        "lstm": _lstm,
        "mlp": _mlp,
    }
    return builders[case.architecture](case, weights)


def _resnet9(case: Case, weights: Weights) -> keras.Model:
    width = case.sizes["width"]
    loads: list[tuple[Any, list[np.ndarray]]] = []

    def conv(x: Any, channels: int, name: str, *, pool: bool = False) -> Any:
        convolution = layers.Conv2D(channels, 3, padding="same", use_bias=False)
        # Keras's momentum is what stays of the running mean, PyTorch's what is new.
        norm = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)
        x = layers.ReLU()(norm(convolution(x)))
        loads.append((convolution, [weights[f"{name}.0.weight"].transpose(2, 3, 1, 0)]))
        kinds = ("weight", "bias", "running_mean", "running_var")
        loads.append((norm, [weights[f"{name}.1.{kind}"] for kind in kinds]))
        return layers.MaxPooling2D()(x) if pool else x

    def residual(x: Any, channels: int, name: str) -> Any:
        return layers.Add()([x, conv(conv(x, channels, f"{name}.branch.0"), channels, f"{name}.branch.1")])

    inputs = keras.Input((28, 28, 1))
    x = conv(inputs, width, "layers.0")
    x = residual(conv(x, 2 * width, "layers.1", pool=True), 2 * width, "layers.2")
    x = conv(conv(x, 4 * width, "layers.3", pool=True), 8 * width, "layers.4", pool=True)
    x = layers.GlobalMaxPooling2D()(residual(x, 8 * width, "layers.5"))
    head = layers.Dense(10)
    model = keras.Model(inputs, head(x))
    loads.append((head, _dense(weights, "layers.8")))
    return _loaded(model, loads)


@keras.saving.register_keras_serializable()
class _CausalAttention(layers.Layer):
    """x_BTD to x_BTD: multi-head attention of each token to itself and those before it, by Keras's own operation."""

    def __init__(self, width: int, heads: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._width, self._heads = width, heads
        self.qkv, self.out = layers.Dense(3 * width), layers.Dense(width)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.qkv.build(input_shape)
        self.out.build(input_shape)

    def call(self, x_BTD: Any) -> Any:
        length = x_BTD.shape[1]
        qkv_BT3HE = ops.reshape(self.qkv(x_BTD), (-1, length, 3, self._heads, self._width // self._heads))
        q_BTHE, k_BTHE, v_BTHE = (qkv_BT3HE[:, :, part] for part in range(3))
        mixed_BTHE = ops.nn.dot_product_attention(q_BTHE, k_BTHE, v_BTHE, is_causal=True)
        return self.out(ops.reshape(mixed_BTHE, (-1, length, self._width)))


@keras.saving.register_keras_serializable()
class _Positions(layers.Layer):
    """x_BTD plus a learned vector for each place."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=input_shape[1:], name="table")

    def call(self, x_BTD: Any) -> Any:
        return x_BTD + self.table


def _gpt(case: Case, weights: Weights) -> keras.Model:
    width, heads = case.sizes["width"], case.sizes["heads"]
    loads: list[tuple[Any, list[np.ndarray]]] = []

    def norm(x: Any, name: str) -> Any:
        layer = layers.LayerNormalization(epsilon=1e-5)
        x = layer(x)
        loads.append((layer, [weights[f"{name}.weight"], weights[f"{name}.bias"]]))
        return x

    def dense(x: Any, units: int, name: str, activation: Any = None) -> Any:
        layer = layers.Dense(units, activation=activation, use_bias=f"{name}.bias" in weights)
        x = layer(x)
        loads.append((layer, _dense(weights, name)))
        return x

    inputs = keras.Input((case.context,), dtype="int32")
    tokens, positions = layers.Embedding(256, width), _Positions()
    x = positions(tokens(inputs))
    loads += [(tokens, [weights["tokens.weight"]]), (positions, [weights["positions.weight"]])]
    for block in range(case.sizes["layers"]):
        name = f"blocks.{block}"
        attention = _CausalAttention(width, heads)
        x = layers.Add()([x, attention(norm(x, f"{name}.attention_norm"))])
        parts = [*_dense(weights, f"{name}.attention.qkv"), *_dense(weights, f"{name}.attention.out")]
        loads.append((attention, parts))
        hidden = dense(norm(x, f"{name}.mlp_norm"), 4 * width, f"{name}.mlp.into", _gelu)
        x = layers.Add()([x, dense(hidden, width, f"{name}.mlp.out")])
    return _loaded(keras.Model(inputs, dense(norm(x, "norm"), 256, "head")), loads)


def _gelu(x: Any) -> Any:
    return keras.activations.gelu(x, approximate=True)


def _lstm(case: Case, weights: Weights) -> keras.Model:
    width = case.sizes["width"]
    inputs = keras.Input((case.context,), dtype="int32")
    tokens, head = layers.Embedding(256, width), layers.Dense(256)
    x, loads = tokens(inputs), [(tokens, [weights["tokens.weight"]])]
    for depth in range(case.sizes["layers"]):
        layer = layers.LSTM(width, return_sequences=True)
        x = layer(x)
        # PyTorch adds two biases where Keras has one; the gates are in the same order.
        bias = weights[f"lstm.bias_ih_l{depth}"] + weights[f"lstm.bias_hh_l{depth}"]
        loads.append((layer, [weights[f"lstm.weight_{kind}_l{depth}"].T for kind in ("ih", "hh")] + [bias]))
    model = keras.Model(inputs, head(x))
    loads.append((head, _dense(weights, "head")))
    return _loaded(model, loads)


def _mlp(_case: Case, weights: Weights) -> keras.Model:
    inputs = keras.Input((28, 28, 1))
    x, loads = layers.Flatten()(inputs), []
    for place, (units, activation) in zip((1, 3, 5), ((256, "relu"), (128, "relu"), (10, None)), strict=True):
        layer = layers.Dense(units, activation=activation)
        x = layer(x)
        loads.append((layer, _dense(weights, f"layers.{place}")))
    return _loaded(keras.Model(inputs, x), loads)


def _dense(weights: Weights, name: str) -> list[np.ndarray]:
    kernel, bias = weights[f"{name}.weight"].T, weights.get(f"{name}.bias")
    return [kernel] if bias is None else [kernel, bias]


def _loaded(model: keras.Model, loads: list[tuple[Any, list[np.ndarray]]]) -> keras.Model:
    for layer, values in loads:
        layer.set_weights(values)
    return model
