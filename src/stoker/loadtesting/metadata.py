"""What a model behind a URL takes, as it says itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from stoker.errors import ServiceError
from stoker.loadtesting.connection import Address, ask
from stoker.loadtesting.payloads import http_request
from stoker.records import BATCH, TensorSpec, from_json


def input_specs(address: Address, model: str, headers: Mapping[str, str] | None = None) -> tuple[TensorSpec, ...]:
    """The inputs of a model, from its metadata.

    The protocol calls every dimension that varies -1: the first becomes the batch if it varies in every input and
    output, the others are named `dim1`, `dim2`, … by their place.

    Raises:
        ServiceError: there is no such model, or what came back is no metadata.
    """
    path = f"/v2/models/{quote(model, safe='')}"
    answer = ask(address, http_request(address, "GET", path, headers=headers))
    said = answer.body[:300].decode("utf-8", "replace")
    if answer.status != 200:
        raise ServiceError(
            f"the server has no metadata of model {model!r}: status {answer.status}: {said}",
            remedy="Name a model with --model; GET /v2/models or the repository's index tells which there are.",
        )
    try:
        document = json.loads(answer.body)
        tensors = [*document["inputs"], *document.get("outputs", ())]
        is_batched = all(one["shape"][:1] == [-1] for one in tensors)
        return tuple(_spec(one, is_batched=is_batched) for one in document["inputs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the metadata of model {model!r} cannot be used ({error!r}): {said}") from error


def _spec(document: dict[str, Any], *, is_batched: bool) -> TensorSpec:
    shape = [
        (BATCH if place == 0 and is_batched else f"dim{place}") if size == -1 else size
        for place, size in enumerate(document["shape"])
    ]
    return from_json({"name": document["name"], "datatype": document["datatype"], "shape": shape}, TensorSpec)
