"""What a candidate is: how it is called, what it computes in, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stoker.artifacts import Artifact
from stoker.artifacts.elements import Arrays
from stoker.compressing.rows import Rows, batches
from stoker.errors import StokerError, first_line
from stoker.records import EngineName, ServingPrecision


class CannotMake(StokerError):
    """A candidate that the library beneath could not make; the search goes on with the next."""


@dataclass(frozen=True)
class Workshop:
    """What candidates are made from: the model given, and rows of training data, asked one at a time.

    `graph` takes the place of the model's own, such as that of a pruned network with the same inputs. `sums_fit` says
    that the CPU adds products of 8 bits without overflow (VNNI and its like); others need weights of 7.
    """

    source: Artifact
    calibration: Rows
    sums_fit: bool = True
    graph: Path | None = None

    @property
    def graph_path(self) -> Path:
        """The graph to make candidates of."""
        return self.graph or self.source.graph_path

    def calibration_inputs(self) -> Iterator[Arrays]:
        """Inputs of each row [1, ...], cut to its own length, so that filling is not calibrated on."""
        for _, inputs in batches(self.calibration, self.source.manifest, 1):
            yield inputs


@dataclass(frozen=True)
class Made:
    """The graph of a candidate, every file that belongs to it, and files `beside` that the engine does not read."""

    graph: Path
    files: tuple[Path, ...]
    beside: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        """What the engine reads [bytes]."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class Candidate:
    """A way to make the model smaller or faster.

    `make(workshop, directory)` writes the graph into an empty directory; raises CannotMake. `effort` is about how many
    times as long that takes as other candidates of its kind.
    """

    name: str
    how: str
    engine: EngineName
    precision: ServingPrecision
    make: Callable[[Workshop, Path], Made] = field(repr=False)
    effort: float = 1.0
    is_pruned: bool = False

    @property
    def is_reduced(self) -> bool:
        """Whether it computes in 8 bits."""
        return self.precision in {"int8", "int8+bf16"}

    @property
    def is_lossy(self) -> bool:
        """Whether it costs accuracy by design, and so has to beat the best that does not."""
        return self.is_reduced or self.is_pruned


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever a library raises, as CannotMake."""
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        raise CannotMake(f"{what} raised {type(error).__name__}: {first_line(error)}") from error
