"""Transforms of inputs, in batches on the device, drawn per sample from (seed, epoch, index); `stoker.transforms`.

A transform is a callable `(inputs_BCHW, draw) -> inputs_BCHW`. All its randomness comes from `draw`, so that a sample
is augmented bit for bit the same in any micro-batch, worker or process. For that, angles and the like are calculated
sample by sample on the host, and sums within an image in whole numbers.
In evaluation a transform is replaced by its method `in_evaluation(inputs_BCHW)` if it has one, else left out.

Images are as stored: uint8 from 0 to 255, or floating, with colours from 0 to 1. Flips, shifts, crops and erasing move
pixels unchanged and take any type. Shapes: B samples, C channels, H height, W width.
"""

from stoker.jobs.regularization import CutMix, Mixup
from stoker.loading.transforms.base import Draw, OneOf, Sometimes, for_evaluation
from stoker.loading.transforms.geometric import (
    AlternatingFlip,
    Cutout,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    RandomShift,
    RandomVerticalFlip,
)
from stoker.loading.transforms.photometric import (
    Autocontrast,
    ColorJitter,
    GaussianBlur,
    GaussianNoise,
    Normalize,
    Posterize,
    RandomGrayscale,
    Solarize,
)
from stoker.loading.transforms.resizing import ProgressiveResizing

__all__ = [
    "AlternatingFlip",
    "Autocontrast",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Draw",
    "GaussianBlur",
    "GaussianNoise",
    "Mixup",
    "Normalize",
    "OneOf",
    "Posterize",
    "ProgressiveResizing",
    "RandomAffine",
    "RandomCrop",
    "RandomErasing",
    "RandomFlip",
    "RandomGrayscale",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomScale",
    "RandomShift",
    "RandomVerticalFlip",
    "Solarize",
    "Sometimes",
    "for_evaluation",
]
