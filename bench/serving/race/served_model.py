"""The model inside each peer's server: Stoker's engine seam, so that everybody computes with the same library.

What to serve and how is in the environment: RACE_ARTIFACT (a version's directory), RACE_SETTINGS (JSON: workers,
threads, max_batch, delay_s), RACE_PORT, RACE_HOST.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.serving.race.samples import Format
from stoker import artifacts, engines


@dataclass(frozen=True)
class Told:
    """What the environment says."""

    artifact: Path
    port: int
    workers: int
    threads: int
    max_batch: int
    delay_s: float


def told() -> Told:
    """What the environment says."""
    return Told(
        Path(os.environ["RACE_ARTIFACT"]), int(os.environ["RACE_PORT"]), **json.loads(os.environ["RACE_SETTINGS"])
    )


class ServedModel:
    """Bodies of samples to bodies of answers, in one batch."""

    def __init__(self) -> None:
        artifact = artifacts.read(told().artifact)
        self.format = Format(artifact.manifest.inputs)
        self._output = artifact.manifest.outputs[0].name
        (self._engine,) = engines.load(artifact, instances=1, threads=told().threads)

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Raw float32 outputs, one for each body."""
        outputs = self._engine.run(self.format.stack([self.format.decode(body) for body in bodies]))[self._output]
        return [row.tobytes() for row in outputs]
