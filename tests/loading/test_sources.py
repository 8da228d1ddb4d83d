"""Sources of files as samples of a job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.loading.dataset_adapters import SourceSamples, as_samples
from stoker.loading.samples import BadSample
from tests.data.files.making import csv_source, folder_source, image_files, png_of, tfrecord_source
from tests.loading.data import contents, source_of


def test_batches_are_stored_content_prepared_on_the_device(tmp_path: Path) -> None:
    """A tuple, so that the first entry is the input and the last the target."""
    samples = as_samples(folder_source(tmp_path), what="data")
    content = samples.fetch(np.array([4, 40]), 0)
    assert isinstance(samples, SourceSamples)
    assert isinstance(content, tuple)
    assert content[0].dtype == torch.uint8
    assert samples.prepare(content)[0].dtype == torch.float32
    assert samples.fingerprint() == folder_source(tmp_path).fingerprint
    assert not samples.is_in_memory


@pytest.mark.parametrize("make", [folder_source, csv_source, tfrecord_source])
def test_workers_fetch_what_the_process_itself_does(make: object, tmp_path: Path) -> None:
    """Bit for bit, and from files that the trainer had open before."""
    samples = as_samples(make(tmp_path), what="data")  # type: ignore[operator]
    inline = contents(source_of(samples, 7), 0, 5)
    by_workers = contents(source_of(samples, 7, "workers"), 0, 5)
    for one, other in zip(inline, by_workers, strict=True):
        pairs = (
            zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_collate_function_of_ones_own_gets_prepared_samples(tmp_path: Path) -> None:
    """And what it makes is not prepared again."""
    samples = as_samples(folder_source(tmp_path), what="data", collate=lambda items: [image for image, _ in items])
    images = samples.fetch(np.array([0, 1]), 0)
    assert images[0].dtype == torch.float32
    assert samples.prepare(images) is images


def test_labels_are_at_hand_for_sampling(tmp_path: Path) -> None:
    """Under the target's key, the last place, or none; under another there are none."""
    samples = as_samples(tfrecord_source(tmp_path), what="data")
    for key in ("label", None, -1):
        found = samples.all_of(key)
        assert found is not None
        assert found[:4].tolist() == [0, 1, 2, 0]
    assert samples.all_of("image") is None


def test_images_of_different_sizes_are_told_by_their_names(tmp_path: Path) -> None:
    """Where no size was given."""
    image_files(tmp_path / "pets", 6)
    (tmp_path / "pets" / "dog" / "0004.png").write_bytes(png_of(4, side=9))
    samples = as_samples(stoker.data.image_folder(tmp_path / "pets"), what="data")
    with pytest.raises(
        BadSample, match=r"samples cat/0000\.png and dog/0004\.png differ in shape: \[3, 6, 6\] and \[3, 9"
    ):
        samples.fetch(np.arange(6), 0)
