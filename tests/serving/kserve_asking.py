"""What KServe's clients do with a server; run as a script by an interpreter that has `kserve`, and needs nothing else.

It gets a question on standard input as JSON (`http`, `grpc`, `model`, `inputs` and `outputs` as lists of name, shape,
datatype and flat data), asserts, and prints what was asked. It is a process of its own because KServe's generated
messages and Triton's have the same names, and cannot both be in one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

Question = dict[str, Any]


def _given(question: Question, *, is_binary: bool) -> InferRequest:
    inputs = []
    for one in question["inputs"]:
        array = np.array(one["data"], np.float32).reshape(one["shape"])
        made = InferInput(one["name"], one["shape"], one["datatype"])
        made.set_data_from_numpy(array, binary_data=is_binary)
        inputs.append(made)
    return InferRequest(model_name=question["model"], infer_inputs=inputs, request_id="k-1")


def _assert_answers(question: Question, response: Any) -> None:
    assert response.model_name == question["model"], response.model_name
    assert response.id == "k-1", response.id
    for expected, found in zip(question["outputs"], response.outputs, strict=True):
        assert found.name == expected["name"]
        np.testing.assert_allclose(found.as_numpy().reshape(-1), expected["data"], rtol=1e-5, atol=1e-5)


async def over_rest(question: Question) -> list[str]:
    """`InferenceRESTClient`: health, readiness, inference in JSON and in binary, a refusal."""
    url, model = f"http://{question['http']}", question["model"]
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=1, timeout=60))
    try:
        assert await client.is_server_live(url)
        assert await client.is_server_ready(url)
        assert await client.is_model_ready(url, model)
        assert not await client.is_model_ready(url, "no-such-model")
        for is_binary in (False, True):
            asked = _given(question, is_binary=is_binary)
            _assert_answers(question, await client.infer(url, asked, model_name=model))
        try:
            await client.infer(url, _given(question, is_binary=False), model_name="no-such-model")
        except Exception as error:  # noqa: BLE001 - httpx's, which need not be here
            assert "no-such-model" in str(error), error  # noqa: PT017 - no pytest in this process
        else:
            raise AssertionError("an unknown model was answered")
    finally:
        await client.close()
    return ["is_server_live", "is_server_ready", "is_model_ready", "infer JSON", "infer binary", "unknown model"]


async def over_grpc(question: Question) -> list[str]:
    """`InferenceGRPCClient`: health, readiness, inference in typed and in raw contents."""
    model = question["model"]
    async with InferenceGRPCClient(question["grpc"], timeout=60) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready(model)
        for is_binary in (False, True):
            _assert_answers(question, await client.infer(_given(question, is_binary=is_binary)))
    return ["is_server_live", "is_server_ready", "is_model_ready", "infer typed", "infer raw"]


def main() -> None:
    """Ask over both, and print what was asked."""
    question = json.load(sys.stdin)
    told = {"rest": asyncio.run(over_rest(question)), "grpc": asyncio.run(over_grpc(question))}
    print(json.dumps({"kserve": version("kserve")} | told))


if __name__ == "__main__":
    main()
