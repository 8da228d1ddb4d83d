from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.records import (
    Achieved,
    ArtifactSource,
    Ceilings,
    CheckpointManifest,
    Dropped,
    DynamicDim,
    Event,
    FileDigest,
    InputColumn,
    Kernel,
    Measurement,
    Occurrence,
    Operation,
    Plan,
    Position,
    Profile,
    Proof,
    Run,
    Segment,
    Share,
    Storage,
    StoredPiece,
    StoredTensor,
    TensorShape,
    TensorSpec,
    Tolerance,
    Widened,
    digest,
    dumps,
    from_json,
    loads,
    to_json,
)
from stoker.records.codec import parsed
from stoker.records.progress import read_event
from tests.cases import each_of
from tests.records.strategies import FINITE, JSON_VALUES, RECORDS, TEXT, record_of

PLAN = Plan(device="cpu", micro_batch=64)
PARTS = {
    Achieved,
    ArtifactSource,
    Dropped,
    DynamicDim,
    InputColumn,
    Kernel,
    Occurrence,
    Operation,
    Proof,
    Segment,
    Share,
    Storage,
    StoredPiece,
    StoredTensor,
    TensorShape,
    TensorSpec,
    Tolerance,
    Widened,
}
"""Records that only ever stand inside others, by the thousand: they carry no schema, that of the whole is theirs."""
every_record = each_of(RECORDS, name=lambda record: record.__name__)
RUN = Run(name="mlp", status="finished", created_at="now", spec_digest="d", total_samples=10)


def changed(original: object, /, **fields: Any) -> str:
    """The JSON text of a record with fields replaced, added or, given as `...`, taken out."""
    document = to_json(original) | fields
    return json.dumps({key: value for key, value in document.items() if value is not ...})


def manifest() -> CheckpointManifest:
    """One that holds two files."""
    files = tuple(FileDigest(name=name, num_bytes=3, sha256="0" * 64) for name in ("a", "b"))
    return CheckpointManifest(
        spec_digest="s", position=Position(), stoker_version="0", torch_version="2", files=files, skeleton={}
    )


@every_record
@settings(max_examples=6)
@given(st.data())
def test_every_record_survives_writing_and_reading(record: type, data: st.DataObject) -> None:
    """What is read is what was written, field by field, and so is its digest."""
    original = data.draw(record_of(record))
    again = loads(dumps(original), record)
    assert again == original
    assert digest(again) == digest(original)


@every_record
def test_every_record_states_what_it_is(record: type) -> None:
    """Records are frozen and take keywords only, so that a new field cannot be mistaken for an old one."""
    assert record in PARTS or record.schema >= 1
    assert record.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(record))


@each_of(sorted(PARTS, key=lambda record: record.__name__), name=lambda record: record.__name__)
def test_parts_of_records_are_nothing_but_their_fields(record: type) -> None:
    """A part repeats neither its name nor a version in the file, and is no document of its own."""
    assert not hasattr(record, "schema")

    @settings(max_examples=5)
    @given(record_of(record))
    def holds(part: object) -> None:
        assert set(to_json(part)) == {field.name for field in dataclasses.fields(record)}

    holds()


@pytest.mark.parametrize(
    ("record", "fields", "problem"),
    [
        (PLAN, {"micro_bach": 3}, "Plan: unknown field 'micro_bach'"),
        (PLAN, {"device": ...}, "Plan: field 'device' is missing"),
        (PLAN, {"micro_batch": "64"}, 'Plan.micro_batch: wanted .*int.*, found "64"'),
        (PLAN, {"micro_batch": 64.0}, "Plan.micro_batch: wanted .*int.*, found 64.0"),
        (PLAN, {"micro_batch": True}, "Plan.micro_batch: wanted .*int.*, found true"),
        (PLAN, {"precision": "fp4"}, "Plan.precision: wanted one of .*'bf16'.*, found \"fp4\""),
        (PLAN, {"checkpoint_every_s": "soon"}, 'Plan.checkpoint_every_s: wanted a number, found "soon"'),
        (PLAN, {"checkpoint_every_s": 10**400}, "Plan.checkpoint_every_s: wanted a number that a float can hold"),
        (PLAN, {"micro_batch": 0}, "Plan: micro_batch must be at least 1, got 0"),
        (PLAN, {"checkpointed_blocks": -1}, "Plan: checkpointed_blocks must be at least 0, got -1"),
        (PLAN, {"malloc": "huge"}, "Plan.malloc: wanted one of .*'mapped'.*, found \"huge\""),
        (RUN, {"metrics": {"test/accuracy": None}}, "Run.metrics.test/accuracy: wanted a number, found null"),
        (RUN, {"failure": 3}, "Run.failure: wanted .*str.*, found 3"),
        (RUN, {"status": None}, "Run.status: wanted one of"),
        (manifest(), {"position": []}, r"CheckpointManifest.position: wanted an object \(Position\), found \[\]"),
        (manifest(), {"files": {}}, "CheckpointManifest.files: wanted"),
        (
            manifest(),
            {"files": [{"record": "FileDigest", "schema": 1, "name": "a", "num_bytes": 3, "sha256": 1}]},
            r"CheckpointManifest.files\[0\].sha256: wanted",
        ),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(record: object, fields: dict[str, Any], problem: str) -> None:
    """An unknown, missing or wrongly typed field is refused, and the error says where in the document it is."""
    with pytest.raises(ValueError, match=problem):
        loads(changed(record, **fields), type(record))


def test_a_long_value_is_shown_in_part() -> None:
    """The error stays readable whatever was found."""
    with pytest.raises(ValueError, match=r"found \"x{70,}\.\.\.$"):
        loads(changed(PLAN, micro_batch="x" * 10_000), Plan)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '"Plan"', "\x00", b"\xff\xfe\xfd"])
def test_what_is_no_record_is_refused(text: str | bytes) -> None:
    """Text that is no JSON, or JSON that is no object, is a ValueError, never another exception."""
    with pytest.raises(ValueError, match=r"."):
        loads(text, Plan)


def test_another_record_is_refused() -> None:
    """A document says which record it is; another one is not read, even if the fields would fit."""
    with pytest.raises(ValueError, match="this is a 'Plan' record, wanted 'Position'"):
        loads(dumps(PLAN), Position)
    with pytest.raises(ValueError, match="this is a None record"):
        loads(changed(PLAN, record=...), Plan)


def test_another_schema_version_is_refused() -> None:
    """A document of a newer Stoker is not half understood."""
    with pytest.raises(ValueError, match="Plan: schema version 2, this Stoker reads version 1"):
        loads(changed(PLAN, schema=2), Plan)
    with pytest.raises(ValueError, match="Plan: schema version None"):
        loads(changed(PLAN, schema=...), Plan)


def test_a_field_that_has_a_default_may_be_missing() -> None:
    """A plan that is written by hand need not state every setting."""
    assert loads(changed(PLAN, precision=..., threads=...), Plan) == PLAN


@pytest.mark.parametrize(("value", "written"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_floats_that_json_lacks_are_written_as_words(value: float, written: str) -> None:
    """Infinities and nan are strings in the file, which any JSON reader takes, and floats again after reading."""
    run = dataclasses.replace(RUN, metrics={"loss": value}, wall_s=value)
    text = dumps(run)
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"loss": written}
    again = loads(text, Run)
    assert (again.wall_s, again.metrics["loss"]) == pytest.approx((value, value), nan_ok=True)


def test_a_whole_number_is_a_float_where_a_float_is_wanted() -> None:
    """JSON writers that drop `.0` do no harm."""
    again = loads(changed(PLAN, checkpoint_every_s=30), Plan)
    assert isinstance(again.checkpoint_every_s, float)


def test_what_has_no_place_in_a_record_is_refused_when_written() -> None:
    """An object that JSON cannot hold fails at once, with its type, not as a mute string in a file."""
    with pytest.raises(TypeError, match="object has no place in a record"):
        dumps(Event(kind="warned", at=0.0, fields={"what": object()}))


def _shuffled(value: Any, order: random.Random) -> Any:
    """The same content with the keys of every dict in another order."""
    if isinstance(value, dict):
        pairs = [(key, _shuffled(item, order)) for key, item in value.items()]
        order.shuffle(pairs)
        return dict(pairs)
    return [_shuffled(item, order) for item in value] if isinstance(value, list) else value


@given(JSON_VALUES, st.randoms(use_true_random=False))
def test_a_digest_does_not_depend_on_the_order_of_keys(value: Any, order: random.Random) -> None:
    """Equal content has one digest, however its dicts were filled."""
    assert digest(_shuffled(value, order)) == digest(value)


@given(JSON_VALUES, JSON_VALUES)
def test_other_content_has_another_digest(one: Any, other: Any) -> None:
    """Two values share a digest only if they are written in the same way, but for the order of keys and 5.0 being 5."""
    texts = [json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True) for value in (one, other)]
    assert (digest(one) == digest(other)) == (texts[0] == texts[1])


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


@given(st.integers(-(2**53), 2**53))
def test_a_whole_number_has_one_digest_however_it_is_held(value: int) -> None:
    """`epochs=5` by default and `--set epochs=5`, read as a float, are one setting."""
    assert digest({"epochs": value}) == digest({"epochs": float(value)})


@given(FINITE.filter(lambda value: not value.is_integer()))
def test_a_fraction_keeps_its_digits_in_a_digest(value: float) -> None:
    """Neighbouring floats are different content."""
    assert digest(value) != digest(math.nextafter(value, math.inf))


@given(TEXT)
def test_a_digest_is_that_of_the_content_alone(text: str) -> None:
    """A tuple and a list, and a record and its JSON, are one content."""
    assert digest((text, 1)) == digest([text, 1])
    plan = dataclasses.replace(PLAN, device=text)
    assert digest(plan) == digest(to_json(plan))


def test_a_digest_can_be_had_of_any_text() -> None:
    """Half a surrogate pair, as in a file name that is no UTF-8, does not stop it."""
    assert digest("\udc80") != digest("\udc81")


@pytest.mark.parametrize("record", [Profile, Ceilings, Measurement], ids=lambda record: record.__name__)
def test_reading_takes_plain_json_values_as_well_as_text(record: type) -> None:
    """`from_json` reads what `to_json` gives."""

    @settings(max_examples=5)
    @given(record_of(record))
    def holds(original: object) -> None:
        assert from_json(to_json(original), record) == original

    holds()


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 300 + "]" * 300, b'{"a":' * 5000 + b"1" + b"}" * 5000])
def test_a_document_that_is_too_deep_is_refused_like_any_other_damage(text: str | bytes) -> None:
    """A ValueError, which every reader of a record expects, and no RecursionError."""
    with pytest.raises(ValueError, match="more than 200 deep"):
        loads(text, Event)


def test_a_deep_document_is_refused_where_the_limit_of_recursion_was_raised() -> None:
    """As a package that the pool imports does: Python's own reader would end the process by a signal."""
    program = (
        "import sys; from stoker.records.codec import parsed; sys.setrecursionlimit(10**6)\n"
        "try: parsed('[' * 150_000)\n"
        "except ValueError as problem: print(problem)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, "more than 200 deep" in ended.stdout) == (0, True), ended.stderr


@pytest.mark.parametrize("text", ['{"10": [1%s, 22]}' % ("0" * 5000), b"-1" + b"0" * 5000])
def test_a_whole_number_of_too_many_digits_is_refused_in_words(text: str | bytes) -> None:
    """Not in those of Python, which speak of a setting of the interpreter; digits within texts are no numbers."""
    with pytest.raises(ValueError, match=r"^A whole number has 5,001 digits, and at most 4,300 are read$"):
        parsed(text)
    assert parsed(json.dumps({"9" * 5000: "9" * 5000})) == {"9" * 5000: "9" * 5000}


def test_brackets_in_texts_are_not_levels() -> None:
    """Of a document only lists and objects count, whatever its strings and keys hold, with quotes and backslashes."""
    value = {'[[{"\\': ["[" * 500, '\\"{' * 500, {"a": [1] * 300}]}
    assert parsed(json.dumps(value)) == parsed(json.dumps(value).encode()) == value


def test_file_names_that_are_not_utf8_can_be_written() -> None:
    """Bytes that Python holds as lone surrogates are shown as such; keys and values; what is read digests the same."""
    event = Event(kind="noted", at=0.0, fields={"bad\udcff": ["caf\u00e9 \udc80", "\ud800"]})
    text = dumps(event)
    assert text.encode().decode() == text
    assert loads(text, Event).fields == {"bad\\xff": ["caf\u00e9 \\x80", "\\ud800"]}
    assert digest(loads(text, Event)) == digest(event)


ODD_VALUES = [-1, 1e300, 10**400, "nan", "x", [1], {"x": {}}, ["a", None], True]


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", value) for value in ODD_VALUES if value is not True]
    + [("allocated_bytes", -1)]
    + [("loss", value) for value in (10**400, "x", [1], {"x": 1})]
    + [("message", value) for value in (5, [1], {})]
    + [("metrics", value) for value in (5, [1], {"a": {"b": 1}}, {"a": "high"}, {"a": 10**400})]
    + [("lrs", value) for value in (5, ["a"], [None], {"a": 1})],
)
def test_an_event_of_odd_content_is_refused_with_the_field(name: str, value: object) -> None:
    """What readers count with is a count, a number, a text or numbers by name."""
    line = json.dumps(to_json(Event(kind="progress", at=1.0, fields={name: value})))
    with pytest.raises(ValueError, match=rf"Event\.fields\.{name}: wanted "):
        read_event(line)


@pytest.mark.parametrize("at", [1e300, "nan", "inf", -1.0])
def test_an_event_is_at_a_time_that_has_a_date(at: object) -> None:
    """A reader may show it as one."""
    with pytest.raises(ValueError, match=r"Event\.at"):
        read_event(changed(Event(kind="warned", at=1.0), at=at))


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "x"])
def test_a_word_for_missing_values_stays_a_word(word: str) -> None:
    """The word in place of a category's missing values may be `nan`, which is also how JSON holds that number."""
    column = InputColumn(name="country", words=(word,), missing_word=word)
    assert loads(dumps(column), InputColumn).number_of(None) == 0


def test_an_unknown_word_does_not_bring_long_words_into_its_error() -> None:
    """A bad row, or an answer of a server, is short however long the words of training are."""
    column = InputColumn(name="text", words=tuple(f"{letter}" * 100_000 for letter in "abc"))
    with pytest.raises(ValueError, match="a word that training did not have") as caught:
        column.number_of("d" * 100_000)
    assert len(str(caught.value)) < 300
