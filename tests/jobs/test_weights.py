from __future__ import annotations

import pytest
import torch

from stoker.errors import BadJob, BadSetting
from stoker.jobs.initial_weights import Weights
from stoker.jobs.job_description import describe_settings
from tests.stepping.models import make_job, mlp


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "last.ckpt"])
def test_pickles_are_refused_with_the_way_out(name):
    """Opening one may run code; the line that converts it is in the message."""
    with pytest.raises(BadJob, match=r"may run code .* safetensors\.torch\.save_file"):
        make_job(mlp, init=name)


def test_what_is_no_source_is_refused():
    """A number, or a pattern where a list of them belongs."""
    with pytest.raises(BadJob, match="wanted a safetensors file"):
        make_job(mlp, init=3)
    with pytest.raises(BadSetting, match="fresh is a list of patterns"):
        Weights("model.safetensors", fresh="head.*")


def test_it_is_known_by_the_weights_it_leads_to():
    """Not by a path or tensors in the description: the digest of the initial weights is in the spec."""
    assert describe_settings(make_job(mlp, init={"0.weight": torch.zeros(1)})) == describe_settings(make_job(mlp))
