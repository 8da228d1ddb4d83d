"""ONNX Runtime: runs most graphs made elsewhere, on the CPU and on NVIDIA GPUs.

A session is safe to call from several threads. Instances of one thread each share one; with more threads each instance
has a session, since those of a session take from one pool, and an instance would compute with fewer while others run.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import BadInput, Graph, cannot_load, cannot_run, not_installed, require_names
from stoker.errors import BadArtifact
from stoker.records import Datatype

try:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
except ImportError as error:
    raise not_installed("onnxruntime") from error

_TYPES: dict[str, Datatype] = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float": "FP32",
    "double": "FP64", "string": "BYTES",
}  # fmt: skip
_FATAL = 4
_SHAPES = re.compile(r"broadcast|[Dd]imension|[Ss]hape|out of (bounds|range)|out of data bounds")


class OnnxRuntime:
    """A session, or a share in one."""

    def __init__(self, session: Any, graph: Graph) -> None:
        self._session = session
        self._names = [spec.name for spec in graph.outputs]
        self._strings = {spec.name for spec in (*graph.inputs, *graph.outputs) if spec.datatype == "BYTES"}
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = _FATAL  # its errors are raised; they need not be printed as well

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs."""
        try:
            found = self._session.run(self._names, self._decoded(inputs), self._options)
        except UnicodeDecodeError as error:
            raise BadInput(f"onnxruntime takes strings in UTF-8: {error}") from error
        except Exception as error:  # its errors have no base of their own
            raise cannot_run("onnxruntime", error, is_input=_is_of_input(error)) from error
        return self._encoded(dict(zip(self._names, found, strict=True)))

    def close(self) -> None:
        """Forget the session; it goes with the last engine that shares it."""
        del self._session

    def _decoded(self, inputs: Arrays) -> Arrays:
        if not self._strings:
            return inputs
        return {
            name: np.vectorize(bytes.decode, otypes=[object])(array) if name in self._strings else array
            for name, array in inputs.items()
        }

    def _encoded(self, outputs: Arrays) -> Arrays:
        if not self._strings:
            return outputs
        return {
            name: np.vectorize(str.encode, otypes=[object])(array) if name in self._strings else array
            for name, array in outputs.items()
        }


def load_all(graph: Graph) -> tuple[OnnxRuntime, ...]:
    """As many engines as the graph asks for.

    Raises:
        BadArtifact: ONNX Runtime cannot load it, it has other inputs or outputs, cannot compute in the precision, or
            has no GPU to run on.
    """
    if graph.precision in ("bf16", "fp16", "int8+bf16") and graph.where == "cpu":
        raise BadArtifact(
            f"{graph.path} is to be computed in {graph.precision}; ONNX Runtime has few kernels for it on the CPU",
            remedy="Use the engine openvino for this precision.",
        )
    shared = graph.threads == 1 or graph.where == "cuda"
    sessions = [_session(graph) for _ in range(1 if shared else graph.instances)]
    found = {one.name: _datatype(one.type) for one in sessions[0].get_inputs()}
    require_names(graph.path, "input", graph.inputs, found)
    found = {one.name: _datatype(one.type) for one in sessions[0].get_outputs()}
    require_names(graph.path, "output", graph.outputs, found)
    return tuple(OnnxRuntime(sessions[i % len(sessions)], graph) for i in range(graph.instances))


def _is_of_input(error: Exception) -> bool:
    """Whether shapes or values of the inputs are to blame; some kernels report shapes as a failure of their own."""
    return isinstance(error, InvalidArgument) or _SHAPES.search(str(error)) is not None


def _session(graph: Graph) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = graph.threads
    options.inter_op_num_threads = 1
    # A spinning thread takes the core that another instance, or the server's own loop, would use.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = _providers(graph)
    try:
        session = onnxruntime.InferenceSession(str(graph.path), options, providers=providers)
    except Exception as error:  # its errors have no base of their own
        raise cannot_load(graph.path, "onnxruntime", error) from error
    if graph.where == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        # It then runs on the CPU, and says so in a line of its log alone.
        raise BadArtifact("ONNX Runtime cannot use CUDA here", remedy="Install the CUDA and cuDNN it was built for.")
    return session


def _providers(graph: Graph) -> list[Any]:
    """Where operators run; what a GPU has no kernel for runs on the CPU."""
    if graph.where == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise BadArtifact("This ONNX Runtime has no CUDA", remedy="pip install onnxruntime-gpu")
    # TF32 is a precision nobody asked for: fp32 means fp32.
    return [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]


def _datatype(name: str) -> str:
    inner = name.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(inner, name)
