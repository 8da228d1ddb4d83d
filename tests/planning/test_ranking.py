"""Plans ranked by forecast, without running any."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import DoesNotFit
from stoker.planning.model.optimizer_states import stored_share
from stoker.planning.plan_ranking import MOST_SIZES, SURE_ENOUGH, compiled, least_demanding, rank
from stoker.records import Device, Forecast, Plan, Profile
from tests.planning.trials import CPU, GPU, NORMS, forecast_of, profile


class Known:
    """Forecasts from a formula: fixed bytes, bytes a sample of which checkpointing saves, a pace by the setting."""

    def __init__(self, device: Device, facts: Profile, *, fixed: float = 1e9, per_sample: float = 1e8) -> None:
        self.device, self.facts, self.fixed, self.per_sample = device, facts, fixed, per_sample
        self.asked: list[Plan] = []

    def needed_bytes(self, plan: Plan) -> float:
        saved = 0.8 * plan.checkpointed_blocks / max(1, self.facts.num_blocks)
        loose = 1.2 if plan.malloc == "default" else 1.0
        return (self.fixed + self.per_sample * plan.micro_batch * (1 - saved)) * loose

    def probability_it_fits(self, plan: Plan) -> float:
        self.asked.append(plan)
        return 1.0 if self.needed_bytes(plan) <= self.device.memory_bytes else 0.0

    def fits(self, plan: Plan, probability: float) -> bool:
        return self.probability_it_fits(plan) >= probability

    def forecast(self, plan: Plan) -> Forecast:
        pace = {"fp8": 0.7, "bf16": 1.0, "fp32": 2.0}[plan.precision] / plan.threads + 1.0 / plan.micro_batch
        pace *= 1 + plan.checkpointed_blocks / 30 + (plan.malloc == "mapped") * 0.1
        return forecast_of(plan, pace_s=pace, peak_bytes=self.needed_bytes(plan))


def ranked(device: Device = GPU, known: Known | None = None, **facts):
    """Candidates on a device."""
    about = profile(**facts)
    return rank(about, device, known or Known(device, about), name="it")


def test_the_fastest_is_first_and_all_fit() -> None:
    """By forecast, on a device with room for everything."""
    found = ranked()
    paces = [1 / candidate.forecast.samples_per_s.value for candidate in found]
    assert paces == sorted(paces)
    assert (found[0].plan.precision, found[0].plan.micro_batch) == ("bf16", 512)
    assert not any(candidate.plan.checkpointed_blocks for candidate in found)


@settings(max_examples=60)
@given(st.floats(1e7, 3e8), st.integers(0, 24), st.floats(1e8, 2e10))
def test_no_plan_left_out_is_better_than_the_first(per_sample: float, blocks: int, fixed: float) -> None:
    """Against all plans that fit, one by one: leaving out what is dominated loses nothing."""
    facts = profile(num_blocks=blocks)
    small = dataclasses.replace(GPU, memory_bytes=16 * 2**30)
    known = Known(small, facts, fixed=fixed, per_sample=per_sample)
    every = [
        Plan(
            device="cuda:0",
            micro_batch=size,
            precision=precision,
            optimizer_implementation="fused",
            memory_format="channels_last",
            checkpointed_blocks=count,
        )
        for size, precision, count in itertools.product(
            facts.coupling.legal_micro_batches(512), ("bf16", "fp32"), {0, blocks // 2, blocks}
        )
    ]
    fitting = [plan for plan in every if known.probability_it_fits(plan) >= SURE_ENOUGH]
    if not fitting:
        with pytest.raises(DoesNotFit):
            rank(facts, small, known, name="small")
        return
    best = rank(facts, small, known, name="small")[0]
    fastest = max(known.forecast(plan).samples_per_s.value for plan in fitting)
    assert best.forecast.samples_per_s.value >= fastest * (1 - 1e-9)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_smaller_micro_batch_that_computes_nothing_twice_is_looked_at(is_here: bool) -> None:
    """Checkpointing saves nineteen twentieths here: the sizes at which blocks need not be are far from the largest."""
    facts = profile(num_blocks=24, has_convolutions=False)

    class Saving(Known):
        def needed_bytes(self, plan: Plan) -> float:
            return self.fixed + self.per_sample * plan.micro_batch * (0.05 if plan.checkpointed_blocks else 1.0)

    small = dataclasses.replace(GPU, memory_bytes=16 * 2**30)
    found = rank(facts, small, Saving(small, facts, per_sample=6e8), name="small", is_here=is_here)
    assert (found[0].plan.micro_batch, found[0].plan.checkpointed_blocks) == (16, 0)
    assert {one.plan.micro_batch for one in found if one.plan.checkpointed_blocks} >= {512, 256}


@pytest.mark.parametrize("dtypes", [("fp32",), ("fp32", "tf32"), ("fp32", "bf16")])
def test_a_large_model_elsewhere_is_forecast_in_every_way_of_its_precision(dtypes: tuple[str, ...]) -> None:
    """Formats and loaders change its time whichever precision the device is fast in; of those only the first counts."""
    facts = profile(parameter_bytes=2 * 2**30, is_in_memory=False)
    device = dataclasses.replace(GPU, fast_dtypes=dtypes)

    class InTf32(Known):
        def forecast(self, plan: Plan) -> Forecast:
            as_fp32 = dataclasses.replace(plan, precision="fp32") if plan.precision == "tf32" else plan
            return super().forecast(as_fp32)

    found = rank(facts, device, InTf32(device, facts), name="elsewhere", is_here=False)
    assert {c.plan.precision for c in found} == {dtypes[-1]}
    assert {c.plan.memory_format for c in found} == {"channels_last", "contiguous"}
    assert {c.plan.loader for c in found} == {"inline", "workers"}


def test_where_nothing_fits_the_least_demanding_plan_is_told() -> None:
    """With what it needs, and what the device has; a group that cannot be cut is named."""
    with pytest.raises(
        DoesNotFit, match=r"micro-batch of 1 and all 12 blocks checkpointed needs about .* H200 has 139"
    ):
        ranked(known=Known(GPU, profile(num_blocks=12), fixed=1e13), num_blocks=12)
    with pytest.raises(DoesNotFit, match="groups of 64"):
        ranked(known=Known(GPU, profile(), per_sample=1e13), coupling=NORMS)
    whole = dataclasses.replace(NORMS, kind="whole_group", group=1024)
    with pytest.raises(DoesNotFit, match="groups of 1024, more than the batch of 512"):
        ranked(coupling=whole)


def test_a_device_far_too_small_is_known_after_few_questions() -> None:
    """Two for each way to execute: the plan that saves nothing, and the least demanding one; one for each offload."""
    facts = profile(num_blocks=12)
    known = Known(GPU, facts, fixed=1e13)
    with pytest.raises(DoesNotFit):
        rank(facts, GPU, known, name="small")
    assert len([plan for plan in known.asked if not plan.uses_host_memory]) == 8  # two precisions, two formats
    assert len([plan for plan in known.asked if plan.uses_host_memory]) == 1 + 2 + 2  # activations, optimiser, both
    assert {plan.micro_batch for plan in known.asked} == {1, 512}


def test_only_the_largest_sizes_are_forecast() -> None:
    """Of each way to execute."""
    found = ranked(has_convolutions=False)
    assert {c.plan.micro_batch for c in found} == {512 // 2**k for k in range(MOST_SIZES)}


def test_the_least_demanding_plan_saves_all_it_can() -> None:
    """Smallest micro-batch, all blocks checkpointed, on a CPU memory that goes back at once."""
    about = profile(num_blocks=12)
    least = least_demanding(about, CPU, Known(CPU, about))
    assert (least.micro_batch, least.checkpointed_blocks, least.malloc) == (1, 12, "mapped")


class ManyWeights(Known):
    """Autocast keeps the weights in bf16 besides: half as much again."""

    def needed_bytes(self, plan: Plan) -> float:
        return super().needed_bytes(plan) * (1.5 if plan.precision == "bf16" else 1.0)


def test_the_least_demanding_plan_may_be_one_in_fp32() -> None:
    """Devices that are too small, and the smallest that is not, are compared with what the best plan of all needs."""
    about = profile()
    known = ManyWeights(GPU, about, fixed=200e9)
    least = least_demanding(about, GPU, known)
    assert least is not None
    assert least.precision == "fp32"
    with pytest.raises(DoesNotFit, match=r"needs about 223\.6 GiB"):
        rank(about, GPU, known, name="it")


def test_a_slow_ranking_ends_early() -> None:
    """Once it has taken half a second, and two per cent of the run; of each precision it has a plan then."""
    times = iter(range(0, 10_000, 4))
    found = rank(profile(), CPU, Known(CPU, profile()), name="cpu", clock=lambda: float(next(times)))
    assert len({(c.plan.precision, c.plan.memory_format, c.plan.threads) for c in found}) < 12
    assert [c.plan.precision for c in found if not c.plan.captured].count("fp32") == 1


class Compiling(Known):
    """Compiled, an update takes `ratio` of the time; compiling takes 20 s, 22 at most; 270,000 samples in all."""

    def __init__(self, ratio: float, plain_s: float) -> None:
        super().__init__(GPU, profile())
        self.ratio, self.plain_s = ratio, plain_s

    def forecast(self, plan: Plan) -> Forecast:
        slower = {"bf16": 1.0, "fp32": 2.0}[plan.precision] * (1 + 1 / plan.micro_batch)
        run_s = slower * self.plain_s * (self.ratio if plan.compile else 1.0)
        once_s = 20.0 if plan.compile else None
        return forecast_of(plan, pace_s=run_s / 270_000, total_s=run_s + (once_s or 0.0), compile_s=once_s)


def test_where_only_compiled_plans_fit_they_are_proposed() -> None:
    """Fused intermediates need no memory; that compiling does not pay back is no reason then."""

    class Fused(Compiling):
        def probability_it_fits(self, plan: Plan) -> float:
            return float(plan.compile)

    found = rank(profile(), GPU, Fused(1.1, 100.0), name="it", can_compile=True)
    assert found
    assert all(candidate.plan.compile for candidate in found)


@pytest.mark.parametrize(
    ("ratio", "plain_s", "is_compiled"),
    [
        (0.8, 1000.0, True),  # saves 200 s
        (0.8, 160.0, False),  # 32 s, less than 1.5 times 22 s
        (0.8, 180.0, True),  # 36 s
        (1.1, 1e6, False),  # slower
    ],
)
def test_a_compiled_plan_is_proposed_where_compiling_pays_back(ratio: float, plain_s: float, is_compiled: bool) -> None:
    """It has to save one and a half times the most that compiling may take; what does not is no candidate at all."""
    facts = profile()
    found = rank(facts, GPU, Compiling(ratio, plain_s), name="it", can_compile=True)
    assert found[0].plan.compile is is_compiled
    assert any(candidate.plan.compile for candidate in found) is is_compiled
    assert not found[-1].plan.compile
    assert not any(c.plan.compile for c in rank(facts, GPU, Compiling(ratio, plain_s), name="it"))


def test_the_time_of_compiling_counts_in_the_order() -> None:
    """Against one that is not compiled and takes as long for each sample."""
    found = rank(profile(), GPU, Compiling(0.8, 200.0), name="it", can_compile=True)
    shares = [
        1 / c.forecast.samples_per_s.value + (c.forecast.compile_s.value if c.forecast.compile_s else 0.0) / 270_000
        for c in found
    ]
    assert shares == sorted(shares)
    assert len({c.plan.compile for c in found}) == 2


class Fused(Known):
    """As known; compiled plans hold `held` of each sample's memory, and are so much faster."""

    held, ratio = 0.5, 0.9

    def needed_bytes(self, plan: Plan) -> float:
        needed = super().needed_bytes(plan) - self.fixed
        return self.fixed + needed * (self.held if plan.compile else 1.0)

    def forecast(self, plan: Plan) -> Forecast:
        found = super().forecast(plan)
        pace_s = (self.ratio if plan.compile else 1.0) / found.samples_per_s.value
        return forecast_of(plan, pace_s=pace_s, total_s=270_000 * pace_s, compile_s=20.0 if plan.compile else None)


@pytest.mark.parametrize(
    ("held", "in_groups", "expected"),
    [
        (1.0, False, {(256, 0)}),  # the same memory: the same plan
        (0.25, False, {(256, 0), (512, 0)}),  # twice the samples, which needs no more saving
        (1.0, True, {(512, 12)}),  # selectively
        (0.7, True, {(512, 12), (512, 0)}),  # the same samples, of which nothing is computed twice
    ],
)
def test_a_compiled_plan_uses_the_memory_that_its_kernels_leave(
    held: float, in_groups: bool, expected: set[tuple[int, int]]
) -> None:
    """Elsewhere the fastest plan is compiled, then one with less saving, or of a larger micro-batch."""
    facts = profile(num_blocks=12, **({"coupling": dataclasses.replace(NORMS, group=512)} if in_groups else {}))
    known = Fused(GPU, facts, fixed=1e9, per_sample=3e8)
    known.held = held
    found = rank(facts, GPU, known, name="it", is_here=False, can_compile=True)
    assert {(c.plan.micro_batch, c.plan.checkpointed_blocks) for c in found if c.plan.compile} == expected
    assert all(known.needed_bytes(c.plan) <= GPU.memory_bytes for c in found)


def test_smaller_states_make_room_for_a_compiled_plan() -> None:
    """Compiled, the fastest plan would not be sure enough to fit; one that is slower without compiling would be."""
    facts = profile(num_blocks=24, has_convolutions=False, numerics=("bf16-states", "8bit-states"))
    states = {"full": 4.0, "bf16": 2.0, "8bit": 1.0}

    class FewBits(Fused):
        def needed_bytes(self, plan: Plan) -> float:
            return (12e9 + 2e9 * states[plan.optimizer_states]) * (1.15 if plan.compile else 1.0)

        def forecast(self, plan: Plan) -> Forecast:
            found = super().forecast(plan)
            pace_s = found.seconds_per_sample * (1.01 if plan.optimizer_states == "8bit" else 1.0)
            return forecast_of(plan, pace_s=pace_s, total_s=270_000 * pace_s, compile_s=20.0 if plan.compile else None)

    device = dataclasses.replace(GPU, memory_bytes=int(16.5e9))
    found = rank(facts, device, FewBits(device, facts), name="it", is_here=False, can_compile=True)
    assert [(c.plan.optimizer_states, c.plan.compile) for c in found[:2]] == [("8bit", True), ("bf16", False)]


def test_a_compiled_plan_that_does_not_fit_saves_more() -> None:
    """Less certain memory than that of the plan that is not compiled needs more room."""
    facts = profile(num_blocks=12)
    known = Fused(GPU, facts, fixed=1e9, per_sample=3e8)
    fastest, *_ = rank(facts, GPU, known, name="it", is_here=False)
    known.held = 1.7
    found = [one.plan for one in compiled(fastest, facts, known)]
    assert [(plan.micro_batch, plan.checkpointed_blocks, plan.checkpointing) for plan in found] == [
        (256, 12, "selective")
    ]


def test_a_plan_that_may_not_be_compiled_as_it_is_saves_otherwise() -> None:
    """As under experts, whose blocks are compiled in parts: full checkpointing takes the place of selective."""
    facts = profile(num_blocks=12)
    known = Fused(GPU, facts, fixed=1e9, per_sample=3e8)
    fastest, *_ = rank(facts, GPU, known, name="it", is_here=False)
    selective = dataclasses.replace(fastest.plan, checkpointed_blocks=12, checkpointing="selective")
    plans = [
        one.plan
        for one in compiled(
            dataclasses.replace(fastest, plan=selective),
            facts,
            known,
            lambda plan: plan.checkpointed_blocks == 0 or plan.checkpointing == "full",
        )
    ]
    assert plans
    assert {plan.checkpointing for plan in plans} == {"full"}
    assert all(plan.compile for plan in plans)


@pytest.mark.parametrize(
    ("numerics", "dtypes", "can_compile", "best"),
    [
        (("fp8",), ("bf16", "fp8"), True, "fp8"),
        ((), ("bf16", "fp8"), True, "bf16"),
        (("fp8",), ("bf16",), True, "bf16"),
        (("fp8",), ("bf16", "fp8"), False, "bf16"),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_fp8_is_proposed_compiled_where_job_and_device_allow_it(
    numerics: tuple[str, ...], dtypes: tuple[str, ...], can_compile: bool, best: str, is_here: bool
) -> None:
    """One plan, the fastest compiled one in bf16; its products pay only where casts are fused."""
    facts = profile(numerics=numerics)
    device = dataclasses.replace(GPU, fast_dtypes=("fp32", *dtypes))
    found = rank(facts, device, Fused(device, facts), name="it", is_here=is_here, can_compile=can_compile)
    assert found[0].plan.precision == best
    assert sum(c.plan.precision == "fp8" for c in found) == (best == "fp8")


class _Captured(Known):
    """As known, with so much of each update saved where the pass is captured, which takes a second once."""

    saved, once_s = 0.1, 1.0

    def forecast(self, plan: Plan) -> Forecast:
        found = super().forecast(plan)
        pace_s = (1 - self.saved * plan.captured) / found.samples_per_s.value
        once_s = self.once_s if plan.captured else None
        return forecast_of(
            plan,
            pace_s=pace_s,
            total_s=270_000 * pace_s + (once_s or 0.0),
            compile_s=once_s,
            peak_bytes=self.needed_bytes(plan),
        )


def test_a_captured_plan_is_proposed_where_it_is_forecast_to_save_something() -> None:
    """Of whole batches that save no memory otherwise; of no job that makes its updates itself."""
    about = profile(num_blocks=4)
    found = rank(about, CPU, _Captured(CPU, about, per_sample=1e6), name="it")
    captured = [c.plan for c in found if c.plan.captured]
    assert found[0].plan.captured
    assert all(plan.micro_batch == about.batch and not plan.checkpointed_blocks for plan in captured)
    own = profile(num_blocks=4, has_own_step=True)
    assert not any(c.plan.captured for c in rank(own, CPU, _Captured(CPU, own, per_sample=1e6), name="it"))
    ragged = dataclasses.replace(about, has_one_shape=False)
    assert not any(c.plan.captured for c in rank(ragged, CPU, _Captured(CPU, ragged, per_sample=1e6), name="it"))
    little = _Captured(CPU, about, per_sample=1e6)
    little.saved = 0.01
    assert not any(c.plan.captured for c in rank(about, CPU, little, name="it"))


def test_capturing_has_to_pay_back_as_compiling_does() -> None:
    """A pass of many operations takes minutes to capture: more than a short run saves by it."""
    about = profile(num_blocks=4)
    known = _Captured(CPU, about, per_sample=1e6)
    saved_s = 0.1 * known.forecast(rank(about, CPU, known, name="it")[0].plan).total_s.value
    for once_s, is_captured in ((saved_s / 3, True), (30 * saved_s, False)):
        known.once_s = once_s
        assert any(c.plan.captured for c in rank(about, CPU, known, name="it")) is is_captured


def test_with_memory_in_plenty_no_plan_that_saves_memory_is_asked_about() -> None:
    """Each question may cost a trace: where the most demanding plan fits, so do all others."""
    facts = profile(num_blocks=12)
    known = Known(GPU, facts, fixed=1e6, per_sample=1e3)
    rank(facts, GPU, known, name="large")
    assert known.asked
    assert all(plan.checkpointed_blocks == 0 and plan.micro_batch == 512 for plan in known.asked)


def test_elsewhere_one_way_that_saves_no_memory_is_taken_for_a_sign_of_plenty() -> None:
    """Of further formats and precisions nothing that saves memory is traced; the first way is known by little."""
    about = profile(num_blocks=4)
    known = Known(GPU, about)
    found = rank(about, GPU, known, name="it", is_here=False)
    settings_of = [(plan.precision, plan.memory_format) for plan in known.asked]
    first = settings_of[0]
    assert known.asked[0].checkpointed_blocks
    assert len(set(settings_of)) > 1
    others = [plan for plan, way in zip(known.asked, settings_of, strict=True) if way != first]
    assert not any(plan.checkpointed_blocks for plan in others)
    assert {c.plan.micro_batch for c in found} == {512, 256}


class WithStates(Known):
    """As Known, with optimiser states of 8 GB in full, which take a little longer in fewer bits."""

    def needed_bytes(self, plan: Plan) -> float:
        return super().needed_bytes(plan) + 8e9 * stored_share(plan.optimizer_states, plan.precision)

    def forecast(self, plan: Plan) -> Forecast:
        slower = dataclasses.replace(plan, optimizer_states="full", optimizer_implementation="fused")
        found = super().forecast(slower)
        if plan.optimizer_states == "full":
            return found
        return forecast_of(plan, pace_s=1.03 / found.samples_per_s.value, peak_bytes=self.needed_bytes(plan))


def best_with_states(memory_bytes: float, *numerics: str) -> Plan:
    """The best plan of a job that allows these on a GPU of so much memory."""
    facts = profile(num_blocks=24, has_convolutions=False, numerics=numerics)
    device = dataclasses.replace(GPU, memory_bytes=memory_bytes)
    return rank(facts, device, WithStates(device, facts), name="it")[0].plan


def test_states_of_fewer_bits_are_taken_where_they_help_and_the_job_allows_them() -> None:
    """Not where full ones fit without recomputation; the more bits, the better; none that is not allowed."""
    both = ("bf16-states", "8bit-states")
    assert best_with_states(64e9, *both).optimizer_states == "full"
    assert best_with_states(7e9, *both).optimizer_states == "8bit"
    assert best_with_states(7e9, "bf16-states").optimizer_states == "bf16"
    with pytest.raises(DoesNotFit):
        best_with_states(7e9)
    with pytest.raises(DoesNotFit):
        best_with_states(4.5e9, "bf16-states")
    assert best_with_states(4.5e9, *both).optimizer_states == "8bit"
