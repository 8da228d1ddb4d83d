"""One version that answers: its batcher, what it counts, and how it retires."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from stoker.records import Manifest, ServiceSettings
from stoker.serving.batching import Batcher
from stoker.serving.batching.executed import Executed
from stoker.serving.observing.metrics import OK, VersionMetrics
from stoker.serving.observing.statistics import Counters
from stoker.serving.repository.loading import Loaded
from stoker.serving.service import Statistics

LONGEST_DRAIN_S = 60.0
_log = logging.getLogger(__name__)


class Served:
    """A version in service. Made on the event loop, with what was loaded on a thread.

    Args:
        name: what its model is asked for as.
        loaded: what passed the checks.
        wanted: its settings as they were given, before what they leave open was chosen.
        metrics: where its requests and batches are counted, besides its own statistics.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        wanted: ServiceSettings,
        *,
        metrics: VersionMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.artifact = loaded.artifact
        self.version = str(loaded.artifact.version)
        self.manifest: Manifest = replace(loaded.artifact.manifest, name=name)
        self.wanted_settings = wanted
        self.settings: ServiceSettings = loaded.settings
        self.load_s = loaded.load_s
        self._counters = Counters(name, self.version)
        self._metrics = metrics
        self._engines = loaded.engines
        self._golden = loaded.golden
        self.batcher = Batcher(loaded.engines, self.manifest, loaded.settings, observe=self._count_batch, clock=clock)

    @property
    def is_broken(self) -> bool:
        """Whether its engines answer nobody any more."""
        return self.batcher.is_broken

    def statistics(self) -> Statistics:
        """What it did since it was loaded."""
        return self._counters.statistics()

    def count_request(self, outcome: str, seconds: float) -> None:
        """Count a request that ended, `seconds` after it came in; `outcome` is `ok` or why it was refused."""
        self._counters.add_request(seconds, succeeded=outcome == OK)
        self._metrics.request(outcome, seconds)

    async def warm(self) -> None:
        """Let the batcher measure how long batches take, on the golden rows; where it cannot, all is given back."""
        try:
            await self.batcher.warm(self._golden)
        except BaseException:
            self.close()
            raise

    async def retire(self) -> None:
        """Answer what was accepted, then give back threads and memory; an engine that hangs is left behind."""
        try:
            await asyncio.wait_for(self.batcher.drain(), LONGEST_DRAIN_S)
        except TimeoutError:
            _log.error(
                "model %s: version %s did not answer within %g s and keeps its memory",
                self.manifest.name, self.version, LONGEST_DRAIN_S,
            )  # fmt: skip
            return
        self.batcher.close()
        self._metrics.release()
        await asyncio.to_thread(self._close_engines)

    def close(self) -> None:
        """Give back threads and memory at once; what still waits is refused."""
        self.batcher.close()
        self._metrics.release()
        self._close_engines()

    def _close_engines(self) -> None:
        """Can take milliseconds, in which the event loop has better things to do."""
        for engine in self._engines:
            engine.close()
        self._engines = ()

    def _count_batch(self, batch: Executed) -> None:
        self._counters.add_batch(batch)
        self._metrics.batch(batch)
