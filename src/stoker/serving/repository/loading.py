"""From a version on disk to engines that have given the stored answers. Everything here blocks: run it on a thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from stoker import artifacts, engines
from stoker.artifacts import Artifact, Golden
from stoker.engines import Engine
from stoker.records import ServiceSettings
from stoker.serving.repository.checking import check_answers
from stoker.serving.repository.sizing import sized


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A version that passed its checks: its engines, one for each instance, and how long that took [s].

    `settings` have both instances and threads.
    """

    artifact: Artifact
    golden: Golden
    settings: ServiceSettings
    engines: tuple[Engine, ...]
    load_s: float


def load_version(path: Path, settings: ServiceSettings, *, cores: int) -> Loaded:
    """Read a version, compare every file with its digest, load its engines, and hold each to the golden answers.

    Raises:
        BadArtifact: it is damaged, no engine here can load it, or its answers are not those stored.
        ServiceError: an engine could not answer.
    """
    started = time.monotonic()
    artifact = artifacts.read(path)
    verified = artifact.verify()
    golden = artifact.golden()
    chosen = sized(settings, cores)
    loaded = engines.load(artifact, instances=chosen.instances or 1, threads=chosen.threads)
    try:
        artifact.require_unchanged(verified)
        for engine in loaded:
            check_answers(engine, artifact.manifest, golden, most_rows=chosen.max_batch_rows)
    except BaseException:
        for engine in loaded:
            engine.close()
        raise
    return Loaded(artifact=artifact, golden=golden, settings=chosen, engines=loaded, load_s=time.monotonic() - started)
