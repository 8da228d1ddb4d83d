"""Sites of one job on hosts without a network between them: they meet in a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import stoker
from stoker.errors import BadJob
from stoker.jobs import load_job
from stoker.records import Event, Layout, dumps
from stoker.stepping.message_folder import MessageFolder
from stoker.store import CheckpointStore, RunDirectory
from stoker.store.site_message import decode_message, encode_message
from stoker.verifying.replay import replay
from tests.flow.builders import PLAN, blobs_job
from tests.flow.command import Outcome, Running, job_file, stoker_process

SITES = """settings['evaluation'] = stoker.Evaluation(every=stoker.epochs(1), select="last")
settings['sync'] = stoker.DiLoCo(every=stoker.updates(4), overlap=1, outer=stoker.SGD(lr=0.7, momentum=0.5))"""


def plan_file(layout: Layout) -> Path:
    """A file with PLAN in a layout."""
    path = Path(f"plan-{layout.replicas}.json")
    path.write_text(dumps(dataclasses.replace(PLAN, layout=layout, loader="memory")))
    return path


def ended_sites(path: Path, *more: str, kills: bool = False) -> list[Outcome]:
    """Both sites, each a process of its own, to their ends; with `kills` the second is killed and started again."""
    common = ["train", path, *more, "--plan", plan_file(Layout()), "--exchange", "messages"]
    with Running(*common, "--site", "0/2", "--run-dir", "site0") as first:
        if kills:
            with Running(*common, "--site", "1/2", "--run-dir", "site1") as second:
                second.until("evaluated", 2)
                os.kill(second.process.pid, signal.SIGKILL)
        other = stoker_process(*common, "--site", "1/2", "--run-dir", "site1", "--json")
        return [first.end(), other]


@pytest.mark.slow
def test_two_sites_without_a_network_end_where_two_processes_do() -> None:
    """Bit for bit the weights of `--on 2xhere`, at both sites, also where one was killed on the way."""
    path = job_file(SITES)
    settings = ("--set", "epochs=9", "--checkpoint-every", "0.001")
    both = ("--on", "2xhere", "--plan", plan_file(Layout(replicas=2)), "--run-dir", "two", "--json")
    together = stoker_process("train", path, *settings, *both)
    assert together.code == 0, together.err
    weights = stoker.load("two").weights()
    for site, ended in enumerate(ended_sites(path, *settings, kills=True)):
        assert ended.code == 0, ended.err
        run = stoker.load(f"site{site}")
        assert run.record.samples == stoker.load("two").record.samples
        assert all(torch.equal(run.weights()[name], weight) for name, weight in weights.items())
    assert ended.of("resumed")
    assert len(list(Path("messages").glob("*.message"))) < 2 * 9 * 5 / 4  # those that none needs are gone


@pytest.mark.slow
def test_a_site_is_made_again_alone_from_the_messages_that_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state, and the messages that it sent, bit for bit; from another message it comes to another state."""
    monkeypatch.setattr(MessageFolder, "needs_from", lambda *_: None)  # so that no site deletes any
    path = job_file(SITES)
    job, entry = load_job(path, {"epochs": "5"})
    common = ("--set", "epochs=5", "--plan", plan_file(Layout()), "--exchange", "messages")
    with Running("train", path, *common, "--site", "0/2", "--run-dir", "site0") as first:
        run = stoker.train(
            job, entry=entry, plan=PLAN, site="1/2", exchange="messages", run_dir="site1", sink=lambda _: None
        )
        assert first.end().code == 0
    found = CheckpointStore(run.directory.checkpoints).newest()
    assert found is not None
    claimed, states = found[1], list[str]()
    got = {one.name: one.read_bytes() for one in Path("messages").glob("*-0000.message")}
    for name, is_changed in (("again", False), ("other", True)):
        shutil.copytree("site1", name, ignore=shutil.ignore_patterns("checkpoints"))
        folder = Path(name) / "messages"
        folder.mkdir()
        for number, (file, content) in enumerate(sorted(got.items())):
            head, message = decode_message(content)
            if is_changed and number == 0:
                message = message[:-1] + bytes([message[-1] ^ 1])
                head = dataclasses.replace(head, sha256=hashlib.sha256(message).hexdigest())
            (folder / file).write_bytes(encode_message(head, message))
        updates = claimed.position.updates
        made = replay(job, RunDirectory(Path(name)), updates, entry=entry, site=(1, 2), messages=folder)
        states.append(made[-1].state_digest())
        own = [(one, Path("messages") / one.name) for one in folder.glob("*-0001.message")]
        assert len(own) == len(got) > 2
        assert all(mine.read_bytes() == theirs.read_bytes() for mine, theirs in own) is not is_changed
    assert states[0] == claimed.state_digest() != states[1]


def test_a_site_goes_on_as_itself_alone(tmp_path: Path) -> None:
    """Its checkpoint is refused to another site, and to a process without a folder."""
    job = blobs_job(sync=stoker.LocalSGD(every=stoker.updates(2)), until=stoker.updates(4))

    def stop(event: Event) -> None:
        if event.kind == "progress":  # of the first update
            signal.raise_signal(signal.SIGTERM)

    run = stoker.train(job, plan=PLAN, site="0/2", exchange=tmp_path / "messages", run_dir="run", sink=stop)
    assert (run.status, run.record.updates) == ("unfinished", 1)
    for other in ({"site": "1/2", "exchange": tmp_path / "other"}, {}):
        with pytest.raises(stoker.errors.BadRun, match="it is of site 0 of 2, and this is"):
            stoker.train(job, resume="run", sink=lambda _: None, **other)


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"site": "0/2", "exchange": "m"}, "no folder is fast enough for"),
        ({"sync": stoker.LocalSGD(every=stoker.updates(2))}, {"site": "0/2"}, "one of them is missing"),
        ({"sync": stoker.LocalSGD(every=stoker.updates(2))}, {"site": "2/2", "exchange": "m"}, "wanted a number from"),
        (
            {"sync": stoker.LocalSGD(every=stoker.updates(2))},
            {"site": "0/2", "exchange": "m", "on": "2xhere"},
            "a site is one process",
        ),
        (
            {"sync": stoker.LocalSGD(every=stoker.updates(2)), "until": stoker.seconds(5)},
            {"site": "0/2", "exchange": "m"},
            "another number of updates at each site",
        ),
    ],
    ids=["lockstep", "no folder", "no site", "processes", "seconds"],
)
def test_what_no_site_can_be(changes: dict[str, object], options: dict[str, str], text: str) -> None:
    """Refused before anything is made, with what to do."""
    with pytest.raises(BadJob, match=text):
        stoker.train(blobs_job(**changes), sink=lambda _: None, **options)
    assert not Path("runs").exists()
    assert not Path("m").exists()


@pytest.mark.slow
def test_a_site_that_is_stopped_while_it_waits_is_left_unfinished() -> None:
    """As any run that is asked to stop: exit code 130, and the same command goes on from the last checkpoint."""
    path = job_file(SITES)
    common = ("train", path, "--set", "epochs=9", "--plan", plan_file(Layout()), "--exchange", "messages")
    with Running(*common, "--site", "0/2", "--run-dir", "site0") as site:
        until = time.monotonic() + 60
        while not list(Path("messages").glob("*-0000.message")):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(site.process.pid, signal.SIGTERM)
        ended = site.end()
    assert ended.code == 130, ended.err
    run = RunDirectory(Path("site0")).read_run()
    assert (run.status, run.failure) == ("unfinished", None)
    assert "asked to stop while waiting for site 1 after update 4" in ended.of("warned")[-1]["message"]
    assert ended.of("stopped")[-1]["samples"] == run.samples == 0
