"""What people do: FastAPI, eager PyTorch in fp32, each request for itself; raw bytes, to be no slower than it must."""

import os

import torch
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from bench.serving.race.modules import with_weights
from bench.serving.race.samples import Format
from bench.serving.race.served_model import told
from stoker import artifacts

asked = told()
app = FastAPI()
torch.set_num_threads(asked.threads)
model = with_weights(os.environ["RACE_MODULE"], asked.artifact / "model.safetensors")
body_format = Format(artifacts.read(asked.artifact).manifest.inputs)


def answer(body: bytes) -> bytes:
    """The model's output for one sample."""
    sample = body_format.decode(body)
    with torch.inference_mode():
        output = model(*(torch.from_numpy(array.copy())[None] for array in sample.values()))
    return output[0].numpy().tobytes()


@app.post("/")
async def predict(request: Request) -> Response:
    """Raw bytes in and out, computed in FastAPI's pool of threads."""
    body = await request.body()
    return Response(await run_in_threadpool(answer, body), media_type="application/octet-stream")
