import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.fakes import NO_HINTS
from stoker.profiling.tracing.session import trace_step
from stoker.profiling.tracing.update import trace_update
from tests.profiling.tracing.jobs import JOBS, SEPARABLE, make_job, settings

CLASSES = 10


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(48, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.change(self.layer(x)))


class _Masked(_Model):
    def change(self, x):
        kept = x[x[:, 0] > 0]  # data-dependent
        return x + kept.sum(0)


class _Selected(_Model):
    def change(self, x):
        return x + torch.masked_select(x, x > 0).mean()  # data-dependent


class _Routed(_Model):
    def change(self, x):
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)  # data-dependent
        return x.index_add(0, rows, x[rows])


class _Repeated(_Model):
    def change(self, x):
        count = (x[:, 0] > 0).sum().clamp(min=1).item()  # data-dependent
        return x + torch.ones(int(count), 16, device=x.device).mean(0)


class _Counting(_Model):
    def change(self, x):
        self.seen = (x > 0).sum().item()
        return x


class _Checking(_Model):
    def change(self, x):
        if x.isnan().any():
            raise ValueError("not a number")
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x


def _line_of(model, text="# data-dependent"):
    import inspect

    lines, first = inspect.getsourcelines(model)
    return f"test_answers.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def _trace(model, target="cuda"):
    job = make_job(model, JOBS["mlp"]().data)
    return trace_update(job, datasets_of(job), SEPARABLE, settings(target))


def _trace_step(model, hints=NO_HINTS, target="cuda"):
    stepped = model()
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1)

    def step(batch):
        F.cross_entropy(stepped(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trace_step(step, (torch.ones(8, 48), torch.zeros(8, dtype=torch.int64)), settings(target), hints=hints)


@pytest.mark.parametrize("model", [_Masked, _Selected, _Routed, _Repeated])
def test_sizes_that_depend_on_data_ask_for_a_hint_and_name_the_line(model):
    """How many rows a mask keeps is not guessed: the error has the user's line and how to say it."""
    line = _line_of(model)
    with pytest.raises(BadJob, match=line) as caught:
        _trace_step(model)
    assert f'hints={{"{line}": 128}}' in caught.value.remedy


@pytest.mark.parametrize("model", [_Masked, _Selected, _Routed, _Repeated])
def test_a_job_is_told_what_it_can_do_without_hints(model):
    """No call takes hints for a Job, so that none is asked for: it is planned by trials, or rewritten."""
    with pytest.raises(BadJob, match=_line_of(model)) as caught:
        _trace(model)
    assert "hints" not in caught.value.remedy
    assert "planned by trials" in caught.value.remedy
    assert "torch.where" in caught.value.remedy


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("model", [_Masked, _Selected, _Routed, _Repeated])
def test_hint_gives_the_size(model, target):
    """With the hint the step is traced, and tensors have the size that the hint says, backward pass included."""
    few, many = (_trace_step(model, {_line_of(model): count}, target) for count in (3, 7))
    sizes = [{shape.shape for one in t.operations for shape in (*one.inputs, *one.outputs)} for t in (few, many)]
    assert any(3 in shape for shape in sizes[0] - sizes[1])
    assert any(7 in shape for shape in sizes[1] - sizes[0])


def test_whole_number_that_changes_nothing_is_answered():
    """Counting correct answers by `.item()` needs no hint: no shape depends on it."""
    assert _trace(_Counting).flops == _trace(_Model_without_change).flops


class _Model_without_change(_Model):  # noqa: N801 - the model of the others, nothing changed
    def change(self, x):
        return x


def test_checks_pass():
    """`any` is no and `all` is yes, so that checks for bad values do not fire."""
    assert _trace(_Checking).flops == _trace(_Model_without_change).flops


class _Numpy(_Model):
    def change(self, x):
        return x + float(x.detach().cpu().numpy().mean())  # data-dependent


def test_what_cannot_be_traced_is_named_with_its_line():
    """Leaving PyTorch in the middle of a step is reported with the user's line and a way out."""
    with pytest.raises(BadJob, match=_line_of(_Numpy)) as caught:
        _trace(_Numpy)
    assert "numpy" in caught.value.remedy


@torch.library.custom_op("stoker_tests::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_doubled.register_autograd(lambda _ctx, grad: grad * 2)


class _Custom(_Model):
    def change(self, x):
        return _doubled(x)  # data-dependent


def test_operation_without_fake_is_named():
    """A user's own operation without a fake implementation is named, with what it needs."""
    with pytest.raises(BadJob, match=f"doubled.*{_line_of(_Custom)}") as caught:
        _trace(_Custom)
    assert "register_fake" in caught.value.remedy


class _Mixed(_Model):
    def change(self, x):
        return x + torch.arange(16, device="cpu")  # another device


class _Scalar(_Model):
    def change(self, x):
        return x + torch.tensor(0.5, device="cpu")


def test_a_tensor_of_the_cpu_does_not_meet_one_of_the_gpu():
    """It would fail on every GPU: the line is named, and the change that would do. On a CPU it is right."""
    with pytest.raises(BadJob, match=f"add.* at {_line_of(_Mixed, '# another device')} cannot be traced") as caught:
        _trace(_Mixed)
    assert "device=x.device" in caught.value.remedy
    assert _trace(_Mixed, "cpu").flops == _trace(_Model_without_change, "cpu").flops


def test_a_scalar_of_the_cpu_may_meet_tensors_of_the_gpu():
    """As it may on a GPU."""
    assert _trace(_Scalar).flops == _trace(_Model_without_change).flops


class _Mismatched(_Model):
    def change(self, x):
        return x @ x  # 16 columns meet another number of rows


def test_pytorch_logs_nothing_of_what_cannot_be_traced(capfd):
    """One error with the operation and the line; no traceback of PyTorch's log above it, and its log is as before."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with pytest.raises(BadJob, match=r"aten.mm.default at test_answers.py:\d+ cannot be traced"):
        _trace(_Mismatched)
    assert not capfd.readouterr().err
    assert not log.disabled


class _Sparse(_Model):
    def change(self, x):
        return x + x.to_sparse().to_dense()  # data-dependent


class _SparseGradient(_Model):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(16, 16, sparse=True)

    def change(self, x):
        return x + self.rows(torch.zeros(len(x), dtype=torch.int64, device=x.device))


@pytest.mark.parametrize("model", [_Sparse, _SparseGradient])
def test_a_sparse_tensor_is_named_with_what_to_do(model):
    """It has no storage; the message was of PyTorch's inside, and its remedy did not help."""
    with pytest.raises(BadJob, match="makes a sparse tensor, as a sparse gradient is") as caught:
        _trace(model)
    assert "sparse=False" in caught.value.remedy
