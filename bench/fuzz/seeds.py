"""Writes the corpus that fuzzing begins from: small files as Stoker's own writers make them.

python -m bench.fuzz.seeds
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save
from torch import nn

import stoker
from bench.fuzz.targets import IDX_SHAPE, IDX_VALUES, RECORDS, checkpoint_of, framed, tensors, zipped
from stoker.data.files.tfrecord import encoded
from stoker.records import CleanList, Dropped, Plan, ServiceSettings, StoredPiece, StoredTensor, dumps, to_json
from stoker.serving.grpc import inference_pb2
from stoker.stepping.message_folder import MessageFolder
from stoker.testing.tiny_models import tiny_artifact

CORPUS = Path(__file__).parent / "corpus"
EVENTS = len(RECORDS)


def main() -> None:
    """Write the corpus anew."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # runs and caches lie here, so that no path of this machine gets into a record
        os.environ["STOKER_CACHE"] = "cache"
        inputs = _artifacts() | _runs() | _checkpoints() | _shards() | _tables() | _wire() | _messages()
    for name, contents in inputs.items():
        shutil.rmtree(CORPUS / name, ignore_errors=True)
        (CORPUS / name).mkdir(parents=True)
        for number, content in enumerate(contents):
            (CORPUS / name / f"{number:02}").write_bytes(content)
    print(f"{sum(map(len, inputs.values()))} files in {CORPUS}")


def _artifacts() -> dict[str, list[bytes]]:
    made = [tiny_artifact(".", name=kind, kind=kind) for kind in ("mlp", "tokens", "images")]
    strings = save(
        {
            "in.x": np.frombuffer(b"onetwo", np.uint8),
            "in.x/lengths": np.array([[3], [3]]),
            "out.y/bf16": np.array([[1], [2]], np.uint16),
        }
    )
    return {
        "manifest": [(one.path / "manifest.json").read_bytes() for one in made],
        "golden": [*((one.path / "golden.safetensors").read_bytes() for one in made), strings],
    }


def _runs() -> dict[str, list[bytes]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 4, generator=generator), torch.arange(64) % 2
    job = stoker.Job(
        model=nn.Linear(4, 2),
        data=(x, y),
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.1),
        batch=16,
        until=stoker.epochs(2),
    )
    path = Path(stoker.train(job, plan=Plan(device="cpu", micro_batch=16)).path)
    texts = {
        name: (path / f"{name}.json").read_bytes()
        for name in ("run", "spec", "plan", "device", "environment")
        if (path / f"{name}.json").exists()
    }
    texts["settings"] = dumps(ServiceSettings()).encode()
    texts["clean"] = dumps(
        CleanList(source="x", made_at="2026-11-22", kept=3, dropped=(Dropped(id="a:1", why="leak"),))
    ).encode()
    texts["plan-only"] = dumps(Plan(device="cpu", micro_batch=16)).encode()
    numbers = {record.__name__: number for number, record in enumerate(RECORDS)}
    records = [
        bytes([numbers[json.loads(text)["record"]]]) + text
        for text in texts.values()
        if json.loads(text)["record"] in numbers
    ]
    log = (path / "events.jsonl").read_bytes()
    kinds = {json.loads(line)["kind"]: line for line in log.splitlines()}
    events = [bytes([EVENTS]) + line for line in kinds.values()]
    return {"records": records + events, "report": [log, b"\n".join(kinds.values()) + b"\n"]}


def _checkpoints() -> dict[str, list[bytes]]:
    whole = checkpoint_of(tensors())
    pieces = (
        StoredPiece(file="model.safetensors", offsets=(0, 0), sizes=(2, 3)),
        StoredPiece(file="model.safetensors", offsets=(0, 0), sizes=(2, 3), number=1),
    )
    spread = dataclasses.replace(
        whole, tensors={"model.w": StoredTensor(shape=(2, 3), dtype="float32", pieces=pieces[:1])}
    )
    earlier = {name: value for name, value in to_json(spread).items() if name != "checksum"} | {"schema": 2}
    return {
        "checkpoint_manifest": [
            dumps(whole).encode(),
            dumps(spread.with_checksum(), indent=None).encode(),
            json.dumps(earlier).encode(),
        ],
        "checkpoint_tensors": [tensors(), save({"model.x": np.zeros((0, 2), np.float16), "y": np.ones(3, bool)})],
    }


def _shards() -> dict[str, list[bytes]]:
    picture, array = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.zeros((3, 3, 3), np.uint8)).save(picture, "png")
    np.save(array, np.arange(3, dtype=np.float32))
    parts = {"png": picture.getvalue(), "cls": b"1", "json": b'{"a": [1]}', "txt": b"text", "npy": array.getvalue()}
    shards = [
        _tar({f"{key:04}.{kind}": parts[kind] for key in range(2) for kind in kinds})
        for kinds in (("png", "cls"), ("json", "txt"), ("npy", "cls"))
    ]
    shards.append(_tar({"a/0.txt": b"x"}, tarfile.GNU_FORMAT))
    messages_ = [encoded({"x": [1.0, 2.0], "label": [3], "name": [b"so"]}), encoded({"x": [0.0], "label": [1, 2]})]
    idx = bytes([0, 0, 8, 2]) + b"".join(size.to_bytes(4, "big") for size in IDX_SHAPE) + IDX_VALUES
    return {
        "tar": shards,
        "tfrecord": [framed(messages_[0]), framed(messages_[0]) + framed(messages_[1])],
        "tf_example": messages_,
        "idx": [idx, zipped(idx)],
        "pattern": [b"train-{000..002}.tar", b"a-{b,c}-{9..7}.tar"],
    }


def _tar(members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if form == tarfile.PAX_FORMAT:
                info.pax_headers = {"comment": "x"}
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()[:-8192]  # less of the zeros at the end


def _tables() -> dict[str, list[bytes]]:
    numbers, words = b"a,b,y\n1,2.5,0\n-3,4e2,1\n", 'city,text\r\nBern,"so, „so“"\r\n"R ""x""\nom",ü\r\n'.encode()
    missing = b"a,b,y\n1,,0\n,NA,1\n"
    rows = b'{"a": 1, "b": "x", "y": 0}\n{"a": 2.5, "b": "\\u00fc", "y": 1}\n\n{"a": null, "b": "z", "y": 2}\n'
    return {
        "csv": [b"\0" + numbers, b"\1" + words, b"\2" + missing, b"\3" + words, b"\2" + numbers],
        "jsonl": [b"\0" + b'{"a": 1}\n{"a": 2}\n', b"\1" + b'{"t": "x"}\n', b"\2" + rows, b"\3" + rows],
    }


def _messages() -> dict[str, list[bytes]]:
    folder = MessageFolder(Path("messages"), 1, 2, job="5" * 64)
    sizes = (0, 1, 300)
    for update, size in enumerate(sizes):
        folder.send(update, 0, torch.arange(size).to(torch.uint8))
    return {"site_message": [path.read_bytes() for path in sorted(folder.folder.glob("*.message"))]}


def _wire() -> dict[str, list[bytes]]:
    image: list[Any] = np.zeros(784).tolist()
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 28, 28]}
    body = json.dumps({"id": "1", "inputs": [tensor | {"data": image}]}, separators=(",", ":")).encode()
    raw = bytes(4 * 784)
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\n"
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n4\r\n{}{}\r\n0\r\nTrailer: 1\r\n\r\n"
    plain = post + b"Content-Length: %d\r\n\r\n" % len(body) + body
    asked = inference_pb2.ModelInferRequest(model_name="digits")
    asked.inputs.add(name="image", datatype="FP32", shape=[1, 28, 28])
    asked.raw_input_contents.append(raw)
    message = asked.SerializeToString()
    frame = b"\0" + len(message).to_bytes(4, "big") + message
    return {
        "http_connection": [bytes([size]) + text for size in (0, 255) for text in (get + get, chunked, plain)],
        "rest_body": [b"\0\0" + raw, b"\xff\xff" + body, len(head).to_bytes(2, "little") + head + raw],
        "grpc_frames": [frame, frame + frame[:40]],
    }


if __name__ == "__main__":
    main()
