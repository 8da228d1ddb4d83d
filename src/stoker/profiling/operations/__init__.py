"""Single operations, called for real: what the micro-benchmark times."""

from stoker.profiling.operations.call import Call, Caller, Pool, prepare, tensors_in
from stoker.profiling.operations.catalogue import benchmark_calls

__all__ = ["Call", "Caller", "Pool", "benchmark_calls", "prepare", "tensors_in"]
