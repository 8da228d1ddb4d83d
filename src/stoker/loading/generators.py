"""The global random generators: seeded by keys, and Python's and NumPy's kept and put back.

PyTorch's generators are seeded before every micro-batch. Python's and NumPy's take ten times as long to seed and are
hardly ever drawn from by a model, so that within training they run on, and a checkpoint keeps their states; before an
item of a dataset is fetched, where drawing from them is common, all are seeded.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_generators(key: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and PyTorch's CPU generators, and that of `device` if it has its own."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the global generator is the one that users' code draws from
    seed_torch(key, device)


def seed_torch(key: int, device: torch.device | None = None) -> None:
    """Seed PyTorch's CPU generator, and that of `device` if it has its own."""
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def generator_states() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, as tensors and numbers."""
    version, words, gauss = random.getstate()
    name, numpy_words, place, has_gauss, numpy_gauss = np.random.get_state()  # noqa: NPY002 - as above
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "words": torch.from_numpy(np.asarray(numpy_words).astype(np.int64)),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "gauss": float(numpy_gauss),
        },
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Put back what `generator_states` gave."""
    ours, theirs = states["python"], states["numpy"]
    random.setstate((ours["version"], tuple(ours["words"].tolist()), ours["gauss"]))
    words = theirs["words"].numpy().astype(np.uint32)
    np.random.set_state((theirs["name"], words, theirs["place"], theirs["has_gauss"], theirs["gauss"]))  # noqa: NPY002
