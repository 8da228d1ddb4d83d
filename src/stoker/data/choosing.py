"""Images on every machine: Fashion-MNIST where it can be had, the embedded digits where it cannot."""

from __future__ import annotations

from stoker.data.arrays import ArraySource
from stoker.data.fashion import FashionMnist, fashion_mnist
from stoker.data.handwritten import Digits
from stoker.data.places import Patience
from stoker.errors import BadJob

_NOTE = "Fashion-MNIST is not reachable: using the embedded UCI digits (1,797 images of 8x8)"
_HURRY = Patience(silence_s=5.0, total_s=60.0)


def images() -> tuple[ArraySource, ArraySource]:
    """Training and test images: Fashion-MNIST if its files are on this machine or can be downloaded now, else digits.

    If the files are missing, one download is tried; a home that is silent for 5 s, or needs more than 60 s for a file,
    counts as out of reach. Where the digits stand in, `note` of both parts says so.
    """
    return _images_of(fashion_mnist(), _HURRY)


def _images_of(fashion: tuple[FashionMnist, FashionMnist], patience: Patience) -> tuple[ArraySource, ArraySource]:
    try:
        for part in fashion:
            part.download(patience)
    except BadJob:
        return Digits("train", note=_NOTE), Digits("test", note=_NOTE)
    return fashion
