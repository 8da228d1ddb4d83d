"""Order, batches, workers, and transforms on the device."""

from stoker.loading.batches import Batch, BatchSource, Pipeline, in_order
from stoker.loading.datasets import Datasets, datasets_of
from stoker.loading.fields import Content, Fields, map_tensors
from stoker.loading.keys import Stream, key_of
from stoker.loading.samples import BadSample, Samples, as_samples, hold_out, seed_generators

__all__ = [
    "BadSample", "Batch", "BatchSource", "Content", "Datasets", "Fields", "Pipeline", "Samples", "Stream", "as_samples",
    "datasets_of", "hold_out", "in_order", "key_of", "map_tensors", "seed_generators",
]  # fmt: skip
