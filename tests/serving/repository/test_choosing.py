"""Which versions are served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.serving.refusals import BadRequest, Unsupported
from stoker.serving.repository.discovery import asked_versions, versions_to_try


def test_newest_first_unless_some_are_asked_for() -> None:
    """Without a choice every version is a candidate, the newest first; with one, those that were chosen."""
    assert versions_to_try((1, 2, 10), ()) == (10, 2, 1)
    assert versions_to_try((1, 2, 10), (1, 2)) == (2, 1)
    assert versions_to_try((1,), (7,)) == (7,)
    assert versions_to_try((), ()) == ()


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ({"latest": {"num_versions": 2}}, (4, 3)),
        ({"all": {}}, (4, 3, 1)),
        ({"specific": {"versions": [1, 3]}}, (1, 3)),
        ({"specific": {"versions": ["1"]}}, (1,)),
    ],
)
def test_a_load_request_chooses_as_tritons_policy_does(policy: Any, versions: tuple[int, ...]) -> None:
    """`version_policy` of the configuration that clients send along is followed."""
    config = json.dumps({"name": "x", "version_policy": policy})
    assert asked_versions({"config": config}, (1, 3, 4)) == versions


def test_nothing_is_asked_for_without_a_policy() -> None:
    """No parameters, others, or a configuration without a policy leave the choice to the settings."""
    assert asked_versions(None, (1,)) == ()
    assert asked_versions({"unload_dependents": True}, (1,)) == ()
    assert asked_versions({"config": '{"backend": "onnxruntime"}'}, (1,)) == ()


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[1]",
        pytest.param("[" * 100_000, id="deep"),
        '{"version_policy": {"oldest": {}}}',
        '{"version_policy": {"latest": {"num_versions": 0}}}',
        '{"version_policy": {"specific": {"versions": []}}}',
        '{"version_policy": {"specific": {"versions": ["x"]}}}',
    ],
)
def test_a_policy_that_cannot_be_read_is_a_bad_request(config: str) -> None:
    """The sentence says what is known."""
    with pytest.raises(BadRequest, match=r"version_policy|JSON"):
        asked_versions({"config": config}, (1,))


def test_files_are_not_uploaded() -> None:
    """Triton's way to send a model along is refused."""
    with pytest.raises(Unsupported, match="put a version into the repository"):
        asked_versions({"file:1/model.onnx": "YWJj"}, (1,))
