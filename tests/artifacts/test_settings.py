"""How a model is served, on disk."""

from pathlib import Path

import pytest

from stoker.artifacts import SETTINGS, read_settings, write_settings
from stoker.errors import BadArtifact
from stoker.records import ServiceSettings


def test_settings_come_back_and_are_the_defaults_where_there_are_none(tmp_path: Path) -> None:
    """What `bench-serve` writes is what a server reads."""
    assert read_settings(tmp_path) == ServiceSettings()
    wanted = ServiceSettings(instances=2, threads=1, buckets=(16, 32), basis="measured")
    write_settings(tmp_path, wanted)
    assert read_settings(tmp_path) == wanted


def test_damaged_settings_name_their_file(tmp_path: Path) -> None:
    """A number where words should be is reported with its field."""
    (tmp_path / SETTINGS).write_text('{"record": "ServiceSettings", "schema": 1, "instances": "two"}')
    with pytest.raises(BadArtifact, match=r"service.json cannot be read: ServiceSettings.instances"):
        read_settings(tmp_path)


def test_settings_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    """A model that is not there has no settings."""
    with pytest.raises(BadArtifact, match=r"service.json"):
        write_settings(tmp_path / "nowhere", ServiceSettings())


def test_what_a_person_writes_needs_no_record_and_no_schema(tmp_path: Path) -> None:
    """As docs/serving.md has it."""
    (tmp_path / SETTINGS).write_text('{"versions": [1]}')
    assert read_settings(tmp_path) == ServiceSettings(versions=(1,))
    (tmp_path / SETTINGS).write_text('{"record": "ServiceSettings", "schema": 2}')
    with pytest.raises(BadArtifact, match="schema version 2"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "cannot be read"),
        ("[]", "an object"),
        ("{}" + " " * 2**20, "more than 1,048,576 bytes"),
        ('{"max_batch_rows": 1000000000}', "max_batch_rows must be from 1 to 65,536, got 1,000,000,000"),
        ('{"threads": 100000}', "threads must be from 1 to 1,024"),
        ('{"instances": 100000}', "instances must be from 1 to 1,024"),
        ('{"max_delay_s": 1e300}', "max_delay_s must be from 0 to 3600"),
        ('{"deadline_s": 1e300}', "at most 86400"),
        ('{"buckets": [1000000000000]}', "from 1 to 999,999,999"),
        (f'{{"versions": {list(range(1, 2000))}}}', "1,999 numbers, at most 1000"),
    ],
)
def test_settings_that_no_server_can_follow_are_refused(text: str, says: str, tmp_path: Path) -> None:
    """Deep, large, and numbers that would fill the memory or start threads without end."""
    (tmp_path / SETTINGS).write_text(text)
    with pytest.raises(BadArtifact, match=r"service\.json cannot be read") as caught:
        read_settings(tmp_path)
    assert says in caught.value.message
