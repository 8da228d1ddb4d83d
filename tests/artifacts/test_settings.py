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
    """A number where words should be is told with its field."""
    (tmp_path / SETTINGS).write_text('{"record": "ServiceSettings", "schema": 1, "instances": "two"}')
    with pytest.raises(BadArtifact, match=r"service.json cannot be read: ServiceSettings.instances"):
        read_settings(tmp_path)


def test_settings_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    """A model that is not there has no settings."""
    with pytest.raises(BadArtifact, match=r"service.json"):
        write_settings(tmp_path / "nowhere", ServiceSettings())
