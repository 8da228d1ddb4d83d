from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, DiLoCo, LocalSGD
from stoker.loading.datasets import datasets_of
from stoker.records import Layout, Plan
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, SIGNALS, World
from stoker.testing.ranks import RankFailed, on_ranks
from stoker.units import samples, updates
from tests.stepping.driving import SEPARABLE, grouped, largest_difference
from tests.stepping.models import images, make_job
from tests.stepping.outer.by_hand import ByHand, vector
from tests.stepping.outer.sites import (
    UPDATES,
    Learned,
    batches,
    ended,
    gpt,
    gpt_job,
    learned,
    make_step,
    train,
)

TWO_SITES = Layout(replicas=2)

EXACT = {
    "diloco": (DiLoCo(every=updates(5), compress="none"), 5),
    "local sgd": (LocalSGD(every=samples(60)), 4),
    "fragments": (DiLoCo(every=updates(6), compress="none", fragments=3), 6),
    "overlap": (DiLoCo(every=updates(5), compress="none", overlap=3), 5),
    "early": (DiLoCo(every=updates(5), compress="none", overlap=1, early=(updates(2), updates(6))), 5),
    "rates by noise": (DiLoCo(every=updates(5), compress="none", rate="by_noise"), 5),
    "fragments and overlap": (DiLoCo(every=updates(6), compress="none", fragments=3, overlap=2, keep=0.25), 6),
}
"""Ways to come together without rounding, and their intervals [updates]."""


ROUNDED = {
    "twice": (DiLoCo(every=updates(4), fragments=2, overlap=1), torch.float32),
    "once more": (DiLoCo(every=updates(4), fragments=2, overlap=1), torch.float32),
    "whole": (DiLoCo(every=updates(5)), torch.float32),
}
"""Ways to come together in 8 bits, with the dtype of training."""


@pytest.fixture(scope="module")
def sites() -> dict[str, tuple[Learned, Learned]]:
    """What both sites learned, by case: all of them in one pair of processes."""
    cases = [*((sync, torch.float64) for sync, _ in EXACT.values()), *ROUNDED.values()]
    return dict(zip([*EXACT, *ROUNDED], zip(*on_ranks(TWO_SITES, learned, cases), strict=True), strict=True))


@pytest.mark.parametrize("case", EXACT)
def test_two_sites_learn_what_is_written_by_hand(case: str, sites: dict[str, tuple[Learned, Learned]]) -> None:
    """Shared weights are those of an independent DiLoCo to 1e-9, with an epoch's last batch of one sample included."""
    one, other = sites[case]
    hand = ByHand(*EXACT[case]).trained()
    module = gpt().double()
    module.load_state_dict(one.shared)
    assert float((vector(module) - hand).abs().max()) < 1e-9 * float(hand.abs().max())
    assert equal(one.shared, other.shared)
    assert not equal(one.own, other.own)


def test_sites_are_equal_bit_for_bit_and_so_is_a_second_run(sites: dict[str, tuple[Learned, Learned]]) -> None:
    """Compressed, in fp32: both sites end with the same shared weights, and two runs with the same of everything."""
    assert equal(sites["twice"][0].shared, sites["twice"][1].shared)
    for first, second in zip(sites["twice"], sites["once more"], strict=True):
        assert equal(first.own, second.own)
        assert equal(first.shared, second.shared)
        assert first.losses == second.losses


def test_what_goes_over_the_link_is_counted(sites: dict[str, tuple[Learned, Learned]]) -> None:
    """A byte a parameter, four for each 1,024 and a note; an exchange carries loss and samples of all sites."""
    one, other = sites["whole"]
    count = sum(p.numel() for p in gpt().parameters())
    message = 8 * (3 + len(SIGNALS)) + count + 4 * math.ceil(count / 1024)
    assert one.sent_bytes == other.sent_bytes == 3 * message  # after 5, 10 and the last update
    assert [exchange.update for exchange in one.exchanges] == [4, 9]
    first = one.exchanges[0]
    assert first.num_bytes == message
    assert first.samples == 16 + 16 + 16 + 1 + 16
    parts = [
        (loss, len(indices))
        for site in (one, other)
        for loss, indices in zip(site.losses[:5], site.indices[:5], strict=True)
    ]
    parts.remove((one.losses[3], 1))  # site 0 held a sample of the last batch of an epoch, and left it to site 1
    assert first.loss == pytest.approx(sum(loss * size for loss, size in parts) / first.samples)
    assert one.exchanges == other.exchanges
    assert min(first.speeds) > 0


def resumed(world: World, sync: DiLoCo) -> tuple[Learned, Learned]:
    """Unbroken, and stopped after every third update: saved, made again and loaded."""
    whole = learned(world, [(sync, torch.float64)])[0]
    step = make_step(world, gpt_job(sync))
    for begin in range(0, UPDATES, 3):
        last = train(step, begin, min(begin + 3, UPDATES))
        saved = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict(), step.outer.state()))
        step = make_step(world, gpt_job(sync))
        step.model.load_state_dict(saved[0])
        step.optimizer.load_state_dict(saved[1])
        step.outer.load(saved[2])
    return whole, ended(step, last)


def test_a_site_resumes_bit_for_bit() -> None:
    """Saved in the middle of rounds and of exchanges, sites end where those that were never stopped do."""
    for whole, broken in on_ranks(TWO_SITES, resumed, DiLoCo(every=updates(4), fragments=2, overlap=2)):
        assert equal(whole.own, broken.own)
        assert equal(whole.shared, broken.shared)


def rejoined(world: World, syncs: list[DiLoCo]) -> list[tuple[Learned, bool]]:
    """Site 1 is lost after 7 updates; a new one comes in its place; whether its weights are the shared ones then."""
    found = []
    for sync in syncs:
        step = make_step(world, gpt_job(sync))
        train(step, 0, 7)
        carried = step.outer.state()
        if world.rank == 1:
            step, carried = make_step(world, gpt_job(sync)), None
        step.outer.regroup(carried)
        is_shared = equal(dict(step.model.state_dict()), step.whole_weights())
        assert step.outer.shared.update == 6
        found.append((ended(step, train(step, 7, UPDATES)), is_shared))
    return found


def test_a_site_that_comes_anew_takes_over_what_is_shared() -> None:
    """It begins from the shared weights, whatever was on its way then, and the sites end as one."""
    syncs = [DiLoCo(every=updates(4)), DiLoCo(every=updates(4), fragments=2, overlap=3)]
    for (one, was_shared), (other, is_shared) in zip(*on_ranks(TWO_SITES, rejoined, syncs), strict=True):
        assert is_shared
        assert not was_shared
        assert equal(one.shared, other.shared)


def made_again(step: Step, world: World) -> Step:
    """A step of another world with this one's model and inner optimiser."""
    again = make_step(world, step.job)
    again.model.load_state_dict(step.model.state_dict())
    again.optimizer.load_state_dict(step.optimizer.state_dict())
    return again


def bereaved(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Site 1 is lost while an exchange is on its way, and site 0 goes on alone.

    Its own weights when they were sent, and the shared ones after that exchange.
    """
    step = make_step(world, gpt_job(DiLoCo(every=updates(4), overlap=3, compress="none", outer=SGD(lr=1.0))))
    train(step, 0, 4)
    own = {name: tensor.detach().clone() for name, tensor in step.model.state_dict().items()}
    train(step, 4, 5)
    if world.rank == 1:
        return None
    left = made_again(step, ALONE)
    left.outer.regroup(step.outer.state())
    assert left.split().parts == 1
    train(left, 5, 7)
    return own, left.whole_weights()


def test_a_site_that_is_left_goes_on_from_its_own() -> None:
    """What was sent counts for nothing unless all have it: the survivor's own pseudo-gradient moves what is shared."""
    (own, shared), _ = on_ranks(TWO_SITES, bereaved)
    assert largest_difference(shared, own) < 1e-12


def spoilt(world: World) -> None:
    """Site 1's weights are spoilt before an exchange."""
    step = make_step(world, gpt_job(LocalSGD(every=updates(4))))
    train(step, 0, 3)
    if world.rank == 1:
        with torch.no_grad():
            next(step.model.parameters())[0, 0] = math.inf
    step.outer.settle()


def test_what_is_not_finite_ends_all_sites() -> None:
    """No other site replaces it, and the error names the site."""
    with pytest.raises(RankFailed, match=r"what site 1 learned up to update 3 is not finite"):
        on_ranks(TWO_SITES, spoilt)


def signalled(world: World) -> list[bool]:
    """After which updates a site hears that the other was asked to stop in the second one."""
    step = make_step(world, gpt_job(DiLoCo(every=updates(4), overlap=2)))
    heard = []
    for update, batch in enumerate(batches(step, 0, 12)):
        if world.rank == 1:
            world.signals.send("stop", value=update >= 1 and not any(heard))
        step.update(batch, update, 0.0)
        heard.append(world.signals.is_set("stop"))
    return heard


def test_signals_are_heard_with_an_exchange_at_the_same_update() -> None:
    """What sites tell each other travels with what they send, and is heard once, when that is taken over."""
    one, other = on_ranks(TWO_SITES, signalled)
    assert one == other
    assert [update for update, is_heard in enumerate(one) if is_heard] == [5]


def signalled_twice(world: World) -> list[int]:
    """The updates after which a site hears a stop that two messages on their way hold, resuming after the first."""
    step = make_step(world, gpt_job(DiLoCo(every=updates(8), fragments=2, overlap=5)))
    heard = []
    for update, batch in enumerate(batches(step, 0, 16)):
        world.signals.send("stop", value=world.rank == 1 and update >= 1 and not heard)
        step.update(batch, update, 0.0)
        if world.signals.is_set("stop"):
            heard.append(update)
            step.outer.load(copy.deepcopy(step.outer.state()))
    return heard


def test_a_resumed_run_does_not_hear_what_was_told_before() -> None:
    """Messages that are sent again hold no signals: the resumed run was not asked to stop."""
    assert on_ranks(TWO_SITES, signalled_twice) == [[8], [8]]


def normed(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Own running statistics before, and shared ones after, an exchange of a network with batch norm."""
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # noqa: E731
    job = make_job(model, data=images(64), sync=LocalSGD(every=updates(50)))
    step = make_step(world, job, coupling=grouped(4), micro_batch=4)
    train(step, 0, 3)
    own = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    step.settle()
    return own, step.kept_weights()


def test_running_statistics_are_averaged() -> None:
    """Each site gathers them over its own groups; what is shared is their mean."""
    (one, shared), (other, _) = on_ranks(TWO_SITES, normed)
    for name in ("2.running_mean", "2.running_var"):
        assert not torch.equal(one[name], other[name])
        assert torch.allclose(shared[name], (one[name] + other[name]) / 2, rtol=1e-12)


def test_one_process_is_lookahead() -> None:
    """With one site and no momentum it is Lookahead (Zhang et al. 2019): the slow weights go a part of the way."""
    step = make_step(ALONE, gpt_job(DiLoCo(every=updates(5), outer=SGD(lr=0.5), compress="none")))
    plain = make_step(ALONE, gpt_job(None))
    slow = vector(plain.model)
    data = datasets_of(plain.job).extent(plain.job)
    assert data.num_train == 49
    found = train(step, 0, 10)
    for update, batch in enumerate(batches(plain, 0, 10)):
        plain.update(batch, update, update / UPDATES)
        if update % 5 == 4:
            slow += 0.5 * (vector(plain.model) - slow)
            nn.utils.vector_to_parameters(slow.clone(), plain.model.parameters())
    assert len(found.losses) == 10
    assert float((vector(step.model) - slow).abs().max()) < 1e-12


def test_one_process_with_averages_trains_as_without() -> None:
    """The average of one site's weights are its weights."""
    step, plain = make_step(ALONE, gpt_job(LocalSGD(every=updates(3)))), make_step(ALONE, gpt_job(None))
    losses = train(step, 0, 10).losses
    theirs = [
        float(plain.update(batch, update, update / UPDATES)) for update, batch in enumerate(batches(plain, 0, 10))
    ]
    assert losses == pytest.approx(theirs, rel=1e-12)


def test_evaluation_sees_the_shared_weights() -> None:
    """Between exchanges what is evaluated and kept are the shared weights, and training goes on from its own."""
    step = make_step(ALONE, gpt_job(DiLoCo(every=updates(50))))
    begun = vector(step.model)
    train(step, 0, 3)
    own = vector(step.model)
    with step.evaluation():
        assert torch.equal(vector(step.model), begun)
    assert torch.equal(vector(step.model), own)
    assert not torch.equal(own, begun)


def test_weights_from_elsewhere_are_where_sites_begin() -> None:
    """Not the initial ones, from which the way to them would count as learned."""
    step = make_step(ALONE, gpt_job(DiLoCo(every=updates(2), compress="none")))
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.add_(1)
    given = vector(step.model)
    step.begin_at_weights()
    with step.with_kept_weights():
        assert torch.equal(vector(step.model), given)
    step.settle()
    assert torch.equal(vector(step.model), given)


def test_speeds_are_told_with_an_exchange() -> None:
    """Of each site while it was at work [samples/s]."""
    step = make_step(ALONE, gpt_job(DiLoCo(every=updates(2))))
    train(step, 0, 2)
    assert step.outer.latest.speeds[0] > 0


def test_coupled_samples_have_to_fit_on_a_site() -> None:
    """A batch of one group cannot be divided: what is learned would depend on the number of sites."""
    job = make_job(gpt, data=gpt_job(None).data, loss="token_cross_entropy", sync=LocalSGD(every=updates(4)))
    world = World(TWO_SITES)
    with pytest.raises(BadJob, match="a batch of 1 groups of 16 coupled samples cannot be shared by 2 sites"):
        Step(job, Plan(device="cpu", micro_batch=16, layout=TWO_SITES), grouped(16), world=world)


def test_sites_are_replicas() -> None:
    """Shards are parts of one site, which is not carried out."""
    layout = Layout(shards=2)
    job = gpt_job(LocalSGD(every=updates(4)))
    with pytest.raises(BadJob, match=r"2 shards: sites that come together after an interval .* hold whole models"):
        Step(job, Plan(device="cpu", micro_batch=16, layout=layout), SEPARABLE, world=World(layout))


def test_a_state_of_another_model_is_refused() -> None:
    """With the sizes of both."""
    step = make_step(ALONE, gpt_job(DiLoCo(every=updates(4))))
    other = make_step(ALONE, gpt_job(DiLoCo(every=updates(4), fragments=2)))
    with pytest.raises(ValueError, match=r"of 3 parts with .* numbers cannot be had from 5 parts"):
        step.outer.load(other.outer.state())


def test_sites_without_their_own_state_begin_from_what_is_shared() -> None:
    """As when a run goes on with more sites than it was saved by."""
    step = make_step(ALONE, gpt_job(DiLoCo(every=updates(4), overlap=2)))
    train(step, 0, 9)
    other = make_step(ALONE, gpt_job(DiLoCo(every=updates(4), overlap=2)))
    other.outer.load({"shared": step.outer.state()["shared"]})
    assert equal(dict(other.model.state_dict()), step.whole_weights())
    assert ended(other, train(other, 9, UPDATES)).shared


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
