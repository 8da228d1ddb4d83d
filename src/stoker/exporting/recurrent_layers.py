"""Recurrent layers over sequences of any length: traced as one operator each, which ONNX has too.

What: `torch.export` (PyTorch 2.13) unrolls `nn.LSTM` and `nn.GRU` over the examples' steps, so that their number is
fixed. Within `whole_recurrences` these layers call operators of Stoker's own instead, which a trace keeps.
Use when: a model with such layers cannot be traced with a varying number of steps.
Costs: PyTorch's own program (`model.pt2`) would need Stoker, and is left out.
Does not combine with: packed sequences, projections (`proj_size`), `nn.RNN`; these are traced as ever.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import rnn

_FUNCTIONS = "_VF"
"""Private to PyTorch: where its recurrent layers find their functions. Without it they are traced as ever."""

_TRANSLATIONS = "onnxscript.function_libs.torch_lib.ops.core"
"""Private to onnxscript."""

_patching = threading.RLock()
"""Held while `_FUNCTIONS` is replaced: two blocks that overlap would restore each other's functions."""

_SETTINGS = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional"
_library = torch.library.Library("stoker", "FRAGMENT")
_library.define(f"lstm(Tensor input, Tensor[] hx, {_SETTINGS}, bool batch_first) -> (Tensor, Tensor, Tensor)")
_library.define(f"gru(Tensor input, Tensor hx, {_SETTINGS}, bool batch_first) -> (Tensor, Tensor)")
_library.impl("lstm", torch.lstm, "CompositeExplicitAutograd")
_library.impl("gru", torch.gru, "CompositeExplicitAutograd")
_OWN: dict[Callable[..., Any], str] = {
    torch.ops.stoker.lstm.default: "aten_lstm",
    torch.ops.stoker.gru.default: "aten_gru",
}
"""Functions of onnxscript that write these operators, by operator."""


def _lstm_shapes(steps: torch.Tensor, hx: Sequence[torch.Tensor], *settings: Any) -> tuple[torch.Tensor, ...]:
    return _outputs(steps, hx[0], settings), torch.empty_like(hx[0]), torch.empty_like(hx[1])


def _gru_shapes(steps: torch.Tensor, hx: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, ...]:
    return _outputs(steps, hx, settings), torch.empty_like(hx)


torch.library.register_fake("stoker::lstm", _lstm_shapes, lib=_library)
torch.library.register_fake("stoker::gru", _gru_shapes, lib=_library)


def _outputs(steps: torch.Tensor, state: torch.Tensor, settings: Sequence[Any]) -> torch.Tensor:
    is_bidirectional = settings[5]
    return steps.new_empty((steps.shape[0], steps.shape[1], state.shape[2] * (2 if is_bidirectional else 1)))


class _Functions:
    """PyTorch's functions of recurrent layers, with those of whole sequences replaced in the thread that makes it.

    Another thread may train at the same time, and the operators of this file have no gradients.
    """

    def __init__(self, original: Any) -> None:
        self._original, self._thread = original, threading.get_ident()

    def lstm(self, *arguments: Any) -> Any:
        hx = arguments[1]
        is_plain = not isinstance(hx, torch.Tensor) and arguments[0].dim() == 3 and hx[0].shape == hx[1].shape
        return (torch.ops.stoker.lstm if is_plain and self._is_here() else self._original.lstm)(*arguments)

    def gru(self, *arguments: Any) -> Any:
        is_plain = isinstance(arguments[2], list | tuple) and arguments[0].dim() == 3  # else of packed sequences
        return (torch.ops.stoker.gru if is_plain and self._is_here() else self._original.gru)(*arguments)

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def has_recurrence(module: nn.Module) -> bool:
    """Whether a module has layers that `whole_recurrences` is for, and they can be traced and written so."""
    is_recurrent = any(isinstance(layer, nn.LSTM | nn.GRU) for layer in module.modules())
    return is_recurrent and hasattr(rnn, _FUNCTIONS) and len(translations()) == len(_OWN)


@contextmanager
def whole_recurrences() -> Iterator[None]:
    """Within the block, LSTM and GRU layers are traced as one operator each, by the thread that is in it."""
    with _patching:
        original = getattr(rnn, _FUNCTIONS)
        setattr(rnn, _FUNCTIONS, _Functions(original))
        try:
            yield
        finally:
            setattr(rnn, _FUNCTIONS, original)


def is_own_program(program: torch.export.ExportedProgram) -> bool:
    """Whether a program has operators that only Stoker defines."""
    return any(getattr(node.target, "namespace", "") == "stoker" for node in program.graph.nodes)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ONNX nodes of these operators, by operator: those of PyTorch's.

    They are private to onnxscript; where it has none, recurrent layers are traced as ever.
    """
    try:
        known = importlib.import_module(_TRANSLATIONS)
    except ImportError:
        return {}
    return {operator: getattr(known, name) for operator, name in _OWN.items() if hasattr(known, name)}
