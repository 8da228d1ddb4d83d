from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from stoker.errors import BadRun, RunFailed
from stoker.predicting.prediction_output import JOB, JOB_KEY, PART_KEY, OutputDirectory, encode, job_digest, next_free
from stoker.records.prediction import BadRow, PredictionJob, PredictionPart
from stoker.testing import FaultyDisk

BAD = BadRow(source="in.csv", row=3, column="x", reason="is null")


def _job(parts: int = 2) -> PredictionJob:
    cut = tuple(PredictionPart(source=0, first_row=number, num_rows=1) for number in range(parts))
    return PredictionJob(
        model="m",
        version=1,
        model_digest="0",
        columns={"x": ("x",)},
        batch_rows=1,
        part_rows=1,
        threads=1,
        sources=(),
        parts=cut,
        made_on="a test",
        made_at="",
    )


def _table(job: PredictionJob, number: int, rows: int = 1) -> bytes:
    import pyarrow as pa

    return encode(pa.table({"y": [number] * rows}), {JOB_KEY: job_digest(job), PART_KEY: str(number)})


def _begun(path: Path) -> tuple[OutputDirectory, PredictionJob]:
    out, job = OutputDirectory(path), _job()
    out.begin(job)
    out.tidy()
    return out, job


def test_a_job_is_read_back(tmp_path: Path) -> None:
    """What a job was begun with is there for its continuation."""
    out, job = _begun(tmp_path / "out")
    assert out.read_job() == job
    assert OutputDirectory(tmp_path / "none").read_job() is None


def test_only_whole_parts_of_this_job_are_done(tmp_path: Path) -> None:
    """A part that is cut off, of another job or another number is computed again."""
    out, job = _begun(tmp_path)
    out.write_part(0, _table(job, 0), [])
    assert out.done_parts(job) == [0]
    for content in (_table(job, 1)[:-5], _table(_job(3), 1), _table(job, 0)):
        (out.predictions / "part-00001.parquet").write_bytes(content)
        assert out.done_parts(job) == [0]


def test_a_part_whose_bad_rows_are_gone_is_not_done(tmp_path: Path) -> None:
    """Each row has an answer or a reason: where the summary was taken away, bad rows are found again, not lost."""
    out, job = _begun(tmp_path)
    out.write_part(0, _table(job, 0, rows=0), [BAD])
    out.write_part(1, _table(job, 1), [])
    assert out.done_parts(job) == [0, 1]
    (out.path / "bad" / "part-00000.jsonl").unlink()
    assert out.done_parts(job) == [1]


def test_bad_rows_of_an_attempt_that_was_cut_off_do_not_stay(tmp_path: Path) -> None:
    """A row is answered or bad, never both: an engine that had no memory for it may have it now."""
    out, job = _begun(tmp_path)
    out.write_part(0, _table(job, 0, rows=0), [BAD])
    out.write_part(0, _table(job, 0), [])
    assert (out.done_parts(job), out.num_bad([0])) == ([0], 0)


def test_bad_rows_are_merged_in_the_order_of_the_parts(tmp_path: Path) -> None:
    """Whichever part was done first; they are counted before and gone from single files after."""
    out, job = _begun(tmp_path)
    for number in (1, 0):
        out.write_part(number, _table(job, number), [BadRow(source="a", row=number, column="", reason="is null")] * 2)
    assert out.num_bad([0, 1]) == 4
    assert out.common_reasons([0, 1]) == [("is null", 4)]
    out.merge_bad_rows(2)
    lines = [json.loads(line) for line in out.bad_rows.read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 0, 1, 1]


def test_text_of_a_bad_row_that_is_no_utf8_is_kept(tmp_path: Path) -> None:
    """A reason may quote what stood in the file, whatever it was, and is read again to say why a job ended."""
    out, job = _begun(tmp_path)
    out.write_part(0, _table(job, 0), [BadRow(source="a\ud83d", row=0, column="x", reason="is '\udcff'")])
    assert out.num_bad([0]) == 1
    assert out.common_reasons([0]) == [("x is '\\xff'", 1)]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_an_output_that_cannot_be_written_is_told(tmp_path: Path, code: int) -> None:
    """Before anything is computed, with what to do that fits this command."""
    with FaultyDisk.refusing(tmp_path, code), pytest.raises(BadRun, match="Cannot write") as caught:
        OutputDirectory(tmp_path / "out").begin(_job())
    assert "-o DIR" in str(caught.value)
    assert "--run-dir" not in str(caught.value)


def test_a_full_disk_leaves_no_part_that_is_not_whole(tmp_path: Path) -> None:
    """A part that does not fit is not there; once there is room, it is written."""
    out, job = _begun(tmp_path)
    with FaultyDisk.full(tmp_path, after_bytes=100) as disk:
        with pytest.raises(RunFailed, match="the disk is full"):
            out.write_part(0, _table(job, 0, rows=0), [BAD])
        assert out.done_parts(job) == []
        disk.room_bytes = None
        out.write_part(0, _table(job, 0, rows=0), [BAD])
    assert out.done_parts(job) == [0]
    assert out.num_bad([0]) == 1


def test_a_directory_with_other_things_is_not_fresh(tmp_path: Path) -> None:
    """Neither a folder of someone's files nor a job that was begun is written over; an empty one may be used."""
    taken = tmp_path / "taken"
    taken.mkdir()
    assert OutputDirectory(taken).is_fresh()
    (taken / "letter.txt").touch()
    assert not OutputDirectory(taken).is_fresh()
    assert next_free(taken) == tmp_path / "taken-2"
    _begun(tmp_path / "taken-2")
    assert next_free(taken) == tmp_path / "taken-3"


def test_a_job_of_another_version_is_refused(tmp_path: Path) -> None:
    """A record that cannot be read is not written over."""
    (tmp_path / JOB).write_text("{}")
    with pytest.raises(BadRun, match="cannot be read"):
        OutputDirectory(tmp_path).read_job()
