"""One model of the repository (`RepositoryModel`) and each version in service (`ServedVersion`).

A new version is loaded and checked on a thread while the old one answers; then the event loop switches to it and the
old one is drained. Any error before the switch leaves the old one in service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from stoker import artifacts
from stoker.artifacts import version_number
from stoker.artifacts.golden import nan_is_unproven, takes_nan
from stoker.errors import StokerError, first_line
from stoker.records import Manifest, ServiceSettings, digest
from stoker.records.codec import JSON
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.scheduler import Executed
from stoker.serving.batching.workers import DEFAULT_HANG_LIMITS, HangLimits
from stoker.serving.daemon_threads import to_daemon_thread
from stoker.serving.metrics import OK, Counters, VersionMetrics
from stoker.serving.refusals import NotFound, Unavailable, shortened
from stoker.serving.repository.discovery import versions_to_try
from stoker.serving.repository.version_loader import Loaded
from stoker.serving.service import ModelState, RepositoryEntry

LONGEST_DRAIN_S = 60.0
_log = logging.getLogger(__name__)


class ServedVersion:
    """A version in service: its batcher and its statistics. Created on the event loop.

    Args:
        name: the model's name in requests.
        loaded: the version that passed its checks.
        wanted: its settings as given, before open ones were chosen.
        metrics: counts its requests and batches, in addition to its own statistics.
        on_broken: called for every engine that takes no more batches.
        patience: when an engine counts as hanging.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        settings: ServiceSettings,
        *,
        metrics: VersionMetrics,
        on_broken: Callable[[], None] = lambda: None,
        patience: HangLimits = DEFAULT_HANG_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.artifact = loaded.artifact
        self.version = str(loaded.artifact.version)
        self.manifest: Manifest = replace(loaded.artifact.manifest, name=name)
        self.wanted_settings = settings
        self.settings: ServiceSettings = loaded.settings
        given = loaded.settings.allow_nan
        self.allow_nan = takes_nan(loaded.golden) if given is None else given
        """Whether inputs may have NaN and infinities; by default if the golden inputs have."""
        if given and not takes_nan(loaded.golden):
            _log.warning("%s", nan_is_unproven(name))
        self.load_s = loaded.load_s
        self._counters = Counters(name, self.version)
        self._metrics = metrics
        self._engines = loaded.engines
        self._golden = loaded.golden
        self.num_left_behind = 0
        """Number of engines that were still computing when it retired, and keep their memory."""

        def observe(batch: Executed) -> None:
            self._counters.add_batch(batch)
            metrics.batch(batch)

        self.batcher = Batcher(
            loaded.engines,
            self.manifest,
            loaded.settings,
            allow_nan=self.allow_nan,
            observe=observe,
            on_broken=on_broken,
            patience=patience,
            clock=clock,
        )

    @property
    def is_broken(self) -> bool:
        """Whether one of its engines has died, or hangs."""
        return self.batcher.is_broken

    @property
    def problem(self) -> str:
        """The problem of that engine; empty if none is broken."""
        return self.batcher.problem

    def statistics(self) -> JSON:
        """Its statistics since it was loaded, in the protocol's form."""
        return self._counters.document()

    def count_request(self, outcome: str, seconds: float) -> None:
        """Count a finished request, which took `seconds`; `outcome` is `ok` or the reason of its refusal."""
        self._counters.add_request(seconds, succeeded=outcome == OK)
        self._metrics.request(outcome, seconds)

    async def warm(self) -> None:
        """Let the batcher measure batches of the golden rows; on an error everything is released."""
        try:
            await self.batcher.warm(self._golden)
        except BaseException:
            self.close()
            raise

    async def retire(self, within_s: float = LONGEST_DRAIN_S) -> None:
        """Answer the accepted requests, then release threads and memory; a hanging engine is left behind."""
        ends_s = time.monotonic() + within_s
        try:
            await asyncio.wait_for(self.batcher.drain(), within_s)
        except TimeoutError:
            _log.error("model %s: version %s did not answer within %g s", self.manifest.name, self.version, within_s)
        self.batcher.close()
        self._metrics.release()
        await to_daemon_thread(self._close_engines, max(0.0, ends_s - time.monotonic()))

    def close(self) -> None:
        """Release threads and memory at once; waiting requests are refused."""
        self.batcher.close()
        self._metrics.release()
        self._close_engines(0.0)

    def _close_engines(self, within_s: float) -> None:
        """Close the engines that finish their batch within that time. Blocks."""
        done = self.batcher.join(within_s)
        for engine in done:
            engine.close()
        self.num_left_behind = len(self._engines) - len(done)
        if self.num_left_behind:
            _log.error(
                "model %s: version %s leaves %d of its %d engines behind at a batch, with their memory",
                self.manifest.name,
                self.version,
                self.num_left_behind,
                len(self._engines),
            )
        self._engines = ()


Start = Callable[[str, Path, ServiceSettings], Awaitable[ServedVersion]]
"""Loads, checks and warms a version of a named model; raises StokerError if it does not pass."""

MOST_LEFT_BEHIND = 4
"""Limit on a model's hanging engines, which keep their memory; then it is not repaired until a load request."""


class RepositoryModel:
    """The versions of one model. All methods belong to the event loop; none blocks it.

    Args:
        name: the model's name in requests.
        path: its directory, with a directory for each version.
        read_settings: reads its current settings; raises StokerError.
        start: brings up a version.
    """

    def __init__(self, name: str, path: Path, read_settings: Callable[[], ServiceSettings], start: Start) -> None:
        self.name = name
        self.path = path
        self.default: ServedVersion | None = None
        self.served: dict[int, ServedVersion] = {}
        self.asked: tuple[int, ...] = ()
        """Versions that the last load request named; valid until the next one."""
        self.is_wanted = True
        """Whether it should be served: it was not unloaded."""
        self.has_served = False
        """Whether a version of it ever passed its checks."""
        self.problem = ""
        """Why its settings or its directory could not be read at the last refresh; empty if they could."""
        self._read_settings = read_settings
        self._start = start
        self._on_disk: tuple[int, ...] = ()
        self._problems: dict[int, StokerError] = {}
        self._moving: dict[int, ModelState] = {}
        self._num_left_behind = 0
        self._lock = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether its default version would answer now."""
        return self.default is not None and not self.default.is_broken

    @property
    def needs_repair(self) -> bool:
        """Whether an engine of a served version is broken, and another may be loaded for it."""
        may_load = self._num_left_behind < MOST_LEFT_BEHIND
        return self.is_wanted and may_load and any(version.is_broken for version in self.served.values())

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do about the versions that could not be loaded."""
        return tuple(problem.remedy for problem in self._problems.values() if problem.remedy is not None)

    def find(self, version: str) -> ServedVersion:
        """The version of that number, or the default one for an empty text.

        Raises:
            NotFound: there is no such version.
            Unavailable: it is not served now; with the reason.
        """
        if not version:
            if self.default is not None:
                return self.default
            why = self.problem or "it is being loaded"
            if not self.is_wanted:
                why = "it was unloaded"
            elif self._problems:
                newest = max(self._problems)
                why = f"version {newest}: {self._problems[newest].message}"
            raise Unavailable(f"model {self.name!r} is not ready: {why}")
        number = version_number(version)
        if number in self.served:
            return self.served[number]
        if number in self._problems:
            why = self._problems[number].message
            raise Unavailable(f"version {version} of model {self.name!r} is not ready: {why}")
        served = ", ".join(map(str, sorted(self.served))) or "none"
        raise NotFound(f"model {self.name!r} has no version {shortened(version)} in service; served: {served}")

    def index(self) -> tuple[RepositoryEntry, ...]:
        """Every version on disk, as of the last scan, and every one in memory."""
        absent = self.problem or ("another version is served" if self.is_wanted else "unloaded")
        reasons = {number: problem.message for number, problem in self._problems.items()}
        states: dict[int, tuple[ModelState, str]] = {
            number: ("UNAVAILABLE", reasons.get(number, absent)) for number in (*self._on_disk, *reasons)
        }
        for number, served in self.served.items():
            stale = reasons.get(number, self.problem)
            states[number] = ("UNAVAILABLE", served.problem) if served.is_broken else ("READY", stale)
        states |= {number: (state, "") for number, state in self._moving.items() if number not in self.served}
        if self.problem and not states:
            return (RepositoryEntry(name=self.name, version="", state="UNAVAILABLE", reason=self.problem),)
        return tuple(
            RepositoryEntry(name=self.name, version=str(number), state=state, reason=reason)
            for number, (state, reason) in sorted(states.items())
        )

    async def refresh(self, asked: tuple[int, ...] | None = None) -> tuple[str, ...]:
        """Serve the versions of the current directory and settings; old ones serve until their successors passed.

        Args:
            asked: versions that a load request names; empty: those of the settings; None: without a request, the
                versions of the last one, and nothing of a model that was unloaded.

        Returns:
            Why a version that should be served is not, a sentence each.
        """
        async with self._lock:
            if asked is not None:
                self.asked, self.is_wanted = asked, True
            if not self.is_wanted:
                return ()
            try:
                settings = await to_daemon_thread(self._read_settings)
                self._on_disk = await to_daemon_thread(artifacts.versions, self.path)
            except Exception as error:  # noqa: BLE001 - an error of one model must not stop the others
                self.problem = f"{self.path} cannot be read: {type(error).__name__}: {first_line(error)}"
                if isinstance(error, StokerError):
                    self.problem = error.message
                return (self.problem,)
            self.problem = ""
            chosen = self.asked or settings.versions
            fresh = await self._bring_up(versions_to_try(self._on_disk, chosen), settings, enough=len(chosen) or 1)
            known = {*self._on_disk, *chosen}
            self._problems = {number: problem for number, problem in self._problems.items() if number in known}
            if fresh:
                await self._swap(fresh)
            return tuple(f"version {number}: {self._problems[number].message}" for number in sorted(self._problems))

    async def unload(self, within_s: float = LONGEST_DRAIN_S) -> None:
        """Stop serving; accepted requests are answered. The model stays unloaded until a load request."""
        async with self._lock:
            self.is_wanted = False
            self._problems.clear()
            await self._swap({}, within_s)

    async def _bring_up(
        self, numbers: tuple[int, ...], settings: ServiceSettings, *, enough: int
    ) -> dict[int, ServedVersion]:
        """The first `enough` versions that pass, including those that serve already."""
        fresh: dict[int, ServedVersion] = {}
        for number in numbers:
            if len(fresh) == enough:
                break
            current = self.served.get(number)
            if current is not None and await to_daemon_thread(self._is_current, current, settings):
                self._problems.pop(number, None)
                fresh[number] = current
                continue
            self._moving[number] = "LOADING"
            try:
                fresh[number] = await self._start(self.name, self.path / str(number), settings)
                self._problems.pop(number, None)
            except StokerError as error:
                self._problems[number] = error
                if current is not None and not current.is_broken:
                    fresh[number] = current
            finally:
                del self._moving[number]
        return fresh

    def _is_current(self, version: ServedVersion, settings: ServiceSettings) -> bool:
        """Whether it answers, and the manifest on disk and the settings are those it was loaded with."""
        if version.is_broken or version.wanted_settings != settings:
            return False
        try:
            return digest(artifacts.read(version.artifact.path).manifest) == version.artifact.digest
        except StokerError:
            return False

    async def _swap(self, fresh: dict[int, ServedVersion], within_s: float = LONGEST_DRAIN_S) -> None:
        """Switch to these versions, then retire those that no longer serve."""
        leaving = [version for number, version in self.served.items() if fresh.get(number) is not version]
        self.served = fresh
        self.has_served = self.has_served or bool(fresh)
        self.default = fresh[max(fresh)] if fresh else None
        for version in leaving:
            number = int(version.version)
            self._moving[number] = "UNLOADING"
            try:
                await version.retire(within_s)
            finally:
                self._num_left_behind += version.num_left_behind
                del self._moving[number]
