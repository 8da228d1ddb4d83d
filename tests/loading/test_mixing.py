from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs.fields import Fields
from stoker.jobs.regularization import CutMix, Mixup
from stoker.jobs.run_length import Extent
from stoker.loading.batches import Batch, BatchSource, InputPipeline, Split, in_order
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.mixing import MixedTarget, pairing_of
from stoker.loading.transforms import RandomFlip, RandomShift
from stoker.records import Plan, Position

CPU = torch.device("cpu")
IMAGES = torch.rand((40, 3, 6, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40)
AUGMENT = (RandomShift(1), RandomFlip())
MIXES = {"mixup": (Mixup(0.4),), "cutmix": (CutMix(),), "either": (Mixup(0.4), CutMix(1.0, p=0.5))}

every_mix = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


def source_of(mix: Any, batch: int = 16, data: Any = (IMAGES, LABELS), **changed: Any) -> BatchSource:
    """Batches of the images, augmented and mixed."""
    samples = as_samples(data, what="data")
    plan = Plan(device="cpu", micro_batch=batch, loader="inline", num_workers=0)
    pipeline = InputPipeline(CPU, Fields(), samples.prepare, AUGMENT, mix=mix, **changed.pop("pipeline", {}))
    return BatchSource(samples, pipeline, Extent(len(samples), batch), seed=3, plan=plan, **changed)


def same(one: Any, other: Any) -> bool:
    """Whether two mixed batches are the same bit for bit."""
    pairs = [(one[0], other[0]), *zip(one[1], other[1], strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def joined(parts: list[Any]) -> Any:
    """Mixed batches one after the other."""
    return (
        torch.cat([part[0] for part in parts]),
        MixedTarget(*(torch.cat(leaves) for leaves in zip(*(part[1] for part in parts), strict=True))),
    )


def augmented(batch: Batch) -> torch.Tensor:
    """The inputs of a batch, not mixed."""
    return Batch(batch.content, batch.indices, batch.epoch, InputPipeline(CPU, Fields(), lambda raw: raw, AUGMENT)).cut(
        0, batch.size
    )[0]


@given(st.integers(1, 70), st.integers(0, 1000))
def test_everyone_is_somebodys_partner_once(size: int, update: int) -> None:
    """Partners are a permutation, drawn again for every update; of one sample it is itself."""
    pairing = pairing_of((Mixup(),), seed=1, epoch=0, update=update, size=size)
    assert sorted(pairing.rows) == list(range(size))
    assert len(pairing.extra) == 0
    if size > 30:
        others = pairing_of((Mixup(),), seed=1, epoch=0, update=update + 1, size=size)
        assert not np.array_equal(pairing.rows, others.rows)
        assert not np.array_equal(pairing.shares, others.shares)


@given(st.integers(2, 40), st.integers(2, 5), st.one_of(st.none(), st.integers(2, 9)))
def test_processes_draw_the_same_pairs(size: int, parts: int, group: int | None) -> None:
    """Whatever part of the batch is here, its samples have the partners and shares that they have in the whole."""
    whole = pairing_of((CutMix(),), seed=1, epoch=2, update=3, size=size)
    for part in range(parts):
        held = Split(part, parts, group).held(size)
        pairing = pairing_of((CutMix(),), seed=1, epoch=2, update=3, size=size, held=held)
        fetched = np.concatenate([held, pairing.extra])
        assert len(set(fetched)) == len(fetched)
        assert np.array_equal(fetched[pairing.rows], whole.rows[held])
        assert np.array_equal(pairing.shares, whole.shares[held])
        assert np.array_equal(pairing.centres, whole.centres[:, held])


def test_mixed_images_are_weighted_means_of_augmented_ones() -> None:
    """Of each sample and its partner, pixel by pixel; both targets, and the sample's share."""
    (batch,) = source_of((Mixup(0.4),)).batches(Position(), 1)
    inputs, target = batch.cut(0, 16)
    x_BCHW, rows = augmented(batch), batch.pairing.rows
    shares = torch.from_numpy(batch.pairing.shares).float()
    weights = shares.view(-1, 1, 1, 1)
    assert torch.allclose(inputs, weights * x_BCHW + (1 - weights) * x_BCHW[rows], atol=1e-6)
    assert torch.equal(target.first, LABELS[batch.indices])
    assert torch.equal(target.second, LABELS[batch.indices[rows]])
    assert torch.equal(target.share, shares)
    assert 4 < int(((shares > 0.05) & (shares < 0.95)).sum()) < 16


def test_boxes_are_pasted_and_the_share_is_what_is_left() -> None:
    """Every pixel is the sample's own or its partner's, the latter in one box; the share is the area outside of it."""
    samples, indices = as_samples((IMAGES, LABELS), what="data"), np.arange(40)
    pipeline = InputPipeline(CPU, Fields(), samples.prepare, mix=(CutMix(),))
    inputs, target = Batch((IMAGES, LABELS), indices, 0, pipeline).cut(0, 40)
    theirs = IMAGES[target.second]
    num_boxes = 0
    for i in np.flatnonzero(target.second.numpy() != np.arange(40)):
        pasted = (inputs[i] != IMAGES[i]).any(0)
        expected = torch.zeros(6, 5, dtype=torch.bool)
        if pasted.any():
            num_boxes += 1
            (top, left), (bottom, right) = pasted.nonzero().amin(0), pasted.nonzero().amax(0)
            expected[top : bottom + 1, left : right + 1] = True
        assert torch.equal(pasted, expected)
        assert torch.equal(inputs[i], torch.where(expected, theirs[i], IMAGES[i]))
        assert float(target.share[i]) == pytest.approx(1 - float(expected.float().mean()))
    assert num_boxes > 20


@every_mix
@settings(max_examples=15)
@given(micro_batch=st.integers(1, 16), update=st.integers(0, 5))
def test_a_sample_is_mixed_alike_however_the_batch_is_cut(mix: Any, micro_batch: int, update: int) -> None:
    """Bit for bit, its augmentation and its partner's included; ragged batches too."""
    source = source_of(mix)
    (batch,) = source.batches(source.extent.position(update), update + 1)
    parts = [batch.cut(at, min(at + micro_batch, batch.size)) for at in range(0, batch.size, micro_batch)]
    assert same(joined(parts), batch.cut(0, batch.size))


@every_mix
@pytest.mark.parametrize("group", [None, 6])
def test_the_parts_of_processes_are_those_of_the_whole(mix: Any, group: int | None) -> None:
    """Three processes fetch their partners along, and hold what one process would at their places."""
    for update, whole in enumerate(source_of(mix).batches(Position(), 4)):
        expected = whole.cut(0, whole.size)
        for part in range(3):
            split = Split(part, 3, group)
            source = source_of(mix, split=split)
            (batch,) = source.batches(source.extent.position(update), update + 1)
            held = split.held(whole.size)
            assert batch.size == len(held)
            assert torch.equal(batch.cut(0, batch.size)[0], expected[0][held])
            parts = [batch.cut(one.start, one.stop) for one in batch.passes(2) if one.counts]
            if split.spans(whole.size) and parts:
                assert same(joined(parts), (expected[0][held], MixedTarget(*(leaf[held] for leaf in expected[1]))))


@pytest.mark.parametrize("workers", [False, True])
def test_a_run_resumed_mixes_as_one_never_stopped(workers: bool) -> None:
    """Pairs are drawn from the update, not from what came before."""
    source = source_of(MIXES["either"])
    straight = [batch.cut(0, batch.size) for batch in source.batches(Position(), 6)]
    plan = Plan(device="cpu", micro_batch=16, loader="workers" if workers else "inline", num_workers=2 * workers)
    again = BatchSource(source.samples, source.pipeline, source.extent, seed=3, plan=plan)
    resumed = [batch.cut(0, batch.size) for batch in again.batches(source.extent.position(4), 6)]
    assert all(map(same, resumed, straight[4:]))


def test_some_samples_are_left_as_they_are() -> None:
    """With probability 1 - p, which is drawn for each."""
    pairing = pairing_of((Mixup(1.0, p=0.3),), seed=1, epoch=0, update=0, size=1000)
    assert 230 < int((pairing.shares < 1).sum()) < 370


def test_one_of_several_ways_is_drawn_for_each_batch() -> None:
    """About equally often."""
    mixes = (Mixup(), CutMix())
    drawn = [pairing_of(mixes, seed=1, epoch=0, update=update, size=2).mix for update in range(200)]
    assert 70 < drawn.count(mixes[0]) < 130


def test_a_batch_at_hand_is_mixed_within_itself() -> None:
    """Traces and trials make batches of their own; what they take is what an update takes."""
    samples = as_samples((IMAGES, LABELS), what="data")
    indices = np.arange(8)
    batch = Batch(samples.fetch(indices, 0), indices, 0, InputPipeline(CPU, Fields(), samples.prepare, mix=(Mixup(),)))
    assert isinstance(batch.cut(0, 8)[1], MixedTarget)
    assert same(joined([batch.cut(0, 3), batch.cut(3, 8)]), batch.cut(0, 8))


def test_the_plans_type_and_layout_are_kept() -> None:
    """float64 for proofs, channels last where the plan says so; in parts as in the whole."""
    for mix in ((Mixup(),), (CutMix(),)):
        source = source_of(mix, pipeline={"channels_last": True, "dtype": torch.float64})
        (batch,) = source.batches(Position(), 1)
        for content in (batch.cut(0, 16), batch.cut(2, 7)):
            assert content[0].dtype == torch.float64
            assert content[0].is_contiguous(memory_format=torch.channels_last)


def test_evaluation_mixes_nothing() -> None:
    """Its pipeline has no mix; samples come as they are."""
    samples = as_samples((IMAGES, LABELS), what="data")
    (batch,) = in_order(samples, InputPipeline(CPU, Fields(), samples.prepare), 40)
    assert torch.equal(batch.cut(0, 40)[0], IMAGES)


def test_dicts_are_mixed_by_their_names() -> None:
    """The input and the target that the fields name; other entries stay."""
    data = {"picture": IMAGES, "label": LABELS, "weight": torch.rand(40)}
    samples, indices = as_samples(data, what="data"), np.arange(8)
    pipeline = InputPipeline(CPU, Fields(inputs="picture"), samples.prepare, mix=(Mixup(),))
    content = Batch(samples.fetch(indices, 0), indices, 0, pipeline).cut(0, 8)
    assert isinstance(content["label"], MixedTarget)
    assert not torch.equal(content["picture"], IMAGES[:8])
    assert torch.equal(content["weight"], data["weight"][:8])


@pytest.mark.parametrize(
    ("data", "fields", "mix", "problem"),
    [
        ((LABELS, LABELS), Fields(), Mixup(), "mixes inputs that are floating numbers, got torch.int64"),
        ((IMAGES,), Fields(), Mixup(), "mixes samples and their targets, and these have none"),
        ((IMAGES.flatten(1), LABELS), Fields(), CutMix(), r"CutMix takes images \[B, C, H, W\], got .* \[8, 90\]"),
        ({"a": IMAGES, "b": IMAGES, "y": LABELS}, Fields(), Mixup(), "goes with one input, and the model takes 2"),
    ],
)
def test_what_cannot_be_mixed_is_a_bad_job(data: Any, fields: Fields, mix: Any, problem: str) -> None:
    """With what came, and what is wanted."""
    samples, indices = as_samples(data, what="data"), np.arange(8)
    batch = Batch(samples.fetch(indices, 0), indices, 0, InputPipeline(CPU, fields, samples.prepare, mix=(mix,)))
    with pytest.raises(BadJob, match=problem):
        batch.cut(0, 8)
