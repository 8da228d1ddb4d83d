"""Which versions of a model to serve. Values in, values out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from stoker.records.codec import JSON
from stoker.serving.problems import BadRequest, Unsupported
from stoker.serving.service import Parameter


def versions_to_try(available: Sequence[int], asked: Sequence[int]) -> tuple[int, ...]:
    """Versions in the order to try them: those asked for, newest first; without any, all of those there are.

    Args:
        available: those on disk.
        asked: those to serve, all of them; empty: the newest that passes its checks.
    """
    return tuple(sorted(set(asked or available), reverse=True))


def asked_versions(parameters: Mapping[str, Parameter] | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions that the parameters of a load request ask for; none for the model's own setting.

    They may have `config`, a model configuration as JSON text; all that is followed of it is
    `version_policy`: `{"latest": {"num_versions": 2}}`, `{"all": {}}` or `{"specific": {"versions": [1]}}`.

    Raises:
        BadRequest: the configuration cannot be read.
        Unsupported: files are sent along.
    """
    parameters = parameters or {}
    for name in parameters:
        if name.startswith("file:"):
            raise Unsupported(f"{name!r}: models are not uploaded; put a version into the repository and load it")
    text = parameters.get("config", "{}")
    try:
        config = json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the parameter 'config' is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadRequest(f"the parameter 'config' must be a JSON object, got {str(text)[:40]}")
    policy = config.get("version_policy")
    return () if not policy else _chosen(policy, available)


def _chosen(policy: JSON, available: Sequence[int]) -> tuple[int, ...]:
    """The versions that a Triton `version_policy` means."""
    newest_first = sorted(available, reverse=True)
    match policy:
        case {"all": _}:
            return tuple(newest_first)
        case {"latest": {"num_versions": int(number)}} if number > 0:
            return tuple(newest_first[:number])
        case {"specific": {"versions": [_, *_] as numbers}} if all(isinstance(one, int | str) for one in numbers):
            try:
                return tuple(int(one) for one in numbers)  # protobuf's JSON writes 64-bit numbers as strings
            except ValueError:
                pass
    raise BadRequest(
        f"version_policy {json.dumps(policy)} is none of "
        '{"latest": {"num_versions": 1}}, {"all": {}}, {"specific": {"versions": [1]}}'
    )
