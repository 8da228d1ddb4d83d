import random
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from stoker.profiling.tracing import fake_device
from stoker.profiling.tracing.fake_device import can_pretend_cuda, is_fake, pretending, why_not_cuda
from tests.profiling.tracing.jobs import JOBS, settings, traced


def _train(device: str, updates: int = 2) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(updates):
        with torch.autocast(device, torch.bfloat16):
            loss = model(torch.ones(4, 4, device=device)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _guard() -> int | None:
    """Address of the device guard of CUDA, which a trace replaces where there is no GPU."""
    return None if torch.cuda.is_available() else fake_device._guards()[1]


def test_cuda_can_be_pretended_here():
    """Nothing has to fall back on this build of PyTorch."""
    assert can_pretend_cuda(), why_not_cuda()


@pytest.mark.parametrize("capability", ["7.5", "9.0"])
def test_whole_step_runs_on_a_device_that_is_not_here(capability):
    """Autocast, a backward pass that adds gradients up, clipping and AdamW run on fake CUDA tensors."""
    with pretending(settings("cuda", capability=capability)) as pretence:
        model = _train("cuda")
        assert pretence.device == torch.device("cuda", 0)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
        assert all(is_fake(tensor) for tensor in model.state_dict().values())
        assert torch.cuda.get_device_capability() == tuple(map(int, capability.split(".")))
    assert not pretence.is_fallback


def test_gradient_scaler_finds_a_device():
    """Code for fp16 that asks whether there is CUDA gets yes."""
    with pretending(settings("cuda")):
        scaler = torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()
        assert scaler.scale(torch.ones(2, device="cuda")).shape == (2,)


def test_process_is_afterwards_as_it_was():
    """Patches, random generators and the table of guards are put back, and real training gives what it gave before."""
    torch.manual_seed(3)
    expected = [tensor.clone() for tensor in _train("cpu").state_dict().values()]
    names = ("is_available", "device_count", "_lazy_init", "default_generators", "get_device_capability")
    before = {name: getattr(torch.cuda, name) for name in names}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    dispatch = vars(fake_device.FakeTensor)["__torch_dispatch__"]
    guard = _guard()
    for _ in range(2):
        with pretending(settings("cuda")):
            torch.manual_seed(8)
            random.seed(8)
            _train("cuda", updates=1)
        torch.manual_seed(3)
        assert all(map(torch.equal, _train("cpu").state_dict().values(), expected))
        torch.set_rng_state(states[2])
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert vars(fake_device.FakeTensor)["__torch_dispatch__"] is dispatch
    assert _guard() == guard
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    torch.manual_seed(3)
    assert all(map(torch.equal, _train("cpu").state_dict().values(), expected))


def test_failure_inside_leaves_nothing_behind():
    """An exception in the block is passed on, and the device is gone."""
    with pytest.raises(ZeroDivisionError), pretending(settings("cuda")):
        _ = 1 / 0
    assert not torch.cuda.is_available() or torch.cuda.device_count() > 0
    assert not is_fake(torch.ones(1))


def test_falls_back_to_a_cpu_and_says_so(monkeypatch):
    """Where the private hooks are missing, a fake CPU stands in."""
    monkeypatch.setattr(fake_device, "why_not_cuda", lambda: "this PyTorch has no hooks")
    with pretending(settings("cuda")) as pretence:
        assert pretence.is_fallback
        assert pretence.device.type == "cpu"
        assert is_fake(_train("cpu")[0].weight)


def test_missing_private_parts_are_named(monkeypatch):
    """The reason names what this PyTorch lacks."""
    why_not_cuda.cache_clear()
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    try:
        if not torch.cuda.is_available():
            assert "_current_graph_task_id" in why_not_cuda()
    finally:
        monkeypatch.undo()
        why_not_cuda.cache_clear()
    assert can_pretend_cuda()


def test_transformers_does_not_take_the_trace_for_an_export(monkeypatch):
    """The library asks whether a tensor is fake, and builds another mask if it is: while tracing the answer is no."""
    module = types.ModuleType("transformers.masking")
    module.is_fake_tensor = original = lambda _tensor: True
    monkeypatch.setitem(sys.modules, "transformers.masking", module)
    with pretending(settings("cuda")):
        assert not module.is_fake_tensor(None)
    assert module.is_fake_tensor is original


def test_convolutions_keep_channels_last():
    """A convolution of a channels-last image gives one, as cuDNN does, and of a contiguous one a contiguous one."""
    with pretending(settings("cuda")):
        conv = nn.Conv2d(3, 8, 3, device="cuda")
        images = torch.ones(2, 3, 8, 8, device="cuda")
        assert conv(images).is_contiguous()
        last = conv(images.to(memory_format=torch.channels_last))
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert not last.is_contiguous()


class _PlainCuda(fake_device.FakeTensorMode):
    """PyTorch's own mode, with the answer that its engine needs."""

    avoid_device_init = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = fake_device.answer_for_engine(func)
        return super().__torch_dispatch__(func, types, args, kwargs or {}) if answer is None else answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "changed"),
    [
        ("cpu", {}),
        ("cuda", {"precision": "bf16", "parts": 2}),
        ("cuda", {"memory_format": "channels_last"}),
    ],
)
@pytest.mark.parametrize("name", JOBS)
def test_results_that_are_looked_up_quicker_are_those_of_pytorch(name, target, changed, monkeypatch):
    """Whole traces are equal, with an empty cache and with one that has every result."""
    fake_device.FakeTensorMode.cache_clear()
    quick = [replace(traced.__wrapped__(name, target, **changed), took_s=0.0) for _ in range(2)]
    monkeypatch.setattr(fake_device, "_modes", lambda: (fake_device.FakeTensorMode, _PlainCuda))
    plain = replace(traced.__wrapped__(name, target, **changed), took_s=0.0)
    assert quick == [plain, plain]


hooked = pytest.mark.skipif(sys.platform != "linux", reason="no build with CUDA has hooks elsewhere")


@hooked
def test_hooks_of_a_build_without_cuda_are_there_while_cuda_is_pretended() -> None:
    """On a build with CUDA and no driver, autograd's engine would ask the driver for streams."""
    has_gpu = torch.cuda.is_available()
    hooks, without = fake_device._hooks()
    before = hooks.value
    if not torch.backends.cuda.is_built():
        assert before == without
    with pretending(settings("cuda")):
        assert hooks.value == (before if has_gpu else without)
    assert hooks.value == before


@hooked
@pytest.mark.parametrize(("name", "value"), [("_HOOKS_SYMBOL", "of_another_pytorch"), ("_NO_CUDA", "3int")])
def test_a_build_with_cuda_whose_hooks_are_elsewhere_falls_back(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names them; nothing is written where they might be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(fake_device, name, value)
    fake_device._hooks.cache_clear()
    try:
        assert "hooks of CUDA" in why_not_cuda.__wrapped__()
    finally:
        fake_device._hooks.cache_clear()


@hooked
def test_another_accelerator_than_cuda_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hooks do not decide what autograd's engine asks, the reason names the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert "driver of cuda" in why_not_cuda.__wrapped__()


def test_guard_of_the_machine_is_back_after_a_trace_in_a_thread_that_ends() -> None:
    """PyTorch frees its no-op guard with the thread that made it; training afterwards must not find it."""
    guard = _guard()

    def trace() -> None:
        for target in ("cuda", "cpu"):
            with pretending(settings(target)):
                _train(target, updates=1)

    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    assert _guard() == guard
    _train("cpu", updates=1)
