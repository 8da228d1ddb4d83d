from __future__ import annotations

from stoker.data.idx_files import DownloadPatience
from stoker.data.image_datasets import _images_of
from tests.data.idx_files import SmallFashion

HURRY = DownloadPatience(silence_s=1.0, total_s=10.0)


def test_files_that_are_here_are_used(tmp_path):
    """With the files on this machine no home is asked, and there is nothing to tell."""
    small = SmallFashion(tmp_path)
    part = small.source(small.publish(tmp_path / "data"))
    chosen = _images_of((part, part), HURRY)
    assert chosen == (part, part)
    assert chosen[0].note is None


def test_files_that_can_be_had_are_fetched(tmp_path):
    """Missing files are downloaded at once, so that the choice stands when training starts."""
    small = SmallFashion(tmp_path)
    part = small.source(home=small.publish(tmp_path / "home").as_uri())
    assert _images_of((part, part), HURRY) == (part, part)
    assert part.is_here()


def test_otherwise_the_digits_stand_in_and_say_so(tmp_path):
    """Out of reach, the embedded digits are returned, with one line to tell the user."""
    part = SmallFashion(tmp_path).source()
    train, test = _images_of((part, part), HURRY)
    assert (train.name, test.name) == ("digits/train", "digits/test")
    line = "Fashion-MNIST is not reachable: using the embedded UCI digits (1,797 images of 8x8)"
    assert train.note == test.note == line
    assert len(train) + len(test) == 1797
