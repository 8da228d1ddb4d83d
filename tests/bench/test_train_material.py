"""What contenders start from is one thing: the same samples in the same order, the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from bench.train.cases import CASES, WEIGHT_DECAY, build, loss_of, quick
from bench.train.contenders.stoker_job import the_job
from bench.train.gpu_cases import GPU_CASES
from bench.train.material import InOrder, Material, prepare, read
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step

LSTM = dataclasses.replace(quick(CASES["lstm"]), most_samples=64)


def _material(folder: Path, seed: int = 0) -> Material:
    prepare(LSTM, folder, seed)
    return read(LSTM, folder)


def test_stokers_batches_are_everybodys(tmp_path: Path) -> None:
    """The order written for others is the one that Stoker computes, over two epochs, whatever the seed."""
    material = _material(tmp_path, seed=3)
    job = the_job(material, seed=3)
    plan = Plan(device="cpu", micro_batch=LSTM.batch)
    data = datasets_of(job)
    step = Step(job, plan, Coupling(kind="separable", group=None, causes=(), evidence=""))
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    for batch, rows in zip(source.batches(Position(), 8), material.batches(), strict=False):
        assert batch.indices.tolist() == rows.tolist()


def test_a_loaders_order_is_everybodys(tmp_path: Path) -> None:
    """Trainers that load by a sampler see the same samples, epoch after epoch."""
    material = _material(tmp_path)
    sampler, batches = InOrder(material), material.batches()
    for _ in range(2):
        expected = [int(row) for _, rows in zip(range(4), batches, strict=False) for row in rows]
        assert list(sampler) == expected


def test_stokers_first_updates_are_a_plain_loops(tmp_path: Path) -> None:
    """The Job that stands for a case learns what the plain loop does: three losses, in fp32, to rounding."""
    material = _material(tmp_path)
    job = the_job(material)
    plan = Plan(device="cpu", micro_batch=LSTM.batch, optimizer_implementation="fused")
    data = datasets_of(job)
    step = Step(job, plan, Coupling(kind="separable", group=None, causes=(), evidence=""))
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    stokers = [float(step.update(batch, at, 0.0)) for at, batch in enumerate(source.batches(Position(), 3))]
    model = material.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LSTM.lr, weight_decay=WEIGHT_DECAY)
    plain = []
    for _, rows in zip(range(3), material.batches(), strict=False):
        loss = loss_of(LSTM, model(material.inputs[rows]), material.targets[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    torch.testing.assert_close(stokers, plain, rtol=1e-5, atol=0.0)


def test_random_samples_suit_their_models(tmp_path: Path) -> None:
    """Cases of a GPU, made tiny, have a loss that is a number."""
    for case in map(quick, GPU_CASES.values()):
        folder = tmp_path / case.name
        folder.mkdir()
        small = dataclasses.replace(case, random_samples=4, batch=4)
        prepare(small, folder)
        material = read(small, folder)
        loss = loss_of(small, material.model()(material.inputs), material.targets)
        assert torch.isfinite(loss)


def test_models_have_the_published_sizes() -> None:
    """ResNet-50 has 25,557,032 parameters, GPT-2 with a vocabulary of 50,304 has 124,475,904."""
    for name, count in (("resnet50", 25_557_032), ("gpt2", 124_475_904)):
        with torch.device("meta"):
            model = build(GPU_CASES[name])
        assert sum(parameter.numel() for parameter in model.parameters()) == count
