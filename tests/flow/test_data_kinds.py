"""Each kind of files, killed and gone on with: the bits of a run never stopped; and a broken file in the middle."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of
from stoker.loading.samples import SampleSubset
from stoker.records import Event
from tests.data.files.making import COUNT, SOURCES
from tests.flow.builders import Heard, assert_equal_weights
from tests.flow.data_kinds import EPOCHS, job_of, plan_with, source_of


def _cases() -> list[tuple[str, int]]:
    """Each kind in the process itself, two of them by workers; without Hugging Face's library where it is missing."""
    has_theirs = importlib.util.find_spec("datasets") is not None
    kinds = [kind for kind in SOURCES if kind != "huggingface" or has_theirs]
    return [(kind, 0) for kind in kinds] + [("folder", 2), ("csv", 2)]


def _kill(root: Path, cases: list[tuple[str, int]]) -> None:
    """A killed run of every case below `root`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.flow.data_kinds", str(root), *(f"{kind}:{workers}" for kind, workers in cases)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # a minute on a busy machine
def test_a_killed_run_ends_at_the_bits_of_one_never_stopped(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """SIGKILL in the second epoch, then the same command: indexed data resume at any sample, whatever their kind.

    The one never stopped fetches in its own process; of tables it reads the CSV: workers and formats change no bit.
    """
    cases, whole = _cases(), dict[str, stoker.Run]()
    _kill(tmp_path, cases)
    for kind, num_workers in cases:
        with subtests.test(kind=kind, num_workers=num_workers):
            place, job, heard = (
                tmp_path / f"{kind}-{num_workers}" / "killed",
                job_of(source_of(kind, tmp_path)),
                Heard(),
            )
            assert not (place / "model.safetensors").exists()
            resumed = stoker.train(job, run_dir=place, plan=plan_with(num_workers), sink=heard)
            assert 0 < heard.of("resumed")[0]["samples"] < EPOCHS * round(COUNT * 0.9)
            assert heard.of("started")[0]["data"]["class"] == "indexed"
            like = "csv" if kind in {"parquet", "jsonl"} else kind
            if like not in whole:
                whole[like] = stoker.train(job, run_dir=tmp_path / like / "whole", plan=plan_with(0), sink=Heard())
            assert_equal_weights(resumed, whole[like])


def _last_of_an_epoch(job: stoker.Job) -> str:
    """The name of the sample that the first epoch takes last."""
    train = datasets_of(job).train
    assert isinstance(train, SampleSubset)
    last = train.order(job.seed).indices(0, len(train) - 1, len(train))
    return job.data.sample_id(int(train.indices[last[0]]))


def _job_anew(root: Path) -> stoker.Job:
    """The job of the folder of images, which is looked through again."""
    return job_of(stoker.data.image_folder(root / "folder" / "images", size=6, mean=0.5, std=0.25))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_that_breaks_in_the_middle_ends_a_run_and_a_whole_one_goes_on(
    num_workers: int, tmp_path: Path
) -> None:
    """The error names the file; once it is mended, the same command goes on to the bits of a run that met no fault."""
    job = job_of(source_of("folder", tmp_path))
    whole = stoker.train(job, run_dir=tmp_path / "whole", plan=plan_with(num_workers), sink=Heard())
    path = tmp_path / "folder" / "images" / _last_of_an_epoch(job)
    good = path.read_bytes()

    def break_it(event: Event) -> None:
        if event.kind == "started":
            path.write_bytes(good[:60])

    with pytest.raises(BadJob, match=rf"{path.name} cannot be read: .*\n.*stoker data check"):
        stoker.train(_job_anew(tmp_path), run_dir=tmp_path / "broken", plan=plan_with(num_workers), sink=break_it)
    path.write_bytes(good)
    heard = Heard()
    run = stoker.train(_job_anew(tmp_path), run_dir=tmp_path / "broken", plan=plan_with(num_workers), sink=heard)
    assert 0 < heard.of("resumed")[0]["samples"] <= 40
    assert_equal_weights(run, whole)


def test_a_source_holds_out_by_class_and_tells_how_it_was_split(tmp_path: Path) -> None:
    """`split` gives parts that a job takes, and the division is reported at the start."""
    train, valid, test = source_of("csv", tmp_path).split(valid=0.2, test=0.1)
    assert valid is not None
    assert test is not None
    assert train is not None
    job = stoker.Job(
        model=job_of(train).model,
        data=train,
        valid=valid,
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.05),
        batch=8,
        until=stoker.epochs(1),
    )
    heard = Heard()
    stoker.train(job, run_dir=tmp_path / "run", plan=plan_with(0), sink=heard)
    assert any("split with seed 0: train 33 (cat" in event["message"] for event in heard.of("noted"))
    assert heard.of("warned") == []
    assert heard.of("started")[0]["data"]["valid"] == len(valid)
