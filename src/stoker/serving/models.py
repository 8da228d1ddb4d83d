"""The models of a repository as a service: what the edges ask."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping

from stoker.artifacts import version_number
from stoker.records import Manifest
from stoker.records.codec import JSON
from stoker.serving.observing.metrics import OK, Metrics
from stoker.serving.problems import DeadlinePassed, Refusal, WouldBeLate
from stoker.serving.repository.configuration import triton_config
from stoker.serving.repository.repository import Repository
from stoker.serving.repository.version import Served
from stoker.serving.service import Entry, Parameter, Request, Response, Statistics
from stoker.serving.wire.fitting import fit

WAY_SHARE = 0.1
"""Share of the time until a deadline that is kept for what the batcher does not see: the way in, and the way back.

A full queue is filled up to what can just be met; without this every answer from it would reach its caller too late.
"""


class Models:
    """A `Service` over a repository; every method belongs to the repository's event loop."""

    def __init__(self, repository: Repository, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        """Set once every model was tried: ready from then on, if they are."""
        self.is_stopping = False
        """Set before a shutdown: no longer ready, though what still comes in is answered."""
        self._repository = repository
        self._metrics = metrics
        self._clock = clock
        metrics.watch(self._live)

    def is_ready(self) -> bool:
        """Whether every model that should be served, and ever was, is; one that never passed takes none down."""
        wanted = [model for model in self._repository.models.values() if model.is_wanted and model.has_served]
        return self.is_open and not self.is_stopping and all(model.is_ready for model in wanted)

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether it would answer now; raises NotFound where there is no such model."""
        found = self._repository.model(model)
        if not version:
            return found.is_ready and not self.is_stopping
        number = version_number(version)
        served = None if number is None else found.served.get(number)
        return served is not None and not served.is_broken and not self.is_stopping

    def manifest(self, model: str, version: str = "") -> Manifest:
        """What it takes and gives; raises Unavailable while it is not loaded."""
        return self._repository.model(model).find(version).manifest

    def versions(self, model: str) -> tuple[str, ...]:
        """Those that are served, oldest first."""
        return tuple(map(str, sorted(self._repository.model(model).served)))

    def config(self, model: str, version: str = "") -> JSON:
        """Its settings in the form of Triton's model configuration."""
        found = self._repository.model(model)
        served = found.find(version)
        return triton_config(served.manifest, served.settings, tuple(sorted(found.served)))

    def statistics(self, model: str = "", version: str = "") -> tuple[Statistics, ...]:
        """Of one version, of all versions of a model, or of all models."""
        if not model:
            return tuple(one.statistics() for one in self._all_served())
        found = self._repository.model(model)
        if version:
            return (found.find(version).statistics(),)
        return tuple(one.statistics() for _, one in sorted(found.served.items()))

    def index(self, *, ready_only: bool = False) -> tuple[Entry, ...]:
        """Every version in the repository and its state."""
        entries = [entry for _, model in sorted(self._repository.models.items()) for entry in model.index()]
        entries += [
            Entry(name=name, version="", state="UNAVAILABLE", reason=reason)
            for name, reason in sorted(self._repository.problems.items())
        ]
        return tuple(entry for entry in entries if entry.state == "READY" or not ready_only)

    async def infer(self, request: Request) -> Response:
        """Answer; cancelling the task takes the request out of the queue before it is computed."""
        began_s = self._clock()
        try:
            # From here to the batcher's queue nothing is awaited: a version that is swapped out meanwhile has either
            # not been found, or has accepted the request and answers it before it goes.
            served = self._repository.model(request.model).find(request.version)
        except Refusal as refusal:
            self._count_refusal(request.model if request.model in self._repository.models else "", refusal)
            raise
        seconds = request.deadline_s if request.deadline_s is not None else served.settings.deadline_s
        deadline_s = math.inf if seconds is None else began_s + seconds
        try:
            answers = await served.batcher.ask(
                fit(request, served.manifest, max_rows=served.settings.max_queue_rows),
                deadline=None if seconds is None else began_s + (1 - WAY_SHARE) * seconds,
                priority=request.priority,
                caller=request.caller,
                num_bytes=request.num_bytes,
            )
        except Refusal as refusal:
            served.count_request(refusal.reason, self._clock() - began_s)
            self._count_refusal(request.model, refusal)
            raise
        except asyncio.CancelledError:
            served.count_request("cancelled", self._clock() - began_s)
            raise
        ended_s = self._clock()
        served.count_request(OK, ended_s - began_s)
        if ended_s > deadline_s:
            self._metrics.deadline_misses.labels(model=request.model).inc()
        return Response(
            model=request.model,
            version=served.version,
            id=request.id,
            outputs={one.name: answers[one.name] for one in request.outputs} if request.outputs else answers,
        )

    async def load(self, model: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Load a model, or its newest version, and serve it once it has passed its checks; see `Service.load`."""
        await self._repository.load(model, parameters)

    async def unload(self, model: str) -> None:
        """Stop serving a model; what it accepted is answered."""
        await self._repository.unload(model)

    def _all_served(self) -> Iterable[Served]:
        for _, model in sorted(self._repository.models.items()):
            for _, served in sorted(model.served.items()):
                yield served

    def _count_refusal(self, model: str, refusal: Refusal) -> None:
        self._metrics.rejected.labels(model=model, reason=refusal.reason).inc()
        if isinstance(refusal, DeadlinePassed | WouldBeLate):
            self._metrics.deadline_misses.labels(model=model).inc()

    def _live(self) -> Iterable[tuple[dict[str, str], int, bool]]:
        """What the metrics read when somebody looks."""
        for served in self._all_served():
            manifest = served.manifest
            facts = {
                "model": manifest.name, "version": served.version, "digest": served.artifact.digest,
                "engine": manifest.engine, "precision": manifest.precision,
            }  # fmt: skip
            yield facts, served.batcher.queue_rows, not served.is_broken
