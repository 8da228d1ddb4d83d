"""From a trained model to an artifact: its graph, its weights, and the proof that engines compute what it does."""

from stoker.exporting.job_inputs import JobInputs, job_inputs, varying
from stoker.exporting.onnx_import import import_onnx
from stoker.exporting.signature import About
from stoker.exporting.torch_export import Inputs, Untraceable, export_call, export_module, named_outputs
from stoker.exporting.version_writer import require_place

__all__ = [
    "About",
    "Inputs",
    "JobInputs",
    "Untraceable",
    "export_call",
    "export_module",
    "import_onnx",
    "job_inputs",
    "named_outputs",
    "require_place",
    "varying",
]
