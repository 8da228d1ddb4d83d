"""Clouds by SkyPilot: its catalogue, and its command line with recorded answers."""

from __future__ import annotations

import importlib
import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import NoDevice, PlaceFailed, PlaceUnreachable
from stoker.launching.launcher import Request
from stoker.launching.meter import Meter
from stoker.launching.sky import LAUNCHER, PREEMPTED_PER_H, read_catalogue
from stoker.records import ENDED, LaunchState, dumps
from stoker.store.mirror import Mirror
from stoker.store.remote_runs import RemoteRuns
from stoker.testing.launcher_conformance import LauncherConformance
from tests.launching.elsewhere import BEGAN_S
from tests.launching.fake_sky import job_is, sky, stores_are
from tests.store.builders import make_run

__all__ = ["sky"]
KEEP = ("--set", "lr=0.1", "--keep", "s3://bucket/runs")


@pytest.mark.usefixtures("sky")
class TestConformance(LauncherConformance):
    launcher = LAUNCHER
    words = {"any/l4:spot": (1, 1, "l4"), "aws/8xh100": (1, 8, "h100"), "any/A10": (1, 1, "a10")}  # noqa: RUF012 - a table
    bad_words = ("", "any/0xl4", "any/l4:spt", "ANY CLOUD", "aws/", "aws/2x8xh100")
    environments = ({},)
    client = ("sky",)


@pytest.mark.parametrize("url", ["file:///home/me/runs", "runs", "local:///runs"])
def test_a_mirror_on_the_machine_itself_is_refused(sky: Path, url: str) -> None:
    """It would be lost with the machine; a bucket is asked for before anything is submitted."""
    submission = TestConformance().submission("any/l4", arguments=("--keep", url))
    with pytest.raises(PlaceFailed, match=r"takes its disk with it.*\n.*s3://bucket/runs"):
        LAUNCHER.start(submission, print)
    assert "launch" not in ((sky / "calls").read_text() if (sky / "calls").exists() else "")


def test_the_catalogue_is_read_as_skypilot_keeps_it(sky: Path, tmp_path: Path) -> None:
    """On demand and spot, accelerators alone, under the names of the catalogue here; its day is known."""
    offers, source = read_catalogue(tmp_path / "runtime/.sky/catalogs/v8")
    assert {(one.cloud, one.device, one.count, one.is_spot) for one in offers} == {
        ("aws", "l4", 1, False),
        ("aws", "l4", 1, True),
        ("aws", "a100-40", 8, False),
        ("aws", "a100-40", 8, True),
        ("aws", "h100", 8, False),
        ("aws", "h100", 8, True),
        ("lambda", "h100", 1, False),
        ("lambda", "a10", 1, False),
        ("lambda", "l4", 1, False),
    }
    assert source.startswith("SkyPilot's catalogue of 20")
    with pytest.raises(PlaceFailed, match="no catalogue of gcp") as refused:
        read_catalogue(tmp_path / "runtime/.sky/catalogs/v8", clouds=("gcp",))
    assert "Known: aws, lambda. `sky gpus list` fetches it" in str(refused.value.remedy)


def test_offers_are_the_word_at_its_highest_price_and_the_cheapest_machine_of_each_cloud(sky: Path) -> None:
    """So that a limit of money holds whichever machine SkyPilot takes."""
    found = LAUNCHER.offers(Request(target=LAUNCHER.parse("any/l4")))
    assert [(one.text, one.price_per_h) for one in found] == [
        ("sky:any/l4", 0.8048),
        ("sky:lambda/1xl4", 0.79),
        ("sky:aws/1xl4", 0.8048),
    ]
    assert "the dearest of 2" in found[0].price_source
    spot = LAUNCHER.offers(Request(target=LAUNCHER.parse("any/l4:spot")))
    assert [(one.text, one.price_per_h, one.preempted_per_h) for one in spot] == [
        ("sky:any/l4:spot", 0.3, PREEMPTED_PER_H),
        ("sky:aws/1xl4:spot", 0.3, PREEMPTED_PER_H),
    ]
    assert LAUNCHER.probe(LAUNCHER.parse("any/l4"), {}).facts["SkyPilot"] == "0.14.1"


@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize(
    ("word", "lacking"),
    [
        ("any/3xh100", "no machine for sky:any/3xh100: it has 1, 8 × h100"),
        ("any/h1000", "no machine for sky:any/h1000: Did you mean 'h100'? Known: a10, a100-40, h100, l4"),
        ("any/mi300x:spot", "no spot machine for sky:any/mi300x:spot: Known: a100-40, h100, l4"),
        ("lambda/l4:spot", "no spot machine for sky:lambda/l4:spot: it has no spot machine of lambda at all"),
    ],
)
def test_a_machine_that_no_cloud_has_is_named_with_what_there_is(word: str, lacking: str) -> None:
    """The numbers in which the device is to be had, or the nearest devices."""
    assert LAUNCHER.probe(LAUNCHER.parse(word), {}).missing == (f"SkyPilot's catalogue has {lacking}",)


def test_a_job_is_launched_with_machines_in_order_and_recovered(sky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheapest first, codes 75 and 130 begin again, the limit is of all machines; secrets are sent separately."""
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    submission = TestConformance().submission(
        "any/l4", arguments=KEEP, secrets=("HF_TOKEN",), most_held_s=7200.0, environment="python3"
    )
    handle = LAUNCHER.start(submission, lambda text: None)
    assert handle["keep"] == "s3://bucket/runs"
    text = (sky / "task.json").read_text()
    task = json.loads(text)
    assert [one["infra"] for one in task["resources"]["ordered"]] == ["lambda/us-east-1", "aws/us-east-1"]
    assert task["resources"]["ordered"][0]["job_recovery"]["recover_on_exit_codes"] == [75, 130]
    command, _, submitted_at = task["run"].rpartition(" ")
    assert command.endswith(" -m stoker.launching.logged_run run '~/.stoker' 7200")
    assert abs(datetime.fromisoformat(submitted_at).timestamp() - time.time()) < 300
    assert "order.json" in (sky / "sent").read_text()
    assert json.loads((sky / "secrets").read_text()) == {"HF_TOKEN": "hunter2"}
    assert "hunter2" not in text + (sky / "calls").read_text()
    job_is(sky, "RUNNING", job_name=handle["job"])
    assert LAUNCHER.start(submission, lambda text: None)["job"] == handle["job"]
    assert sum('"launch"' in call for call in (sky / "calls").read_text().splitlines()) == 1


def test_the_first_job_of_a_user_is_launched(sky: Path) -> None:
    """SkyPilot has no controller yet, and says that as an error of its queue; without one no job is known."""
    (sky / "queue").unlink()
    handle = LAUNCHER.start(TestConformance().submission("any/l4", arguments=KEEP, secrets=()), print)
    assert json.loads((sky / "task.json").read_text())["name"] == handle["job"]
    assert LAUNCHER.state(handle).phase == "lost"


def test_an_equal_run_of_somebody_else_is_another_job(sky: Path) -> None:
    """Neither found as one's own nor cancelled: the owner is in the name."""
    settings: dict[str, Any] = {"arguments": KEEP, "secrets": ()}
    theirs = TestConformance().submission("any/l4", owner="you@there:/runs", **settings)
    job_is(sky, "RUNNING", job_name=LAUNCHER.start(theirs, lambda text: None)["job"])
    handle = LAUNCHER.start(TestConformance().submission("any/l4", owner="me@here:/runs", **settings), print)
    assert LAUNCHER.state(handle).phase == "lost", "SkyPilot has only the job of the other owner"
    calls = [json.loads(call) for call in (sky / "calls").read_text().splitlines()]
    names = [words[words.index("-n") + 1] for words in calls if words[:2] == ["jobs", "launch"]]
    assert len(set(names)) == 2
    assert json.loads((sky / "task.json").read_text())["name"] == handle["job"] == names[1]


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the path for packages that read object stores; it has s3fs."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "s3fs.py").touch()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.usefixtures("readers")
def test_without_a_url_skypilot_makes_and_mounts_a_bucket(sky: Path) -> None:
    """Of the run alone; the run keeps its mirror there, it comes home from there, and what is at risk is said."""
    said: list[str] = []
    handle = LAUNCHER.start(TestConformance().submission("any/l4", secrets=()), said.append)
    name = handle["keep"].removeprefix("s3://")
    assert re.fullmatch(r"stoker-[0-9a-f]{24}", name)
    task = json.loads((sky / "task.json").read_text())
    assert task["file_mounts"] == {"/stoker-runs": {"name": name, "store": "s3", "mode": "MOUNT"}}
    order = json.loads((sky / "order.json").read_text())
    assert order["arguments"][-2:] == ["--keep", "file:///stoker-runs"]
    assert (
        f"checkpoints go to s3://{name}, a bucket that SkyPilot makes: a preemption or `stoker stop` loses" in said[0]
    )
    assert f"`sky storage delete {name}`" in said[0]
    other = LAUNCHER.start(TestConformance().submission("any/l4", secrets=(), owner="you@there:/runs"), print)
    assert other["keep"] != handle["keep"]
    text = LAUNCHER.script(TestConformance().submission("any/l4", secrets=()))
    assert name in text
    assert "filled in from `sky check`: s3 where it can be had" in text


@pytest.mark.usefixtures("readers")
def test_a_run_goes_on_from_the_bucket_or_url_that_it_had(sky: Path) -> None:
    """Also where another store would be taken now: a new bucket is empty, and the run would begin again."""
    first = LAUNCHER.start(TestConformance().submission("any/l4", secrets=()), print)
    stores_are(sky, "GCP")
    again = LAUNCHER.start(TestConformance().submission("any/l4", secrets=(), earlier=first), print)
    assert again["keep"] == first["keep"]
    assert json.loads((sky / "task.json").read_text())["file_mounts"]["/stoker-runs"]["store"] == "s3"
    at_url = LAUNCHER.start(TestConformance().submission("any/l4", arguments=KEEP, secrets=()), print)
    again = LAUNCHER.start(TestConformance().submission("any/l4", secrets=(), earlier=at_url), print)
    assert again["keep"] == "s3://bucket/runs"
    assert "file_mounts" not in json.loads((sky / "task.json").read_text())
    assert json.loads((sky / "order.json").read_text())["arguments"][-2:] == ["--keep", "s3://bucket/runs"]


@pytest.mark.usefixtures("readers")
def test_a_run_whose_record_is_not_here_goes_on_from_its_bucket(sky: Path) -> None:
    """A bucket of that name that SkyPilot has made is taken, and not another store that would be chosen today."""
    stores_are(sky, "AWS", "GCP")
    submission = TestConformance().submission("any/l4", secrets=())
    name = LAUNCHER.start(submission, print)["keep"].removeprefix("s3://")
    table = "NAME   UPDATED  STORE  COMMAND  STATUS  \n{}  2 mins ago  {}  sky jobs launch ...  READY   "
    (sky / "storage").write_text(table.format("stoker-another", "GCS"))
    assert LAUNCHER.start(submission, print)["keep"] == f"s3://{name}"
    (sky / "storage").write_text(table.format(name, "GCS"))
    with pytest.raises(PlaceFailed, match="come home from gs://…, for which gcsfs is missing here"):
        LAUNCHER.start(submission, print)
    (sky / "storage").write_text(table.format(name, "S3"))
    stores_are(sky, "GCP")
    with pytest.raises(PlaceFailed, match="SkyPilot has no storage of aws for"):
        LAUNCHER.start(submission, print)


def test_a_run_whose_mirror_could_not_be_made_or_read_is_refused(sky: Path, readers: Path) -> None:
    """The disk of a cloud's machine goes with it: nothing is rented that would be lost."""
    submission = TestConformance().submission("any/l4", secrets=())
    stores_are(sky)
    with pytest.raises(
        PlaceFailed, match="takes its disk with it, and SkyPilot has no storage of aws or gcp"
    ) as refused:
        LAUNCHER.start(submission, print)
    assert "--keep URL" in str(refused.value.remedy)
    stores_are(sky, "GCP")
    with pytest.raises(PlaceFailed, match="come home from gs://…, for which gcsfs is missing here"):
        LAUNCHER.start(submission, print)
    assert '"launch"' not in (sky / "calls").read_text()
    (readers / "gcsfs.py").touch()
    importlib.invalidate_caches()
    assert LAUNCHER.start(submission, print)["keep"].startswith("gs://stoker-")
    assert json.loads((sky / "task.json").read_text())["file_mounts"]["/stoker-runs"]["store"] == "gcs"


def test_data_that_no_machine_of_a_cloud_has_are_refused(sky: Path) -> None:
    """Before one is rented: a path outside of the job's folder is only here."""
    outside = TestConformance().submission("any/l4", secrets=(), arguments=KEEP, expected=("/data/train.parquet",))
    with pytest.raises(PlaceFailed, match=r"/data/train\.parquet is outside of the job's folder, and no machine"):
        LAUNCHER.start(outside, lambda text: None)
    assert not (sky / "calls").exists()


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ("PENDING", "queued"),
        ("STARTING", "queued"),
        ("RUNNING", "starting"),
        ("RECOVERING", "preempted"),
        ("CANCELLED", "stopped"),
        ("SUCCEEDED", "finished"),
        ("FAILED_NO_RESOURCE", "failed"),
        ("FAILED", "failed"),
        ("FAILED_CONTROLLER", "lost"),
        ("SOMETHING_NEW", "failed"),
    ],
)
def test_states_of_skypilot_have_their_meaning(sky: Path, status: str, phase: str) -> None:
    """With the reason that SkyPilot gives as evidence."""
    job_is(sky, status, failure_reason="no L4 in 12 regions", recovery_count=2, end_at=BEGAN_S)
    state = LAUNCHER.state({"job": "conforming-1a2b3c", "keep": "x"})
    assert (state.at == "2026-11-25T10:00:00+00:00") == (phase in ENDED)
    assert (state.phase, state.restarts) == (phase, 2)
    assert state.evidence == f"{status}: no L4 in 12 regions"


def test_looking_for_a_machine_costs_nothing(sky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight hours without a machine are no money, and do not end the run; with one, time counts."""
    meter = Meter(price_per_h=2.5, max_cost=20.0)
    for hour, status, spent in ((0, "STARTING", 0.0), (8, "STARTING", 0.0), (9, "RUNNING", 0.0), (10, "RUNNING", 2.5)):
        monkeypatch.setattr(
            "stoker.launching.launcher.utc_now", lambda *_, hour=hour: f"2026-11-25T{hour:02}:00:00+00:00"
        )
        job_is(sky, status)
        meter.on_state(LAUNCHER.state({"job": "conforming-1a2b3c", "keep": "x"}))
        assert (meter.spent, meter.over_limit()) == (spent, None)


def test_a_running_job_says_itself_how_it_is(sky: Path) -> None:
    """By the marked lines of its log, which also hold the events."""
    said = LaunchState(phase="running", why="training", at="2026-11-25T12:00:00+00:00")
    job_is(sky, "RUNNING", f"(c, pid=1) STOKER event {{}}\n(c, pid=1) STOKER state {dumps(said, indent=None)}\n")
    handle = {"job": "conforming-1a2b3c", "keep": "x"}
    assert (LAUNCHER.state(handle).phase, LAUNCHER.state(handle).why) == ("running", "training")
    assert LAUNCHER.events(handle, 0) == b"{}\n"


def test_an_unknown_job_is_lost_and_a_silent_server_is_unknown(sky: Path) -> None:
    """Only the first is an end."""
    handle = {"job": "conforming-1a2b3c", "keep": "x"}
    assert LAUNCHER.state(handle).phase == "lost"
    program = sky.parent / "bin" / "sky"
    program.write_text("#!/bin/sh\necho 'Failed to connect to the API server' >&2; exit 1\n")
    assert LAUNCHER.state(handle).phase == "unknown"
    with pytest.raises(PlaceUnreachable):
        LAUNCHER.stop(handle)


def test_what_skypilot_refuses_is_one_sentence(sky: Path) -> None:
    """The last line of its errors, without colours; not the last of what it was doing."""
    said = "\x1b[31msky.exceptions.ResourcesUnavailableError: Quota exceeded for L4 in us-east-1\x1b[0m\n"
    (sky / "refuses").write_text(f"Traceback …\n{said}")
    with pytest.raises(PlaceFailed, match=r"^SkyPilot: Quota exceeded for L4 in us-east-1"):
        LAUNCHER.start(TestConformance().submission("any/l4", arguments=KEEP, secrets=()), lambda text: None)


def test_skypilot_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With how it is installed; also where what is lacking first is its catalogue."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(PlaceFailed, match="not installed") as missing:
        LAUNCHER.stop({"job": "x", "keep": "x"})
    assert "skypilot" in str(missing.value.remedy)
    with pytest.raises(PlaceFailed, match="not installed"):
        LAUNCHER.offers(Request(target=LAUNCHER.parse("any/l4")))


def test_the_run_comes_home_from_its_mirror(sky: Path, tmp_path: Path) -> None:
    """Into the directory here, which has the launch record already."""
    url = f"file://{tmp_path}/bucket"
    said: list[str] = []
    with Mirror(make_run(tmp_path / "there/mlp"), RemoteRuns.open(url), said.append, said.append):
        pass
    home = tmp_path / "runs/mlp"
    home.mkdir(parents=True)
    (home / "launch.json").write_text("{}")
    LAUNCHER.fetch({"job": "mlp", "keep": url}, home)
    assert {path.name for path in home.iterdir()} == {"launch.json", "run.json", "spec.json", "events.jsonl"}


def test_several_nodes_are_refused_in_words() -> None:
    """With what can be asked for instead."""
    with pytest.raises(NoDevice, match=r"asks for 2 nodes.\nA run has one node there"):
        LAUNCHER.parse("aws/2x8xh100")
