"""The examples of docs/data.md, each trained for an epoch on files made here."""

from __future__ import annotations

from pathlib import Path

import pytest

import stoker
from stoker.jobs import load_job
from stoker.records import Plan
from tests.data.files.making import example_files, image_files, shard_files
from tests.flow.builders import Heard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _customers(root: Path) -> dict[str, str]:
    """A table with a few ages missing."""
    rows = [
        f"{'' if at % 9 == 4 else 20 + at},{1000 * at},{('Bern', 'Rom')[at % 2]},{('no', 'yes')[at % 3 > 0]}"
        for at in range(40)
    ]
    (root / "customers.csv").write_text("\n".join(["age,income,city,bought", *rows]) + "\n")
    return {"path": str(root / "customers.csv")}


def _records(root: Path) -> dict[str, str]:
    example_files(root)
    return {"shards": str(root / "*.tfrecord"), "size": "8"}


SETTINGS = {
    "data_images": lambda root: {"path": str(image_files(root / "pets")), "size": "8"},
    "data_table": _customers,
    "data_shards": lambda root: {"shards": shard_files(root), "size": "8"},
    "data_shards, records": _records,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    """From its file, as the command line does it."""
    job, entry = load_job(EXAMPLES / f"{name.partition(',')[0]}.py", SETTINGS[name](tmp_path) | {"epochs": "1"})
    plan, heard = Plan(device="cpu", micro_batch=job.batch), Heard()
    run = stoker.train(job, entry=entry, run_dir=tmp_path / "run", plan=plan, sink=heard)
    assert run.status == "finished"
    assert 0 <= heard.of("evaluated")[-1]["metrics"]["accuracy"] <= 1
