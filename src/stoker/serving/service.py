"""The seam between the wire and the models: what an edge (HTTP, gRPC) asks of a service.

Requests and responses are named tuples, which take a third of the time that frozen dataclasses take to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from stoker.artifacts.elements import Arrays
from stoker.records import Manifest
from stoker.records.codec import JSON

Parameter = str | int | float | bool
"""Value of a request's or a response's parameter."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An output that a request names; with `classification` its so many largest values as `value:index:label`."""

    name: str
    classification: int = 0


class Request(NamedTuple):
    """An inference request, decoded; whether it fits the model's inputs is not yet checked.

    `version` is empty for the model's default one, `outputs` for all. `deadline_s` counts from when the request came in
    (`parameters.timeout`, in microseconds on the wire); `priority` is 1 for the most urgent, 0 for the default.
    `caller` is the name of the API key it came with. `num_bytes` are those of its body.
    """

    model: str
    inputs: Arrays
    version: str = ""
    id: str = ""
    outputs: tuple[Wanted, ...] = ()
    deadline_s: float | None = None
    priority: int = 0
    caller: str = ""
    num_bytes: int = 0
    parameters: Mapping[str, Parameter] = MappingProxyType({})


class Response(NamedTuple):
    """Answers to a request: the outputs it wanted, in its order."""

    model: str
    version: str
    id: str
    outputs: Arrays


ModelState = Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A version of a model in the repository's index; `reason` says why it is not ready."""

    name: str
    version: str
    state: ModelState
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Total:
    """How many, and how many nanoseconds they took together."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchTotal:
    """Executed batches of one size [rows], and the time in each part of them."""

    batch_size: int
    compute_input: Total = Total()
    compute_infer: Total = Total()
    compute_output: Total = Total()


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a model's version did since it was loaded, as the protocol's statistics extension counts.

    `last_inference_ms` is since 1970; `inference_count` counts rows, `execution_count` batches.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Total = Total()
    fail: Total = Total()
    queue: Total = Total()
    compute_input: Total = Total()
    compute_infer: Total = Total()
    compute_output: Total = Total()
    batches: tuple[BatchTotal, ...] = ()


class Service(Protocol):
    """Models that can be asked. Methods raise `Refusal`: NotFound, BadRequest, QueueFull, Unavailable and others."""

    def is_ready(self) -> bool:
        """Whether every model that should be served is."""
        ...

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether it would answer now; raises NotFound where there is no such model."""
        ...

    def manifest(self, model: str, version: str = "") -> Manifest:
        """What it takes and gives; raises Unavailable while it is not loaded."""
        ...

    def versions(self, model: str) -> tuple[str, ...]:
        """Those that are served, oldest first."""
        ...

    def config(self, model: str, version: str = "") -> JSON:
        """Its settings in the form of Triton's model configuration."""
        ...

    def statistics(self, model: str = "", version: str = "") -> tuple[Statistics, ...]:
        """Of one version, of all versions of a model, or of all models."""
        ...

    def index(self, *, ready_only: bool = False) -> tuple[Entry, ...]:
        """Every version in the repository and its state."""
        ...

    async def infer(self, request: Request) -> Response:
        """Answer; cancelling the task takes the request out of the queue before it is computed."""
        ...

    async def load(self, model: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Load a model, or its newest version, and serve it once it has passed its checks; the old serves until then.

        `parameters` are those of the protocol's request, as they came (`config`: a model configuration as JSON text,
        whose `version_policy` chooses versions); BadRequest or Unsupported where they cannot be followed.
        """
        ...

    async def unload(self, model: str) -> None:
        """Stop serving a model; what it accepted is answered."""
        ...
