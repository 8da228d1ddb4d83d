"""Optimisers' states under the names of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadRun, RunFailed
from stoker.records import to_json
from stoker.stepping.torch_optimizers import use_implementation
from stoker.training.checkpoints import restore
from stoker.training.named_state import _require_same_placements, names_of, numbered, pack, tree_of, united, unpack
from tests.training.builders import advance, assert_bit_equal, everything_of, saved, step_of, tiny_job


def test_state_goes_by_the_names_of_the_models_parameters() -> None:
    """Whatever groups they are in, and whatever the optimiser's order."""
    step = step_of(tiny_job(optimizer=stoker.AdamW(lr=0.01, groups={"*bias": {"weight_decay": 0.0}})))
    advance(step, 0, 1)
    tree = tree_of(step)
    assert names_of(step) == ["0.weight", "3.weight", "0.bias", "3.bias"]
    assert torch.equal(tree["state"]["0.bias"]["exp_avg"], step.optimizer.state[step.model[0].bias]["exp_avg"])
    assert [group["params"] for group in tree["groups"]] == [["0.weight", "3.weight"], ["0.bias", "3.bias"]]


@pytest.mark.parametrize("optimizer", [stoker.AdamW(lr=0.01), stoker.SGD(lr=0.1, momentum=0.9)])
def test_how_an_update_is_computed_is_no_part_of_the_state(optimizer: Any) -> None:
    """A run that switched to a fused kernel, and one that began with it, have one state: else a replay differs."""
    step = step_of(tiny_job(optimizer=optimizer))
    advance(step, 0, 1)
    kept = [pack(tree_of(step), "optimizer")[0]]
    for implementation in ("fused", "foreach", "default"):
        assert use_implementation(step.optimizer, implementation, is_ours=True) is None
        kept.append(pack(tree_of(step), "optimizer")[0])
    assert all(one == kept[0] for one in kept)


def test_what_is_of_no_parameter_is_kept(tmp_path: Path) -> None:
    """An optimiser may keep state of its own, under a name."""

    class Counting(torch.optim.SGD):
        """Keeps a count under a name."""

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.state["count"] = {"steps": torch.ones(())}

    step = step_of(tiny_job(optimizer=lambda params: Counting(params, lr=0.1, momentum=0.9)))
    advance(step, 0, 1)
    fresh = step_of(tiny_job(optimizer=lambda params: Counting(params, lr=0.1)))
    restore(fresh, *saved(step, tmp_path, 1))
    assert fresh.optimizer.state["count"] == {"steps": torch.ones(())}
    assert_bit_equal(everything_of(fresh), everything_of(step))


def test_the_state_of_another_optimiser_is_refused(tmp_path: Path) -> None:
    """Of one that trains all parameters, where the job's trains some."""
    frozen = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    frozen[0].requires_grad_(False)
    step = step_of(tiny_job())
    advance(step, 0, 1)
    path, manifest = saved(step, tmp_path, 1)
    with pytest.raises(BadRun, match=r"no group of it is that of '3\.weight' and 1 more"):
        restore(step_of(tiny_job(model=frozen)), path, manifest)


def stage(names: list[str], **settings: Any) -> dict[str, Any]:
    """One stage's tree: a group of these parameters, and a number as the state of each."""
    groups = [{"lr": 0.1, **settings, "params": names}]
    return {"state": {name: {"step": len(name)} for name in names}, "unnamed": {}, "groups": groups}


def test_groups_of_stages_with_the_same_settings_are_one() -> None:
    """So a process alone finds the groups it knows; those with other settings stay separate."""
    first = stage(["a.weight"])
    first["groups"].append({"lr": 0.5, "params": ["a.bias"]})
    trees = [first, stage(["b.weight", "b.bias"]), stage(["c.weight"], weight_decay=0.1)]
    whole = unpack(united([pack(tree, "optimizer")[0] for tree in trees]), {})
    assert [group["params"] for group in whole["groups"]] == [
        ["a.weight", "b.weight", "b.bias"],
        ["a.bias"],
        ["c.weight"],
    ]
    assert [group["lr"] for group in whole["groups"]] == [0.1, 0.5, 0.1]
    assert list(whole["state"]) == ["a.weight", "b.weight", "b.bias", "c.weight"]
    assert whole == json.loads(json.dumps(to_json(whole)))


def test_two_groups_of_one_stage_stay_two_though_their_settings_are_the_same() -> None:
    """A schedule of the user's may distinguish them by their place."""
    first = stage(["a"])
    first["groups"].append({"lr": 0.1, "params": ["b"]})
    whole = unpack(united([pack(tree, "optimizer")[0] for tree in (first, stage(["c"]))]), {})
    assert [group["params"] for group in whole["groups"]] == [["a", "c"], ["b"]]


def test_other_groups_of_as_many_parameters_are_refused() -> None:
    """A state goes back only to an optimiser that is divided in the same way."""
    step = step_of(tiny_job(optimizer=stoker.AdamW(lr=0.01, groups={"*bias": {"weight_decay": 0.0}})))
    tree = tree_of(step)
    first, second = tree["groups"]
    first["params"], second["params"] = [first["params"][0], second["params"][0]], [first["params"][1], "3.bias"]
    with pytest.raises(ValueError, match=r"no group of it is that of '0\.weight' and 1 more"):
        numbered(step, tree)


class Spread:
    """A parameter of four elements, two of which are here."""

    shape = torch.Size([4])

    def to_local(self) -> torch.Tensor:
        """These two."""
        return torch.zeros(2)


def test_a_part_that_does_not_say_which_it_is_is_refused() -> None:
    """A user's optimiser may keep plain tensors of the size that it was given; scalars and whole ones are fine."""
    _require_same_placements("w", Spread(), {"step": torch.zeros(()), "whole": torch.zeros(4), "count": 3})
    with pytest.raises(RunFailed, match=r"keeps 'momentum' of w, .* of shape \[2\]"):
        _require_same_placements("w", Spread(), {"momentum": torch.zeros(2)})
