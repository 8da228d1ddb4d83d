"""All models of a server: loaded at the start, again when their directories change, and when their engines break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stoker import artifacts
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.records import ServiceSettings
from stoker.serving.batching.watching import DEFAULT_PATIENCE, Patience
from stoker.serving.observing.metrics import Metrics
from stoker.serving.problems import NotFound, Unavailable, shortened
from stoker.serving.repository.backoff import Backoff
from stoker.serving.repository.choosing import asked_versions
from stoker.serving.repository.finding import Found, find_models
from stoker.serving.repository.loading import load_version
from stoker.serving.repository.model import Model
from stoker.serving.repository.settings import Override, model_settings, require_models
from stoker.serving.repository.snapshots import Snapshot, settled, snapshot
from stoker.serving.repository.version import LONGEST_DRAIN_S, Served
from stoker.serving.service import Parameter

_log = logging.getLogger(__name__)

MOST_LOADS = 4
"""Versions that are loaded at the same time, at most: no more than there are cores, and two in any case, so that one
that hangs does not hold up all others."""
LOADING_SHARE = 1 / 8
"""Share of the memory that the files of versions which are loaded at the same time may have together; a version with
larger files is loaded alone. Engines take a few times a file's size while they read it."""
_WARMING_TURN_S = 30.0
"""How long a version waits for others to be measured, whose computing would disturb its own."""
_LAST = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Where models come from, and the cores and the memory [bytes, 0: unknown] that they may use.

    `settings` of a model stand in for its `service.json`; `overrides` change single ones of either. `patience` is what
    there is with engines that hang.
    """

    places: tuple[Path, ...]
    settings: Mapping[str, ServiceSettings] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    patience: Patience = DEFAULT_PATIENCE


class Repository:
    """Models by name. All methods belong to one event loop; versions are loaded on threads, a few at a time."""

    def __init__(
        self,
        shelf: Shelf,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.models: dict[str, Model] = {}
        self._shelf = shelf
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        self.problems: dict[str, str] = {}
        """Why directories that may be models could not be looked at, by name, at the last look."""
        self.looked_at_s = clock()
        """When the directories were last looked at, on the clock."""
        self._loader = ThreadPoolExecutor(
            max_workers=max(2, min(MOST_LOADS, shelf.cores)), thread_name_prefix="stoker-load"
        )
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
        """Load every model there is; why those that could not be served are not, by name.

        Raises:
            BadArtifact: a place is no directory, or two models have one name.
            BadJob: a setting is given for a model that is not there.
        """
        found = await asyncio.to_thread(find_models, self._shelf.places)
        for fault in found.faults.values():
            raise fault
        require_models(self._shelf.overrides, found.models)
        self.problems = found.problems
        models = [self._add(name, path) for name, path in found.models.items()]
        reasons = await asyncio.gather(*map(self._refreshed, models))
        told = {model.name: each for model, each in zip(models, reasons, strict=True) if each}
        return told | {name: (reason,) for name, reason in found.problems.items()}

    def model(self, name: str) -> Model:
        """The model of that name.

        Raises:
            NotFound: there is none.
        """
        try:
            return self.models[name]
        except KeyError:
            # Without the names of others: questions about health need no key.
            raise NotFound(f"there is no model {shortened(name)}") from None

    async def load(self, name: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Serve a model, or its newest version; see `Service.load`. It goes on if the caller does not wait.

        Raises:
            NotFound: there is no such directory.
            Unavailable: a version that should be served is not; those that served still do.
        """
        if name not in self.models:
            found = await asyncio.to_thread(find_models, self._shelf.places)
            if name in found.problems:
                raise Unavailable(f"model {name!r}: {found.problems[name]}")
            if name in found.models and name not in self.models:
                self._add(name, found.models[name])
        model = self.model(name)
        on_disk = await asyncio.to_thread(artifacts.versions, model.path)
        asked = asked_versions(parameters, on_disk)
        problems = await self._shielded(self._refresh(model, asked))
        if problems:
            raise Unavailable(f"model {name!r}: {'; '.join(problems)}")

    async def unload(self, name: str) -> None:
        """Stop serving a model, answering what it accepted.

        Raises:
            NotFound: there is no such model.
        """
        await self._shielded(self.model(name).unload())

    async def look_around(self) -> None:
        """Look at the directories: models that changed and rest are refreshed, those that are gone unloaded."""
        await asyncio.gather(*await self._look())

    async def _look(self) -> list[asyncio.Task[None]]:
        """The work that a look found to do, begun; what is wrong with one model stays that model's."""
        async with self._looking:  # whoever asks meanwhile, by a signal, wants to see what is there then
            found = await asyncio.to_thread(find_models, self._shelf.places)
            self._tell_problems(found)
            seen = await asyncio.to_thread(lambda: {name: snapshot(path) for name, path in found.models.items()})
            changed, self._seen = settled(seen, self._seen, self._tried), seen
            tasks = []
            for name in [name for name in changed if name not in self._refreshing]:
                model = self.models.get(name) or self._add(name, found.models[name])
                self._tried[name] = seen[name]
                if model.is_wanted:
                    self._refreshing.add(name)
                    tasks.append(self._spawn(self._refresh_changed(model)))
            absent = [model for name, model in self.models.items() if name not in found.models]
            for model in await asyncio.to_thread(lambda: list(filter(self._is_gone, absent))):
                if self.models.pop(model.name, None) is not None:
                    self._tried.pop(model.name, None)
                    tasks.append(self._spawn(model.unload()))
            self.looked_at_s = self._clock()
            return tasks

    def _tell_problems(self, found: Found) -> None:
        """Keep what could not be looked at for the index, and log what is new of it."""
        problems = found.problems | {name: fault.message for name, fault in found.faults.items()}
        for name, problem in problems.items():
            if self.problems.get(name) != problem:
                _log.warning("the models' directories cannot all be looked at: %s: %s", name, problem)
        self.problems = problems

    def _is_gone(self, model: Model) -> bool:
        """Whether a model's directory was removed; not where the place that it was in cannot be seen."""
        try:
            is_visible = model.path not in self._shelf.places and model.path.parent.is_dir()
            return is_visible and not model.path.exists()
        except OSError:
            return False

    async def watch(self, every_s: float) -> None:
        """Look around again and again, until cancelled; what goes wrong is logged once, and tried again.

        A model that takes long to load, or never ends loading, does not hold up the next look.
        """
        last = ""
        while True:
            await self._sleep(every_s)
            try:
                await self._look()
                last = ""
            except Exception as error:  # noqa: BLE001 - the watch goes on, whatever a look met
                if str(error) != last:
                    _log.exception("the models' directories cannot be looked at")
                last = str(error)

    async def close(self, within_s: float = LONGEST_DRAIN_S) -> None:
        """Answer what was accepted, as far as there is time, then give everything back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.unload(within_s) for model in self.models.values()))
        await asyncio.to_thread(self._loader.shutdown, wait=True, cancel_futures=True)

    def _add(self, name: str, path: Path) -> Model:
        shelf = self._shelf
        read = partial(model_settings, name, path, given=shelf.settings.get(name), overrides=shelf.overrides)
        self.models[name] = Model(name, path, read, self._start)
        return self.models[name]

    async def _refresh(self, model: Model, asked: tuple[int, ...] | None = None) -> tuple[str, ...]:
        self._tried[model.name] = self._seen[model.name] = await asyncio.to_thread(snapshot, model.path)
        return await model.refresh(asked)

    async def _refreshed(self, model: Model) -> tuple[str, ...]:
        """Like `_refresh`, and what nobody foresaw is a reason as well."""
        try:
            return await self._refresh(model)
        except Exception as error:  # noqa: BLE001 - one model's problem, not the server's
            model.problem = f"it could not be loaded: {first_line(error)}"
            _log.exception("model %s could not be loaded", model.name)
            return (model.problem,)

    async def _refresh_changed(self, model: Model) -> None:
        try:
            await self._refresh_unasked(model)
        except Exception as error:  # noqa: BLE001 - one model's problem, of which the index tells
            model.problem = f"it could not be refreshed: {first_line(error)}"
            _log.exception("model %s could not be refreshed", model.name)
        finally:
            self._refreshing.discard(model.name)

    async def _refresh_unasked(self, model: Model) -> None:
        """The same where nobody waits to hear what came of it: it is logged."""
        before = model.default
        for problem in await self._refresh(model):
            _log.warning("model %s: %s", model.name, problem)
        if model.default is not None and model.default is not before:
            _log.info("model %s: version %s passed its checks and serves", model.name, model.default.version)

    async def _start(self, name: str, path: Path, settings: ServiceSettings) -> Served:
        """Load a version on a loading thread, warm it here."""
        began = self._clock()
        try:
            artifact = await asyncio.to_thread(artifacts.read, path)
            load = partial(load_version, path, settings, cores=self._shelf.cores, memory_bytes=self._shelf.memory_bytes)
            async with self._loading(artifact.num_bytes):
                loaded = await asyncio.get_running_loop().run_in_executor(self._loader, load)
            served = Served(
                name, loaded, settings, metrics=self._metrics.version(name, path.name),
                on_broken=partial(self._mend_soon, name), patience=self._shelf.patience, clock=self._clock,
            )  # fmt: skip
            await self._warm(served)
        except _LAST:
            raise
        except BaseException as error:  # a panic in a library written in Rust is no Exception
            self._metrics.load(name, self._clock() - began, passed=False)
            if isinstance(error, StokerError):
                raise
            _log.exception("model %s: version %s could not be brought up", name, path.name)
            raise BadArtifact(f"{path} could not be brought up: {first_line(error)}") from error
        self._metrics.load(name, self._clock() - began, passed=True)
        return served

    @asynccontextmanager
    async def _loading(self, num_bytes: int) -> AsyncIterator[None]:
        """Within the block a version is loaded; entered once there is memory for it beside those under way."""
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

    async def _warm(self, served: Served) -> None:
        """Measure a version while no other one is measured; a turn that does not come is not waited for."""
        is_alone = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WARMING_TURN_S):
                is_alone = await self._warming.acquire()
        try:
            await served.warm()
        finally:
            if is_alone:
                self._warming.release()

    def _mend_soon(self, name: str) -> None:
        """Load a model anew of which an engine broke, with longer and longer pauses between attempts."""
        model = self.models.get(name)
        if model is not None and name not in self._repairing:
            self._repairing.add(name)
            self._spawn(self._mend(model))

    async def _mend(self, model: Model) -> None:
        backoff = self._repairs.setdefault(model.name, Backoff())
        try:
            while model.needs_repair:
                await self._sleep(backoff.pause_s(self._clock()))
                told = "; ".join(one.problem for one in model.served.values() if one.is_broken)
                _log.warning("model %s is loaded anew, since an engine of it is broken: %s", model.name, told)
                await self._refresh_unasked(model)
        finally:
            self._repairing.discard(model.name)

    async def _shielded(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The outcome of `work`, which goes on if whoever waits for it is cancelled."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
