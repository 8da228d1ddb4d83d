"""A service without models: what the edges are tested with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.records import ArtifactSource, Datatype, DynamicDim, Manifest, TensorSpec, Tolerance
from stoker.records.codec import JSON
from stoker.serving.batching.scheduler import Executed
from stoker.serving.metrics import Counters
from stoker.serving.protocol import fit
from stoker.serving.refusals import NotFound, Refusal, Unavailable
from stoker.serving.service import InferenceRequest, InferenceResponse, Parameter, RepositoryEntry

ONE_ROW = Executed(
    instance=0,
    rows=1,
    requests=1,
    reason="idle",
    sizes=(),
    elements=1,
    padding=0,
    queue_s=(0.0,),
    input_s=0.0,
    infer_s=1e-6,
    output_s=0.0,
    succeeded=True,
)


def manifest_of(
    name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **changes: object
) -> Manifest:
    """A manifest of which only the tensors matter."""
    plain = Manifest(
        name=name,
        engine="onnxruntime",
        precision="fp32",
        graph="model.onnx",
        golden="golden.safetensors",
        inputs=inputs,
        outputs=outputs,
        tolerance=Tolerance(absolute=0.0, relative=0.0),
        proved_on="a test",
        source=ArtifactSource(kind="run", name="a-run", digest="0" * 64),
        made_at="2026-11-22T00:00:00Z",
        files=(),
    )
    return replace(plain, **changes)


def echo_manifest(name: str, datatype: Datatype, width: int | str = 3) -> Manifest:
    """A model `x` → `y` that gives what it takes."""
    shape = ("batch", width)
    return manifest_of(
        name,
        (TensorSpec(name="x", datatype=datatype, shape=shape),),
        (TensorSpec(name="y", datatype=datatype, shape=shape),),
    )


# `digits`: scores of ten classes. `two`: two inputs, two outputs. `echo-…`: gives what it takes.
DIGITS = manifest_of(
    "digits",
    (TensorSpec(name="image", datatype="FP32", shape=("batch", 8, 8)),),
    (TensorSpec(name="scores", datatype="FP32", shape=("batch", 10)),),
    labels={"scores": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")},
)
TWO = manifest_of(
    "two",
    (
        TensorSpec(name="a", datatype="INT64", shape=("batch", "tokens")),
        TensorSpec(name="b", datatype="INT64", shape=("batch", "tokens")),
    ),
    (
        TensorSpec(name="sum", datatype="INT64", shape=("batch", "tokens")),
        TensorSpec(name="difference", datatype="INT64", shape=("batch", "tokens")),
    ),
    dims=(DynamicDim(name="tokens", low=1, high=16),),
)
ECHOES: dict[Datatype, str] = {
    datatype: f"echo-{datatype.lower()}"
    for datatype in ("BOOL", "UINT8", "INT8", "INT32", "UINT64", "FP16", "BF16", "FP32", "FP64", "BYTES")
}


def scores_of(image: np.ndarray) -> np.ndarray:
    """What `digits` gives: the sums of ten runs of six pixels."""
    return np.ascontiguousarray(image.reshape(-1, 64)[:, :60].reshape(-1, 10, 6).sum(axis=2, dtype=np.float32))


def _computed(manifest: Manifest, inputs: Arrays) -> Arrays:
    if manifest.name == "digits":
        return {"scores": scores_of(inputs["image"])}
    if manifest.name == "two":
        return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}
    return {"y": inputs["x"]}


@dataclass
class FakeService:
    """Computes at once in NumPy; `refuse` is raised instead, and `hold` is waited for before."""

    manifests: dict[str, Manifest] = field(
        default_factory=lambda: {
            one.name: one
            for one in (DIGITS, TWO, *(echo_manifest(name, datatype, "width") for datatype, name in ECHOES.items()))
        }
    )
    unloaded: set[str] = field(default_factory=set)
    loaded_with: dict[str, Parameter] = field(default_factory=dict)
    requests: list[InferenceRequest] = field(default_factory=list)
    refuse: BaseException | None = None
    hold: asyncio.Event | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    max_rows: int = 1000
    refused: list[tuple[str, str]] = field(default_factory=list)

    def is_ready(self) -> bool:
        return not self.unloaded

    def count_refusal(self, model: str, refusal: Refusal) -> None:
        self.refused.append((model, refusal.reason))

    def _known(self, model: str, version: str) -> Manifest:
        if model not in self.manifests or version not in {"", "1"}:
            raise NotFound(f"there is no model {model!r} {version}")
        return self.manifests[model]

    def is_model_ready(self, model: str, version: str = "") -> bool:
        return self._known(model, version).name not in self.unloaded

    def manifest(self, model: str, version: str = "") -> Manifest:
        found = self._known(model, version)
        if model in self.unloaded:
            raise Unavailable(f"{model!r} is not loaded", retry_after_s=1.5)
        return found

    def versions(self, model: str) -> tuple[str, ...]:
        self._known(model, "")
        return ("1",)

    def config(self, model: str, version: str = "") -> JSON:
        specs = self._known(model, version)
        return {
            "name": model,
            "platform": "onnxruntime_onnx",
            "max_batch_size": 32,
            "input": [
                {"name": s.name, "data_type": f"TYPE_{s.datatype}".replace("BYTES", "STRING"), "dims": [-1]}
                for s in specs.inputs
            ],
            "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
            "dynamic_batching": {"max_queue_delay_microseconds": 0},
        }

    def statistics(self, model: str = "", version: str = "") -> list[JSON]:
        counts = []
        for name in [self._known(model, version).name] if model else list(self.manifests):
            counters = Counters(name, "1", wall_clock=lambda: 1_790_000_000.0)
            for _ in self.requests:
                counters.add_request(1e-6, succeeded=True)
                counters.add_batch(ONE_ROW)
            counts.append(counters.document())
        return counts

    def index(self, *, ready_only: bool = False) -> tuple[RepositoryEntry, ...]:
        entries = (
            RepositoryEntry(name=name, version="1", state="UNAVAILABLE" if name in self.unloaded else "READY")
            for name in self.manifests
        )
        return tuple(entry for entry in entries if entry.state == "READY" or not ready_only)

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        self.requests.append(request)
        manifest = self.manifest(request.model, request.version)
        inputs = fit(request, manifest, max_rows=self.max_rows)
        if self.hold is not None:
            self.held.set()
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if self.refuse is not None:
            raise self.refuse
        outputs = _computed(manifest, inputs)
        if request.outputs:
            outputs = {one.name: outputs[one.name] for one in request.outputs}
        return InferenceResponse(
            model=request.model, version="1", id=request.id, outputs=outputs, labels=manifest.labels
        )

    async def load(self, model: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        self._known(model, "")
        self.loaded_with = dict(parameters or {})
        self.unloaded.discard(model)

    async def unload(self, model: str) -> None:
        self._known(model, "")
        self.unloaded.add(model)


def refusing(error: Refusal) -> FakeService:
    """A service that refuses every inference."""
    return FakeService(refuse=error)


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
