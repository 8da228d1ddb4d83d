"""ONNX Runtime: runs most ONNX graphs, on the CPU and on NVIDIA GPUs.

A session is safe to call from several threads. Instances of one thread each share one session. With more threads each
instance has its own: calls of one session share one thread pool, and would get fewer threads each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import BadInput, EngineRecord, Graph, cannot_load, cannot_run, not_installed, require_names
from stoker.errors import BadArtifact
from stoker.records import Datatype

_TYPES: dict[str, Datatype] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
}
_FATAL = 4
_SHAPES = re.compile(r"broadcast|[Dd]imension|[Ss]hape|out of (bounds|range)|out of data bounds")


class OnnxRuntime:
    """An inference session, which instances may share."""

    def __init__(self, library: Any, session: Any, graph: Graph) -> None:
        self._session = session
        self._invalid_argument = library.capi.onnxruntime_pybind11_state.InvalidArgument
        self._names = [spec.name for spec in graph.outputs]
        self._strings = {spec.name for spec in (*graph.inputs, *graph.outputs) if spec.datatype == "BYTES"}
        self._options = library.RunOptions()
        self._options.log_severity_level = _FATAL  # its errors are raised, not printed as well

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs."""
        try:
            outputs = self._session.run(self._names, self._converted(inputs, bytes.decode), self._options)
        except UnicodeDecodeError as error:
            raise BadInput(f"onnxruntime takes strings in UTF-8: {error}") from error
        except Exception as error:  # its errors have no base of their own
            # Some kernels report shapes that do not fit as a failure of their own.
            is_input = isinstance(error, self._invalid_argument) or _SHAPES.search(str(error)) is not None
            raise cannot_run("onnxruntime", error, is_input=is_input) from error
        return self._converted(dict(zip(self._names, outputs, strict=True)), str.encode)

    def close(self) -> None:
        """Drop the session; it ends with the last engine that shares it."""
        del self._session

    def _converted(self, arrays: Arrays, convert: Callable[[Any], Any]) -> Arrays:
        """Strings converted between our bytes and the library's text; other arrays as they are."""
        if not self._strings:
            return arrays
        return {
            name: np.vectorize(convert, otypes=[object])(array) if name in self._strings else array
            for name, array in arrays.items()
        }


def load_all(graph: Graph) -> tuple[OnnxRuntime, ...]:
    """One engine for each instance of the graph.

    Raises:
        BadArtifact: ONNX Runtime is not installed or cannot load it, it has other inputs or outputs, the precision is
            not supported, or there is no GPU.
    """
    try:
        import onnxruntime  # noqa: PLC0415 - the engine is listed without its library
    except ImportError as error:
        raise not_installed("onnxruntime") from error
    if graph.precision in ("bf16", "fp16", "int8+bf16") and graph.where == "cpu":
        raise BadArtifact(
            f"{graph.path} is to be computed in {graph.precision}; ONNX Runtime has few kernels for it on the CPU",
            remedy="Use the engine openvino for this precision.",
        )
    shared = graph.threads == 1 or graph.where == "cuda"
    sessions = [_session(onnxruntime, graph) for _ in range(1 if shared else graph.instances)]
    require_names(graph.path, "input", graph.inputs, _datatypes(sessions[0].get_inputs()))
    require_names(graph.path, "output", graph.outputs, _datatypes(sessions[0].get_outputs()))
    return tuple(OnnxRuntime(onnxruntime, sessions[i % len(sessions)], graph) for i in range(graph.instances))


def _session(library: Any, graph: Graph) -> Any:
    options = library.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = graph.threads
    options.inter_op_num_threads = 1
    # A spinning thread takes the core that another instance, or the server's own loop, would use.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if graph.where == "cuda":
        if "CUDAExecutionProvider" not in library.get_available_providers():
            raise BadArtifact("This ONNX Runtime has no CUDA", remedy="pip install onnxruntime-gpu")
        # fp32 means fp32, not TF32. An operator without a GPU kernel runs on the CPU.
        providers.insert(0, ("CUDAExecutionProvider", {"use_tf32": "0"}))
    try:
        session = library.InferenceSession(str(graph.path), options, providers=providers)
    except Exception as error:  # its errors have no base of their own
        raise cannot_load(graph.path, "onnxruntime", error) from error
    if graph.where == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        # The session then runs on the CPU; only a line of its log says so.
        raise BadArtifact("ONNX Runtime cannot use CUDA here", remedy="Install the CUDA and cuDNN it was built for.")
    return session


def _datatypes(tensors: Iterable[Any]) -> dict[str, str]:
    """Datatype by tensor name, in the protocol's words where it has one: `tensor(float)` is FP32."""
    return {
        tensor.name: _TYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"), tensor.type)
        for tensor in tensors
    }


ENGINE = EngineRecord(
    name="onnxruntime",
    load_all=load_all,
    platform="onnxruntime_onnx",
    packages=("onnxruntime",),
    export_rank=2,
    reference_rank=1,
)
