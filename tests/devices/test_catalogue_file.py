from __future__ import annotations

import copy
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from stoker.devices.catalogue import builtin_catalogue, catalogue, load_catalogue, read_catalogue

DOCUMENT = json.loads(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))


def test_every_source_is_used():
    """A document that supports no figure is a leftover."""
    used = {cell.source.title for entry in builtin_catalogue().entries for cell in entry.cells.values()}
    assert used == {source["title"] for source in DOCUMENT["sources"].values()}


SLIPS = [
    (lambda row: row["cells"].pop("bandwidth_gb_per_s"), r"'h100': column 'bandwidth_gb_per_s' is missing"),
    (lambda row: row["cells"].pop("multiprocessors"), r"device 'h100': column 'multiprocessors' is missing"),
    (
        lambda row: row["cells"].update(memory_gb=[80, "driver", "2026-01-01"]),
        r"'memory_gb'.*Did you mean 'memory_gib'",
    ),
    (lambda row: row["cells"]["memory_gib"].__setitem__(0, 80 * 2**30), r"'h100', column 'memory_gib'.*1 to 4096 GiB"),
    (lambda row: row["cells"]["memory_gib"].__setitem__(0, "80"), r"'memory_gib'.*found '80'"),
    (lambda row: row["cells"]["memory_gib"].__setitem__(0, True), r"'memory_gib'.*found True"),
    (lambda row: row["cells"]["power_w"].__setitem__(1, "hearsay"), r"'power_w': no such source 'hearsay'"),
    (lambda row: row["cells"]["power_w"].__setitem__(1, ["hearsay"]), r"'power_w': no such source \['hearsay'\]"),
    (lambda row: row["cells"]["power_w"].__setitem__(2, "last May"), r"'power_w': wanted a date.*'last May'"),
    (lambda row: row["cells"]["power_w"].__setitem__(2, 2026), r"'power_w': wanted a date"),
    (lambda row: row["cells"].update(power_w=700), r"'power_w': wanted \[value, source, date\]"),
    (lambda row: row.update(cells=[]), r"'h100': wanted `cells`"),
    (lambda row: row.update(kind="gpu"), r"'h100': no such kind 'gpu'.*cuda"),
    (lambda row: row.update(name="H 100"), r"named 'H 100'"),
    (lambda row: row.update(aliases="hopper"), r"'h100': wanted `aliases` as a list"),
    (lambda row: row.update(aliases=["l4"]), r"'l4' is a name and an alias"),
]


def slipped(slip) -> dict:
    """The built-in document with a slip in the row of the H100."""
    document = copy.deepcopy(DOCUMENT)
    slip(next(row for row in document["devices"] if row["name"] == "h100"))
    return document


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        *SLIPS,
        (lambda row: row.update(name="l4"), r"'l4' stands for two devices"),
        (lambda row: row.update(driver_names=["NVIDIA L4"]), r"'NVIDIA L4' stands for two devices"),
    ],
)
def test_a_bad_row_is_named(slip, said):
    """The error names the row, the column, the expected and the found value."""
    with pytest.raises(ValueError, match=said):
        load_catalogue(json.dumps(slipped(slip)))


@pytest.mark.parametrize(("slip", "said"), SLIPS)
def test_a_bad_row_of_a_user_does_no_harm(tmp_path, slip, said):
    """It is named with its file; the built-in device of its name, and the file's other rows, are used."""
    bad = next(row for row in slipped(slip)["devices"] if row["name"] in ("h100", "H 100"))
    path = tmp_path / "devices.json"
    path.write_text(json.dumps({"devices": [bad]}))
    known = read_catalogue(path, builtin_catalogue())
    (problem,) = known.problems
    assert re.search(said, problem)
    assert str(path) in problem
    assert known.find("h100") == builtin_catalogue().find("h100")


def test_good_rows_beside_a_bad_one_are_used(tmp_path):
    """One slip costs one row."""
    row = next(row for row in DOCUMENT["devices"] if row["name"] == "l4")
    clash = {**row, "name": "x1", "aliases": ["h100"], "driver_names": []}
    path = tmp_path / "devices.json"
    path.write_text(json.dumps({"devices": [{"name": "x"}, clash, {**row, "title": "My L4"}]}))
    known = read_catalogue(path, builtin_catalogue())
    assert len(known.problems) == 2
    assert "device 'x1': 'h100' is a name and an alias" in known.problems[1]
    assert known.find("l4")[0].title == "My L4"


def test_a_user_adds_and_replaces_devices(tmp_path):
    """A new row with a source of its own, and one that takes the place of a built-in device."""
    row = copy.deepcopy(next(one for one in DOCUMENT["devices"] if one["name"] == "l4"))
    new = {**row, "name": "l5", "title": "NVIDIA L5", "driver_names": ["NVIDIA L5"]}
    new["cells"] = {**row["cells"], "memory_gib": [48, "mine", "2026-12-01"]}
    old = {**row, "title": "My L4"}
    path = tmp_path / "devices.json"
    path.write_text(json.dumps({"sources": {"mine": {"title": "I looked", "publisher": "me"}}, "devices": [new, old]}))
    known = read_catalogue(path, builtin_catalogue())
    assert known.problems == ()
    assert known.find("l5")[0].cells["memory_gib"].source.title == "I looked"
    assert known.find("l4")[0].title == "My L4"
    assert len(known.entries) == len(builtin_catalogue().entries) + 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "wanted an object"),
        ('{"devices": 3}', "wanted `devices` as a list"),
        ('{"devices": [3]}', "a device is named '3'"),
        ('{"sources": {"a": {}}, "devices": []}', "sources"),
        ('{"sources": [], "devices": []}', "sources"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, said):
    """Whatever is in it, or if it is not there: it is reported, and the built-in catalogue is used."""
    path = tmp_path / "devices.json"
    if content is not None:
        path.write_text(content)
    known = read_catalogue(path, builtin_catalogue())
    assert known.entries == builtin_catalogue().entries
    assert len(known.problems) == 1
    assert str(path) in known.problems[0]
    assert said in known.problems[0]


def test_the_file_of_the_documentation_is_one(tmp_path):
    """The example of docs/devices.md adds a device without a word."""
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    (tmp_path / "devices.json").write_text(re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0])
    known = read_catalogue(tmp_path / "devices.json", builtin_catalogue())
    assert known.problems == ()
    assert known.find("x1")[0].dense_flops["bf16"] == 160e12


def test_a_byte_order_mark_is_no_slip(tmp_path):
    """Editors on Windows write one; prices are read with it too."""
    row = {**next(one for one in DOCUMENT["devices"] if one["name"] == "l4"), "title": "My L4"}
    (tmp_path / "devices.json").write_text(json.dumps({"devices": [row]}), encoding="utf-8-sig")
    known = read_catalogue(tmp_path / "devices.json", builtin_catalogue())
    assert known.problems == ()
    assert known.find("l4")[0].title == "My L4"


def test_the_users_file_is_found(tmp_path, monkeypatch):
    """`$STOKER_CATALOGUE` is read once, on top of what is built in."""
    row = {**next(one for one in DOCUMENT["devices"] if one["name"] == "l4"), "title": "My L4"}
    (tmp_path / "mine.json").write_text(json.dumps({"devices": [row]}))
    monkeypatch.setenv("STOKER_CATALOGUE", str(tmp_path / "mine.json"))
    read = catalogue.__wrapped__  # without its cache
    assert read().find("l4")[0].title == "My L4"
    monkeypatch.delenv("STOKER_CATALOGUE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read() == builtin_catalogue()
