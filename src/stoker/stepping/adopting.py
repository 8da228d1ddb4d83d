"""Models of other libraries as a Step needs them; plain modules of PyTorch are left as they are.

- Hugging Face: the cache of keys and values, which is for generating, is off in `config`: kept through training it
  takes memory, and a block that is computed twice would fill it twice. What generates switches it on itself
  (`generation_config` is not touched).
- Keras 3 on PyTorch: see `stoker.stepping.keras_models`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from torch import nn


def adopted(model: nn.Module) -> nn.Module:
    """`model`, changed in place or wrapped."""
    if is_keras(model) and isinstance(model, nn.Module):
        from stoker.stepping.keras_models import KerasModel  # noqa: PLC0415 - imports Keras, which is here then

        return KerasModel(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None) is True:
        config.use_cache = False
    return model


def merged(model: nn.Module) -> nn.Module:
    """`model` with low-rank adapters of peft merged into the weights they adapt, in place; others as they are."""
    merge = getattr(model, "merge_and_unload", None)
    return merge() if callable(merge) else model


def naming() -> contextlib.AbstractContextManager[None]:
    """Within the block a model is made anew, under the names that it has in every process."""
    if "keras" not in sys.modules:
        return contextlib.nullcontext()
    if sys.modules["keras"].backend.backend() != "torch":
        return contextlib.nullcontext()
    from stoker.stepping.keras_models import fresh_names  # noqa: PLC0415 - as above

    return fresh_names()


def is_keras(model: object) -> bool:
    """Whether it is a model or layer of Keras."""
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    return layer is not None and isinstance(model, layer)


def is_foreign(model: object) -> bool:
    """Whether it is a Keras model that computes by another library than PyTorch."""
    return is_keras(model) and not isinstance(model, nn.Module)
