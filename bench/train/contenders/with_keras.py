"""Keras 3 as it comes, `fit` on arrays; the backend is chosen by the environment variable KERAS_BACKEND.

Samples lie in everybody's order of the first epoch, and `fit` does not shuffle them: it is spared the gathering.
"""

from __future__ import annotations

from typing import Any

import keras

from bench.train.cases import WEIGHT_DECAY
from bench.train.contenders.keras_models import keras_model
from bench.train.material import Material
from bench.train.pacing import Pacer


class _Pace(keras.callbacks.Callback):
    """Losses in Keras's logs are means since the epoch began; batches are of one size."""

    def __init__(self, batch: int, pacer: Pacer) -> None:
        super().__init__()
        self._batch, self._pacer = batch, pacer
        self._mean, self._logs = 0.0, {}  # type: ignore[var-annotated]
        self._number = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._number, self._logs = batch, logs or {}
        self._pacer.updated(self._batch, self._loss)

    def _loss(self) -> float:
        mean_before, self._mean = self._mean, float(self._logs["loss"])
        return (self._number + 1) * self._mean - self._number * mean_before


def run(material: Material, pacer: Pacer) -> None:
    """Train until stopped."""
    case = material.case
    model = keras_model(case, {name: tensor.numpy() for name, tensor in material.weights.items()})
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=case.lr, weight_decay=WEIGHT_DECAY, epsilon=1e-8),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    order = material.order[0]
    inputs, targets = material.inputs[order].numpy(), material.targets[order].numpy()
    if not case.is_text:
        inputs = inputs.transpose(0, 2, 3, 1).copy()
    pace = _Pace(case.batch, pacer)
    model.fit(inputs, targets, batch_size=case.batch, epochs=10_000, shuffle=False, verbose=0, callbacks=[pace])
