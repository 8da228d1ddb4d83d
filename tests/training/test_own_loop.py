"""The levers without the trainer: a loop that is somebody's own learns the same, and is left its objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.devices import malloc
from stoker.errors import BadJob, NoDevice
from stoker.records import Plan, dumps
from stoker.stepping.torch_optimizers import use_implementation
from stoker.training.own_loop import OwnLoop, prepare

pytestmark = pytest.mark.usefixtures("place")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "custom-loop.md"


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Threads and memory of the process are the loop's to set; tests leave them as they found them."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    malloc.apply_malloc("default")


def _images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(16, 1, 8, 8, generator=drawn), torch.randint(0, 10, (16,), generator=drawn)


def _train(loop: OwnLoop, updates: range) -> None:
    for number in updates:
        images, labels = loop.to_device(_batch(number))
        with loop.autocast():
            loss = F.cross_entropy(loop.model(images), labels)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> OwnLoop:
    """The loop as it was before: nothing is applied."""
    return OwnLoop(model, optimizer, Plan(device="cpu", micro_batch=16))


_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("make", _OPTIMIZERS.values(), ids=_OPTIMIZERS)
def test_levers_in_the_middle_of_training_change_nothing_that_is_learned(make) -> None:
    """In float64, with the optimiser's state already there, fused channels-last training goes on as it would have."""
    ends = []
    for is_prepared in (False, True):
        model = _images().double()
        optimizer = make(model.parameters())
        loop = _plain(model, optimizer)
        batches = [tuple(t.double() if t.is_floating_point() else t for t in _batch(n)) for n in range(6)]
        for number, (images, labels) in enumerate(batches):
            if number == 3 and is_prepared:
                plan = Plan(
                    device="cpu", micro_batch=16, memory_format="channels_last", optimizer_implementation="fused"
                )
                loop = prepare(model, optimizer, plan)
                assert loop.notes == ()
            images, labels = loop.to_device((images, labels))  # noqa: PLW2901 - as a user's loop would
            F.cross_entropy(loop.model(images), labels).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.allclose(*ends, rtol=1e-9, atol=1e-12)


def test_objects_stay_the_users_own() -> None:
    """The model and the optimiser handed over are those that come back, and a scheduler made before still rules."""
    model = _images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = list(model.parameters())
    loop = prepare(model, optimizer)
    assert loop.model is model
    assert loop.optimizer is optimizer
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    _train(loop, range(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["fused"] is True


def test_autocast_is_the_plans_precision() -> None:
    """Under bf16 products are in bf16; under fp32 nothing is cast."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtypes = []
    for precision in ("bf16", "fp32"):
        loop = prepare(model, optimizer, Plan(device="cpu", micro_batch=1, precision=precision))
        with loop.autocast():
            dtypes.append(model(torch.zeros(1, 4)).dtype)
    assert dtypes == [torch.bfloat16, torch.float32]


def test_to_device_keeps_the_form_of_a_batch() -> None:
    """Containers stay what they are, images are laid out channels-last, what is no tensor is left alone."""
    model = _images()
    loop = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Plan(device="cpu", micro_batch=1, memory_format="channels_last"),
    )
    placed = loop.to_device({"image": torch.zeros(2, 3, 4, 4), "name": ["a", "b"], "pair": (torch.ones(2), 7)})
    assert placed["image"].is_contiguous(memory_format=torch.channels_last)
    assert placed["name"] == ["a", "b"]
    assert torch.equal(placed["pair"][0], torch.ones(2))
    assert placed["pair"][1] == 7


def test_checkpointed_blocks_leave_the_gradient_as_it_is() -> None:
    """Blocks are computed again in the backward pass under autocast, to the same bits."""
    torch.manual_seed(0)
    gradients = []
    for count in (0, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
        loop = prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Plan(device="cpu", micro_batch=1, precision="bf16", checkpointed_blocks=count),
        )
        with loop.autocast():
            loss = model(torch.ones(2, 8)).float().square().mean()
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_plan_comes_from_a_file(tmp_path: Path) -> None:
    """A plan file is taken as `--plan` takes it."""
    path = tmp_path / "plan.json"
    path.write_text(dumps(Plan(device="cpu", micro_batch=4, threads=1)), encoding="utf-8")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert prepare(model, optimizer, path).plan.micro_batch == 4
    assert prepare(model, optimizer, str(path)).plan.micro_batch == 4


@pytest.mark.slow
def test_a_measured_plan_leaves_model_and_optimiser_untouched_until_it_is_applied() -> None:
    """Trials train copies: weights, statistics and the state of the optimiser are those handed over."""
    model = _images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _train(_plain(model, optimizer), range(2))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    loop = prepare(
        model, optimizer, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), example_batch=_batch(0)
    )
    assert loop.decision is not None
    assert loop.plan.micro_batch == 16
    assert loop.decision.chosen.forecast.step_s.basis == "measured here"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(optimizer.state[p]["exp_avg"], m) for p, m in zip(model.parameters(), moments, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.LBFGS, "LBFGS has no fused implementation"),
        (lambda p: torch.optim.Adam(p, capturable=True), "capturable"),
    ],
)
def test_what_has_no_fused_implementation_is_left_and_said(optimizer, words: str) -> None:
    """An optimiser that cannot be computed so stays as it is, and the reason is reported."""
    made = optimizer(list(nn.Linear(2, 2).parameters()))
    before = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    assert words in (use_implementation(made, "fused") or "")
    assert [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups] == before


def test_what_cannot_be_meant_is_refused() -> None:
    """Another model's optimiser, a plan that is none, half of what measuring takes: each error has a remedy."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadJob, match="2 of the 2 parameters that SGD steps are not the model's"):
        prepare(other, optimizer)
    with pytest.raises(BadJob, match="'fast' is no plan"):
        prepare(model, optimizer, "fast")
    with pytest.raises(BadJob, match="one of them is missing"):
        prepare(model, optimizer, loss=lambda model, batch: model(batch).sum())
    with pytest.raises(BadJob, match=r"a dict, wanted a torch\.optim\.Optimizer"):
        prepare(model, {})  # type: ignore[arg-type]
    with pytest.raises(BadJob, match="tf32"):
        prepare(model, optimizer, Plan(device="cpu", micro_batch=1, precision="tf32"))
    with pytest.raises(BadJob, match="repeated blocks"):
        prepare(model, optimizer, Plan(device="cpu", micro_batch=1, checkpointed_blocks=2))
    with pytest.raises(NoDevice):
        prepare(model, optimizer, on="cuda:7")


def test_the_page_runs_and_four_lines_make_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """The loop of docs/custom-loop.md runs before and after, and the second has at most four lines more."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    before, after = blocks[:2]
    losses = []
    for block in (before, after):
        names: dict[str, object] = {}
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page's own code
        losses.append(names["loss"].item())  # type: ignore[attr-defined]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert "optimiser" in capsys.readouterr().out
    lines = [[line for line in block.splitlines() if line.strip() and "print" not in line] for block in (before, after)]
    assert len(lines[1]) - len(lines[0]) <= 4
    assert stoker.prepare is prepare
