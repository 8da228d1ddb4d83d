"""(Job, Plan) -> Step: forward, loss, backward, clip, update. Steps are made only here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.stepping import keras_models as keras_models

__getattr__ = on_first_use(__name__, __file__)
