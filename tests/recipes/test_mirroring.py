from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.recipes import MirrorAveraged, mirror_averaged
from stoker.stepping.model import build_model
from tests.recipes.test_recipe_whitening import pictures
from tests.training.builders import tiny_job


def lopsided() -> nn.Module:
    """A model that sees left from right."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))


def test_evaluation_is_the_average_of_both_ways() -> None:
    """And does not see left from right; training is the model's own."""
    model = build_model(mirror_averaged(tiny_job(model=lopsided, data=pictures())))
    x_BCHW = pictures()[0]
    assert torch.equal(model(x_BCHW), model.model(x_BCHW))
    assert not torch.allclose(model(x_BCHW), model(x_BCHW.flip(-1)))
    model.eval()
    expected = (model.model(x_BCHW) + model.model(x_BCHW.flip(-1))) / 2
    assert torch.equal(model(x_BCHW), expected)
    torch.testing.assert_close(model(x_BCHW.flip(-1)), expected)


def test_a_module_given_is_left_as_it_is() -> None:
    """Training the average does not train the module that the job was made with."""
    given = lopsided()
    made = build_model(mirror_averaged(tiny_job(model=given, data=pictures())))
    assert all(mine is not its for mine, its in zip(made.parameters(), given.parameters(), strict=True))
    assert all(torch.equal(mine, its) for mine, its in zip(made.parameters(), given.parameters(), strict=True))


def test_marks_of_a_given_modules_parameters_are_kept() -> None:
    """An optimiser chooses groups by them."""
    given = lopsided()
    given[1].weight.decays = False  # type: ignore[index]
    made = build_model(mirror_averaged(tiny_job(model=given, data=pictures())))
    assert made.model[1].weight.decays is False


def test_what_has_no_left_and_right_is_refused() -> None:
    """Reported with the shape."""
    with pytest.raises(BadJob, match=r"takes images \[B, C, H, W\], got a tensor of shape \[4, 36\]"):
        MirrorAveraged(lopsided()).eval()(torch.zeros(4, 36))
