"""(Job, Plan) -> Step: forward, loss, backward, clip, update. Nobody else writes a step."""

from stoker.stepping.coupling import find_coupling
from stoker.stepping.losses import Objective, measure_name
from stoker.stepping.model import build_model, bytes_of, num_parameters, weights_digest
from stoker.stepping.step import Step

__all__ = [
    "Objective", "Step", "build_model", "bytes_of", "find_coupling", "measure_name", "num_parameters",
    "weights_digest",
]  # fmt: skip
