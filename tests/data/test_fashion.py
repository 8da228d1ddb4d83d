from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.data import fashion_mnist
from stoker.data.image_datasets import FASHION_MNIST_FILES

DEBIAN = Path("/usr/share/datasets/fashion-mnist")

needs_files = pytest.mark.skipif(
    not (DEBIAN / "t10k-images-idx3-ubyte.gz").is_file(),
    reason=f"Debian's dataset-fashion-mnist is not installed in {DEBIAN}",
)


@pytest.fixture(scope="module")
def parts():
    """Both parts as Debian distributes them."""
    return fashion_mnist(DEBIAN)


def test_what_is_published_is_what_is_described():
    """60,000 and 10,000 images of 28 × 28 with one label each; the file sizes of the idx format."""
    (train_images, train_labels), (test_images, test_labels) = FASHION_MNIST_FILES["train"], FASHION_MNIST_FILES["test"]
    assert (train_images.num_bytes, train_labels.num_bytes) == (47_040_016, 60_008)
    assert (test_images.num_bytes, test_labels.num_bytes) == (7_840_016, 10_008)
    train, test = fashion_mnist()
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.fingerprint != test.fingerprint
    assert train.fingerprint == fashion_mnist("/elsewhere")[0].fingerprint


@needs_files
def test_debians_files_are_what_was_published(parts):
    """Their uncompressed content has the recorded digests; shapes, dtypes and classes are those described."""
    for part in parts:
        images, labels = part.arrays()
        assert (images.shape, images.dtype) == ((len(part), 1, 28, 28), torch.uint8)
        assert (labels.shape, labels.dtype) == ((len(part),), torch.int64)
        assert torch.bincount(labels).tolist() == [len(part) // 10] * 10


@needs_files
def test_training_images_are_standardised(parts):
    """Over the training part, prepared pixels have mean 0 and deviation 1."""
    images, labels = parts[0].arrays()
    prepared, unchanged = parts[0].prepare((images[::8], labels[::8]))
    assert prepared.dtype == torch.float32
    assert abs(float(prepared.mean())) < 5e-3
    assert abs(float(prepared.std()) - 1) < 5e-3
    assert torch.equal(unchanged, labels[::8])


@needs_files
def test_the_first_image_is_the_ankle_boot(parts):
    """Rows are not shuffled or transposed: the first training image is the boot (9), its sole along the bottom."""
    image, label = parts[0][0]
    assert int(label) == 9
    assert image[0, -8:-2].mean() > image[0, 2:8].mean()


def test_the_environment_names_a_folder(tmp_path, monkeypatch):
    """$STOKER_DATA is looked in before the cache and what is installed, also where torchvision keeps its files."""
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in FASHION_MNIST_FILES["test"]:
        (raw / file.name).touch()
    monkeypatch.setenv("STOKER_DATA", str(tmp_path))
    assert fashion_mnist()[1]._find() == tuple(raw / file.name for file in FASHION_MNIST_FILES["test"])
