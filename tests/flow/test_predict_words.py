"""A model of a table with words: exported, it takes the words, with the numbers that they had in training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import stoker
from stoker.artifacts import read
from stoker.data.files.tables import Table
from stoker.engines import load
from stoker.errors import BadJob
from stoker.predicting.column_mapping import Input, misfit
from stoker.predicting.input_conversion import elements
from stoker.predicting.prediction_request import PredictOptions
from stoker.predicting.row_source import SourceColumn
from stoker.records import InputColumn
from tests.flow.builders import PLAN

CITIES = ("Bern", "Rom", "Zürich")
CUT = PredictOptions(batch_rows=8, part_rows=16, max_bad="50%")


class Customers(nn.Module):
    """A number and a city to the scores of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.city = nn.Embedding(3, 2)
        self.last = nn.Linear(3, 2)

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Features [B, 1] and cities [B, 1] to scores [B, 2]."""
        return self.last(torch.cat([features / 50, self.city(categories[:, 0])], dim=1))


def _write(path: Path, cities: tuple[str, ...] = CITIES) -> Table:
    lines = [f"{'' if row % 7 == 3 else 20 + row},{cities[row % 3]},{'yes' if row % 2 else 'no'}" for row in range(24)]
    path.write_text("\n".join(["age,city,bought", *lines, ""]))
    return stoker.data.csv(path, features=["age"], categories=["city"], target="bought", missing={"age": "mean"})


def _job(table: Table) -> stoker.Job:
    return stoker.Job(
        model=Customers,
        data=table,
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=8,
        until=stoker.epochs(1),
        name="customers",
    )


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A table of 24 rows, some of whose ages are missing."""
    return _write(tmp_path / "customers.csv")


@pytest.fixture
def model(table: Table, tmp_path: Path) -> Path:
    """What was trained on it, exported after its file has got other words."""
    run = stoker.train(_job(table), plan=dataclasses.replace(PLAN, micro_batch=8))
    Path(table.paths[0]).rename(tmp_path / "first.csv")
    changed = _write(tmp_path / "customers.csv", ("Basel", "Chur", "Genf"))
    stoker.export(run, tmp_path / "models" / "customers", job=_job(changed))
    return tmp_path / "models" / "customers"


def _expected(model: Path, table: Table) -> np.ndarray:
    """The engine's answers to the table's own numbers."""
    (engine,) = load(read(model), threads=1)
    batch = table.rows(np.arange(len(table)))
    answer = engine.run({"features": batch["features"].numpy(), "categories": batch["categories"].numpy()})
    engine.close()
    return np.asarray(answer["output"])


def test_the_table_of_training_is_answered_as_in_training(model: Path, table: Table, tmp_path: Path) -> None:
    """From CSV, Parquet and JSONL: words have the run's numbers, whatever the file holds by now, and means fill in."""
    expected = _expected(model, stoker.data.csv(tmp_path / "first.csv", like=table))
    rows = [{"age": None if row % 7 == 3 else 20 + row, "city": CITIES[row % 3]} for row in range(24)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "first.parquet")
    (tmp_path / "first.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for suffix in ("csv", "parquet", "jsonl"):
        summary = stoker.predict(model, [tmp_path / f"first.{suffix}"], tmp_path / suffix, CUT)
        found = pq.read_table(tmp_path / suffix / "predictions")
        assert summary.bad_rows == 0
        np.testing.assert_allclose(np.stack(found["output"].to_numpy()), expected, atol=1e-6)
        assert set(found["label"].to_pylist()) <= {"yes", "no"}


def test_an_unknown_word_makes_a_bad_row_that_names_it_and_those_known(model: Path, tmp_path: Path) -> None:
    """The other rows are answered; a column under another name is read by the same words."""
    (tmp_path / "new.csv").write_text("years,town\n30,Bern\n31,Oslo\n32,\n33,Rom\n")
    columns = ("features=years", "categories=town")
    options = PredictOptions(batch_rows=8, part_rows=16, max_bad="50%", columns=columns)
    assert stoker.predict(model, [tmp_path / "new.csv"], tmp_path / "out", options).bad_rows == 2
    bad = (tmp_path / "out" / "bad_rows.jsonl").read_text()
    assert '"column": "town"' in bad
    assert "is 'Oslo', a word that training did not have; known: 'Bern', 'Rom', 'Zürich'" in bad
    assert "is empty" in bad


def test_a_table_that_lacks_a_column_of_training_is_refused(model: Path, tmp_path: Path) -> None:
    """The column and the way to name another are in the error; a column of the input's name has numbers."""
    (tmp_path / "new.csv").write_text("age,town\n30,Bern\n")
    with pytest.raises(BadJob, match="has no column 'city', which the model was trained with") as caught:
        stoker.predict(model, [tmp_path / "new.csv"], tmp_path / "out", CUT)
    assert "Known: age, town. If it has another name: --map categories=" in str(caught.value.remedy)
    (tmp_path / "numbers.csv").write_text("age,categories\n30,2\n31,0\n")
    assert stoker.predict(model, [tmp_path / "numbers.csv"], tmp_path / "numbers", CUT).bad_rows == 0


def test_the_artifact_keeps_columns_words_and_what_stood_in_for_missing_values(model: Path, table: Table) -> None:
    """They are in the manifest, by input, in the order of its elements."""
    features, categories = read(model).manifest.inputs
    assert features.columns == (InputColumn(name="age", missing=table.table.record.means["age"]),)
    assert categories.columns == (InputColumn(name="city", words=CITIES),)


def test_a_word_is_looked_up_once_however_many_rows_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of millions of rows have few words; unknown ones are named in each row that has them."""
    asked: list[str | None] = []
    number_of = InputColumn.number_of
    monkeypatch.setattr(InputColumn, "number_of", lambda self, word: asked.append(word) or number_of(self, word))
    column = InputColumn(name="city", words=CITIES)
    spec = Input("categories", "INT64", (1,), None, columns=(column,))
    samples = elements([["Rom", "Oslo", None] * 100], ["city"], spec, allow_nan=False)
    assert asked == ["Rom", "Oslo", None]
    assert np.asarray(samples.values)[::3].tolist() == [[1]] * 100
    assert sorted(samples.bad) == [row for row in range(300) if row % 3]
    assert samples.bad[299] == "is empty"
    assert "Oslo" in samples.bad[298]


def test_a_column_without_text_is_no_category() -> None:
    """A map is refused before a row is read, as a list is."""
    spec = Input("categories", "INT64", (1,), None, columns=(InputColumn(name="city", words=CITIES),))
    for kind in (pa.map_(pa.string(), pa.int32()), pa.list_(pa.string()), pa.binary(), pa.struct([("a", pa.int8())])):
        assert "wanted words" in misfit(SourceColumn("city", kind), spec, is_element=True, is_word=True)
    for kind in (pa.string(), pa.int64(), pa.bool_(), pa.date32(), pa.dictionary(pa.int32(), pa.string())):
        assert not misfit(SourceColumn("city", kind), spec, is_element=True, is_word=True)


def test_missing_numbers_that_stay_nan_are_not_filled_in(tmp_path: Path) -> None:
    """`missing` as a number is kept as one, also a whole one; NaN stands for itself."""
    path = tmp_path / "customers.csv"
    path.write_text("age,tall,city\n1,2,Rom\n,,Rom\n3,4,Bern\n")
    table = stoker.data.csv(path, categories=["city"], missing={"age": 7, "tall": float("nan")})
    age, tall = table.input_columns["features"]
    assert (repr(age.missing), tall.missing) == ("7.0", None)


def test_more_words_than_a_manifest_holds_are_left_out_with_a_note(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model then takes numbers, as it says."""
    run = stoker.train(_job(table), plan=dataclasses.replace(PLAN, micro_batch=8))
    monkeypatch.setattr("stoker.exporting.export._MOST_BYTES_OF_WORDS", 100)
    manifest = stoker.export(run, tmp_path / "models" / "customers", job=_job(table)).manifest
    assert not any(spec.columns for spec in manifest.inputs)
    assert any("takes numbers of categories, and no words" in note for note in manifest.notes)
