"""The samples that the probe looks at."""

from __future__ import annotations

import pytest
import torch

from stoker.errors import BadJob
from stoker.loading.dataset_adapters import as_samples
from stoker.stepping.probe import probe_samples
from tests.stepping.models import make_job, mlp


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_items_of_a_type_without_operations_are_told_before_training(dtype: torch.dtype) -> None:
    """By its name, with what to do, where PyTorch says `"min_all" not implemented`."""
    items = [(torch.ones(6).to(dtype), 1)] * 8
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(BadJob, match=f"samples hold {name}, with which PyTorch does not compute") as told:
        probe_samples(make_job(mlp), as_samples(items, what="data"), torch.float64)
    assert "int32" in str(told.value.remedy)
