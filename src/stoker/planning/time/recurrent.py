"""Recurrent layers on a GPU: what cuDNN computes of all time steps at once, and what step after step.

What  A layer's inputs are multiplied for all steps together. The state's product, and what is computed of it element by
      element, are two kernels for each step, of which none begins before the last one has ended. Backward likewise; the
      gradients of the weights are products over all steps.
Costs  Nothing was measured here: what a step takes beside its product is a judgement.
Does not combine with  cuDNN's persistent kernels, which keep small weights in registers from step to step, and layers
      that it runs beside each other: where it takes those, it is faster.
Source  Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs" (2016),
      arXiv:1604.01946, sections 3.1 to 3.3; their streaming of layers is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planning.time.products import Sizes
from stoker.records.trace import Operation

STEP_S = 5e-6
"""Of each step, beside its product at full rate: two kernels that begin, and wait for each other [s]. A judgement."""
_LAYERS = ("_cudnn_rnn", "_cudnn_rnn_backward")


@dataclass(frozen=True)
class RecurrentWork:
    """Products of recurrent layers, each with how often it is made, and how many `steps` follow each other.

    Steps are those of all layers and directions together; `batch` and `width` are those of a state.
    """

    products: tuple[tuple[Sizes, int], ...]
    steps: int
    batch: int
    width: int


def recurrent_work(operation: Operation) -> RecurrentWork | None:
    """What recurrent layers compute; None of any other operation, and where its shapes do not tell."""
    matrices = [tensor.shape for tensor in operation.inputs[1:] if len(tensor.shape) == 2]
    states = [tensor.shape for tensor in operation.inputs[1:] if len(tensor.shape) == 3]
    if operation.name not in _LAYERS or not matrices or not states:
        return None
    cells, batch, width = states[0]
    rows = operation.inputs[0].numel // max(1, operation.inputs[0].shape[-1])
    if not cells or not batch or not rows:
        return None
    length, each = rows // batch, len(matrices) // cells
    products: list[tuple[Sizes, int]] = []
    for place, (outputs, inputs) in enumerate(matrices):
        # The first matrix of each cell is its inputs'.
        at_once, times = (rows, 1) if place % each == 0 else (batch, length)
        if operation.name.endswith("_backward"):
            products += [((1, at_once, inputs, outputs), times), ((1, outputs, inputs, rows), 1)]
        else:
            products.append(((1, at_once, outputs, inputs), times))
    return RecurrentWork(tuple(products), length * cells, batch, width)
