"""The fake target device of a trace; all private hooks of PyTorch that tracing needs are in this file.

What: `FakeTensorMode` gives tensors with shapes and no memory. On a build of PyTorch without CUDA, or on a machine
without a GPU, a fake `cuda` tensor survives a forward pass, but not a backward pass, autocast or an optimiser.
`pretending` adds the missing parts, and removes them afterwards:

- c10 has no device guard for CUDA; a guard of zero devices in its slot makes PyTorch install its own no-op guard
  (`_ensureCUDADeviceGuardSet` ignores an empty slot).
- Autograd's engine, on a build with CUDA, asks the driver for the streams of CUDA's nodes. It learns from CUDA's hooks
  that there is CUDA; they get the methods of a build without (`_leave_out_hooks`).
- Autograd's engine, on accumulating a gradient, needs a stream of the tensor's accelerator. It asks the tensor for its
  device from C++, and gets `meta`; every other caller gets `cuda`.
- Python code that asks for CUDA and its properties gets the target's answers.

Use when: the target is not attached. Costs: 2 to 3 s once, to import TorchDynamo, which any PyTorch optimiser does too.
Does not combine with: Windows, where the slot has another linker name; there a CPU is used instead (`is_fallback`).
Source: c10/core/impl/FakeGuardImpl.h and DeviceGuardImplInterface.cpp, aten/src/ATen/DeviceAccelerator.cpp and
detail/CUDAHooksInterface.h, torch/csrc/autograd/engine.cpp and input_buffer.cpp, torch/_subclasses/fake_tensor.py of
PyTorch 2.11 and 2.13.
"""

# ruff: noqa: SLF001 - private parts of PyTorch are what this file is for

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stoker.errors import NoDevice
from stoker.loading.order import python_generators, restore_python_generators
from stoker.records import TraceSettings
from stoker.stepping.without_compiler import checkpointing_without_compiler, without_compiler

try:
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

    _MISSING = ""
    without_compiler(FakeTensorMode.__torch_dispatch__)
except ImportError as _problem:  # a future PyTorch that moved them: nothing can be traced
    _MISSING = f"this PyTorch has no FakeTensorMode where 2.13 has it ({_problem})"

_GUARDS_SYMBOL = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA_SLOT = 1
"""Place of CUDA among c10::DeviceType: CPU is 0."""
_HOOKS_SYMBOL = "_ZN2at6detail12getCUDAHooksEv"
_NO_CUDA = "N2at18CUDAHooksInterfaceE"
"""C++ name of the hooks of a build without CUDA, from which those of a build with CUDA are derived."""
_META = torch.device("meta")
_ASKS_DEVICE: Any = getattr(getattr(torch.ops.prim, "device", None), "default", None)
"""The operation by which a tensor is asked for its device: most of what a mode sees."""
_COMPILER = "torch._dynamo"
_INNER_FILES = ("torch/_stats.py", "torch/_compile.py", "torch/_ops.py", "_dynamo/eval_frame.py")
"""Files of PyTorch on the stack between a C++ request for a device and a mode that answers."""
_TRACING = f"{Path(__file__).parent}/"

_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
_misleads_engine = False
"""Whether autograd's engine gets `meta` in place of `cuda`: while a GPU is pretended on a machine without one."""


class Patches(contextlib.ExitStack):
    """Attributes of PyTorch replaced within the block, and restored after it."""

    def put(self, owner: Any, name: str, value: object) -> None:
        """Replace `owner.name`, if it exists."""
        if hasattr(owner, name):
            self.callback(setattr, owner, name, vars(owner).get(name, getattr(owner, name)))
            setattr(owner, name, value)


class MixedDevices(RuntimeError):
    """An operation on tensors of a GPU and of the CPU, which fails on every GPU."""


@dataclass(frozen=True)
class Pretence:
    """The fake device: its mode, its name in PyTorch, and whether a CPU is used in place of a GPU."""

    mode: FakeTensorMode
    device: torch.device
    is_fallback: bool


@functools.lru_cache(maxsize=1)
def why_not_cuda() -> str:
    """Why no CUDA device can be pretended here; empty where one can."""
    if _MISSING:
        return _MISSING
    if torch.cuda.is_available():
        return ""
    needed = {
        torch._C: ("_ensureCUDADeviceGuardSet", "_current_graph_task_id", "_current_autograd_node"),
        torch.ops.prim: ("device",),
        FakeTensor: ("_find_common_device",),
    }
    for owner, names in needed.items():
        for name in names:
            if not hasattr(owner, name):
                return f"this PyTorch ({torch.__version__}) has no {name}"
    try:
        _guards()
    except (OSError, ValueError) as problem:
        return f"the table of device guards cannot be reached ({problem})"
    if not torch.backends.cuda.is_built():
        return ""
    try:
        with contextlib.ExitStack() as stack:
            _leave_out_hooks(stack)
            accelerator = torch.accelerator.current_accelerator()
    except (OSError, AttributeError, ValueError) as problem:
        return f"the hooks of CUDA in PyTorch {torch.__version__} cannot be reached ({problem})"
    if accelerator is not None:
        return f"PyTorch {torch.__version__} asks the driver of {accelerator} in a backward pass, and there is none"
    return ""


def can_pretend_cuda() -> bool:
    """Whether a CUDA device can be pretended here, without falling back to a CPU."""
    return not why_not_cuda()


@contextlib.contextmanager
def pretending(settings: TraceSettings, known: FakeTensorMode | None = None) -> Iterator[Pretence]:
    """Within the block tensors are fake, on the target of `settings`; afterwards the process is restored.

    So are random generators. Autograd runs in the calling thread, so that the mode sees its operations. `known` is the
    mode of an earlier block, whose fakes go on.

    Raises:
        NoDevice: the target is a GPU of unknown compute capability, which decides its kernels.
    """
    wants_cuda = settings.target == "cuda"
    if wants_cuda and not settings.capability:
        raise NoDevice(
            "The model cannot be traced for a GPU whose compute capability is not known.",
            remedy="Add it to a catalogue of your own (STOKER_CATALOGUE).",
        )
    is_cuda = wants_cuda and can_pretend_cuda()
    with contextlib.ExitStack() as stack:
        if can_pretend_cuda() and not torch.cuda.is_available():  # any fake mode may replace the guard
            guards = _guards()
            stack.callback(guards.__setitem__, _CUDA_SLOT, guards[_CUDA_SLOT])
        leaving_out = stack.enter_context(_compiler_left_out())
        stack.callback(restore_python_generators, python_generators())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count()) if is_cuda else ()))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        with leaving_out():
            references_of_engine()  # found once, before anything is pretended
        if is_cuda:
            _pretend_cuda(stack, settings.capability)
        stack.enter_context(_seen_as_plain_tensors())
        with leaving_out():
            made = _modes()[is_cuda](allow_non_fake_inputs=True) if known is None else known
        mode = stack.enter_context(made)
        yield Pretence(mode, torch.device("cuda", 0) if is_cuda else torch.device("cpu"), wants_cuda and not is_cuda)


def _name_of_source(kind: str) -> Callable[..., object]:
    """What makes the names of where fakes come from, in place of a class of the compiler's."""
    if not kind.endswith("Source"):
        raise AttributeError(kind)
    return lambda *_, **named: types.SimpleNamespace(**{"name": kind, **named})


class _StandIn(types.ModuleType):
    """`torch._dynamo` with its settings, names of sources and `disable`; whatever else is asked of it is imported.

    Fakes and activation checkpointing import it, which takes a second, and without symbolic shapes need nothing else of
    it.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        self.source = types.ModuleType(f"{_COMPILER}.source")
        vars(self.source)["__getattr__"] = _name_of_source
        self.disable = lambda function: function  # as a decorator: within the block nothing is compiled
        self._parts: dict[str, types.ModuleType] = {_COMPILER: self, f"{_COMPILER}.source": self.source}
        with self.imported():
            self._parts[f"{_COMPILER}.config"] = importlib.import_module(f"{_COMPILER}.config")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(_COMPILER), name)

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """Within the block, which only PyTorch's own code for fakes runs in, an import gives the stand-in."""
        if _COMPILER in sys.modules:
            yield
            return
        sys.modules.update(self._parts)
        try:
            yield
        finally:
            for name in (*self._parts, f"{_COMPILER}.config"):
                sys.modules.pop(name, None)


_stand_in = functools.lru_cache(maxsize=1)(_StandIn)


@contextlib.contextmanager
def _compiler_left_out() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Within the block fakes do without PyTorch's compiler; the result is a context in which a fake mode is made."""
    if _COMPILER in sys.modules:
        yield contextlib.nullcontext
        return
    stand_in, convert = _stand_in(), FakeTensorConverter.from_real_tensor

    def from_real_tensor(*args: Any, **kwargs: Any) -> FakeTensor:
        with stand_in.imported():
            return convert(*args, **kwargs)

    with Patches() as patches, checkpointing_without_compiler():
        patches.put(FakeTensorConverter, "from_real_tensor", from_real_tensor)
        torch._dynamo = stand_in
        try:
            yield stand_in.imported
        finally:
            if vars(torch).get("_dynamo") is stand_in:
                del torch._dynamo


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within the block operations on real tensors run for real, although a fake mode is on."""
    with _disable_current_modes():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, without memory."""
    return isinstance(tensor, FakeTensor)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on `device` of the sizes, strides and dtype of `tensor`, a parameter if it is one."""
    with torch.no_grad(), mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad and tensor.is_leaf:
        fake.requires_grad_(True)
    return fake


def is_in_backward() -> bool:
    """Whether autograd's engine is running."""
    return bool(torch._C._current_graph_task_id() != -1)


def next_sequence_number() -> int:
    """Sequence number of the next node of autograd's graph [nodes]."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number_of_node() -> int:
    """Sequence number of the running autograd node [nodes]; -1 for none. PyTorch's profiler links passes by it."""
    node: Any = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def storage_key(storage: torch.UntypedStorage) -> int:
    """Key of a storage, unique among the living ones [address]."""
    return int(storage._cdata)


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """Numbers of references to the tensor and to its storage; -1 where PyTorch does not count them."""
    if not _CAN_COUNT:
        return -1, -1
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1)
def references_of_engine() -> tuple[int, int]:
    """As `references`, of a gradient held by autograd's engine only, as a mode sees it; measured on an example."""
    seen: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                seen.append(references(args[0]))
            return func(*args, **(kwargs or {}))

    without_compiler(Look.__torch_dispatch__)  # as `Recorder`, whose frames hold as many references
    if not _CAN_COUNT:
        return 0, 0
    with FakeTensorMode(), Look(), torch.enable_grad():  # type: ignore[no-untyped-call]
        leaf = torch.ones(2, requires_grad=True)
        middle = leaf * 2
        (middle.tanh() * middle.sigmoid()).sum().backward()
    return seen[0] if seen else (0, 0)


def calling_instruction() -> tuple[int, int] | None:
    """The Python frame and instruction that called into PyTorch; None if autograd's engine did."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or _is_inner(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name == "_engine_run_backward":
        return None
    return id(frame), frame.f_lasti


def answer_for_engine(func: Any) -> torch.device | None:
    """`meta` if autograd's engine asks a tensor for its device and no GPU is attached; None: answer as usual."""
    is_question = func is _ASKS_DEVICE and _misleads_engine
    return _META if is_question and calling_instruction() is None else None


def answer_for_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """The answer if a tensor is asked for its device, as `answer_for_engine` or a fake mode gives it; else None."""
    if func is not _ASKS_DEVICE:
        return None
    if (answer := answer_for_engine(func)) is not None:
        return answer
    is_known = isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation
    return args[0].fake_device if is_known else None


@functools.lru_cache(maxsize=4096)
def _is_inner(file_name: str) -> bool:
    return file_name.endswith(_INNER_FILES) or file_name.startswith(_TRACING)


def _fake_of(
    made: torch.Tensor, device: torch.device, mode: FakeTensorMode, attributes: dict[torch.device, dict[str, Any]]
) -> FakeTensor:
    """As the constructor: fakes of a mode on one device have the same `attributes`, which those of the first become."""
    known = attributes.get(device)
    if known is None:
        fake = FakeTensor(mode, made, device)
        attributes[device] = dict(vars(fake))
        return fake
    fake = torch.Tensor._make_subclass(
        FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    vars(fake).update(known)
    return fake


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@functools.cache
def _modes() -> tuple[type[FakeTensorMode], type[FakeTensorMode]]:
    """Classes of fake modes for a CPU and for CUDA. They look results up that PyTorch has in its cache, but quicker.

    Most of an operation on fakes is to say what it is on, as a key of the cache. Here a strided tensor is said with the
    facts that its others follow from, a third of them. The rest is mostly to make results, which `_fake_of` does.
    Source: `_prep_args_for_hash` and `_get_output_tensor_from_cache_entry` of torch/_subclasses/fake_tensor.py.
    """

    class Quick(FakeTensorMode):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._attributes: dict[torch.device, dict[str, Any]] = {}

        def _prep_args_for_hash(self, result: list[object], args: Any, *about: Any) -> None:
            result += (Quick, type(args), len(args))
            if isinstance(args, dict):
                result.append(tuple(args))
                args = args.values()
            for arg in args:
                kind = type(arg)
                if kind in _PLAIN:
                    result += (kind, arg)
                elif (
                    kind is FakeTensor
                    and arg.fake_mode is self
                    and arg.constant is None
                    and arg.layout is torch.strided
                    and not arg.is_quantized
                ):
                    result += (
                        arg.dtype,
                        arg.shape,
                        arg.stride(),
                        arg.storage_offset(),
                        arg.untyped_storage().nbytes(),
                        arg.device,
                        arg.requires_grad,
                        arg.is_conj(),
                        arg.is_neg(),
                        arg.is_inference(),
                    )
                elif kind in (list, tuple):
                    self._prep_args_for_hash(result, arg, *about)
                else:
                    super()._prep_args_for_hash(result, (arg,), *about)

        def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
            metadata = entry.metadata
            if metadata is None or entry.inplace_idx is not None or metadata.is_conj or metadata.is_neg:
                return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
            made = torch.empty_strided(
                metadata.shape,
                metadata.stride,
                dtype=metadata.dtype,
                layout=metadata.layout,
                device=_META,
                requires_grad=metadata.requires_grad,
            )
            if entry.view_idx is not None:
                storage = args[entry.view_idx].untyped_storage()
                made.set_(storage, metadata.storage_offset, metadata.shape, metadata.stride)
            return _fake_of(made, metadata.device, self, self._attributes)

    class QuickCuda(Quick):
        """Fake tensors that never start the driver, nor ask for a stream."""

        avoid_device_init = True  # a property there: BatchNorm's counter must stay fake

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = answer_for_engine(func)
            return super().__torch_dispatch__(func, types, args, kwargs or {}) if answer is None else answer

    without_compiler(QuickCuda.__torch_dispatch__)
    return Quick, QuickCuda


def _pretend_cuda(stack: contextlib.ExitStack, capability: str) -> None:
    major, minor = (int(part) for part in capability.split("."))
    patches = stack.enter_context(Patches())
    patches.put(torch.cuda, "get_device_capability", lambda *_: (major, minor))
    patches.put(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8 or including_emulation)
    _answer_as_cudnn(patches)
    if torch.cuda.is_available():
        torch.empty(1, device="cuda:0")  # autograd's engine needs a context, which a fake's may not have made
        return
    _install_guard()
    if torch.backends.cuda.is_built():
        _leave_out_hooks(stack)
    _answer_as_a_machine_with_cuda(patches)
    patches.put(fake_tensor, "init_gpu_context", lambda _device: None)  # 2.11 makes a real tensor there
    patches.put(sys.modules[__name__], "_misleads_engine", True)
    original: Callable[..., Any] = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = answer_for_engine(func)
        return original(cls, func, types, args, kwargs or {}) if answer is None else answer

    patches.put(FakeTensor, "__torch_dispatch__", classmethod(dispatch))
    config = importlib.import_module("torch._functorch.config")
    # Scalars made by the engine are on `meta`; combined with tensors of the device, the device wins.
    stack.enter_context(config.patch(fake_tensor_prefer_device_type="cuda"))
    _refuse_mixed_devices(patches)


def _refuse_mixed_devices(patches: Patches) -> None:
    """Restore the check for CPU tensors that a preferred device disables; CPU scalars may meet a GPU's."""
    original: Callable[..., tuple[torch.device, bool]] = FakeTensor._find_common_device

    def common_device(func: Any, flat_args: Sequence[object]) -> tuple[torch.device, bool]:
        result = original(func, flat_args)
        if result[0].type == "cuda" and func is not torch.ops.aten._foreach_copy.default:
            for arg in flat_args:
                if isinstance(arg, FakeTensor) and arg.device.type == "cpu" and arg.dim() > 0:
                    raise MixedDevices(f"a tensor {list(arg.shape)} on the CPU meets one on {result[0]}")
        return result

    patches.put(FakeTensor, "_find_common_device", staticmethod(common_device))


def _answer_as_a_machine_with_cuda(patches: Patches) -> None:
    generator = torch.Generator()  # for keyed seeding of the device
    state = generator.get_state()
    answers: dict[str, object] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_initialized": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_name": lambda *_: "pretended",
        "synchronize": lambda *_: None,
        "_lazy_init": lambda: None,
        "get_rng_state": lambda *_, **__: state,
        "set_rng_state": lambda *_, **__: None,
        "default_generators": (generator,),
    }
    for name, answer in answers.items():
        patches.put(torch.cuda, name, answer)
    patches.put(torch.backends.cudnn, "is_acceptable", lambda _tensor: False)  # it has no version without a driver


def _answer_as_cudnn(patches: Patches) -> None:
    """Convolutions lay out their results as cuDNN does: channels last if an operand is."""
    backend = getattr(getattr(torch._C, "_ConvBackend", None), "Cudnn", None)
    if backend is None:
        return

    def layout(inputs: torch.Tensor, weight: torch.Tensor, _backend: object) -> torch.memory_format:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = formats.get(inputs.dim())
        is_last = last is not None and any(
            not each.is_contiguous() and each.is_contiguous(memory_format=last) for each in (inputs, weight)
        )
        return last if is_last and last is not None else torch.contiguous_format

    patches.put(torch._C, "_select_conv_backend", lambda *_, **__: backend)
    patches.put(torch._C, "_conv_determine_backend_memory_format", layout)


@contextlib.contextmanager
def _seen_as_plain_tensors() -> Iterator[None]:
    """Within the block, PyTorch and transformers treat fake tensors as real ones."""
    with Patches() as patches:
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # else the for-loop would be traced
            module = importlib.import_module(name)
            patches.put(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])
        # Module.to() swaps fake parameters in place, which fails on weak references to them.
        patches.put(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=lambda _tensor: []))
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers"):  # it builds a mask for fake tensors, as in an export
                patches.put(module, "is_fake_tensor", lambda _tensor: False)
        yield


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}"))


@functools.lru_cache(maxsize=1)
def _guards() -> ctypes.Array[ctypes.c_void_p]:
    """c10's table of device guards, up to CUDA's slot."""
    return (ctypes.c_void_p * (_CUDA_SLOT + 1)).in_dll(_library("c10"), _GUARDS_SYMBOL)


def _install_guard() -> None:
    """Fill CUDA's slot with PyTorch's no-op guard; the caller restores it."""
    torch._C._ensureCUDADeviceGuardSet()  # enough where PyTorch is built with CUDA
    guards = _guards()
    if guards[_CUDA_SLOT]:
        return
    _, guard = _guard_of_no_device()
    guards[_CUDA_SLOT] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()


@functools.lru_cache(maxsize=1)
def _hooks() -> tuple[ctypes.c_void_p, int]:
    """Which methods CUDA's hooks have, as a pointer that can be set, and the address of those that know no CUDA.

    A C++ object starts with a pointer to its methods, which follow two words: an offset, and the address of its type,
    whose second word is its name (Itanium C++ ABI, on every system but Windows).

    Raises:
        OSError, AttributeError, ValueError: this PyTorch has them elsewhere.
    """
    library = _library("torch_cpu")
    find = getattr(library, _HOOKS_SYMBOL)
    find.argtypes, find.restype = (), ctypes.c_void_p
    offset, kind = table = (ctypes.c_void_p * 2).in_dll(library, f"_ZTV{_NO_CUDA}")
    name = kind and ctypes.c_char_p.from_address(kind + ctypes.sizeof(ctypes.c_void_p)).value
    if offset or name != _NO_CUDA.encode():
        raise ValueError(f"methods of {name!r} in place of {_NO_CUDA}")
    return ctypes.c_void_p.from_address(find()), ctypes.addressof(table) + ctypes.sizeof(table)


def _leave_out_hooks(stack: contextlib.ExitStack) -> None:
    """Let C++ answer, until `stack` closes, as a build without CUDA does: autograd's engine then needs no streams."""
    hooks, without = _hooks()
    stack.callback(setattr, hooks, "value", hooks.value)
    hooks.value = without


@functools.lru_cache(maxsize=1)
def _guard_of_no_device() -> tuple[Any, Any]:
    """A C++ object whose methods all return 0; with 0 devices PyTorch replaces it."""
    zero = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    return (zero, methods), (ctypes.c_void_p * 2)(ctypes.addressof(methods), 0)
