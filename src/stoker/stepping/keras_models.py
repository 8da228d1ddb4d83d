"""Keras 3 models on PyTorch, as plain modules.

What: a Keras model is a module of PyTorch where `KERAS_BACKEND=torch`, but not a plain one: sublayers are not
registered, moving statistics and the state of seed generators are parameters, it cannot be copied with its tensors
shared, and every call has to say whether it is in training. Here its trainable variables are parameters, its other ones
buffers, by the names that Keras gives them (`dense/kernel`); before each pass its variables are made to hold them, so
that copies of the module share the layers and have their own tensors.
Use when: always, for a Keras model in a Job. Costs: a few microseconds a pass.
Does not combine with: float64 proofs (layers convert their inputs to their own type, so that fp32 is compared); batch
norms that `Job(freeze=…)` would freeze, which do not know of it: set `layer.trainable = False`, as in Keras. Batch
norms are not recognised: such a model is trained a whole coupling group at a time.
Source: `keras/src/backend/torch/{layer,core}.py` of Keras 3.15: `Variable._value` is the tensor a variable holds. The
counters of automatic names are in a private module: where it is gone, a model that is made twice in one process needs
layers with names of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from torch import nn

from stoker.errors import BadJob

try:
    from keras.src.backend.common import global_state as _names
except ImportError:
    _names = None


class KerasModel(nn.Module):
    """A Keras model; `keras` is the model itself, holding this module's weights since the last pass.

    Raises:
        BadJob: it is not built, so that it has no weights yet.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not model.built:
            raise BadJob(
                f"the Keras model {model.name!r} has no weights before it is built",
                remedy="Give it a keras.Input, or call model.build(input_shape) before handing it over.",
            )
        self._layers = _Shared(model)
        for name, variable in self._layers.variables.items():
            if variable.trainable:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.detach())

    @property
    def keras(self) -> Any:
        """The Keras model, its variables holding this module's tensors; for `save`, `summary` and the like."""
        self._link()
        return self._layers.model

    @property
    def keras_norms(self) -> list[str]:
        """Names of its layers that keep moving statistics, and are trained."""
        norm = keras.layers.BatchNormalization
        layers = self._layers.model._flatten_layers()  # noqa: SLF001 - layers of layers have no public list
        return [layer.name for layer in layers if isinstance(layer, norm) and layer.trainable]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the Keras model returns, in the mode of this module."""
        self._link()
        with keras.device(str(next(self.parameters()).device)):
            return self._layers.model(*args, training=self.training, **kwargs)

    def _link(self) -> None:
        """Let the variables hold this module's tensors, which moving, copying and loading may have replaced."""
        held, variables = {**self._parameters, **self._buffers}, self._layers.variables
        for name, tensor in held.items():
            if variables[name]._value is not tensor:  # noqa: SLF001 - assigning to `value` would copy
                variables[name]._value = tensor  # noqa: SLF001 - likewise


class _Shared:
    """Layers that all copies of a module call; copies of it are itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.variables: dict[str, Any] = {}
        for variable in model.variables:
            name = variable.path.replace(".", "_")
            while name in self.variables:  # layers that a user gave one name
                name += "'"
            self.variables[name] = variable

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Within the block layers are named as in a process that has made none: the same at every call."""
    if _names is None:
        yield
        return
    before = _names.get_global_attribute("object_name_uids")
    _names.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        _names.set_global_attribute("object_name_uids", before)
