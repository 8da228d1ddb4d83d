"""Loops tuned by hand for a GPU, as far as a CPU shows them: what of them is compiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.train.cases import build, quick
from bench.train.contenders.gpu_by_hand import blocks_of, compile_blocks
from bench.train.gpu_cases import GPU_CASES


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "resnet50" else ()) for name in GPU_CASES]
)
def test_blocks_are_compiled_each_for_its_own_shape(name: str) -> None:
    """Every block runs in compiled code, without symbolic sizes; a transformer's blocks share one."""
    torch.compiler.reset()
    case, sizes = quick(GPU_CASES[name]), []
    if name == "resnet50":
        case = dataclasses.replace(case, image=(3, 64, 64))
    model = build(case)

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        sizes.append([one for each in inputs if isinstance(each, torch.Tensor) for one in each.shape])
        return graph.forward

    compile_blocks(model, backend=backend)
    text = torch.zeros(2, case.context or 1, dtype=torch.int64)
    model(text if case.is_text else torch.zeros(2, *case.image, dtype=torch.uint8))
    assert sizes
    assert all(isinstance(one, int) for each in sizes for one in each)
    if case.is_text:
        assert len(sizes) == 1 < len(blocks_of(model))
