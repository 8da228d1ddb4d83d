"""Models that come, change, break and go."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker import artifacts, engines
from stoker.artifacts import Artifact
from stoker.errors import ServiceError
from stoker.records import ServiceSettings
from stoker.serving.batching.workers import HangLimits
from stoker.serving.metrics import Metrics
from stoker.serving.refusals import Failed, NotFound, Unavailable
from stoker.serving.repository import model_settings
from stoker.serving.repository.model import MOST_LEFT_BEHIND
from stoker.serving.repository.repository import Repository, RepositoryOptions, RepositoryService
from stoker.serving.service import InferenceRequest
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs
from tests.serving.waiting import until


async def at_once(_seconds: float) -> None:
    """Stands in for a pause."""
    await asyncio.sleep(0)


def opened(folder: Path, story: Callable[[Repository, RepositoryService], Awaitable[None]], **shelf: Any) -> None:
    """Run a story of a repository over a folder, and close it."""

    async def main() -> None:
        metrics = Metrics()
        repository = Repository(RepositoryOptions(places=(folder,), **shelf), metrics, sleep=at_once)
        models = RepositoryService(repository, metrics)
        await repository.open()
        models.is_open = True
        try:
            await story(repository, models)
        finally:
            await repository.close()

    asyncio.run(main())


async def version_of(models: RepositoryService, model: str = "digits") -> str:
    """The version that answers."""
    return (await models.infer(InferenceRequest(model=model, inputs=tiny_inputs()))).version


def test_looking_around_finds_what_changed_once_it_rests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new version, a new model and one that is gone: each at the second look that shows it, and logged in a line."""
    caplog.set_level("INFO", logger="stoker.serving")
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="digits", seed=1)
        tiny_artifact(tmp_path, name="words", kind="tokens")
        await repository.look_around()
        assert await version_of(models) == "1"
        await repository.look_around()
        assert await version_of(models) == "2"
        assert models.is_model_ready("words")
        shutil.rmtree(tmp_path / "words")
        await repository.look_around()
        with pytest.raises(NotFound, match=r"no model 'words'$"):
            models.is_model_ready("words")

    opened(tmp_path, story)
    told = [record.message for record in caplog.records if record.name.startswith("stoker.serving")]
    assert sorted(told) == [
        f"model {model}: version {number} passed its checks and serves"
        for model, number in (("digits", 2), ("words", 1))
    ]


def test_a_version_that_failed_is_not_tried_until_it_changes(tmp_path: Path) -> None:
    """Looking around again and again loads a corrupt version once, and again when its files are put right."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        bad = tiny_artifact(tmp_path, name="digits", seed=1)
        whole = bad.graph_path.read_bytes()
        bad.graph_path.write_bytes(b"half")
        for _ in range(4):
            await repository.look_around()
        assert _failed(models) == 1
        assert await version_of(models) == "1"
        bad.graph_path.write_bytes(whole)
        for _ in range(2):
            await repository.look_around()
        assert await version_of(models) == "2"

    opened(tmp_path, story)


def _failed(models: RepositoryService) -> float:
    return models._metrics.loads.labels(model="digits", outcome="failed")._value.get()


def test_an_unloaded_model_stays_unloaded(tmp_path: Path) -> None:
    """A new version does not bring back what somebody unloaded; a load request does."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        await models.unload("digits")
        tiny_artifact(tmp_path, name="digits", seed=1)
        for _ in range(3):
            await repository.look_around()
        with pytest.raises(Unavailable, match="unloaded"):
            await version_of(models)
        assert models.is_ready()
        await models.load("digits")
        assert await version_of(models) == "2"

    opened(tmp_path, story)


def test_loading_takes_a_model_that_was_not_there(tmp_path: Path) -> None:
    """Without watching, a load request finds a new model; one that is nowhere is not found."""
    tiny_artifact(tmp_path, name="digits")

    async def story(_repository: Repository, models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="words", kind="tokens")
        await models.load("words")
        assert models.is_model_ready("words", "1")
        with pytest.raises(NotFound, match=r"no model 'nobody'$"):
            await models.load("nobody")

    opened(tmp_path, story)


def test_a_load_that_nobody_waits_for_goes_on(tmp_path: Path) -> None:
    """A client that hangs up does not leave a model half loaded."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="digits", seed=1)
        asked = asyncio.ensure_future(models.load("digits"))
        await until(lambda: any(entry.state == "LOADING" for entry in models.index()))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.gather(*repository._tasks)
        assert await version_of(models) == "2"

    opened(tmp_path, story)


class Breakable:
    """An engine that works until the test makes it fail, and then fails for good."""

    def __init__(self, engine: engines.Engine, state: dict[str, Any]) -> None:
        self._engine = engine
        self._state = state
        self._is_broken = False

    def run(self, inputs):
        self._is_broken = self._is_broken or self._state["fail"]
        if self._is_broken:
            raise ServiceError("the device is gone")
        return self._engine.run(inputs)

    def close(self) -> None:
        self._engine.close()


def test_engines_that_broke_are_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests fail, readiness falls, and the model comes back once its engines can be loaded again."""
    tiny_artifact(tmp_path, name="digits")
    state = {"fail": False, "loads": 0}
    load = engines.load

    def loading(*args: Any, **how: Any) -> tuple[Breakable, ...]:
        state["loads"] += 1
        if state["loads"] == 2:
            raise ServiceError("the device is still gone")
        state["fail"] = False
        return tuple(Breakable(engine, state) for engine in load(*args, **how))

    monkeypatch.setattr(engines, "load", loading)

    async def story(repository: Repository, models: RepositoryService) -> None:
        state["fail"] = True
        while models.is_ready():
            with pytest.raises(Failed, match="the device is gone"):
                await version_of(models)
        await asyncio.gather(*repository._tasks)
        assert state["loads"] == 3
        assert models.is_ready()
        assert await version_of(models) == "1"

    opened(tmp_path, story)


def test_a_broken_model_that_is_unloaded_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unloaded while its next repair is due: it stays so, and the server is ready."""
    tiny_artifact(tmp_path, name="digits")
    state = {"fail": False}
    load = engines.load
    monkeypatch.setattr(
        engines, "load", lambda *args, **how: tuple(Breakable(engine, state) for engine in load(*args, **how))
    )

    async def story(repository: Repository, models: RepositoryService) -> None:
        pauses, is_over = asyncio.Event(), asyncio.Event()

        async def pause(_seconds: float) -> None:
            pauses.set()
            await is_over.wait()

        repository._sleep = pause
        state["fail"] = True
        while models.is_ready():
            with pytest.raises(Failed, match="the device is gone"):
                await version_of(models)
        await until(pauses.is_set)
        state["fail"] = False
        await models.unload("digits")
        is_over.set()
        await asyncio.gather(*repository._tasks)
        with pytest.raises(Unavailable, match="unloaded"):
            await version_of(models)
        assert models.is_ready()

    opened(tmp_path, story)


class Hanging:
    """An engine that answers, until the test makes it hang: then it does so until it is let go."""

    def __init__(self, engine: engines.Engine, state: dict[str, Any]) -> None:
        self._engine = engine
        self._state = state

    def run(self, inputs):
        if self._state["hangs"]:
            self._state["begun"].set()
            self._state["let_go"].wait(60.0)
        return self._engine.run(inputs)

    def close(self) -> None:
        self._state["closed"] += 1
        self._engine.close()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Engines hang while `hangs` is set here; how often they were loaded and closed."""
    state: dict[str, Any] = {
        "hangs": False,
        "loads": 0,
        "closed": 0,
        "begun": threading.Event(),
        "let_go": threading.Event(),
    }
    load = engines.load

    def loading(*args: Any, **how: Any) -> tuple[Hanging, ...]:
        state["loads"] += 1
        state["hangs"] = False
        return tuple(Hanging(engine, state) for engine in load(*args, **how))

    monkeypatch.setattr(engines, "load", loading)
    yield state
    state["let_go"].set()


IMPATIENT = HangLimits(least_s=0.3, times=1.0, every_s=0.01)


def test_an_engine_that_hangs_is_loaded_anew_without_being_asked(tmp_path: Path, hanging: dict[str, Any]) -> None:
    """Though the only caller has gone: not ready, said why, and ready again with another engine; the old is left."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        hanging["hangs"] = True
        asked = asyncio.create_task(version_of(models))
        await until(hanging["begun"].is_set)
        asked.cancel()
        await until(lambda: hanging["loads"] == 2 and not repository._tasks)
        assert models.is_ready()
        assert await version_of(models) == "1"
        assert hanging["closed"] == 0

    opened(tmp_path, story, patience=IMPATIENT)
    assert hanging["closed"] == 1


def test_a_model_whose_engines_keep_hanging_stays_broken(tmp_path: Path, hanging: dict[str, Any]) -> None:
    """Each leaves its memory behind, so there is an end to it; the index says what is the matter."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        for _ in range(MOST_LEFT_BEHIND + 1):
            hanging["hangs"] = True
            with pytest.raises(Failed, match="and hangs"):
                await version_of(models)
            await asyncio.gather(*repository._tasks)
        assert not models.is_ready()
        (entry,) = models.index()
        assert (entry.state, "and hangs" in entry.reason) == ("UNAVAILABLE", True)
        with pytest.raises(Unavailable, match="has died"):
            await version_of(models)

    opened(tmp_path, story, patience=IMPATIENT)
    assert hanging["loads"] == MOST_LEFT_BEHIND + 1


def test_two_looks_at_once_take_a_model_away_once(tmp_path: Path) -> None:
    """A signal comes while the watch is at work, and directories are gone."""
    for name in ("digits", "words"):
        tiny_artifact(tmp_path, name=name)

    async def story(repository: Repository, models: RepositoryService) -> None:
        shutil.rmtree(tmp_path / "digits")
        shutil.rmtree(tmp_path / "words")
        await asyncio.gather(*(repository.look_around() for _ in range(3)))
        assert models.index() == ()

    opened(tmp_path, story)


def test_whatever_a_library_raises_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of no kind that is known leaves the old version serving, and the next look around goes on."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="digits", seed=1)
        with monkeypatch.context() as patched:
            patched.setattr(engines, "load", _raise)
            with pytest.raises(Unavailable, match="could not be brought up: out of registers"):
                await models.load("digits")
            for _ in range(2):
                await repository.look_around()
        assert await version_of(models) == "1"
        await models.load("digits")
        assert await version_of(models) == "2"

    opened(tmp_path, story)


def _raise(*_arguments: Any, **_how: Any) -> None:
    raise MemoryError("out of registers\nand more")


def test_watching_goes_on_after_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that cannot be read is reported once, and watched again when it is back."""
    place = tmp_path / "models"
    tiny_artifact(place, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        glances = 0

        async def move(_seconds: float) -> None:
            nonlocal glances
            glances += 1
            if glances == 1:
                place.rename(tmp_path / "gone")
            if glances == 4:
                (tmp_path / "gone").rename(place)
                tiny_artifact(place, name="digits", seed=1)
            if glances == 8:
                raise asyncio.CancelledError

        repository._sleep = move
        with pytest.raises(asyncio.CancelledError):
            await repository.watch(1.0)
        await asyncio.gather(*repository._tasks)
        assert await version_of(models) == "2"

    opened(place, story)
    told = [record.message for record in caplog.records if "is not a directory" in record.message]
    assert len(told) == 1
    assert "the models' directories cannot all be looked at" in told[0]


@pytest.mark.parametrize("settings", ["[" * 100_000, "{", '{"versions": [0]}', '{"max_batch_rows": 1000000000}', "\0"])
def test_one_models_damaged_settings_are_its_own(settings: str, tmp_path: Path) -> None:
    """The others get their new versions, it goes on as it was, and the index says what is wrong; at a start too."""
    for name in ("digits", "other"):
        tiny_artifact(tmp_path, name=name)

    async def story(repository: Repository, models: RepositoryService) -> None:
        (tmp_path / "other" / "service.json").write_text(settings)
        for _ in range(3):
            await repository.look_around()
        tiny_artifact(tmp_path, name="digits", seed=1)
        for _ in range(2):
            await repository.look_around()
        assert await version_of(models) == "2"
        assert await version_of(models, "other") == "1"
        (entry,) = (entry for entry in models.index() if entry.name == "other")
        assert (entry.state, "service.json cannot be read" in entry.reason) == ("READY", True)

    opened(tmp_path, story)

    async def afterwards(_repository: Repository, models: RepositoryService) -> None:
        assert await version_of(models) == "2"
        assert {entry.name: entry.state for entry in models.index(ready_only=True)} == {"digits": "READY"}
        with pytest.raises(Unavailable, match=r"service\.json cannot be read"):
            await version_of(models, "other")

    opened(tmp_path, afterwards)


def test_a_sibling_that_cannot_be_read_stops_nothing_and_is_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that may not read one directory starts, serves the rest, and picks up their new versions."""
    for name in ("digits", "private"):
        tiny_artifact(tmp_path, name=name)
    versions = artifacts.versions

    def forbidden(path: Path) -> tuple[int, ...]:
        if path.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return versions(path)

    monkeypatch.setattr(artifacts, "versions", forbidden)

    async def story(repository: Repository, models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="digits", seed=1)
        for _ in range(2):
            await repository.look_around()
        assert await version_of(models) == "2"
        (entry,) = (entry for entry in models.index() if entry.name == "private")
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "its directory cannot be read: Permission denied")
        with pytest.raises(Unavailable, match="Permission denied"):
            await models.load("private")

    opened(tmp_path, story)


def test_a_watch_survives_whatever_a_look_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of no kind that is known is logged once, and the next look goes on."""
    tiny_artifact(tmp_path, name="digits")

    async def story(repository: Repository, models: RepositoryService) -> None:
        glances = 0
        look = repository._look

        async def raising() -> list[asyncio.Task[None]]:
            raise RecursionError("too deep")

        async def move(_seconds: float) -> None:
            nonlocal glances
            glances += 1
            monkeypatch.setattr(repository, "_look", raising if glances < 4 else look)
            if glances == 4:
                tiny_artifact(tmp_path, name="digits", seed=1)
            if glances == 8:
                raise asyncio.CancelledError

        repository._sleep = move
        with pytest.raises(asyncio.CancelledError):
            await repository.watch(1.0)
        await asyncio.gather(*repository._tasks)
        assert await version_of(models) == "2"

    opened(tmp_path, story)
    assert [record.message for record in caplog.records].count("the models' directories cannot be looked at") == 1


class _Panic(BaseException):
    """What a library in Rust raises where it gives up (pyo3's PanicException)."""


def test_a_panic_of_a_library_is_one_versions_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, and ends neither the start nor the watch."""
    for name in ("digits", "other"):
        tiny_artifact(tmp_path, name=name)
    load = engines.load

    def panicking(artifact: Artifact, **how: Any) -> Any:
        if artifact.manifest.name == "other":
            raise _Panic("called `Result::unwrap()` on an `Err` value")
        return load(artifact, **how)

    monkeypatch.setattr(engines, "load", panicking)

    async def story(_repository: Repository, models: RepositoryService) -> None:
        assert await version_of(models) == "1"
        with pytest.raises(Unavailable, match="could not be brought up: called"):
            await version_of(models, "other")

    opened(tmp_path, story)


def test_models_load_at_the_same_time_and_one_that_hangs_holds_up_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several are under way at once; the watch brings up others during one that never ends."""
    for name in ("digits", "slow"):
        tiny_artifact(tmp_path, name=name)
    load, together, let_go = engines.load, threading.Barrier(2), threading.Event()

    def loading(artifact: Artifact, **how: Any) -> Any:
        if artifact.version == 1:
            together.wait(60.0)
        elif artifact.manifest.name == "slow":
            let_go.wait(60.0)
        return load(artifact, **how)

    monkeypatch.setattr(engines, "load", loading)

    async def story(repository: Repository, models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="slow", seed=1)
        await repository._look()
        await repository._look()
        tiny_artifact(tmp_path, name="digits", seed=1)
        await repository._look()
        await repository._look()
        await until(lambda: models.is_model_ready("digits", "2"))
        assert await version_of(models, "slow") == "1"
        let_go.set()
        await until(lambda: models.is_model_ready("slow", "2"))

    opened(tmp_path, story)


def test_closing_does_not_wait_for_a_load_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once the time is over; its thread does not keep the process from ending."""
    tiny_artifact(tmp_path, name="digits")
    load, threads, let_go = engines.load, [], threading.Event()

    def loading(artifact: Artifact, **how: Any) -> Any:
        if artifact.version == 2:
            threads.append(threading.current_thread())
            let_go.wait(60.0)
        return load(artifact, **how)

    monkeypatch.setattr(engines, "load", loading)

    async def story(repository: Repository, _models: RepositoryService) -> None:
        tiny_artifact(tmp_path, name="digits", seed=1)
        await repository._look()
        await repository._look()
        await until(lambda: bool(threads))
        await repository.close(0.01)
        assert threads[0].is_alive()
        assert threads[0].daemon
        let_go.set()

    opened(tmp_path, story)
    assert f"{tmp_path / 'digits' / '2'} is still being loaded after 0.01 s" in caplog.text


def test_versions_with_large_files_are_loaded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they would take more than their share of the memory; each is loaded all the same."""
    for number in range(4):
        tiny_artifact(tmp_path, name=f"m{number}")
    load, under_way, most = engines.load, threading.Semaphore(0), [0]
    lock, running = threading.Lock(), [0]

    def loading(artifact: Artifact, **how: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        under_way.acquire(timeout=0.05)  # long enough for another one to come, if it may
        with lock:
            running[0] -= 1
        return load(artifact, **how)

    monkeypatch.setattr(engines, "load", loading)

    async def story(_repository: Repository, models: RepositoryService) -> None:
        assert len(models.index(ready_only=True)) == 4

    monkeypatch.setattr("stoker.serving.repository.version_loader._require_room", lambda *_: None)
    opened(tmp_path, story, cores=4, memory_bytes=1000)
    assert most[0] == 1
    opened(tmp_path, story, cores=4)
    assert most[0] > 1


def test_a_largest_batch_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    """The check would end the server, and with it the other models."""
    tiny_artifact(tmp_path, name="digits")
    (tmp_path / "digits" / "service.json").write_text('{"max_batch_rows": 65536}')

    async def story(_repository: Repository, models: RepositoryService) -> None:
        with pytest.raises(Unavailable, match=r"max_batch_rows=65,536 takes 2\.8 MiB"):
            await version_of(models)

    opened(tmp_path, story, memory_bytes=4 * 2**20)


def test_settings_that_fail_in_a_way_nobody_foresaw_are_one_models_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of defence: the model says so, the others start."""
    for name in ("digits", "other"):
        tiny_artifact(tmp_path, name=name)
    read = model_settings.read_settings

    def failing(model: Path) -> ServiceSettings:
        if model.name == "other":
            raise KeyError("nobody foresaw this")
        return read(model)

    monkeypatch.setattr(model_settings, "read_settings", failing)

    async def story(_repository: Repository, models: RepositoryService) -> None:
        assert await version_of(models) == "1"
        (entry,) = (entry for entry in models.index() if entry.name == "other")
        assert (entry.version, entry.state) == ("", "UNAVAILABLE")
        assert "KeyError: 'nobody foresaw this'" in entry.reason

    opened(tmp_path, story)
