"""The inputs of a job's model as its exported graph takes them: samples as the data source stores them.

The source's own preparation (conversion, standardisation) becomes the first part of the graph, so that a client sends
raw bytes. Augmentation is left out, except for what replaces it in evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadArtifact
from stoker.exporting.torch_export import Call, as_array, names_of_arguments
from stoker.jobs import Job
from stoker.jobs.fields import Fields
from stoker.loading.fields import Content
from stoker.loading.order import Indices
from stoker.loading.samples import Samples
from stoker.loading.transforms import for_evaluation

Key = Any
"""Position of an input in a batch: a dict's key, a tuple's index, or None where the batch is the input."""


@dataclass(frozen=True)
class JobInputs:
    """The inputs of a job's model in batches of its samples.

    Attributes:
        names: what the exported model calls them, in the model's order.
        keys: position of each in a batch.
        samples: whose preparation belongs to the model.
        fields: how the model is called with a batch.
        template: a batch in which everything but the inputs is empty.
        is_prepared: whether the exported model takes samples already prepared, its graph leaving that out.
    """

    names: tuple[str, ...]
    keys: tuple[Key, ...]
    samples: Samples
    fields: Fields
    template: Content
    is_prepared: bool = False
    stand_ins: tuple[Callable[..., Any], ...] = ()
    """What the job's augmentation is in evaluation, such as the middle of an image for a crop anywhere."""

    def prepared(self) -> JobInputs:
        """The same inputs for a model that takes prepared samples."""
        return dataclasses.replace(self, is_prepared=True)

    def arrays(self, rows: Sequence[int] | Indices, samples: Samples | None = None) -> Arrays:
        """Rows as the exported model takes them, of `samples` or else the job's own."""
        chosen = samples or self.samples
        return self.of_content(chosen.fetch(np.asarray(rows, dtype=np.int64), 0), chosen)

    def of_content(self, content: Content, samples: Samples) -> Arrays:
        """As `arrays`, of samples that were fetched."""
        if self.is_prepared:
            content = self.for_model(content, samples)
        entries = entries_of(content)
        return {name: as_array(entries[key]) for name, key in zip(self.names, self.keys, strict=True)}

    @property
    def has_preparation(self) -> bool:
        """Whether the source prepares samples before the model takes them."""
        content = self.samples.fetch(np.zeros(1, dtype=np.int64), 0)
        return self.for_model(content, self.samples) is not content

    @property
    def call(self) -> Call:
        """Calls the job's model with these inputs in order."""

        def call(module: nn.Module, *inputs: torch.Tensor) -> Any:
            content = with_entries(self.template, dict(zip(self.keys, inputs, strict=True)))
            return self.fields.call(module, content if self.is_prepared else self.for_model(content, self.samples))

        return call

    def for_model(self, content: Content, samples: Samples) -> Content:
        """Samples that were fetched as the job's model takes them in evaluation."""
        for change in self.stand_ins:
            content = self.fields.map_inputs(content, change)
        return samples.prepare(content)


def job_inputs(job: Job, module: nn.Module, samples: Samples) -> JobInputs:
    """Find the inputs of a job's model in its data, and name them.

    Names are the data source's, a dict's keys, or those of the model's arguments.

    Raises:
        BadArtifact: an input is no tensor whose first dimension is the samples.
    """
    content = samples.fetch(np.arange(min(2, len(samples))), 0)
    fields, entries = job.fields, entries_of(content)
    arguments: list[Any] = []
    fields.call(lambda *positional, **named: arguments.extend((*positional, *named.values())), content)
    keys = tuple(next(key for key, entry in entries.items() if entry is argument) for argument in arguments)
    for key in keys:
        if not isinstance(entries[key], torch.Tensor) or entries[key].dim() == 0:
            raise BadArtifact(
                f"The model's input {key!r} is a {type(entries[key]).__name__}; an exported model takes tensors",
                remedy="Name the tensors that go into the model: stoker.Fields(inputs=…).",
            )
    described = getattr(job.data, "fields", ())
    if isinstance(content, Mapping):
        names = tuple(map(str, keys))
    elif isinstance(content, tuple) and len(described) == len(content):
        names = tuple(described[key].name for key in keys)
    else:
        names = names_of_arguments(module, len(keys))
    emptied = {
        key: entry[:0] if isinstance(entry, torch.Tensor) and entry.dim() else entry
        for key, entry in entries.items()
        if key not in keys
    }
    template = with_entries(content, emptied)
    return JobInputs(names, keys, samples, fields, template, stand_ins=for_evaluation(job.augment))


def entries_of(content: Content) -> dict[Key, Any]:
    """The entries of a batch by their keys."""
    if isinstance(content, Mapping):
        return dict(content)
    if isinstance(content, tuple | list):
        return dict(enumerate(content))
    return {None: content}


def with_entries(content: Content, changed: Mapping[Key, Any]) -> Content:
    """The batch with some entries replaced."""
    entries = {**entries_of(content), **changed}
    if isinstance(content, Mapping):
        return entries
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*entries.values())
    return type(content)(entries.values()) if isinstance(content, tuple | list) else entries[None]


def varying(batches: Sequence[Arrays]) -> dict[str, dict[int, str]]:
    """Names for the dimensions in which batches differ; those of equal sizes in each share a name.

    Two-dimensional inputs of whole numbers are tokens.
    """
    dynamic: dict[str, dict[int, str]] = {}
    names: dict[tuple[int, ...], str] = {}
    for name, array in batches[0].items():
        is_tokens = array.ndim == 2 and array.dtype.kind in "iu"
        for axis, sizes in enumerate(zip(*(batch[name].shape for batch in batches), strict=True)):
            if axis > 0 and len(set(sizes)) > 1:
                new = "tokens" if is_tokens and "tokens" not in names.values() else f"{name}_{axis}"
                dynamic.setdefault(name, {})[axis] = names.setdefault(sizes, new)
    return dynamic
