"""One version that answers: its batcher, what it counts, and how it retires."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from stoker.artifacts import Golden, datatype_of
from stoker.records import Manifest, ServiceSettings
from stoker.serving.batching import Batcher
from stoker.serving.batching.assembling import FLOATS, is_finite
from stoker.serving.batching.executed import Executed
from stoker.serving.batching.watching import DEFAULT_PATIENCE, Patience
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
        on_broken: is told of every engine that takes no more batches.
        patience: when an engine counts as hanging.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        wanted: ServiceSettings,
        *,
        metrics: VersionMetrics,
        on_broken: Callable[[], None] = lambda: None,
        patience: Patience = DEFAULT_PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.artifact = loaded.artifact
        self.version = str(loaded.artifact.version)
        self.manifest: Manifest = replace(loaded.artifact.manifest, name=name)
        self.wanted_settings = wanted
        self.settings: ServiceSettings = loaded.settings
        given = loaded.settings.allow_nan
        self.allow_nan = not _all_finite(loaded.golden) if given is None else given
        """Whether inputs may have NaN and infinities."""
        self.load_s = loaded.load_s
        self._counters = Counters(name, self.version)
        self._metrics = metrics
        self._engines = loaded.engines
        self._golden = loaded.golden
        self.num_left_behind = 0
        """Engines that were still at a batch when it retired, and keep what they hold."""
        self.batcher = Batcher(
            loaded.engines, self.manifest, loaded.settings,
            allow_nan=self.allow_nan, observe=self._count_batch, on_broken=on_broken, patience=patience, clock=clock,
        )  # fmt: skip

    @property
    def is_broken(self) -> bool:
        """Whether an engine of it has died, or hangs."""
        return self.batcher.is_broken

    @property
    def problem(self) -> str:
        """What became of that engine, in words; empty where none is broken."""
        return self.batcher.problem

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

    async def retire(self, within_s: float = LONGEST_DRAIN_S) -> None:
        """Answer what was accepted, then give back threads and memory; an engine that hangs is left behind."""
        ends_s = time.monotonic() + within_s
        try:
            await asyncio.wait_for(self.batcher.drain(), within_s)
        except TimeoutError:
            _log.error("model %s: version %s did not answer within %g s", self.manifest.name, self.version, within_s)
        self.batcher.close()
        self._metrics.release()
        await asyncio.to_thread(self._close_engines, max(0.0, ends_s - time.monotonic()))

    def close(self) -> None:
        """Give back threads and memory at once; what still waits is refused."""
        self.batcher.close()
        self._metrics.release()
        self._close_engines(0.0)

    def _close_engines(self, within_s: float) -> None:
        """Close those that are done with their batch within that time. Blocks."""
        done = self.batcher.join(within_s)
        for engine in done:
            engine.close()
        self.num_left_behind = len(self._engines) - len(done)
        if self.num_left_behind:
            _log.error(
                "model %s: version %s leaves %d of its %d engines behind at a batch, with their memory",
                self.manifest.name, self.version, self.num_left_behind, len(self._engines),
            )  # fmt: skip
        self._engines = ()

    def _count_batch(self, batch: Executed) -> None:
        self._counters.add_batch(batch)
        self._metrics.batch(batch)


def _all_finite(golden: Golden) -> bool:
    """Whether the inputs that a model was exported with are finite numbers."""
    floats = (array for array in golden.inputs.values() if datatype_of(array.dtype) in FLOATS)
    return all(map(is_finite, floats))
