"""Order, batches, workers, and transforms on the device."""

from stoker.loading.batches import Batch, BatchSource, Pipeline, in_order
from stoker.loading.datasets import Datasets, datasets_of
from stoker.loading.fields import Content, Fields, map_tensors
from stoker.loading.generators import generator_states, restore_generators, seed_generators, seed_torch
from stoker.loading.given_data import as_samples
from stoker.loading.keys import Stream, extended, key_of
from stoker.loading.samples import BadSample, Samples, hold_out
from stoker.loading.split import Pass, Split
from stoker.loading.worker_watch import WorkerDeath, WorkerWatch, named

__all__ = [
    "BadSample", "Batch", "BatchSource", "Content", "Datasets", "Fields", "Pass", "Pipeline", "Samples", "Split",
    "Stream",
    "WorkerDeath", "WorkerWatch", "as_samples", "datasets_of", "extended", "generator_states", "hold_out", "in_order",
    "key_of", "map_tensors", "named", "restore_generators", "seed_generators", "seed_torch",
]  # fmt: skip
