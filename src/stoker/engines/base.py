"""The seam between a model on disk and whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stoker.artifacts.elements import Arrays
from stoker.records import ServingPrecision, TensorSpec

Where = Literal["cpu", "cuda"]
"""What an engine computes on."""


class Engine(Protocol):
    """A model that is loaded and can answer; one caller at a time.

    Several engines of one artifact run at the same time, and share its weights where the library beneath can. While
    one computes, other threads of Python go on.
    """

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs, by name.

        Inputs have the manifest's names, dtypes and shapes, which is not checked; they are read until this returns.
        Arrays that are contiguous and writable are read where they lie, others are copied first. Outputs are the
        caller's own.

        Raises:
            ServiceError: the library beneath could not, with the line that says why.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory; nothing may be running, and nothing runs afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What an engine loads: a file, what it takes and gives, and how it is computed.

    `precision` is what sums and products are computed in; of int8 graphs, the part that is not quantised is computed
    in fp32. Each of `instances` engines computes with `threads` threads.
    """

    path: Path
    precision: ServingPrecision
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    instances: int = 1
    threads: int = 1
    where: Where = "cpu"
