"""Sites that make updates of their own, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.errors import BadRun
from stoker.jobs import DiLoCo
from stoker.records import Layout, Position
from stoker.stepping.world import ALONE, World
from stoker.store import CheckpointStore
from stoker.testing.ranks import on_ranks
from stoker.training import kept_weights, model_weights, restore
from stoker.units import updates
from tests.stepping.outer.sites import Learned, ended, gpt_job, make_step, train
from tests.training.legs import save

SYNC = DiLoCo(every=updates(5), fragments=2, overlap=1, rate="by_noise", early=(updates(3), updates(5)))


def stopped_and_resumed(world: World, folder: Path) -> tuple[Learned, Learned]:
    """A run of two sites that never stopped; and one that was resumed between two exchanges, one under way."""
    whole = make_step(world, gpt_job(SYNC))
    begun = train(whole, 0, 6)
    save(whole, folder, Position(samples=100, updates=6))
    found = CheckpointStore(folder).newest()
    assert found is not None
    step = make_step(world, gpt_job(SYNC))
    assert restore(step, *found) == {"at": 6}
    del begun
    return ended(whole, train(whole, 6, 14)), ended(step, train(step, 6, 14))


def test_sites_go_on_each_from_its_own_state(tmp_path: Path) -> None:
    """Weights, momenta, and what was on its way: bit-equal to sites that never stopped. One alone takes the shared."""
    for whole, resumed in on_ranks(Layout(replicas=2), stopped_and_resumed, tmp_path):
        assert resumed.losses == whole.losses
        for kind in ("own", "shared"):
            mine, theirs = getattr(resumed, kind), getattr(whole, kind)
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    shared = kept_weights(*found)
    assert all(torch.equal(model_weights(*found)[name], weight) for name, weight in shared.items())
    for sync in (SYNC, None):
        step = make_step(ALONE, gpt_job(sync))
        restore(step, *found)
        live = step.model.state_dict()
        assert all(torch.equal(live[name], weight) for name, weight in shared.items())


def test_sites_do_not_go_on_from_processes_in_lockstep(tmp_path: Path) -> None:
    """There are no shared weights and no momenta of theirs."""
    save(make_step(ALONE, gpt_job(None)), tmp_path, Position(samples=16, updates=1))
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    with pytest.raises(BadRun, match="of processes that trained in lockstep"):
        restore(make_step(ALONE, gpt_job(SYNC)), *found)


def test_another_sync_is_refused(tmp_path: Path) -> None:
    """Fragments that were kept do not fit others."""
    save(make_step(ALONE, gpt_job(SYNC)), tmp_path, Position(samples=16, updates=1))
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    with pytest.raises(BadRun, match="does not fit the job's sync"):
        restore(make_step(ALONE, gpt_job(DiLoCo(every=updates(5), fragments=3))), *found)
