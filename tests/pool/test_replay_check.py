from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import PlaceFailed
from stoker.pool.bisection import Bisection, Side
from stoker.pool.blob_tree import TreeLimits, pack_folder
from stoker.pool.commitment import Block, keep_block
from stoker.pool.events import Refused, sha256
from stoker.pool.leased_job import BlobCache
from stoker.pool.replay_check import TOLERANCES, Making, ReplayVerdict, check_block, check_update
from stoker.records.codec import to_json
from stoker.store import CheckpointStore
from tests.pool.counting import save
from tests.pool.fake_pool import FakePool


def committed(folder: Path, *, is_sealed: bool = False) -> Block:
    """A block of ten updates, whose blob is in `folder/blobs`."""
    run, blobs = folder / "run", folder / "blobs"
    blobs.mkdir()
    store = CheckpointStore(run / "checkpoints")
    save(store, bytes(32), 10)

    def put(path: Path) -> str:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blobs / digest)
        return digest

    return keep_block(
        run,
        store.names()[-1],
        0,
        "",
        put=put,
        limits=TreeLimits(num_bytes=1 << 20),
        aside=folder,
        is_sealed=is_sealed,
    )


ALONE = SimpleNamespace(site=0)
"""The order of a job at one agent."""


def checked(folder: Path, answer: dict[str, Any], *, disk_bytes: int = 1 << 20) -> ReplayVerdict:
    """The verdict where the replay prints `answer`."""
    block = committed(folder)
    box: Any = SimpleNamespace(aside=folder / "aside", order=ALONE, replay=lambda *_, **__: None)
    out = json.dumps(answer).encode()
    host: Any = SimpleNamespace(limits=SimpleNamespace(disk_bytes=disk_bytes), run=lambda _: (2, out, b""))
    fetch = lambda digest, **_: folder / "blobs" / digest  # noqa: E731
    return check_block(Making(box=box, before=None, block=block, fetch=fetch, host=host, is_same_class=True))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("BadRun", "the run was made on cuda:0, which this machine does not have"),
        ("BadRun", "the disk is full"),
        ("BadJob", "No module named 'timm'"),
        ("RunFailed", "out of memory"),
    ],
)
def test_what_a_verifier_cannot_do_says_nothing_about_the_block(tmp_path, kind, problem) -> None:
    """An honest agent is not slashed for a verifier's disk, devices or packages."""
    with pytest.raises(PlaceFailed, match="the replay ended"):
        checked(tmp_path, {"kind": kind, "problem": problem})


@pytest.mark.parametrize("lies", [False, True])
def test_a_sealed_block_is_opened_with_the_key_of_its_commitment(tmp_path: Path, lies: bool) -> None:
    """An agent that states another key has committed to what is no checkpoint."""
    block = committed(tmp_path, is_sealed=True)
    made = save(CheckpointStore(tmp_path / "made"), bytes(32), 10)
    answer = json.dumps({"manifest": to_json(made), "states": []}).encode()
    host: Any = SimpleNamespace(limits=SimpleNamespace(disk_bytes=1 << 20), run=lambda _: (0, answer, b""))
    box: Any = SimpleNamespace(aside=tmp_path / "aside", order=ALONE, replay=lambda *_, **__: None)
    client: Any = FakePool(tmp_path / "blobs")
    block = replace(block, seal="7" * 64 if lies else block.seal)
    fetch = BlobCache(client, tmp_path / "got").fetch
    making = Making(box=box, before=None, block=block, fetch=fetch, host=host, is_same_class=True)
    assert check_block(making).equal is not lies


def test_a_block_that_is_too_large_for_a_verifier(tmp_path) -> None:
    """Is too large for that verifier alone."""
    with pytest.raises(PlaceFailed, match="are taken here"):
        checked(tmp_path, {}, disk_bytes=10)


def test_the_records_of_another_job_are_wrong_on_any_machine(tmp_path) -> None:
    """A run that is not of the order's job was not made by it."""
    verdict = checked(tmp_path, {"kind": "NotTheRun", "problem": "the run is of another job"})
    assert verdict.equal is False


def test_tolerances_lie_between_what_was_measured_of_honest_agents_and_of_cheats() -> None:
    """In each precision, over as many updates as it is said to hold for: above the noise, below the smallest cheat."""
    path = Path(__file__).parents[2] / "bench" / "results" / "pool_loss_opinion_2026-11-27.json"
    cases = json.loads(path.read_bytes())["cases"]
    weighed = 0
    for case in cases:
        tolerance, most = TOLERANCES[case["precision"]]
        if case["criterion"] == "weights" and case["updates"] <= most:
            assert 3 * case["honest_most"] < tolerance < min(case["cheats_least"].values()) / 2
            weighed += 1
    assert weighed == 4


@pytest.mark.parametrize("bad", ["too large", "refused", "no checkpoint"])
@pytest.mark.parametrize("cheat", ["agent", "verifier"])
def test_a_state_that_one_side_supplied_suffices(tmp_path, bad: str, cheat: str) -> None:
    """What the other supplied may be too large, missing, or no state: the update is made, and that side loses."""
    block = committed(tmp_path)
    store = CheckpointStore(tmp_path / "supplied" / "checkpoints")
    agreed, made = save(store, bytes(range(32)), 6), save(store, bytes(range(1, 33)), 7)
    root = tmp_path / "supplied"
    names = [str(path.relative_to(root)) for path in root.glob("checkpoints/*0006*/*")]
    pack_folder(root, names, tmp_path / "blobs" / "good", TreeLimits(num_bytes=1 << 20))
    (tmp_path / "blobs" / "too large").write_bytes(bytes(3 << 20))
    (tmp_path / "blobs" / "no checkpoint").write_bytes(b"no tree")

    def fetch(digest: str, **_: str) -> Path:
        if digest == "refused":
            raise Refused("there is no such blob")
        return tmp_path / "blobs" / digest

    answer = json.dumps({"manifest": to_json(made), "states": [made.state_digest()]}).encode()
    host: Any = SimpleNamespace(limits=SimpleNamespace(disk_bytes=1 << 20), run=lambda _: (0, answer, b""))
    box: Any = SimpleNamespace(aside=tmp_path / "aside", order=ALONE, replay=lambda *_, **__: None)
    making = Making(box=box, before=None, block=block, fetch=fetch, host=host, is_same_class=True)
    right = Side(end=made.state_digest(), before="good", after="good")
    wrong = Side(end=sha256(b"wrong"), before=bad, after=bad)
    agent, verifier = (wrong, right) if cheat == "agent" else (right, wrong)
    low_state = agreed.state_digest()
    search = Bisection(begin=0, low=6, high=7, low_state=low_state, agent=agent, verifier=verifier)
    assert check_update(making, search).equal is (cheat == "verifier")
