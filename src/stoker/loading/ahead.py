"""The next batch on its way to a GPU while this one is computed on.

What: each batch is copied from page-locked memory on a stream of its own, one batch ahead of the one that is given
back. Use when: batches lie in the host's memory, or come from workers. Costs: the device's memory of one more batch.
Does not combine with: fetching in the training process, where a batch fetched ahead would draw from the generators that
a checkpoint keeps. Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from typing import TypeVar

import torch

from stoker.loading.fields import Content, map_tensors

Place = TypeVar("BatchKey")
Fetched = Generator[tuple[Place, Content], None, None]


def copied_ahead(fetched: Fetched[Place], device: torch.device) -> Fetched[Place]:
    """What is fetched, with its tensors on `device`; as it is where that is no GPU."""
    return _on_gpu(fetched, device) if device.type == "cuda" else fetched


def _on_gpu(fetched: Fetched[Place], device: torch.device) -> Fetched[Place]:
    aside = torch.cuda.Stream(device)

    def copies() -> Iterator[tuple[Place, Content, torch.cuda.Event]]:
        for place, content in fetched:
            with torch.cuda.stream(aside):
                copied = map_tensors(content, lambda tensor: _pinned(tensor).to(device, non_blocking=True))
                arrived = aside.record_event()
            yield place, copied, arrived

    with closing(fetched):
        coming = copies()
        ahead = next(coming, None)
        while ahead is not None:
            (place, content, arrived), ahead = ahead, next(coming, None)
            computing = torch.cuda.current_stream(device)
            computing.wait_event(arrived)
            # The allocator may give the memory to another copy only when what is computed on it is done.
            map_tensors(content, partial(_used_on, computing))
            yield place, content


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    tensor.record_stream(stream)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
