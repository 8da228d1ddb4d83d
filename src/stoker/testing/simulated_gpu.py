"""A simulated GPU: tensors of device `cuda:N` without a GPU, computed by the CPU's kernels.

What: a small extension (`simulated_gpu.cpp`) gives PyTorch's CUDA device an allocator, a device guard, generators and
kernels: each operation runs as the CPU's on the same memory. Dispatch, autograd's threads of each device, autocast and
errors about tensors on several devices are PyTorch's own. This file replaces what Python calls of `torch.cuda`: streams
and events, memory statistics with an end of memory, pinned copies, graphs that repeat operations, properties; NCCL is
gloo on the same memory; `nvidia-smi` answers.
Use when: code for CUDA has to be executed where there is no GPU. It says nothing about a GPU's speed or rounding.
Costs: a minute once, to compile; some 20 µs an operation. What it does not see: work that does not wait for another
stream, since all streams compute at once; operations without a kernel for CPUs, such as recurrent layers' own on GPUs.
Does not combine with: a build of PyTorch with CUDA; the rest of the process, which from then on has a GPU.
Source: c10/core/impl/DeviceGuardImplInterface.h, ATen/detail/CUDAHooksInterface.h, ATen/native/CPUFallback.cpp and
test/cpp_extensions/open_registration_extension of PyTorch 2.13, which does the same for a device of its own.
"""

# ruff: noqa: SLF001 - private parts of PyTorch are what this file is for

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import distributed_c10d

from stoker.devices import TorchBuild, detection
from stoker.errors import NoDevice
from stoker.testing.gpu_batch_norm import give_the_cpu_batch_norm_kernels
from stoker.units import GIB, MIB

MODEL = "Simulated GPU"
_SOURCE, _NAME = Path(__file__).with_suffix(".cpp"), "stoker_simulated_gpu"


def simulate_gpus(count: int = 1, *, memory_bytes: int = GIB, capability: tuple[int, int] = (9, 0)) -> None:
    """Give this process simulated GPUs, from now on; called again it changes their number and memory.

    Args:
        count: number of devices.
        memory_bytes: memory of each [bytes]; beyond it allocations raise `torch.OutOfMemoryError`.
        capability: compute capability.

    Raises:
        NoDevice: this PyTorch has CUDA.
    """
    if torch.version.cuda is not None and not is_simulated():
        raise NoDevice(
            f"PyTorch {torch.__version__} has CUDA: GPUs are simulated for builds without.",
            remedy="Use the GPU, or a CPU build of PyTorch.",
        )
    extension = _extension()
    extension.set_devices(count, memory_bytes)
    torch.cuda.default_generators = tuple(extension.generator(index) for index in range(count))
    _PROPERTIES.clear()
    _PROPERTIES.extend(
        types.SimpleNamespace(
            name=MODEL,
            major=capability[0],
            minor=capability[1],
            total_memory=memory_bytes,
            multi_processor_count=108,
            warp_size=32,
            uuid=f"GPU-{index}",
            is_integrated=False,
            L2_cache_size=MIB,
        )
        for index in range(count)
    )
    if not is_simulated():
        give_the_cpu_batch_norm_kernels()
        _replace_torch_cuda(extension)
        _replace_nccl(extension)
    _pass_on()


def is_simulated() -> bool:
    """Whether this process has simulated GPUs."""
    return getattr(torch.cuda, "is_simulated", False)


@functools.cache
def _extension() -> Any:
    """The extension, compiled once for each version of PyTorch and of its source, in PyTorch's cache of extensions."""
    built_for = f"{torch.__version__} {sys.version}".encode()
    digest = hashlib.sha256(_SOURCE.read_bytes() + built_for).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library = root / f"{_NAME}-{digest}.so"
    if not library.exists():
        from torch.utils import cpp_extension  # noqa: PLC0415 - imports setuptools

        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:  # renamed when whole: several processes may build it
            built = cpp_extension.load(name=_NAME, sources=[str(_SOURCE)], extra_cflags=["-O1"], build_directory=folder)
            (Path(folder) / f"{_NAME}.so").rename(library)
        return built
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_PROPERTIES: list[Any] = []


def _index(device: Any = None) -> int:
    """The index of a device given as PyTorch takes it: None is the current one."""
    if isinstance(device, int):
        index: int | None = device
    else:
        index = None if device is None else torch.device(device).index
    return _extension().current_device() if index is None or index < 0 else index


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Self:
        """A new stream, or the one that is named by its id."""
        if named:
            return super().__new__(cls, priority=priority, **named)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """Its handle."""
        return int(self.stream_id)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # noqa: FBT001, FBT002, N802 - PyTorch's signature
    """As `torch.cuda.Event`: a new event, of the device of the stream that it is recorded in."""
    cuda = torch.device("cuda")
    return torch.Event(device=cuda, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class Graph:
    """As `torch.cuda.CUDAGraph`: the operations between begin and end, which are also computed then."""

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: FBT001, FBT002 - PyTorch's signature
        self._graph = _extension().Graph()

    def capture_begin(self, *_pool: Any, **_settings: Any) -> None:
        """Note operations from now on."""
        self._graph.begin()

    def capture_end(self) -> None:
        """Note no more."""
        self._graph.end()

    def replay(self) -> None:
        """Compute the operations again, from and to the same memory."""
        self._graph.replay()

    def reset(self) -> None:
        """Forget them."""
        self._graph.reset()


@contextlib.contextmanager
def _in_stream(stream: Any) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _stream_of(device: Any = None) -> Stream:
    current = torch.accelerator.current_stream(_index(device))
    return Stream(stream_id=current.stream_id, device_index=current.device_index, device_type=current.device_type)


def _replace_torch_cuda(extension: Any) -> None:  # noqa: C901 - a list of replacements
    """Functions and classes of `torch.cuda` that need a build with CUDA."""

    def memory(place: int) -> Any:
        return lambda device=None: extension.memory(_index(device))[place]

    def memory_info(device: Any = None) -> tuple[int, int]:
        _, _, reserved, _, limit = extension.memory(_index(device))
        return limit - reserved, limit

    def exchange_device(device: int) -> int:
        before: int = extension.current_device()
        if device >= 0:
            extension.set_device(device)
        return before

    def no_work(*_: Any, **__: Any) -> None:
        """Nothing is left to wait for."""

    def state(device: Any = "cuda") -> torch.Tensor:
        return torch.cuda.default_generators[_index(device)].get_state()

    def set_state(new: torch.Tensor, device: Any = "cuda") -> None:
        torch.cuda.default_generators[_index(device)].set_state(new)

    def seed_current(seed: int) -> None:
        torch.cuda.default_generators[_index()].manual_seed(seed)

    def seed_all(seed: int) -> None:
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)

    ranges: list[str] = []
    replaced: dict[str, Any] = {
        "is_simulated": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": no_work,
        "_lazy_init": no_work,
        "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: len(_PROPERTIES),
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(_index(device)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_properties": lambda device=None: _PROPERTIES[_index(device)],
        "get_device_capability": lambda device=None: (
            _PROPERTIES[_index(device)].major,
            _PROPERTIES[_index(device)].minor,
        ),
        "get_device_name": lambda device=None: _PROPERTIES[_index(device)].name,
        "synchronize": lambda device=None: extension.memory(_index(device)) and None,
        "ipc_collect": no_work,
        "mem_get_info": memory_info,
        "memory_allocated": memory(0),
        "max_memory_allocated": memory(1),
        "memory_reserved": memory(2),
        "max_memory_reserved": memory(3),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(_index(device)),
        "empty_cache": lambda: [extension.empty_cache(index) for index in range(len(_PROPERTIES))] and None,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": _in_stream,
        "current_stream": _stream_of,
        "set_stream": torch.accelerator.set_stream,
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=_index(device), device_type=1),
        "_sleep": no_work,
        "set_sync_debug_mode": no_work,
        "get_sync_debug_mode": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "graph_pool_handle": lambda: (0, 0),
        "get_rng_state": state,
        "set_rng_state": set_state,
        "manual_seed_all": seed_all,
        "manual_seed": seed_current,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
        for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.graphs, torch.cuda.streams):
            if hasattr(module, name):
                setattr(module, name, value)
    torch.cuda.nvtx.range_push = ranges.append
    torch.cuda.nvtx.range_pop = ranges.pop
    history: Any = torch.cuda.memory  # of allocations, which there is none of
    history._record_memory_history = history._dump_snapshot = None
    private: Any = torch._C
    private._host_emptyCache = no_work
    torch.version.cuda = "13.0"
    detection.installed_torch = lambda: TorchBuild(torch.__version__, torch.version.cuda)
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        return (
            extension.resize_storage(storage, size) or storage
            if storage.device.type == "cuda"
            else resize(storage, size)
        )

    storages: Any = torch.UntypedStorage
    storages.resize_ = resize_storage


class _IsNccl(type):
    """Makes a process group's backend of that name an instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C._distributed_c10d.Backend) and instance.name() == "nccl"


def _replace_nccl(extension: Any) -> None:
    """NCCL's backend, over gloo."""

    class ProcessGroupNCCL(metaclass=_IsNccl):
        """As PyTorch's."""

        class Options:
            """As PyTorch's; only the timeout is used."""

            _timeout = timedelta(minutes=10)

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            return extension.collectives(distributed_c10d.ProcessGroupGloo(store, rank, size, options._timeout))

    backend: Any = torch._C._distributed_c10d.Backend
    backend._set_default_timeout = lambda _backend, _timeout: None  # gloo keeps the one that it was made with
    replaced: Any = distributed_c10d
    replaced.ProcessGroupNCCL, replaced._NCCL_AVAILABLE = ProcessGroupNCCL, True


def _pass_on() -> None:
    """Give processes that this one starts the same GPUs, and a program `nvidia-smi` that answers Stoker's query."""
    folder = Path(tempfile.gettempdir()) / f"stoker-simulated-gpu-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    rows = [
        f"{index}, {one.uuid}, {one.name}, {one.total_memory // MIB}, {one.major}.{one.minor}, 580.0"
        for index, one in enumerate(_PROPERTIES)
    ]
    program = folder / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", "cat << END", *rows, "END", ""]), encoding="utf-8")
    program.chmod(0o700)
    first = _PROPERTIES[0]
    capability = (first.major, first.minor)
    call = f"simulate_gpus({len(_PROPERTIES)}, memory_bytes={first.total_memory}, capability={capability})"
    (folder / "sitecustomize.py").write_text(f"from {__name__} import simulate_gpus\n{call}\n", encoding="utf-8")
    for name in ("PATH", "PYTHONPATH"):
        paths = os.environ.get(name, "").split(os.pathsep) if os.environ.get(name) else []
        if str(folder) not in paths:
            os.environ[name] = os.pathsep.join([str(folder), *paths])
