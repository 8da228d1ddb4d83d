from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.loading.order import mix_keys
from stoker.loading.transforms.base import _mixed
from tests.loading.transforms.pictures import draw_for


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True), st.integers(0, 50), st.data())
def test_draws_do_not_depend_on_how_a_batch_is_cut(indices: list[int], epoch: int, data: st.DataObject) -> None:
    """The draws of a part of the batch are that part of the draws, call after call, of every kind."""
    start = data.draw(st.integers(0, len(indices) - 1))
    stop = data.draw(st.integers(start + 1, len(indices)))
    whole, part = draw_for(indices, epoch), draw_for(indices[start:stop], epoch)
    for _ in range(3):
        assert torch.equal(part.uniform(), whole.uniform()[start:stop])
        assert torch.equal(part.integers(-2, 5), whole.integers(-2, 5)[start:stop])
        assert np.array_equal(part.numbers(1, 3), whole.numbers(1, 3)[start:stop])
        assert torch.equal(part.noise((2, 3)), whole.noise((2, 3))[start:stop])


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=20, unique=True), st.data())
def test_draws_for_some_samples_do_not_depend_on_the_others(indices: list[int], data: st.DataObject) -> None:
    """A branch's draws for a sample do not depend on which others take that branch, nor on other branches' draws."""
    rows = np.array(data.draw(st.lists(st.sampled_from(range(len(indices))), min_size=1, unique=True)))
    together, alone = draw_for(indices).of(rows, 1), draw_for([indices[rows[0]]]).of(np.array([0]), 1)
    assert together.uniform()[0] == alone.uniform()[0]
    assert not torch.equal(draw_for(indices).of(rows, 0).uniform(), draw_for(indices).of(rows, 1).uniform())


def test_draws_differ_by_seed_epoch_sample_and_call() -> None:
    """Nothing is drawn twice."""
    same = draw_for(range(100))
    drawn = [same.uniform(), same.uniform()]
    drawn += [draw_for(range(100), epoch=1).uniform(), draw_for(range(100), seed=1).uniform()]
    assert len({float(value) for values in drawn for value in values}) > 390


def test_uniform_draws_are_uniform() -> None:
    """In [0, 1), with mean and deviation within five deviations of theirs."""
    values = draw_for(range(100_000)).uniform()
    assert values.dtype == torch.float32
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert abs(float(values.double().mean()) - 0.5) < 5 * 0.2887 / 100_000**0.5
    assert abs(float(values.double().std()) - 0.2887) < 0.003


def test_integers_are_equally_likely_and_reach_both_ends() -> None:
    """Chi-squared of the counts of -2 to 2 is within five deviations of its mean."""
    counts = torch.bincount(draw_for(range(50_000)).integers(-2, 2) + 2)
    assert len(counts) == 5
    chi_squared = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert chi_squared < 4 + 5 * 8**0.5


def test_noise_has_mean_0_and_deviation_1_and_no_pattern() -> None:
    """Over samples and places; neighbours are independent."""
    noise = draw_for(range(400)).noise((250,)).double()
    assert abs(float(noise.mean())) < 5 / 100_000**0.5
    assert abs(float(noise.std()) - 1) < 0.01
    assert float(noise.abs().max()) < 3.47
    assert abs(float((noise[:, 1:] * noise[:, :-1]).mean())) < 5 / 100_000**0.5
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 5 / 100_000**0.5


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=10))
def test_bits_on_the_device_are_mixed_as_on_the_host(keys: list[int]) -> None:
    """PyTorch has no unsigned 64-bit arithmetic: signed numbers stand for the same bits."""
    on_host = np.array(keys, dtype=np.uint64)
    on_device = _mixed(torch.from_numpy(on_host.view(np.int64).copy()))
    assert np.array_equal(on_device.numpy().view(np.uint64), mix_keys(on_host))


def test_lasting_draws_are_a_samples_own() -> None:
    """The same in every epoch and in any batch, and independent of those of the epoch."""
    lasting = draw_for(range(50)).lasting().uniform()
    assert torch.equal(lasting, draw_for(range(50), epoch=7).lasting().uniform())
    assert torch.equal(lasting[10:20], draw_for(range(10, 20)).lasting().uniform())
    assert not torch.equal(lasting, draw_for(range(50)).uniform())
