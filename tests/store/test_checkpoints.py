from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import BadRun, RunFailed
from stoker.records import CheckpointManifest, FileDigest, Position, dumps
from stoker.store import CheckpointStore, Draft, checkpoint_name, checkpoint_store, write_file
from stoker.store.checkpoint_store import manifest_from
from stoker.testing import FaultyDisk, PowerCutAt, operations_of
from tests.store.builders import content, manifest_at, newest_samples, save

LOSSES = ("nothing", "data", "data and names")


def name(samples: int) -> str:
    """The checkpoint's name."""
    return checkpoint_name(Position(samples=samples))


def rewrite_manifest(checkpoint: Path, **changes) -> None:
    """Change fields of a manifest on disk."""
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_newest_comes_back_with_its_manifest(tmp_path: Path) -> None:
    """Files, sizes and digests as written; a fresh reader needs nothing else."""
    written = save(CheckpointStore(tmp_path / "checkpoints"), 100)
    path, manifest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert path == written == tmp_path / "checkpoints" / "000000000100"
    assert [(f.name, f.num_bytes) for f in manifest.files] == [
        ("model.safetensors", len(content(100))),
        ("optimizer.safetensors", 50),
    ]


def test_without_checkpoints_there_is_no_newest_and_no_best(tmp_path: Path) -> None:
    """A run may be cut off before its first; looking makes nothing."""
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest() is None
    assert store.best() is None
    assert list(tmp_path.iterdir()) == []


def test_the_last_ones_are_kept_and_the_best(tmp_path: Path) -> None:
    """The best stays however old it is, until another is marked."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for samples in (100, 200):
        save(store, samples)
    store.mark_best(name(100))
    for samples in (300, 400, 500):
        save(store, samples)
    assert store.names() == (name(100), name(400), name(500))
    store.mark_best(name(500))
    save(store, 600)
    assert store.names() == (name(500), name(600))
    assert store.best()[0] == tmp_path / name(500)
    assert store.problems == []


@pytest.mark.parametrize("keep_last", [1, 2, 3, 4, 5])
def test_as_many_are_kept_as_asked_for(tmp_path: Path, keep_last: int) -> None:
    """From the first one on until there are so many, and ever after."""
    store = CheckpointStore(tmp_path, keep_last=keep_last)
    for count in range(1, 8):
        save(store, 100 * count)
        assert len(store.names()) == min(count, keep_last)


def test_one_can_be_kept_but_not_none(tmp_path: Path) -> None:
    """With keep_last=1 the newest alone stays."""
    store = CheckpointStore(tmp_path, keep_last=1)
    for samples in (100, 200):
        save(store, samples)
    assert store.names() == (name(200),)
    with pytest.raises(ValueError, match="keep_last=0"):
        CheckpointStore(tmp_path, keep_last=0)


DAMAGES = {
    "truncated": (
        lambda c: (c / "model.safetensors").write_bytes(content(200)[:120]),
        f"model.safetensors has 120 of {len(content(200)):,} bytes",
    ),
    "flipped": (
        lambda c: (c / "model.safetensors").write_bytes(b"W" + content(200)[1:]),
        "model.safetensors has SHA-256",
    ),
    "file lost": (lambda c: (c / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "manifest lost": (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest torn": (lambda c: (c / "manifest.json").write_text('{"record": '), "manifest.json cannot be used"),
    "manifest of zeros": (lambda c: (c / "manifest.json").write_bytes(bytes(100)), "manifest.json cannot be used"),
    "a file": (lambda c: (shutil.rmtree(c), c.touch()), "cannot be read: Not a directory"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path, kind: str) -> None:
    """The one before is used, and the problem says what is wrong with numbers, and which one is used."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    damage, said = DAMAGES[kind]
    damage(save(store, 200))
    assert store.newest()[0].name == name(100)
    [problem] = store.problems
    assert problem.startswith(f"checkpoint {name(200)}: {said}")
    assert problem.endswith(f"; using {name(100)}")


@pytest.mark.parametrize("kind", DAMAGES)
def test_if_all_are_damaged_training_does_not_silently_start_anew(tmp_path: Path, kind: str) -> None:
    """Every one is reported with its reason, and nothing is removed."""
    store = CheckpointStore(tmp_path)
    for path in [save(store, 100), save(store, 200)]:
        DAMAGES[kind][0](path)
    with pytest.raises(BadRun, match=f"{name(200)}: .*; checkpoint {name(100)}: ") as caught:
        store.newest()
    assert "--new" in str(caught.value.remedy)
    assert len(store.names()) == 2


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_manifest_of_another_version_is_told_with_both_versions(tmp_path: Path, offset: int) -> None:
    """It is not damaged: another Stoker wrote it, and an older checkpoint must not quietly take its place."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    own = CheckpointManifest.schema
    rewrite_manifest(save(store, 200), schema=own + offset)
    with pytest.raises(BadRun, match=f"schema version {own + offset}, this Stoker reads version {own}") as caught:
        store.newest()
    assert "start another run with --new" in str(caught.value.remedy)


def test_one_that_another_process_found_is_read_by_name(tmp_path: Path) -> None:
    """Files that are not there for this process are reported as what they are."""
    store = CheckpointStore(tmp_path)
    written = save(store, 100)
    path, manifest = store.named(name(100))
    assert (path, manifest.position.samples) == (written, 100)
    (written / "model.safetensors").unlink()
    with pytest.raises(BadRun, match=r"not whole for every process: model\.safetensors is missing"):
        store.named(name(100))


def seal_two(store: CheckpointStore) -> tuple[Draft, tuple[FileDigest, ...]]:
    """A draft of two files, by two processes."""
    draft = store.begin(name(100))
    files: tuple[FileDigest, ...] = ()
    for part in ("a", "b"):

        def write(folder: Path, part: str = part) -> list[str]:
            write_file(folder / part, content(100))
            return [part]

        files += store.seal(draft, write)
    return draft, files


def test_a_draft_becomes_a_checkpoint_once_all_have_sealed_their_files(tmp_path: Path) -> None:
    """Until then readers see nothing."""
    store = CheckpointStore(tmp_path)
    draft, files = seal_two(store)
    assert [file.name for file in files] == ["a", "b"]
    assert store.newest() is None
    assert store.complete(draft, manifest_at(100)(files)) == tmp_path / name(100)
    assert store.newest() is not None
    assert [path.name for path in tmp_path.iterdir()] == [name(100)]


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_draft_whose_files_are_not_as_sealed_is_refused(tmp_path: Path, damage: str) -> None:
    """As where a process wrote to a disk of its own; nothing is left."""
    store = CheckpointStore(tmp_path)
    draft, files = seal_two(store)
    path = draft.aside / "b"
    path.unlink() if damage == "gone" else path.write_bytes(b"short")
    there = "is not there" if damage == "gone" else "has 5 of"
    with pytest.raises(RunFailed, match=f"b {there}") as caught:
        store.complete(draft, manifest_at(100)(files))
    assert "one directory" in (caught.value.remedy or "")
    assert list(tmp_path.iterdir()) == []


def test_training_that_turned_back_writes_a_position_again(tmp_path: Path) -> None:
    """The damaged one is not replaced in place but followed, and then removed with what was beyond it."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for samples in (100, 200):
        save(store, samples)
    (save(store, 300) / "model.safetensors").unlink()
    (tmp_path / name(200) / "model.safetensors").unlink()
    save(store, 150)
    assert store.names() == (name(150),), "keep_last=2 pruned 100 before; 200 and 300 are of an abandoned future"
    again = save(store, 150)
    assert again.name == f"{name(150)}.2"
    assert save(store, 150).name == f"{name(150)}.3"
    assert store.names() == (f"{name(150)}.3",)
    assert newest_samples(tmp_path) == 150
    assert save(store, 200).name == name(200)
    assert store.names() == (f"{name(150)}.3", name(200))


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    """Positions beyond twelve digits, and tenth writings, are the newest; other names are no checkpoints."""
    names = (name(1), name(2), f"{name(2)}.2", f"{name(2)}.10", name(999_999_999_999), name(1_000_000_000_000))
    for entry in (*names, "best.json", "12", f"{name(3)}.x", f".writing-{name(4)}-1-0123abcd"):
        (tmp_path / entry).mkdir()
    assert CheckpointStore(tmp_path).names() == names


def test_a_damaged_one_does_not_take_the_place_of_a_kept_one(tmp_path: Path) -> None:
    """The last two *usable* ones are kept."""
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 100)
    (save(store, 200) / "model.safetensors").unlink()
    save(store, 300)
    assert store.names() == (name(100), name(300))


def test_the_best_is_never_replaced_by_another(tmp_path: Path) -> None:
    """If it, or its mark, is damaged, that is reported; and then nothing is removed that might be it."""
    store = CheckpointStore(tmp_path, keep_last=1)
    store.mark_best(save(store, 100).name)
    save(store, 200)
    (tmp_path / name(100) / "model.safetensors").unlink()
    with pytest.raises(BadRun, match=r"best checkpoint.*model\.safetensors is missing"):
        store.best()
    for text in ("{", "[]", '{"best": 3}', '{"best": "../../elsewhere"}'):
        (tmp_path / "best.json").write_text(text)
        with pytest.raises(BadRun, match=r"best\.json"):
            store.best()
    save(store, 300)
    assert len(store.names()) == 3
    assert "no checkpoint was removed" in store.problems[0]


def test_only_what_is_there_can_be_marked_best(tmp_path: Path) -> None:
    """A mark of nothing is our own bug."""
    with pytest.raises(ValueError, match=r"no checkpoint 'x' .* there are none"):
        CheckpointStore(tmp_path).mark_best("x")
    with pytest.raises(ValueError, match="12 digits"):
        CheckpointStore(tmp_path).write("7", lambda directory: None, manifest_at(7))


@pytest.mark.parametrize("loses", LOSSES)
@pytest.mark.parametrize("samples", [200, 100], ids=["the next position", "the same position again"])
@pytest.mark.parametrize("keep_last", [1, 2])
def test_at_every_operation_the_previous_checkpoint_or_the_new_one_can_be_read(
    tmp_path: Path, loses: str, samples: int, keep_last: int
) -> None:
    """Power cut at each operation of writing, marking and pruning: never neither, and the next writer goes on."""

    def write_and_mark(directory: Path) -> None:
        store = CheckpointStore(directory, keep_last)
        store.mark_best(save(store, samples).name)

    for earlier in (50, 100):
        save(CheckpointStore(tmp_path / "before", keep_last), earlier)
    shutil.copytree(tmp_path / "before", tmp_path / "counted")
    num_operations = len(operations_of(lambda: write_and_mark(tmp_path / "counted")))
    assert num_operations > 15
    seen = []
    for at in range(num_operations + 1):
        directory = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        with PowerCutAt(at, loses=loses) as disk:
            write_and_mark(directory)
        found = newest_samples(directory)
        assert found in {100, samples}, disk.operations
        seen.append(found)
        best = CheckpointStore(directory).best()
        assert best is None or best[1].position.samples == samples, disk.operations
        store = CheckpointStore(directory, keep_last)
        assert all(checkpoint_store._is_whole(directory / there) for there in store.names()), disk.operations
        assert save(store, 300).name == name(300)
        assert newest_samples(directory) == 300
        assert not list(directory.glob(".*")), disk.operations
    assert seen == sorted(seen, key=lambda found: found == samples), "once the new one is there it stays"
    assert seen[-1] == samples
    assert best is not None, "the last cut came after all was done"


@pytest.mark.parametrize("loses", LOSSES)
def test_a_checkpoint_that_was_written_survives_a_power_cut_right_after(tmp_path: Path, loses: str) -> None:
    """The very first one too, in a directory that was not there."""
    with PowerCutAt(1000, loses=loses):
        save(CheckpointStore(tmp_path / "checkpoints"), 100)
    assert newest_samples(tmp_path / "checkpoints") == 100


FAULTS = {
    "full": lambda place: FaultyDisk.full(place, after_bytes=100),
    "full at the manifest": lambda place: FaultyDisk.full(place, after_bytes=len(content(200)) + 60),
    "read-only": FaultyDisk.read_only,
    "failing sync": FaultyDisk.failing_sync,
    "not permitted": lambda place: FaultyDisk.refusing(place, errno.EACCES),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failed_write_leaves_the_previous_and_nothing_half_made(tmp_path: Path, kind: str) -> None:
    """Training failed, what was saved is intact; the message names the checkpoint and has a remedy."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    with FAULTS[kind](tmp_path), pytest.raises(RunFailed, match=f"Cannot write checkpoint {name(200)}") as caught:
        save(store, 200)
    assert caught.value.remedy
    assert [p.name for p in tmp_path.iterdir()] == [name(100)]
    assert newest_samples(tmp_path) == 100
    save(store, 200)
    assert newest_samples(tmp_path) == 200


def test_a_full_disk_is_told_with_what_the_checkpoint_needs(tmp_path: Path) -> None:
    """As much as the previous one took."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    num_bytes = len(content(100)) + 50
    with FaultyDisk.full(tmp_path, after_bytes=10), pytest.raises(RunFailed, match=rf"needed: {num_bytes} B\)"):
        save(store, 200)


def test_a_full_disk_is_noticed_in_files_of_other_libraries(tmp_path: Path) -> None:
    """What did not go through the store's own writing is fsynced by it, and there the error shows."""
    store = CheckpointStore(tmp_path)
    with FaultyDisk.full(tmp_path, after_bytes=99), pytest.raises(RunFailed, match="the disk is full"):
        store.write(name(1), lambda directory: (directory / "a").write_bytes(bytes(100)) and None, manifest_at(1))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_callers_own_passes_and_leaves_nothing(tmp_path: Path) -> None:
    """A bug in what is written is not the disk's."""

    def files(directory: Path) -> None:
        (directory / "half").touch()
        raise KeyError("bug")

    with pytest.raises(KeyError):
        CheckpointStore(tmp_path / "c").write(name(1), files, manifest_at(1))
    assert list((tmp_path / "c").iterdir()) == []


def test_files_in_directories_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    """Named by their path within it."""

    def files(directory: Path) -> None:
        (directory / "shards").mkdir()
        write_file(directory / "shards" / "0", b"abc")

    store = CheckpointStore(tmp_path)
    written = store.write(name(1), files, manifest_at(1))
    assert [f.name for f in store.newest()[1].files] == ["shards/0"]
    (written / "shards" / "0").unlink()
    with pytest.raises(BadRun, match="0 is missing"):
        store.newest()


def test_reading_does_not_disturb_a_writer(tmp_path: Path) -> None:
    """A report of a run in progress leaves what is being written alone; the next writer clears leftovers."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    (tmp_path / f".writing-{name(200)}-7-0123abcd").mkdir()
    assert CheckpointStore(tmp_path).newest()[0].name == name(100)
    assert len(list(tmp_path.iterdir())) == 2
    save(store, 200)
    assert sorted(p.name for p in tmp_path.iterdir()) == [name(100), name(200)]


WRITE_FOREVER = """
import sys
from pathlib import Path
from stoker.store import CheckpointStore
from tests.store.builders import save
store, samples = CheckpointStore(Path(sys.argv[1]), keep_last=1), int(sys.argv[2])
while True:
    samples += 100
    print("writing", samples, flush=True)
    save(store, samples)
    print("written", samples, flush=True)
    store.mark_best(f"{samples:012d}")
"""


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    """SIGKILL, eight times, each going on from what the one before left: what was reported written is never lost."""
    newest = 0
    root = str(Path(__file__).parents[2])
    for num_lines in (1, 2, 3, 4, 5, 8, 13, 21):
        code = f"import sys; sys.path.insert(0, {root!r})\n{WRITE_FOREVER}"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(newest)], stdout=subprocess.PIPE, text=True
        ) as child:
            lines = [child.stdout.readline() for _ in range(num_lines)]
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.readlines()
        assert child.returncode == -signal.SIGKILL
        reported = max([int(line.split()[1]) for line in lines if line.startswith("written")], default=newest)
        found = newest_samples(tmp_path)
        if reported:
            assert found is not None
            assert found >= reported
        best = CheckpointStore(tmp_path).best()
        assert best is None or best[1].position.samples <= found
        newest = found or 0
    assert newest > 0


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    """Position, cursor, identity, digests: what is read is what was written, or the checkpoint counts as damaged."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    path = save(store, 28_740) / "manifest.json"
    whole = path.read_bytes()
    original = manifest_from(whole)
    accepted = []
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = manifest_from(bytes(damaged))
        except ValueError:
            continue
        if found != original:
            accepted.append((place, bytes(damaged)))
    assert accepted == []
    path.write_bytes(whole.replace(b'"samples": 28740', b'"samples": 68740'))
    assert store.newest()[0].name == name(100)
    assert "not as it was written" in store.problems[0]


@pytest.mark.parametrize("changes", [{"cursor": -5}, {"epoch": 10**30}, {"updates": -1}, {"samples": 2**63}])
def test_a_position_out_of_its_bounds_is_no_checkpoint(tmp_path: Path, changes: dict[str, int]) -> None:
    """It is refused before its checksum is computed."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    path = save(store, 200)
    document = json.loads((path / "manifest.json").read_text())
    document["position"] |= changes
    (path / "manifest.json").write_text(json.dumps(document))
    assert store.newest()[0].name == name(100)
    assert f"position.{next(iter(changes))} must be from 0" in store.problems[0]


def test_a_manifest_without_a_checksum_is_damaged(tmp_path: Path) -> None:
    """The field may be left out of no manifest that is read."""
    store = CheckpointStore(tmp_path)
    path = save(store, 100) / "manifest.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    path.write_text(json.dumps(document))
    with pytest.raises(BadRun, match="it is not as it was written"):
        store.newest()


def test_a_checkpoint_of_another_job_is_passed_over(tmp_path: Path) -> None:
    """Its manifest names the job; a run takes only checkpoints of its own, and a copied one at another name is none."""
    store = CheckpointStore(tmp_path, spec_digest="s")
    save(store, 100)
    foreign = save(store, 200) / "manifest.json"
    manifest = dataclasses.replace(manifest_from(foreign.read_bytes()), spec_digest="0" * 64)
    foreign.write_text(dumps(manifest.with_checksum()))
    shutil.copytree(tmp_path / name(100), tmp_path / name(300))
    assert store.newest()[0].name == name(100)
    assert "of the position 100 samples" in store.problems[0]
    assert "of another job (000000000000…, this run is s…)" in store.problems[1]


def test_a_deep_manifest_is_damaged_and_not_fatal(tmp_path: Path) -> None:
    """Nesting that Python's parser gives up on, and nesting that it reads and others would not walk through."""
    store = CheckpointStore(tmp_path)
    save(store, 100)
    for samples, text in ((200, "[" * 100_000), (300, "[" * 500 + "]" * 500)):
        (save(store, samples) / "manifest.json").write_text(text)
    assert store.newest()[0].name == name(100)
    assert all("200 deep" in problem for problem in store.problems)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/../../b", ""])
def test_a_manifest_names_files_of_its_own_directory_only(tmp_path: Path, file: str) -> None:
    """A checkpoint from elsewhere cannot have another file read in its name."""
    digest = FileDigest(name=file, num_bytes=1, sha256="0" * 64)
    with pytest.raises(ValueError, match="is no file of it"):
        manifest_at(100)((digest,))
