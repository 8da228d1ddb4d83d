"""All models of a server: loaded at the start, again when their directories change, and when their engines break."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stoker import artifacts
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.records import ServiceSettings
from stoker.serving.batching.watching import DEFAULT_PATIENCE, Patience
from stoker.serving.observing.metrics import Metrics
from stoker.serving.problems import NotFound, Unavailable
from stoker.serving.repository.backoff import Backoff
from stoker.serving.repository.choosing import asked_versions
from stoker.serving.repository.finding import find_models
from stoker.serving.repository.loading import load_version
from stoker.serving.repository.model import Model
from stoker.serving.repository.settings import Override, model_settings, require_models
from stoker.serving.repository.snapshots import Snapshot, settled, snapshot
from stoker.serving.repository.version import LONGEST_DRAIN_S, Served
from stoker.serving.service import Parameter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Where models come from, and the cores they may use.

    `settings` of a model stand in for its `service.json`; `overrides` change single ones of either. `patience` is what
    there is with engines that hang.
    """

    places: tuple[Path, ...]
    settings: Mapping[str, ServiceSettings] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    cores: int = 1
    patience: Patience = DEFAULT_PATIENCE


class Repository:
    """Models by name. All methods belong to one event loop; loading happens on a thread, one version at a time."""

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
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stoker-load")
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
        require_models(self._shelf.overrides, found)
        problems = {}
        for model in [self._add(name, path) for name, path in found.items()]:
            if reasons := await self._refresh(model):
                problems[model.name] = reasons
        return problems

    def model(self, name: str) -> Model:
        """The model of that name.

        Raises:
            NotFound: there is none.
        """
        try:
            return self.models[name]
        except KeyError:
            known = ", ".join(sorted(self.models)) or "none"
            raise NotFound(f"there is no model {name!r}; known: {known}") from None

    async def load(self, name: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Serve a model, or its newest version; see `Service.load`. It goes on if the caller does not wait.

        Raises:
            NotFound: there is no such directory.
            Unavailable: a version that should be served is not; those that served still do.
        """
        if name not in self.models:
            found = await asyncio.to_thread(find_models, self._shelf.places)
            if name in found:
                self._add(name, found[name])
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
        """One glance at the directories: models that changed and rest are refreshed, those that are gone unloaded."""
        async with self._looking:  # whoever asks meanwhile, by a signal, wants to see what is there then
            await self._look_around()

    async def _look_around(self) -> None:
        found = await asyncio.to_thread(find_models, self._shelf.places)
        seen = await asyncio.to_thread(lambda: {name: snapshot(path) for name, path in found.items()})
        changed, self._seen = settled(seen, self._seen, self._tried), seen
        for name in changed:
            model = self.models.get(name) or self._add(name, found[name])
            if model.is_wanted:
                await self._refresh_unasked(model)
            self._tried[name] = seen[name]
        for name in [name for name, model in self.models.items() if name not in found and not model.path.exists()]:
            model = self.models.pop(name)
            self._tried.pop(name, None)
            await model.unload()

    async def watch(self, every_s: float) -> None:
        """Look around again and again, until cancelled; what goes wrong is logged once, and tried again."""
        last = ""
        while True:
            await self._sleep(every_s)
            try:
                await self.look_around()
                last = ""
            except (StokerError, OSError) as error:
                if str(error) != last:
                    _log.warning("the models' directories cannot be looked at: %s", error)
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

    async def _refresh_unasked(self, model: Model) -> None:
        """The same where nobody waits to hear what came of it: it is logged."""
        before = model.default
        for problem in await self._refresh(model):
            _log.warning("model %s: %s", model.name, problem)
        if model.default is not None and model.default is not before:
            _log.info("model %s: version %s passed its checks and serves", model.name, model.default.version)

    async def _start(self, name: str, path: Path, settings: ServiceSettings) -> Served:
        """Load a version on the loading thread, warm it here."""
        began = self._clock()
        try:
            load = partial(load_version, path, settings, cores=self._shelf.cores)
            loaded = await asyncio.get_running_loop().run_in_executor(self._loader, load)
            served = Served(
                name, loaded, settings, metrics=self._metrics.version(name, path.name),
                on_broken=partial(self._mend_soon, name), patience=self._shelf.patience, clock=self._clock,
            )  # fmt: skip
            await served.warm()
        except Exception as error:
            self._metrics.load(name, self._clock() - began, passed=False)
            if isinstance(error, StokerError):
                raise
            _log.exception("model %s: version %s could not be brought up", name, path.name)
            raise BadArtifact(f"{path} could not be brought up: {first_line(error)}") from error
        self._metrics.load(name, self._clock() - began, passed=True)
        return served

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
