"""The forms of the race's models that `stoker compress` accepts.

    python -m bench.serving.race.accepted --work DIR
    python -m bench.serving.race --work DIR --compressed cnn=DIR/compressed/cnn minilm=DIR/compressed/minilm …

What is accepted has to keep a metric, so the CNN is trained first: an epoch on Fashion-MNIST, its images padded to
32 × 32 and repeated into three channels. A text has to keep its nearest neighbour. What exists already is kept.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

import stoker
from bench.compress.search import keeps_neighbour, minilm_rows
from bench.serving.race.modules import untrained_cnn
from bench.serving.race.workloads import make
from stoker import api, artifacts
from stoker.compressing.scores import Metric
from stoker.exporting import About

_IMAGES = 6_000


def main() -> None:
    """Export what is missing of both models, and compress it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder that the race is given")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each search")
    options = parser.parse_args()
    work: Path = options.work
    if not artifacts.versions(work / "models" / "cnn"):
        _train_cnn(work / "models" / "cnn")
    make("minilm", work / "models")
    _, (images, labels) = (_as_asked(source.arrays()) for source in stoker.data.images())
    np.savez(work / "images.npz", x_BCHW=images[:_IMAGES].numpy(), target=labels[:_IMAGES].numpy())
    _compress(work, "cnn", options.seconds, data=work / "images.npz", metric="accuracy", max_drop="0.5%")
    metric = Metric("neighbours kept", keeps_neighbour)
    _compress(work, "minilm", options.seconds, data=minilm_rows(work / "texts.npz"), metric=metric, max_drop="8%")


def _train_cnn(place: Path) -> None:
    train, _ = (_as_asked(source.arrays()) for source in stoker.data.images())
    model = untrained_cnn()
    job = stoker.Job(
        model=model,
        data=train,
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=stoker.schedules.one_cycle(),
        batch=256,
        until=stoker.epochs(1),
    )
    model.load_state_dict(stoker.train(job).weights())
    api.export(model.eval(), place, inputs={"x_BCHW": train[0][:16]}, about=About(name="cnn"))


def _compress(work: Path, model: str, seconds: float, **terms: Any) -> None:
    place = work / "compressed" / model
    if artifacts.versions(place):
        return
    shutil.copytree(work / "models" / model, place)
    found = api.compress(place, threads=2, seconds=seconds, tell=print, **terms)
    print(f"{model}: {found.artifact.path if found.artifact else 'nothing was accepted'}")


def _as_asked(arrays: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Images as the race's CNN takes them, float32 [N, 3, 32, 32] about zero, and their labels [N]."""
    images, labels = arrays
    scaled = (images.float().reshape(-1, 1, *images.shape[-2:]) / 255 - 0.29) / 0.35
    return F.pad(scaled, (2, 2, 2, 2), value=float(scaled.min())).expand(-1, 3, -1, -1).contiguous(), labels.long()


if __name__ == "__main__":
    main()
