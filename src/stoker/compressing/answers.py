"""What a model answers for rows, in batches as a service would make them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import Arrays
from stoker.compressing.rows import Rows, batches
from stoker.engines import Engine
from stoker.errors import BadJob
from stoker.loading.order import Indices
from stoker.records import Manifest

Array = NDArray[Any]


def answers(engine: Engine, rows: Rows, manifest: Manifest, *, batch: int = 32) -> Arrays:
    """Every output for all rows [N, ...], in the rows' order.

    Outputs with a dimension that was cut with the inputs are filled up with zeros, so that rows stack.

    Raises:
        ServiceError: the engine could not.
        BadJob: outputs of different batches do not stack.
    """
    found: Arrays = {}
    for chosen, inputs in batches(rows, manifest, batch):
        for name, part in engine.run(inputs).items():
            if part.shape[:1] != (len(chosen),):
                raise BadJob(f"output {name!r} has shape {list(part.shape)} for {len(chosen)} rows")
            found[name] = _placed(found.get(name), part, chosen, len(rows), name)
    return found


def _placed(whole: Array | None, part: Array, chosen: Indices, rows: int, name: str) -> Array:
    """`part` put into the rows `chosen` of `whole`, which grows to hold it."""
    if whole is None:
        whole = np.zeros((rows, *part.shape[1:]), part.dtype)
    if whole.ndim != part.ndim:
        raise BadJob(f"output {name!r} has {part.ndim} dimensions in one batch and {whole.ndim} in another")
    size = tuple(max(a, b) for a, b in zip(whole.shape[1:], part.shape[1:], strict=True))
    if size != whole.shape[1:]:
        whole = np.pad(whole, [(0, 0), *((0, new - old) for new, old in zip(size, whole.shape[1:], strict=True))])
    region: Any = (chosen, *(slice(0, length) for length in part.shape[1:]))
    whole[region] = part
    return whole
