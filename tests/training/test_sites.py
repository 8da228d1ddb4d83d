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
from stoker.training.checkpoints import kept_weights, model_weights, restore
from stoker.training.elastic.state_broadcast import SurvivorState, state_from_furthest_rank
from stoker.training.snapshots import snapshot_of
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


def came_anew(world: World, num_updates: int) -> tuple[bool, bool, int, float]:
    """Site 1 is replaced after so many updates of a run that began at other weights than the job's.

    Gives whether its inner optimiser has site 0's state, whether it has the shared weights, how far it is, and the
    norm of what is shared.
    """
    step = make_step(world, gpt_job(SYNC))
    with torch.no_grad():
        next(step.model.parameters()).add_(1.0)  # as in a fork
    step.begin_at_weights()
    train(step, 0, num_updates)
    position = Position(samples=16 * num_updates, updates=num_updates)
    carried = SurvivorState(position, None, {}, snapshot_of(step), step.outer.state())
    if world.rank == 1:
        step, carried = make_step(world, gpt_job(SYNC)), None
    given = state_from_furthest_rank(step, carried)
    assert given is not None
    moments = torch.cat([state["exp_avg_sq"].flatten() for state in step.optimizer.state.values()])
    theirs = moments.clone()
    torch.distributed.broadcast(theirs, src=0)
    live, shared = step.model.state_dict(), step.whole_weights()
    is_shared = all(torch.equal(live[name], shared[name]) for name in live)
    norm = float(sum(row.norm() for row in step.outer.shared.tensors()))
    return torch.equal(theirs, moments), is_shared, given.position.updates, norm


@pytest.mark.parametrize("num_updates", [1, 7])
def test_a_site_that_comes_takes_over_the_state_of_a_living_one(num_updates: int) -> None:
    """Without a checkpoint, before and after a first exchange: moments, the shared weights and theirs, the position."""
    (_, was_shared, there, norm), (has_moments, is_shared, here, taken) = on_ranks(
        Layout(replicas=2), came_anew, num_updates
    )
    assert not was_shared  # a living site keeps weights of its own
    assert has_moments
    assert is_shared
    assert there == here == num_updates
    assert norm == taken > 0


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
