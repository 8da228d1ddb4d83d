"""Answers of REST: JSON, with the outputs that were wanted so as binary data behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from stoker.artifacts.elements import datatype_of
from stoker.serving.service import Response
from stoker.serving.wire.forms import Form
from stoker.serving.wire.json_data import to_json
from stoker.serving.wire.tensors import Buffer, to_raw


class Encoded(NamedTuple):
    """A body, and the length of the JSON at its start where binary data follow it (else None)."""

    body: bytes
    json_bytes: int | None


def encode(response: Response, form: Form) -> Encoded:
    """An answer in the form that was wanted; every byte of a row-major output is copied once, into the body."""
    tail: list[Buffer] = []
    outputs = []
    for name, array in response.outputs.items():
        output: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": array.shape}
        if form.is_binary(name):
            raw = to_raw(array)
            output["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            output["data"] = to_json(array)
        outputs.append(output)
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    document["outputs"] = outputs
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Encoded(b"".join((text, *tail)), len(text)) if tail else Encoded(text, None)
