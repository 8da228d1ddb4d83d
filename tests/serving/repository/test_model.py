"""How versions of a model take over from each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.errors import BadArtifact
from stoker.records import ServiceSettings
from stoker.serving.refusals import NotFound, Unavailable
from stoker.serving.repository.model import RepositoryModel
from stoker.testing.tiny_models import tiny_artifact
from tests.serving.waiting import until


class FakeServed:
    def __init__(self, artifact, settings) -> None:
        self.artifact = artifact
        self.version = artifact.path.name
        self.wanted_settings = settings
        self.is_broken = False
        self.problem = ""
        self.num_left_behind = 0
        self.is_retired = False
        self.may_leave = asyncio.Event()
        self.may_leave.set()

    async def retire(self, _within_s: float) -> None:
        await self.may_leave.wait()
        self.is_retired = True


class Shop:
    """A model whose versions start at once, unless their number is among the `bad`; what was started is remembered."""

    def __init__(self, folder: Path, versions: int) -> None:
        self.folder = folder
        self.settings = ServiceSettings()
        self.bad: set[int] = set()
        self.started: list[FakeServed] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        for _ in range(versions):
            self.publish()
        self.model = RepositoryModel("digits", folder / "digits", lambda: self.settings, self.start)

    def publish(self) -> None:
        tiny_artifact(self.folder, name="digits")

    async def start(self, name: str, path: Path, settings: ServiceSettings) -> FakeServed:
        from stoker import artifacts

        await self.may_start.wait()
        if int(path.name) in self.bad:
            raise BadArtifact(f"version {path.name} is damaged")
        self.started.append(FakeServed(artifacts.read(path), settings))
        return self.started[-1]

    def states(self) -> list[tuple[str, str]]:
        return [(entry.version, entry.state) for entry in self.model.index()]


Story = Callable[[Shop], Awaitable[None]]


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., None]:
    """Run a story of a shop in an event loop."""

    def run(story: Story, *, versions: int = 1) -> None:
        async def main() -> None:
            await story(Shop(tmp_path, versions))

        asyncio.run(main())

    return run


def test_the_newest_version_serves(tell) -> None:
    """Older ones stay on the disk, and the index says why they are not ready."""

    async def story(shop: Shop) -> None:
        assert await shop.model.refresh() == ()
        assert shop.model.find("").version == "2"
        assert shop.states() == [("1", "UNAVAILABLE"), ("2", "READY")]
        assert shop.model.index()[0].reason == "another version is served"
        with pytest.raises(NotFound, match="served: 2"):
            shop.model.find("1")
        with pytest.raises(NotFound):
            shop.model.find("²")

    tell(story, versions=2)


def test_the_old_one_serves_until_the_new_one_has_passed(tell) -> None:
    """While the new version is on its way the old one is found; afterwards the new one, and the old one retires."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        old = shop.model.find("")
        shop.publish()
        shop.may_start.clear()
        coming = asyncio.ensure_future(shop.model.refresh())
        await until(lambda: ("2", "LOADING") in shop.states())
        assert shop.model.find("") is old
        shop.may_start.set()
        await coming
        assert shop.model.find("").version == "2"
        assert old.is_retired

    tell(story)


def test_the_pointer_moves_before_the_old_one_is_drained(tell) -> None:
    """A version that still answers what it accepted holds no new request up."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        old = shop.model.find("")
        old.may_leave.clear()
        shop.publish()
        coming = asyncio.ensure_future(shop.model.refresh())
        await until(lambda: ("1", "UNLOADING") in shop.states())
        assert shop.model.find("").version == "2"
        assert not old.is_retired
        old.may_leave.set()
        await coming

    tell(story)


def test_a_version_that_fails_leaves_the_old_one(tell) -> None:
    """The reason is in the index, in what refresh gives, and in the refusal of who asks for that version."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        old = shop.model.find("")
        shop.publish()
        shop.bad = {2}
        assert await shop.model.refresh() == ("version 2: version 2 is damaged",)
        assert shop.model.find("") is old
        assert not old.is_retired
        assert shop.states() == [("1", "READY"), ("2", "UNAVAILABLE")]
        with pytest.raises(Unavailable, match="version 2 is damaged"):
            shop.model.find("2")

    tell(story)


def test_at_the_start_the_newest_that_passes_serves(tell) -> None:
    """A server that starts over comes to where one that went on would be."""

    async def story(shop: Shop) -> None:
        shop.bad = {3}
        await shop.model.refresh()
        assert shop.model.find("").version == "2"

    tell(story, versions=3)


def test_what_has_not_changed_is_not_loaded_again(tell) -> None:
    """A second look starts nothing; changed settings, or a version that was replaced, start it again."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        await shop.model.refresh()
        assert len(shop.started) == 1
        shop.settings = ServiceSettings(max_batch_rows=4)
        await shop.model.refresh()
        assert len(shop.started) == 2
        assert shop.started[0].is_retired
        manifest = shop.folder / "digits" / "1" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"made_at": "2026', '"made_at": "2025'))
        await shop.model.refresh()
        assert len(shop.started) == 3

    tell(story)


def test_several_versions_serve_where_that_is_asked(tell) -> None:
    """Settings, or a load request, name versions; the highest is the default; one that fails leaves the others."""

    async def story(shop: Shop) -> None:
        shop.settings = ServiceSettings(versions=(1, 2))
        await shop.model.refresh()
        assert shop.model.find("").version == "2"
        assert shop.model.find("1").version == "1"
        shop.bad = {3}
        assert len(await shop.model.refresh((1, 3))) == 1
        assert list(shop.model.served) == [1]

    tell(story, versions=3)


def test_a_rollback_holds_until_the_next_load(tell) -> None:
    """A load request for version 1 stays in force when a newer version appears; another request lifts it."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        await shop.model.refresh((1,))
        shop.publish()
        await shop.model.refresh()
        assert shop.model.find("").version == "1"
        await shop.model.refresh(())
        assert shop.model.find("").version == "3"

    tell(story, versions=2)


def test_removing_the_newest_version_rolls_back(tell) -> None:
    """The one before it serves again."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        newest = shop.folder / "digits" / "2"
        newest.rename(shop.folder / "aside")
        await shop.model.refresh()
        assert shop.model.find("").version == "1"
        assert shop.states() == [("1", "READY")]

    tell(story, versions=2)


def test_an_unloaded_model_says_so(tell) -> None:
    """It is found, and unavailable; a load request brings it back, a refresh without one does not."""

    async def story(shop: Shop) -> None:
        with pytest.raises(Unavailable, match="it is being loaded"):
            shop.model.find("")
        await shop.model.refresh()
        await shop.model.unload()
        with pytest.raises(Unavailable, match="it was unloaded"):
            shop.model.find("")
        assert [(one.state, one.reason) for one in shop.model.index()] == [("UNAVAILABLE", "unloaded")]
        assert await shop.model.refresh() == ()
        assert not shop.model.is_ready
        await shop.model.refresh(())
        assert shop.model.is_ready

    tell(story)


def test_a_broken_version_is_started_anew(tell) -> None:
    """It is not ready, is replaced by a fresh start of the same version, and stays where that fails."""

    async def story(shop: Shop) -> None:
        await shop.model.refresh()
        shop.started[0].is_broken = True
        assert not shop.model.is_ready
        assert shop.model.needs_repair
        assert shop.states() == [("1", "UNAVAILABLE")]
        shop.bad = {1}
        await shop.model.refresh()
        assert shop.model.needs_repair
        shop.bad = set()
        await shop.model.refresh()
        assert shop.model.is_ready
        assert shop.model.find("") is shop.started[1]

    tell(story)
