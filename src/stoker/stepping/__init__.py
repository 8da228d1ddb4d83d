"""(Job, Plan) -> Step: forward, loss, backward, clip, update. Nobody else writes a step."""

from stoker.stepping.blocks import repeated_blocks
from stoker.stepping.checkpointing import num_blocks
from stoker.stepping.coupling import coupling_by_types, find_coupling
from stoker.stepping.losses import Objective, measure_name
from stoker.stepping.model import build_model, bytes_of, num_parameters, weights_digest
from stoker.stepping.not_finite import NotFinite
from stoker.stepping.out_of_memory import free_bytes, ran_out_of_memory, reachable_bytes
from stoker.stepping.outline import outline
from stoker.stepping.step import Step

__all__ = [
    "NotFinite", "Objective", "Step", "build_model", "bytes_of", "coupling_by_types", "find_coupling", "free_bytes",
    "measure_name", "num_blocks", "num_parameters", "outline", "ran_out_of_memory", "reachable_bytes",
    "repeated_blocks", "weights_digest",
]  # fmt: skip
