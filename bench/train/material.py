"""What all contenders start from, written once and read by each: samples, their order, initial weights.

Contenders read files rather than call Stoker, so that what importing Stoker takes is not on the others' account.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler

from bench.train.cases import Case, build

TEXT_BYTES = 4_000_000
"""How much of the standard library's source is read, training and test part together [bytes]."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Inputs [N, ...] and targets [N, ...]."""

EPOCHS_OF_ORDER = 5
"""Epochs whose order is written: as many as `equal_accuracy` trains. Later ones repeat it, which no speed knows."""


@dataclass(frozen=True)
class Material:
    """A case ready to be trained: inputs [N, ...] and targets [N, ...] as the model takes them, and test ones.

    `order` has a row of sample indices [N] for each epoch; `weights` is the model's first state; `folder` is where
    all of it was read.
    """

    case: Case
    folder: Path
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    order: torch.Tensor
    weights: dict[str, torch.Tensor]

    def model(self) -> nn.Module:
        """The case's module with the initial weights, in training mode."""
        model = build(self.case)
        model.load_state_dict(self.weights)
        return model.train()

    def batches(self) -> Iterator[torch.Tensor]:
        """Indices [B] of one batch after another, without end."""
        while True:
            for epoch in self.order:
                yield from epoch.split(self.case.batch)


class InOrder(Sampler[int]):
    """The same samples in the same order as everybody's: an epoch's indices each time it is asked."""

    def __init__(self, material: Material) -> None:
        self._order = material.order
        self._epoch = 0

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._order.shape[1]

    def __iter__(self) -> Iterator[int]:
        """The next epoch's indices."""
        row = self._order[self._epoch % len(self._order)]
        self._epoch += 1
        yield from row.tolist()


def prepare(case: Case, folder: Path, seed: int = 0) -> None:
    """Write the case's material to `folder`; the order and the generator's seed go by `seed`.

    Raises:
        BadJob: the data are not on this machine and cannot be had.
    """
    from stoker.loading.order import EpochOrder  # noqa: PLC0415 - contenders import this module, and not Stoker

    if case.random_samples:
        num, arrays = case.random_samples, _random(case, seed)
        test_inputs, test_targets = (array[:1] for array in arrays)
    else:
        num, arrays, (test_inputs, test_targets) = _real(case)
    order = EpochOrder(num, seed)
    torch.manual_seed(seed)
    torch.save(
        {
            "weights": build(case).state_dict(),
            "order": torch.from_numpy(np.stack([order.indices(e, 0, num) for e in range(EPOCHS_OF_ORDER)])),
            "test_inputs": test_inputs,
            "test_targets": test_targets,
        },
        folder / "material.pt",
    )
    for name, array in zip(("inputs", "targets"), arrays, strict=True):
        np.save(folder / f"{name}.npy", array.numpy())


def read(case: Case, folder: Path) -> Material:
    """The material that `prepare` wrote."""
    kept = torch.load(folder / "material.pt", weights_only=True)
    inputs, targets = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("inputs", "targets"))
    _READ[folder] = Material(
        case, folder, inputs, targets, kept["test_inputs"], kept["test_targets"], kept["order"], kept["weights"]
    )
    return _READ[folder]


def read_again(folder: Path) -> Material:
    """What `read` read from the folder before, in this process."""
    return _READ[folder]


_READ: dict[Path, Material] = {}


def _real(case: Case) -> tuple[int, Pair, Pair]:
    """How many training samples, those samples and the test ones, as the model takes them."""
    from stoker import data  # noqa: PLC0415 - likewise

    train: data.ArraySource
    test: data.ArraySource
    if case.context is not None:
        train, test = data.python_source(context=case.context, limit_bytes=TEXT_BYTES)
    else:
        train, test = data.fashion_mnist()
    fitting = len(train) // case.batch * case.batch  # whole batches alone: nobody compiles or tunes for a second shape
    num = fitting if case.most_samples is None else min(fitting, case.most_samples)
    inputs, targets = train.prepare(tuple(array[:num] for array in train.arrays()))
    test_inputs, test_targets = test.prepare(tuple(array[: case.most_samples] for array in test.arrays()))
    return num, (inputs, targets), (test_inputs, test_targets)


def _random(case: Case, seed: int) -> Pair:
    """Random tokens and those that follow them, or random images and classes."""
    generator, num = torch.Generator().manual_seed(seed), case.random_samples
    assert num is not None, "asked for random samples"
    if case.context is not None:
        text = torch.randint(case.sizes.get("vocab", 256), (num, case.context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    pixels = torch.randint(256, (num, *case.image), generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(case.sizes.get("classes", 10), (num,), generator=generator)
