"""Where settings come from, and which count."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import BadArtifact, BadJob
from stoker.records import ServiceSettings, dumps
from stoker.serving.repository.model_settings import model_settings, overridden, parse_overrides, require_models


def test_the_last_word_counts_and_one_model_before_every_one() -> None:
    """`digits.NAME` beats `NAME` wherever it stands; names with dots are models."""
    words = parse_overrides(["digits.max_batch_rows=8", "max_batch_rows=4", "*.threads=2", "a.b.threads=3"])
    assert overridden(ServiceSettings(), words, "digits") == ServiceSettings(max_batch_rows=8, threads=2)
    assert overridden(ServiceSettings(), words, "other") == ServiceSettings(max_batch_rows=4, threads=2)
    assert overridden(ServiceSettings(), words, "a.b").threads == 3


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("buckets=16,32", "buckets", (16, 32)),
        ("versions=[1]", "versions", (1,)),
        ("max_delay_s=0.002", "max_delay_s", 0.002),
        ("deadline_s=null", "deadline_s", None),
    ],
)
def test_values_are_written_as_json_or_as_a_list(word: str, name: str, value: object) -> None:
    """Numbers, null, and lists with or without brackets."""
    assert getattr(overridden(ServiceSettings(deadline_s=1.0), parse_overrides([word]), "any"), name) == value


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("max_batch_rows", "MODEL.NAME=VALUE"),
        ("=3", "MODEL.NAME=VALUE"),
        ("digits.max_rows=3", "Did you mean 'max_queue_rows'|Known"),
        ("basis=guess", "no setting 'basis'"),
        ("max_batch_rows=many", "wanted"),
        ("max_batch_rows=0", "from 1 to 65,536"),
        ("max_delay_s=-1", "from 0"),
    ],
)
def test_what_is_no_setting_is_refused_at_once(word: str, says: str) -> None:
    """The word is named, and what would do."""
    with pytest.raises(BadJob, match=says) as caught:
        parse_overrides([word])
    assert "--set" in caught.value.message


def test_the_file_counts_unless_settings_are_given(tmp_path: Path) -> None:
    """`service.json`, else the defaults; given settings stand in for it; overrides go over either."""
    assert model_settings("digits", tmp_path) == ServiceSettings()
    (tmp_path / "service.json").write_text(dumps(ServiceSettings(instances=2)))
    assert model_settings("digits", tmp_path).instances == 2
    assert model_settings("digits", tmp_path, given=ServiceSettings(threads=5)).threads == 5
    words = parse_overrides(["instances=3"])
    assert model_settings("digits", tmp_path, overrides=words) == ServiceSettings(instances=3)


@pytest.mark.parametrize("content", ["{", "[]", '{"record": "ServiceSettings", "schema": 1, "max_rows": 3}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    """It is an error, not the defaults."""
    (tmp_path / "service.json").write_text(content)
    with pytest.raises(BadArtifact, match=r"service\.json cannot be read"):
        model_settings("digits", tmp_path)


def test_a_setting_for_a_model_that_is_not_there_is_refused() -> None:
    """It would change nothing, in silence; the nearest name is reported. Settings for every model are always of one."""
    overrides = parse_overrides(["digts.max_batch_rows=4", "max_delay_s=0"])
    with pytest.raises(BadJob, match="no model 'digts'") as refused:
        require_models(overrides, ("digits", "words"))
    assert "digits" in str(refused.value)
    require_models(overrides[1:], ("digits",))
    require_models(overrides, ())
