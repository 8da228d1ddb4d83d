"""A model of Keras 3 learns to read digits; `stoker.load(RUN).model().keras` is a Keras model again.

pip install keras
stoker train examples/keras_images.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

from typing import Any

import stoker


def network() -> Any:
    """Convolutions over images of one channel, which Stoker's data have first and Keras wants last."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((1, 8, 8)),
            layers.Permute((2, 3, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def job(epochs: int = 5) -> stoker.Job:
    """Trained with AdamW; the loss takes logits, so the last layer has no softmax."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=network,
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=2e-3),
        batch=32,
        until=stoker.epochs(epochs),
    )
