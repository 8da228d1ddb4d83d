"""All models of a server (`Repository`), and the `Service` that HTTP and gRPC call (`RepositoryService`).

Models are loaded at the start, when their directories change, and, with growing pauses, when their engines break.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stoker import artifacts
from stoker.artifacts import version_number
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.records import Manifest, ServiceSettings
from stoker.records.codec import JSON
from stoker.serving.batching.workers import DEFAULT_HANG_LIMITS, HangLimits
from stoker.serving.daemon_threads import begin, to_daemon_thread
from stoker.serving.metrics import OK, Metrics
from stoker.serving.protocol import fit, triton_config
from stoker.serving.refusals import DeadlinePassed, DeadlineUnreachable, NotFound, Refusal, Unavailable, shortened
from stoker.serving.repository.discovery import Snapshot, asked_versions, find_models, settled_models, snapshot
from stoker.serving.repository.model import LONGEST_DRAIN_S, RepositoryModel, ServedVersion
from stoker.serving.repository.model_settings import Override, model_settings, require_models
from stoker.serving.repository.version_loader import Loaded, load_version
from stoker.serving.service import InferenceRequest, InferenceResponse, Parameter, RepositoryEntry

_log = logging.getLogger(__name__)

MOST_LOADS = 4
"""Limit on versions loaded at the same time: at most the cores, and at least two, so that a hanging one does not block
all others."""
LOADING_SHARE = 1 / 8
"""Share of the memory for the files of all versions loaded at the same time; a larger version is loaded alone. Engines
take a few times a file's size while they read it."""
_WARMING_TURN_S = 30.0
"""How long a version's warm-up waits for that of others, which would disturb its measurements [s]."""
_LAST = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, kw_only=True)
class RepositoryOptions:
    """Where models come from, and the cores and the memory [bytes, 0: unknown] that they may use.

    `settings` of a model replace its `service.json`; `overrides` change single ones of either. `patience` says when an
    engine counts as hanging.
    """

    places: tuple[Path, ...]
    settings: Mapping[str, ServiceSettings] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    patience: HangLimits = DEFAULT_HANG_LIMITS


class Repository:
    """Models by name. All methods belong to one event loop; versions are loaded on threads, a few at a time."""

    def __init__(
        self,
        shelf: RepositoryOptions,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.models: dict[str, RepositoryModel] = {}
        self._shelf = shelf
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        self.problems: dict[str, str] = {}
        """Why directories that may be models could not be read at the last scan, by name."""
        self.looked_at_s = clock()
        """Time of the last scan of the directories, on the clock."""
        self._loads: dict[Future[Loaded], str] = {}
        self._load_places = asyncio.Semaphore(max(2, min(MOST_LOADS, shelf.cores)))
        self._room = asyncio.Condition()
        self._loading_bytes = 0
        self._warming = asyncio.Lock()
        self._refreshing: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._repairs: dict[str, Backoff] = {}
        self._repairing: set[str] = set()
        self._tried: dict[str, Snapshot] = {}
        self._seen: dict[str, Snapshot] = {}
        self._looking = asyncio.Lock()

    async def open(self) -> dict[str, tuple[str, ...]]:
        """Load every model; why some are not served, by name.

        Raises:
            BadArtifact: a place is not a directory, or two models have one name.
            BadJob: a setting is given for an unknown model.
        """
        discovered = await to_daemon_thread(find_models, self._shelf.places)
        for fault in discovered.faults.values():
            raise fault
        require_models(self._shelf.overrides, discovered.models)
        self.problems = discovered.problems
        models = [self._add(name, path) for name, path in discovered.models.items()]
        reasons = await asyncio.gather(*map(self._refreshed, models))
        problems = {model.name: why for model, why in zip(models, reasons, strict=True) if why}
        return problems | {name: (reason,) for name, reason in discovered.problems.items()}

    def model(self, name: str) -> RepositoryModel:
        """The model of that name.

        Raises:
            NotFound: there is none.
        """
        try:
            return self.models[name]
        except KeyError:
            # Without the names of others: health requests need no key.
            raise NotFound(f"there is no model {shortened(name)}") from None

    async def load(self, name: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Serve a model, or its newest version; see `Service.load`. It continues if the caller is cancelled.

        Raises:
            NotFound: there is no such directory.
            Unavailable: a version that should be served is not; earlier ones still serve.
        """
        if name not in self.models:
            discovered = await to_daemon_thread(find_models, self._shelf.places)
            if name in discovered.problems:
                raise Unavailable(f"model {name!r}: {discovered.problems[name]}")
            if name in discovered.models and name not in self.models:
                self._add(name, discovered.models[name])
        model = self.model(name)
        on_disk = await to_daemon_thread(artifacts.versions, model.path)
        asked = asked_versions(parameters, on_disk)
        problems = await self._shielded(self._refresh(model, asked))
        if problems:
            raise Unavailable(f"model {name!r}: {'; '.join(problems)}")

    async def unload(self, name: str) -> None:
        """Stop serving a model; accepted requests are answered.

        Raises:
            NotFound: there is no such model.
        """
        await self._shielded(self.model(name).unload())

    async def look_around(self) -> None:
        """Scan the directories: refresh models whose files changed and are stable, unload those that are gone."""
        await asyncio.gather(*await self._look())

    async def _look(self) -> list[asyncio.Task[None]]:
        """Scan, and start the work found; an error of one model does not affect the others."""
        async with self._looking:  # a request during a scan, by a signal, needs a new scan
            discovered = await to_daemon_thread(find_models, self._shelf.places)
            problems = discovered.problems | {name: fault.message for name, fault in discovered.faults.items()}
            for name, problem in problems.items():
                if self.problems.get(name) != problem:
                    _log.warning("the models' directories cannot all be looked at: %s: %s", name, problem)
            self.problems = problems
            seen = await to_daemon_thread(lambda: {name: snapshot(path) for name, path in discovered.models.items()})
            changed, self._seen = settled_models(seen, self._seen, self._tried), seen
            tasks = []
            for name in [name for name in changed if name not in self._refreshing]:
                model = self.models.get(name) or self._add(name, discovered.models[name])
                self._tried[name] = seen[name]
                if model.is_wanted:
                    self._refreshing.add(name)
                    tasks.append(self._spawn(self._refresh_changed(model)))
            absent = [model for name, model in self.models.items() if name not in discovered.models]
            for model in await to_daemon_thread(lambda: list(filter(self._is_gone, absent))):
                if self.models.pop(model.name, None) is not None:
                    self._tried.pop(model.name, None)
                    tasks.append(self._spawn(model.unload()))
            self.looked_at_s = self._clock()
            return tasks

    def _is_gone(self, model: RepositoryModel) -> bool:
        """Whether a model's directory was removed; not if its parent cannot be seen."""
        try:
            is_visible = model.path not in self._shelf.places and model.path.parent.is_dir()
            return is_visible and not model.path.exists()
        except OSError:
            return False

    async def watch(self, every_s: float) -> None:
        """Scan the directories every `every_s` until cancelled; an error is logged once, and the scan repeated.

        A model that is slow to load, or never finishes, does not delay the next scan.
        """
        last = ""
        while True:
            await self._sleep(every_s)
            try:
                await self._look()
                last = ""
            except Exception as error:  # noqa: BLE001 - the watch continues after any error
                if str(error) != last:
                    _log.exception("the models' directories cannot be looked at")
                last = str(error)

    async def close(self, within_s: float = LONGEST_DRAIN_S) -> None:
        """Answer the accepted requests within the time, then release everything; a load that hangs is left behind."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loads = dict(self._loads)
        unloading = asyncio.gather(*(model.unload(within_s) for model in self.models.values()))
        _, left = await asyncio.to_thread(wait, loads, within_s)
        await unloading
        for load in left:
            _log.error("%s is still being loaded after %g s, and left behind", loads[load], within_s)

    def _add(self, name: str, path: Path) -> RepositoryModel:
        shelf = self._shelf
        read = partial(model_settings, name, path, given=shelf.settings.get(name), overrides=shelf.overrides)
        self.models[name] = RepositoryModel(name, path, read, self._start)
        return self.models[name]

    async def _refresh(self, model: RepositoryModel, asked: tuple[int, ...] | None = None) -> tuple[str, ...]:
        self._tried[model.name] = self._seen[model.name] = await to_daemon_thread(snapshot, model.path)
        return await model.refresh(asked)

    async def _refreshed(self, model: RepositoryModel) -> tuple[str, ...]:
        """Like `_refresh`, with any error as a reason."""
        try:
            return await self._refresh(model)
        except Exception as error:  # noqa: BLE001 - one model's problem, not the server's
            model.problem = f"it could not be loaded: {first_line(error)}"
            _log.exception("model %s could not be loaded", model.name)
            return (model.problem,)

    async def _refresh_changed(self, model: RepositoryModel) -> None:
        try:
            await self._refresh_unasked(model)
        except Exception as error:  # noqa: BLE001 - one model's problem, shown in the index
            model.problem = f"it could not be refreshed: {first_line(error)}"
            _log.exception("model %s could not be refreshed", model.name)
        finally:
            self._refreshing.discard(model.name)

    async def _refresh_unasked(self, model: RepositoryModel) -> None:
        """Like `_refresh`, with its outcome logged."""
        before = model.default
        for problem in await self._refresh(model):
            _log.warning("model %s: %s", model.name, problem)
        if model.default is not None and model.default is not before:
            _log.info("model %s: version %s passed its checks and serves", model.name, model.default.version)

    async def _start(self, name: str, path: Path, settings: ServiceSettings) -> ServedVersion:
        """Load a version on a thread, and warm it up."""
        began = self._clock()
        try:
            artifact = await to_daemon_thread(artifacts.read, path)
            load = partial(load_version, path, settings, cores=self._shelf.cores, memory_bytes=self._shelf.memory_bytes)
            async with self._loading(artifact.num_bytes), self._load_places:
                loading = begin(load, name=f"stoker-load-{name}")
                self._loads[loading] = str(path)
                loading.add_done_callback(self._loads.pop)
                loaded = await asyncio.wrap_future(loading)
            served = ServedVersion(
                name,
                loaded,
                settings,
                metrics=self._metrics.version(name, path.name),
                on_broken=partial(self._repair_soon, name),
                patience=self._shelf.patience,
                clock=self._clock,
            )
            is_alone = False
            with contextlib.suppress(TimeoutError):  # a turn that does not come is not waited for
                async with asyncio.timeout(_WARMING_TURN_S):
                    is_alone = await self._warming.acquire()
            try:
                await served.warm()
            finally:
                if is_alone:
                    self._warming.release()
        except _LAST:
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self._metrics.load(name, self._clock() - began, passed=False)
            if isinstance(error, StokerError):
                raise
            _log.exception("model %s: version %s could not be brought up", name, path.name)
            raise BadArtifact(f"{path} could not be brought up: {first_line(error)}") from error
        self._metrics.load(name, self._clock() - began, passed=True)
        return served

    @asynccontextmanager
    async def _loading(self, num_bytes: int) -> AsyncIterator[None]:
        """Enter once there is memory to load a version of this size in addition to those being loaded."""
        most = LOADING_SHARE * self._shelf.memory_bytes if self._shelf.memory_bytes else math.inf
        async with self._room:
            await self._room.wait_for(lambda: not self._loading_bytes or self._loading_bytes + num_bytes <= most)
            self._loading_bytes += num_bytes
        try:
            yield
        finally:
            self._loading_bytes -= num_bytes
            async with self._room:
                self._room.notify_all()

    def _repair_soon(self, name: str) -> None:
        """Reload a model with a broken engine, with growing pauses between attempts."""
        model = self.models.get(name)
        if model is not None and name not in self._repairing:
            self._repairing.add(name)
            self._spawn(self._repair(model))

    async def _repair(self, model: RepositoryModel) -> None:
        backoff = self._repairs.setdefault(model.name, Backoff())
        try:
            while model.needs_repair:
                await self._sleep(backoff.pause_s(self._clock()))
                if not model.needs_repair:  # it was unloaded, or loaded by request
                    break
                problems = "; ".join(version.problem for version in model.served.values() if version.is_broken)
                _log.warning("model %s is loaded again, since an engine of it is broken: %s", model.name, problems)
                await self._refresh_unasked(model)
        finally:
            self._repairing.discard(model.name)

    async def _shielded(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which continues if the waiting task is cancelled."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


FIRST_S, LONGEST_S = 1.0, 60.0


class Backoff:
    """Pauses before attempts: none at first, then 1 s, doubled after each, up to a minute.

    After longer than the longest pause without an attempt they start from none again.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._due_at_s = float("-inf")

    def pause_s(self, now_s: float) -> float:
        """Pause before the next attempt [s]; counts as an attempt."""
        if now_s - self._due_at_s > LONGEST_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(LONGEST_S, 2 * self._pause_s or FIRST_S)
        self._due_at_s = now_s + self._pause_s
        return self._pause_s


WAY_SHARE = 0.1
"""Share of the time until a deadline that is reserved for the transport, outside of the batcher.

A full queue is filled up to what can just be met; without this reserve every answer from it would arrive too late.
"""


class RepositoryService:
    """A `Service` over a repository; every method belongs to the repository's event loop."""

    def __init__(self, repository: Repository, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        """Set once every model was tried; before, the server is not ready."""
        self.is_stopping = False
        """Set before a shutdown: no longer ready, though requests are still answered."""
        self._repository = repository
        self._metrics = metrics
        self._clock = clock
        metrics.watch(self._served_versions)

    def is_ready(self) -> bool:
        """Whether every model that should be served, and ever was, is; one that never passed does not count."""
        models = [model for model in self._repository.models.values() if model.is_wanted and model.has_served]
        return self.is_open and not self.is_stopping and all(model.is_ready for model in models)

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether it would answer now; raises NotFound if there is no such model."""
        entry = self._repository.model(model)
        if not version:
            return entry.is_ready and not self.is_stopping
        number = version_number(version)
        served = None if number is None else entry.served.get(number)
        return served is not None and not served.is_broken and not self.is_stopping

    def manifest(self, model: str, version: str = "") -> Manifest:
        """Its manifest; raises Unavailable while it is not loaded."""
        return self._repository.model(model).find(version).manifest

    def versions(self, model: str) -> tuple[str, ...]:
        """The served versions, oldest first."""
        return tuple(map(str, sorted(self._repository.model(model).served)))

    def config(self, model: str, version: str = "") -> JSON:
        """Its settings in the form of Triton's model configuration."""
        entry = self._repository.model(model)
        served = entry.find(version)
        return triton_config(served.manifest, served.settings, tuple(sorted(entry.served)))

    def statistics(self, model: str = "", version: str = "") -> list[JSON]:
        """Statistics of one version, all versions of a model, or all models."""
        if not model:
            return [served.statistics() for served in self._all_served()]
        entry = self._repository.model(model)
        if version:
            return [entry.find(version).statistics()]
        return [served.statistics() for _, served in sorted(entry.served.items())]

    def index(self, *, ready_only: bool = False) -> tuple[RepositoryEntry, ...]:
        """Every version in the repository and its state."""
        entries = [entry for _, model in sorted(self._repository.models.items()) for entry in model.index()]
        entries += [
            RepositoryEntry(name=name, version="", state="UNAVAILABLE", reason=reason)
            for name, reason in sorted(self._repository.problems.items())
        ]
        return tuple(entry for entry in entries if entry.state == "READY" or not ready_only)

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Answer a request; cancelling the task removes it from the queue if it is not yet computed."""
        began_s = self._clock()
        try:
            # Nothing is awaited between here and the batcher's queue: a version that is being replaced has either not
            # been found, or has accepted the request and answers it before it retires.
            served = self._repository.model(request.model).find(request.version)
        except Refusal as refusal:
            self.count_refusal(request.model, refusal)
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
            self.count_refusal(request.model, refusal)
            raise
        except asyncio.CancelledError:
            served.count_request("cancelled", self._clock() - began_s)
            raise
        ended_s = self._clock()
        served.count_request(OK, ended_s - began_s)
        if ended_s > deadline_s:
            self._metrics.deadline_misses.labels(model=request.model).inc()
        return InferenceResponse(
            model=request.model,
            version=served.version,
            id=request.id,
            outputs={output.name: answers[output.name] for output in request.outputs} if request.outputs else answers,
            labels=served.manifest.labels,
        )

    async def load(self, model: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Load a model, or its newest version, and serve it once it passed its checks; see `Service.load`."""
        await self._repository.load(model, parameters)

    async def unload(self, model: str) -> None:
        """Stop serving a model; accepted requests are answered."""
        await self._repository.unload(model)

    def _all_served(self) -> Iterable[ServedVersion]:
        for _, model in sorted(self._repository.models.items()):
            for _, served in sorted(model.served.items()):
                yield served

    def count_refusal(self, model: str, refusal: Refusal) -> None:
        """Count a request that was not answered; names of models that do not exist are no labels."""
        model = model if model in self._repository.models else ""
        self._metrics.rejected.labels(model=model, reason=refusal.reason).inc()
        if isinstance(refusal, DeadlinePassed | DeadlineUnreachable):
            self._metrics.deadline_misses.labels(model=model).inc()

    def _served_versions(self) -> Iterable[tuple[dict[str, str], int, bool]]:
        """Labels, rows in the queue, and readiness of each served version, for the metrics."""
        for served in self._all_served():
            manifest = served.manifest
            facts = {
                "model": manifest.name,
                "version": served.version,
                "digest": served.artifact.digest,
                "engine": manifest.engine,
                "precision": manifest.precision,
            }
            yield facts, served.batcher.queue_rows, not served.is_broken
