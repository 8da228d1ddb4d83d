"""What is asked of every server: the model, the samples, and the latency within which the open loop has to stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.serving.race.samples import Arrays
from stoker import artifacts
from stoker.artifacts import Artifact
from stoker.records import DynamicDim
from stoker.records.service import Objective

NUM_SAMPLES = 64
_CLS, _SEP = 101, 102


@dataclass(frozen=True)
class Workload:
    """Samples of one model; `lengths` are those of texts in tokens, both ends included."""

    name: str
    model: str
    objective: Objective
    lengths: tuple[int, int] = (0, 0)

    def samples(self) -> list[Arrays]:
        """The same for everyone, without a batch dimension. Tokens are random: time does not depend on them."""
        random = np.random.default_rng(1)
        if self.model == "cnn":
            return [{"x_BCHW": random.standard_normal((3, 32, 32)).astype(np.float32)} for _ in range(NUM_SAMPLES)]
        low, high = self.lengths
        return [_text(random, int(random.integers(low, high + 1))) for _ in range(NUM_SAMPLES)]


WORKLOADS = (
    Workload("cnn", "cnn", Objective(q=0.99, within_s=0.030)),
    Workload("minilm-mixed", "minilm", Objective(q=0.99, within_s=0.200), (8, 128)),
    Workload("minilm-64", "minilm", Objective(q=0.99, within_s=0.200), (64, 64)),
)


def make(model: str, directory: Path) -> Artifact:
    """The model's artifact; exported unless it is there already."""
    place = directory / model
    if artifacts.versions(place):
        return artifacts.read(place)
    import torch  # noqa: PLC0415 - only where something is exported

    from bench.serving.race.modules import module_named  # noqa: PLC0415 - likewise
    from stoker.exporting import About, export_module  # noqa: PLC0415 - likewise

    module = module_named(model)
    if model == "cnn":
        return export_module(module, {"x_BCHW": torch.randn(16, 3, 32, 32)}, place, About(name=model))
    texts = [_text(np.random.default_rng(seed), 24) for seed in range(16)]
    inputs = {name: torch.from_numpy(np.stack([text[name] for text in texts])) for name in texts[0]}
    about = About(
        name=model,
        dynamic={name: {1: "tokens"} for name in inputs},
        dims=(DynamicDim(name="tokens", low=2, high=512),),
        pad=dict.fromkeys(inputs, 0.0),
    )
    return export_module(module, inputs, place, about)


def _text(random: np.random.Generator, length: int) -> Arrays:
    ids = random.integers(1000, 20_000, length)
    ids[0], ids[-1] = _CLS, _SEP
    return {"input_ids": ids.astype(np.int64), "attention_mask": np.ones(length, dtype=np.int64)}
