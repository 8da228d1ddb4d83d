"""From a trained model to an artifact: its graph, its weights, and the proof that engines compute what it does."""

from stoker.exporting.about import About
from stoker.exporting.flat import named_outputs
from stoker.exporting.imports import import_onnx
from stoker.exporting.job_inputs import JobInputs, job_inputs, varying
from stoker.exporting.modules import Inputs, export_call, export_module
from stoker.exporting.torch_graph import Untraceable
from stoker.exporting.writing import require_place

__all__ = [
    "About", "Inputs", "JobInputs", "Untraceable", "export_call", "export_module", "import_onnx", "job_inputs",
    "named_outputs", "require_place", "varying",
]  # fmt: skip
