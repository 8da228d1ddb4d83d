"""What clients that others wrote do with a server: scenarios that hold for every server of the protocol.

Each takes a `Subject`, asks over the wire, and asserts; the edges are tested with them over a fake service, and the
whole server over exported models.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio

from stoker.artifacts.dtypes import Arrays, datatype_of


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model behind a server, and what it is known to answer.

    `http`, `grpc` and `admin` are `host:port`; `grpc_admin` is empty where there is none. `labels` are those of
    `scores`, the output that classes are asked of; both are empty where the model has none. `key` is an API key.
    """

    http: str
    grpc: str
    admin: str = ""
    grpc_admin: str = ""
    model: str
    version: str = "1"
    inputs: Arrays
    outputs: Arrays
    rtol: float = 1e-5
    atol: float = 1e-5
    scores: str = ""
    labels: tuple[str, ...] = ()
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What a request carries; new each time, since tritonclient adds to what it is given."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def _given(module: Any, arrays: Arrays, **how: Any) -> list[Any]:
    """A client's inputs."""
    given = []
    for name, array in arrays.items():
        one = module.InferInput(name, list(array.shape), datatype_of(array.dtype))
        one.set_data_from_numpy(array, **how)
        given.append(one)
    return given


def _assert_answers(subject: Subject, result: Any, names: tuple[str, ...] = ()) -> None:
    for name in names or tuple(subject.outputs):
        expected, found = subject.outputs[name], result.as_numpy(name)
        assert found is not None, f"{name} is missing"
        assert found.shape == expected.shape
        if expected.dtype == object:
            assert found.tolist() == expected.tolist()
        else:
            np.testing.assert_allclose(
                found.astype(np.float64), expected.astype(np.float64), rtol=subject.rtol, atol=subject.atol
            )


def triton_http_default(subject: Subject) -> None:
    """`tritonclient.http` as it comes: binary inputs, no outputs named, all of them binary."""
    with over_http.InferenceServerClient(subject.http) as client:
        result = client.infer(
            subject.model, _given(over_http, subject.inputs), request_id="a-1", headers=subject.headers
        )
        assert result.get_response()["id"] == "a-1"
        assert result.get_response()["model_name"] == subject.model
        _assert_answers(subject, result)


def triton_http_versioned(subject: Subject) -> None:
    """A version in the path."""
    with over_http.InferenceServerClient(subject.http) as client:
        result = client.infer(
            subject.model, _given(over_http, subject.inputs), model_version=subject.version, headers=subject.headers
        )
        assert result.get_response()["model_version"] == subject.version
        _assert_answers(subject, result)


def triton_http_json(subject: Subject) -> None:
    """Inputs and outputs as JSON alone."""
    with over_http.InferenceServerClient(subject.http) as client:
        wanted = [over_http.InferRequestedOutput(name, binary_data=False) for name in subject.outputs]
        inputs = _given(over_http, subject.inputs, binary_data=False)
        _assert_answers(subject, client.infer(subject.model, inputs, outputs=wanted, headers=subject.headers))


def triton_http_one_output(subject: Subject) -> None:
    """The last output alone, binary."""
    name = list(subject.outputs)[-1]
    with over_http.InferenceServerClient(subject.http) as client:
        wanted = [over_http.InferRequestedOutput(name)]
        result = client.infer(subject.model, _given(over_http, subject.inputs), outputs=wanted, headers=subject.headers)
        assert [one["name"] for one in result.get_response()["outputs"]] == [name]
        _assert_answers(subject, result, (name,))


def triton_http_compressed(subject: Subject) -> None:
    """Bodies compressed both ways."""
    with over_http.InferenceServerClient(subject.http) as client:
        for algorithm in ("gzip", "deflate"):
            result = client.infer(
                subject.model,
                _given(over_http, subject.inputs),
                headers=subject.headers,
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
            _assert_answers(subject, result)


def triton_http_many_at_once(subject: Subject) -> None:
    """`async_infer` over several connections."""
    with over_http.InferenceServerClient(subject.http, concurrency=4) as client:
        pending = [
            client.async_infer(subject.model, _given(over_http, subject.inputs), headers=subject.headers)
            for _ in range(12)
        ]
        for one in pending:
            _assert_answers(subject, one.get_result())


def triton_http_classes(subject: Subject) -> None:
    """The largest three scores, with their labels."""
    with over_http.InferenceServerClient(subject.http) as client:
        wanted = [over_http.InferRequestedOutput(subject.scores, class_count=3)]
        result = client.infer(subject.model, _given(over_http, subject.inputs), outputs=wanted, headers=subject.headers)
        _assert_classes(subject, result.as_numpy(subject.scores))


def _assert_classes(subject: Subject, found: np.ndarray) -> None:
    scores = subject.outputs[subject.scores]
    assert found.shape == (len(scores), 3)
    for row, elements in zip(scores, found, strict=True):
        best = np.argsort(-row, kind="stable")[:3]
        parts = [element.decode().split(":") for element in elements]
        assert [int(part[1]) for part in parts] == best.tolist()
        assert [part[2] for part in parts] == [subject.labels[index] for index in best]
        np.testing.assert_allclose([float(part[0]) for part in parts], row[best], rtol=1e-4, atol=1e-4)


def triton_http_tells(subject: Subject) -> None:
    """Health, metadata, configuration and statistics."""
    with over_http.InferenceServerClient(subject.http) as client:
        told = {"headers": subject.headers}
        assert client.is_server_live(**told)
        assert client.is_server_ready(**told)
        assert client.is_model_ready(subject.model, **told)
        assert not client.is_model_ready("no-such-model", **told)
        assert "binary_tensor_data" in client.get_server_metadata(**told)["extensions"]
        metadata = client.get_model_metadata(subject.model, **told)
        assert metadata["name"] == subject.model
        assert subject.version in metadata["versions"]
        assert {one["name"] for one in metadata["inputs"]} == set(subject.inputs)
        assert client.get_model_config(subject.model, **told)["name"] == subject.model
        before = _success(client.get_inference_statistics(subject.model, **told))
        client.infer(subject.model, _given(over_http, subject.inputs), headers=subject.headers)
        assert _success(client.get_inference_statistics(subject.model, **told)) == before + 1
        assert client.get_inference_statistics(**told)["model_stats"]


def _success(statistics: dict[str, Any]) -> int:
    return int(statistics["model_stats"][0]["inference_stats"]["success"].get("count", 0))


def triton_http_repository(subject: Subject) -> None:
    """The index, unloading and loading, on the admin port."""
    with over_http.InferenceServerClient(subject.admin) as client:
        told = {"headers": subject.headers}
        index = client.get_model_repository_index(**told)
        assert any(one["name"] == subject.model and one["state"] == "READY" for one in index)
        client.unload_model(subject.model, **told)
        assert not client.is_model_ready(subject.model, **told)
        client.load_model(subject.model, **told)
        assert client.is_model_ready(subject.model, **told)


async def triton_http_aio(subject: Subject) -> None:
    """`tritonclient.http.aio`."""
    async with over_http_aio.InferenceServerClient(subject.http) as client:
        assert await client.is_model_ready(subject.model, headers=subject.headers)
        result = await client.infer(subject.model, _given(over_http_aio, subject.inputs), headers=subject.headers)
        _assert_answers(subject, result)


def triton_grpc_default(subject: Subject) -> None:
    """`tritonclient.grpc` as it comes: raw contents; then compressed."""
    with over_grpc.InferenceServerClient(subject.grpc) as client:
        for algorithm in (None, "gzip", "deflate"):
            result = client.infer(
                subject.model,
                _given(over_grpc, subject.inputs),
                request_id="a-1",
                headers=subject.headers,
                compression_algorithm=algorithm,
                priority=1,
                timeout=60_000_000,
            )
            assert result.get_response().id == "a-1"
            _assert_answers(subject, result)


def triton_grpc_one_output(subject: Subject) -> None:
    """The last output alone, of a version that is named."""
    name = list(subject.outputs)[-1]
    with over_grpc.InferenceServerClient(subject.grpc) as client:
        result = client.infer(
            subject.model,
            _given(over_grpc, subject.inputs),
            model_version=subject.version,
            outputs=[over_grpc.InferRequestedOutput(name)],
            headers=subject.headers,
        )
        assert [one.name for one in result.get_response().outputs] == [name]
        assert result.get_response().model_version == subject.version
        _assert_answers(subject, result, (name,))


def triton_grpc_classes(subject: Subject) -> None:
    """The largest three scores, with their labels."""
    with over_grpc.InferenceServerClient(subject.grpc) as client:
        result = client.infer(
            subject.model,
            _given(over_grpc, subject.inputs),
            outputs=[over_grpc.InferRequestedOutput(subject.scores, class_count=3)],
            headers=subject.headers,
        )
        _assert_classes(subject, result.as_numpy(subject.scores))


def triton_grpc_tells(subject: Subject) -> None:
    """Health, metadata, configuration and statistics."""
    with over_grpc.InferenceServerClient(subject.grpc) as client:
        told = {"headers": subject.headers}
        assert client.is_server_live(**told)
        assert client.is_server_ready(**told)
        assert client.is_model_ready(subject.model, **told)
        assert "binary_tensor_data" in client.get_server_metadata(**told).extensions
        metadata = client.get_model_metadata(subject.model, **told)
        assert subject.version in metadata.versions
        assert {one.name for one in metadata.inputs} == set(subject.inputs)
        assert client.get_model_config(subject.model, **told).config.name == subject.model
        before = _success(client.get_inference_statistics(subject.model, as_json=True, **told))
        client.infer(subject.model, _given(over_grpc, subject.inputs), headers=subject.headers)
        assert _success(client.get_inference_statistics(subject.model, as_json=True, **told)) == before + 1


def triton_grpc_repository(subject: Subject) -> None:
    """The index, unloading and loading, on the admin port."""
    with over_grpc.InferenceServerClient(subject.grpc_admin) as client:
        told = {"headers": subject.headers}
        index = client.get_model_repository_index(**told).models
        assert any(one.name == subject.model and one.state == "READY" for one in index)
        client.unload_model(subject.model, **told)
        assert not client.is_model_ready(subject.model, **told)
        client.load_model(subject.model, **told)
        assert client.is_model_ready(subject.model, **told)


def triton_grpc_stream(subject: Subject) -> None:
    """A stream: every request has its answer, known by its id; a bad one is an error and ends nothing."""
    answered: Queue[tuple[Any, Any]] = Queue()
    with over_grpc.InferenceServerClient(subject.grpc) as client:
        client.start_stream(partial(_put, answered), headers=subject.headers)
        wanted = {f"r-{number}" for number in range(8)}
        for number, one in enumerate(sorted(wanted)):
            model = subject.model if number != 3 else "no-such-model"
            client.async_stream_infer(model, _given(over_grpc, subject.inputs), request_id=one)
        results = [answered.get(timeout=60) for _ in wanted]
        client.stop_stream()
    errors = [error for _, error in results if error is not None]
    assert len(errors) == 1
    assert "no-such-model" in str(errors[0])
    good = [result for result, error in results if error is None]
    assert {result.get_response().id for result in good} == wanted - {"r-3"}
    for result in good:
        _assert_answers(subject, result)


def _put(queue: Queue[tuple[Any, Any]], result: Any, error: Any) -> None:
    queue.put((result, error))


async def triton_grpc_aio(subject: Subject) -> None:
    """`tritonclient.grpc.aio`."""
    async with over_grpc_aio.InferenceServerClient(subject.grpc) as client:
        assert await client.is_model_ready(subject.model, headers=subject.headers)
        result = await client.infer(subject.model, _given(over_grpc_aio, subject.inputs), headers=subject.headers)
        _assert_answers(subject, result)


def curl(subject: Subject) -> None:
    """What people type: nested lists in, JSON out."""
    inputs = [
        {"name": name, "shape": array.shape, "datatype": datatype_of(array.dtype), "data": array.tolist()}
        for name, array in subject.inputs.items()
    ]
    headers = [word for name, value in subject.headers.items() for word in ("-H", f"{name}: {value}")]
    done = subprocess.run(
        [
            "curl",
            "-sS",
            "--noproxy",
            "*",
            "--max-time",
            "20",
            *headers,
            "--data-binary",
            "@-",
            f"http://{subject.http}/v2/models/{subject.model}/infer",
        ],
        input=json.dumps({"id": "by-hand", "inputs": inputs}),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["id"] == "by-hand"
    for one in answer["outputs"]:
        expected = subject.outputs[one["name"]]
        assert tuple(one["shape"]) == expected.shape
        found = np.array(one["data"], np.float64).reshape(one["shape"])
        np.testing.assert_allclose(found, expected, rtol=subject.rtol, atol=subject.atol)


OVER_HTTP = (
    triton_http_default,
    triton_http_versioned,
    triton_http_json,
    triton_http_one_output,
    triton_http_compressed,
    triton_http_many_at_once,
    triton_http_tells,
    curl,
)
OVER_GRPC = (triton_grpc_default, triton_grpc_one_output, triton_grpc_tells, triton_grpc_stream)
"""Those that need neither labels nor an admin port."""


def kserve(subject: Subject, python: str) -> dict[str, Any]:
    """KServe's clients over both protocols, in a process of the interpreter `python`; gives what they asked."""
    question = {
        "http": subject.http,
        "grpc": subject.grpc,
        "model": subject.model,
        "inputs": _as_lists(subject.inputs),
        "outputs": _as_lists(subject.outputs),
    }
    done = subprocess.run(
        [python, str(Path(__file__).with_name("kserve_asking.py"))],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def _as_lists(arrays: Arrays) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": datatype_of(array.dtype),
            "data": array.reshape(-1).tolist(),
        }
        for name, array in arrays.items()
    ]
