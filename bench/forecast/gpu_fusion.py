"""What a compiler makes of an eager forward pass: whatever stands between two matrix products becomes one kernel.

Such a kernel reads what comes from outside once and writes what is needed outside once; matrix products stay the
libraries'. Source: PyTorch 2's inductor with default settings (Ansel et al., ASPLOS 2024, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from stoker.planning.model.gpu_roofline import kind_of
from stoker.records.trace import Operation


@dataclass(frozen=True)
class Call:
    """An operation with the tensors it read and made, which are kept so that no two storages share an address."""

    operation: Operation
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def fused(forward: Sequence[Call], backward: Sequence[Call]) -> tuple[Counter[Operation], Counter[Operation]]:
    """The operations of compiled passes, counted."""
    calls = [*enumerate([*forward, *backward])]
    last_reader = {key: place for place, call in calls for key in map(_storage, call.inputs)}
    cut = len(forward)
    return _fused(calls[:cut], last_reader), _fused(calls[cut:], last_reader)


def _fused(calls: Sequence[tuple[int, Call]], last_reader: dict[int, int]) -> Counter[Operation]:
    counts: Counter[Operation] = Counter()
    for is_fusible, group in groupby(calls, key=lambda pair: _is_fusible(pair[1].operation)):
        members = list(group)
        if is_fusible:
            counts[_kernel([call for _, call in members], members[-1][0], last_reader)] += 1
        else:
            counts.update(call.operation for _, call in members)
    return counts


def _is_fusible(operation: Operation) -> bool:
    return kind_of(operation)[0] in {"row", "stream"}


def _kernel(calls: Sequence[Call], end: int, last_reader: dict[int, int]) -> Operation:
    """One kernel that does what `calls` do; `end` is the place of the last of them."""
    made = dict(_sizes(tensor for call in calls for tensor in call.outputs))
    read = dict(_sizes(tensor for call in calls for tensor in call.inputs if _storage(tensor) not in made))
    # What nobody reads any more is the pass's result, or was only an intermediate: the last call's is kept.
    kept = {_storage(tensor) for tensor in calls[-1].outputs}
    written = sum(size for key, size in made.items() if last_reader.get(key, -1) > end or key in kept)
    return Operation(name="fused", inputs=(), outputs=(), flops=0, bytes_read=sum(read.values()), bytes_written=written)


def _sizes(tensors: Iterator[Tensor]) -> Iterator[tuple[int, int]]:
    """Storages and the bytes of them that are seen; broadcast dimensions count once."""
    for tensor in tensors:
        numel = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            numel *= size if stride else 1
        yield _storage(tensor), numel * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - the only name a storage has
