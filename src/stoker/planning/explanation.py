"""Why this plan, in a few lines; and the messages of a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stoker.planning.model.activation_offload import WAITING
from stoker.planning.model.communication import MessageTime
from stoker.planning.model.host import link_rate
from stoker.planning.model.layout_forecast import COPIES_AND_HOOKS, LayoutUpdate
from stoker.planning.model.optimizer_offload import HOST_SHARES, memory_rate
from stoker.planning.model.run_forecast import TracedForecasts, seconds_per_sample
from stoker.planning.plan_ranking import COMPILING_PAYS_BACK, SURE_ENOUGH, pays_back, saved_s
from stoker.planning.plan_search import PLANNING_SHARE
from stoker.profiling.tracing import fake_device
from stoker.records import NOT_COMPARED, Candidate, Device, Forecast, Measurement, Plan, Profile, Rejection
from stoker.records.hardware import Links
from stoker.units import format_bytes, format_count, format_seconds

MOSTLY = 0.8
"""Parts of a run's time are listed if updates are less than this share of it."""

LEAST_SHARE = 0.01
"""Parts of less than this share of a run, or of an update, are not listed."""


def explain(
    chosen: Candidate,
    profile: Profile,
    device: Device,
    measured: Sequence[Measurement],
    rejected: Sequence[Rejection],
    *,
    is_given: bool = False,
) -> tuple[str, ...]:
    """Five lines: the plan, what the contract allows, what each setting gave, the memory, and the time to finish.

    A sixth lists the parts of that time if it is not mostly updates. `is_given`: the user gave this plan.
    """
    plan, forecast = chosen.plan, chosen.forecast
    hardware = device.model
    if device.kind == "cpu":
        hardware += f", {device.cores} {'core' if device.cores == 1 else 'cores'}"
    elif device.cores:
        hardware += f", {device.cores} multiprocessors"
    peak, held, probability = forecast.peak_bytes, forecast.reserved_bytes, forecast.probability_it_fits
    memory = f"memory: {format_bytes(peak.value)} at the peak ({peak.basis})"
    if held is not None:
        memory += f", {format_bytes(held.value)} held by the allocator"
    memory += f", of {format_bytes(device.memory_bytes)}"
    if probability is not None:
        memory += f"; fits with {probability:.0%} probability"
    return (
        f"{hardware}: {plan.in_words()}",
        _legality(profile),
        _gains(chosen, measured, rejected, is_given=is_given),
        memory,
        _time_to_finish(forecast),
        *_time_parts(chosen),
    )


def explain_again(lines: Sequence[str], chosen: Candidate) -> tuple[str, ...]:
    """The lines of an earlier decision with the time to finish of `chosen`, without those on the moment it was made."""
    kept = [line for line in lines if not line.startswith(("of that: ", "others use ", "tried with "))]
    is_time = [line.startswith("to finish: ") for line in kept]
    new = _time_to_finish(chosen.forecast)
    return (
        *(new if time else line for line, time in zip(kept, is_time, strict=True)),
        *_time_parts(chosen, is_again=True),
    )


def _time_to_finish(forecast: Forecast) -> str:
    total = forecast.total_s
    interval = f"{format_seconds(total.low)} to {format_seconds(total.high)}, {total.basis}"
    samples = format_count(forecast.total_samples)
    updates = f"{forecast.total_updates} updates, {format_seconds(forecast.step_s.value)} each"
    return f"to finish: {format_seconds(total.value)} ({interval}) for {samples} samples in {updates}"


def why_not_compiled(chosen: Candidate, compiled: Forecast) -> str:
    """Forecast effect of compiling the chosen plan, and why it is not done.

    Args:
        chosen: a plan that is not compiled.
        compiled: forecast of the same plan, compiled.

    Raises:
        ValueError: `compiled` is the forecast of a plan that is not compiled.
    """
    if compiled.compile_s is None:
        raise ValueError("this forecast is of a plan that is not compiled")
    plain = chosen.untried or chosen.forecast
    ratio = compiled.step_s.scaled(1 / plain.step_s.value)
    gain = saved_s(compiled, plain)
    once_s = compiled.compile_s
    takes = f"compiling takes {format_seconds(once_s.value)}, {format_seconds(once_s.high)} at most"
    words = f"{ratio.value:.2f}x the time of an update ({ratio.low:.2f} to {ratio.high:.2f}) by forecast"
    if gain <= 0:
        return f"{words}: nothing saved, and {takes}"
    words += f", which saves {format_seconds(gain)} of the run; {takes}"
    likely = compiled.probability_it_fits
    if likely is not None and likely < SURE_ENOUGH:
        return f"{words}: not taken, since it fits with {likely:.0%} probability, and {SURE_ENOUGH:.0%} are asked for"
    if not pays_back(compiled, plain):
        return f"{words}, and is done where it saves {COMPILING_PAYS_BACK:g} times that"
    return f"{words}: not tried, since that would take over {PLANNING_SHARE:.0%} of the run or save less than it costs"


def _time_parts(chosen: Candidate, *, is_again: bool = False) -> tuple[str, ...]:
    """One line with the parts of the run's time; none if it is mostly updates.

    `is_again` is true of a plan that another process tried, and that this one compiles again.
    """
    forecast, total_s = chosen.forecast, chosen.forecast.total_s.value
    training_s = forecast.total_samples / forecast.samples_per_s.value
    if training_s >= MOSTLY * total_s:
        return ()
    saves = forecast.evaluations + training_s / (forecast.checkpoint_every_s or chosen.plan.checkpoint_every_s)
    saving_s, lost_s, trials_s = saves * forecast.checkpoint_s.value, forecast.lost_s or 0.0, forecast.trials_s or 0.0
    is_compiled_here = forecast.total_s.basis == "measured here" and not is_again  # in the trial, then
    compiling_s = 0.0 if forecast.compile_s is None or is_compiled_here else forecast.compile_s.value
    evaluating_s = max(0.0, total_s - training_s - saving_s - lost_s - trials_s - compiling_s)
    evaluations = "1 evaluation" if forecast.evaluations == 1 else f"{forecast.evaluations} evaluations"
    parts = (
        ("updates", training_s),
        (evaluations, evaluating_s),
        ("checkpoints", saving_s),
        ("failures", lost_s),
        ("trying plans", trials_s),
        ("compiling" if chosen.plan.compile else "capturing", compiling_s),
    )
    listed = [f"{what} {format_seconds(part_s)}" for what, part_s in parts if part_s >= LEAST_SHARE * total_s]
    is_evaluation = evaluating_s == max(part_s for _, part_s in parts)
    advice = "; evaluate less often with stoker.Evaluation(every=…), or fewer samples" if is_evaluation else ""
    return (f"of that: {' · '.join(listed)}{advice}",)


def _legality(profile: Profile) -> str:
    coupling = profile.coupling
    if coupling.kind == "separable":
        words = f"samples are separable: any micro-batch up to the batch of {profile.batch} learns the same"
        if coupling.tried is None or coupling.tried >= profile.batch:
            return words
        return f"{words}, as far as batches of {coupling.tried} show; `stoker verify` trains on larger ones"
    if coupling.evidence == NOT_COMPARED:
        return "samples were not compared: the whole batch goes through the model at once, however they are coupled"
    rule = "whole groups" if coupling.kind == "batch_norm" else "exactly one group"
    through = ", ".join(coupling.causes)
    return f"samples are coupled by {through}: a micro-batch is {rule} of {coupling.group} samples"


def _gains(chosen: Candidate, measured: Sequence[Measurement], rejected: Sequence[Rejection], *, is_given: bool) -> str:
    """Speed of the chosen settings against plans that differ in one of them."""
    if not measured:
        return f"speed: forecast from a trace of one update, {chosen.forecast.step_s.basis}; nothing was run"
    best = next(m for m in measured if m.plan == chosen.plan)
    compared = []
    for other in measured:
        names = [f.name for f in dataclasses.fields(Plan) if getattr(best.plan, f.name) != getattr(other.plan, f.name)]
        if "loader" in names and "num_workers" in names:
            names.remove("num_workers")  # which follows from the loader
        if len(names) == 1:
            chosen_value, other_value = (_setting_text(names[0], getattr(m.plan, names[0])) for m in (best, other))
            ratio = seconds_per_sample(other) / seconds_per_sample(best)
            compared.append(f"{chosen_value} {ratio:.2f}x {other_value}")
    parts = list(compared)
    parts += [f"{r.plan.precision} at micro-batch {r.plan.micro_batch} ruled out: {r.reason}" for r in rejected]
    error = chosen.forecast.gradient_error
    if error is not None:
        parts.append(f"gradient {error:.1%} from fp32's")
    if is_given:
        parts.insert(0, "the plan that was given was tried, and no other")
    elif len(measured) == 1 and not rejected:
        parts.insert(0, "nothing else was tried, it would not have paid back")
    elif not compared and len(measured) > 1:
        parts.insert(0, f"the fastest of {len(measured)} plans that were tried")
    return "speed: " + "; ".join(parts)


def _setting_text(setting: str, value: object) -> str:
    texts = {
        "threads": f"{value} thread{'' if value == 1 else 's'}",
        "activation_offload": "inputs of blocks on the host" if value else "inputs of blocks on the device",
        "compile": "compiled" if value else "not compiled",
        "captured": "captured" if value else "not captured",
        "loss_chunks": f"loss in {value} chunk{'' if value == 1 else 's'}",
        "malloc": f"{value} memory",
        "micro_batch": f"micro-batch {value}",
        "num_workers": f"{value} loader worker{'' if value == 1 else 's'}",
        "optimizer_implementation": f"{value} optimiser",
        "optimizer_states": f"{value} optimiser states",
        "optimizer_offload": "optimiser on the device" if value == "none" else f"optimiser's {value} on the host",
        "loader": f"{value} loader",
    }
    return texts.get(setting, str(value).replace("_", "-"))


def describe_stand_in(forecasts: TracedForecasts, plan: Plan) -> tuple[str, ...]:
    """What was traced in place of the job: a CPU for the device, and why; experts that get equally many tokens."""
    lines = list[str]()
    if forecasts.is_fallback(plan):
        lines.append(f"traced on a CPU in its place, which runs other kernels: {fake_device.why_not_cuda()}")
    if forecasts.is_balanced(plan):
        lines.append("experts are assumed to get equally many tokens each")
    return tuple(lines)


def describe_offload(
    forecasts: TracedForecasts, plan: Plan, device: Device, needed_bytes: float | None
) -> tuple[str, ...]:
    """Why the optimiser or inputs of blocks are on the host, what they take there, and how much of an update it takes.

    Args:
        forecasts: of plans on the device.
        plan: one of which either is on the host.
        device: the device.
        needed_bytes: of the device for the plan that needs the least with all of it there; None: a user chose the plan.
    """
    hardware, update = forecasts.hardware, forecasts.update(plan)
    there = hardware.host_memory_bytes
    memory = f"of this machine's {format_bytes(there)}" if there else "of the host's memory, whose size is not known"
    basis = "by the catalogue" if hardware.host_bandwidth_bytes_per_s else "assumed of an unknown host"
    link = f"{format_bytes(link_rate(hardware))}/s of link"
    whole = f"an update's {format_seconds(update.step_s.value)}"
    spent = {share.what: share.value for share in update.shares}
    lines: list[str] = []
    if (work := forecasts.host_work(plan)) is not None:
        kept = f"there it takes {format_bytes(forecasts.host_bytes(plan))} {memory}, the copy for checkpoints included"
        taken = f"{format_seconds(sum(spent.get(what, 0.0) for what in HOST_SHARES))} of {whole} are the host's"
        rates = f"{format_bytes(memory_rate(hardware))}/s of memory and {link}"
        lines.append(f"the optimiser is on the host{{why}}; {kept}; {taken}, at {rates} ({basis})")
    if (sent := forecasts.activation_work(plan)) is not None:
        which = f"inputs of {len(sent.copies)} of {plan.checkpointed_blocks} checkpointed blocks"
        what = f"{which} are on the host{{why}}" if work is None else f"so are {which}"
        copied = (
            f"{format_bytes(sent.sent_bytes)} go there in each micro-batch, and come back while blocks are computed"
        )
        shown = f"the device waits for them {format_seconds(spent.get(WAITING, 0.0))} of {whole}, at {link}"
        known = "by the catalogue" if hardware.host_link_bytes_per_s else "assumed"
        kept = f"; pinned they take {format_bytes(sent.kept_bytes)} {memory}"
        lines.append(f"{what}; {copied}{kept}; {shown} ({known})")
    why = ""
    if needed_bytes is not None:
        least, has = format_bytes(needed_bytes), format_bytes(device.memory_bytes)
        held = "with its state on the device" if work is not None else "with all of them on the device"
        why = f" because nothing faster fits: {held} an update needs {least} of {has}"
    return tuple(line.format(why=why) for line in lines)


def describe_messages(spread: LayoutUpdate, links: Sequence[Links]) -> tuple[str, ...]:
    """Messages of an update, a line for each kind, waiting times, and the basis of the links."""
    worth = [message for message in spread.messages if message.seconds > LEAST_SHARE * spread.total_s]
    lines = [describe_message(message) for message in sorted(worth, key=lambda message: -message.seconds)]
    if spread.bubble_s > 0:
        lines.append(
            f"stages wait for each other {format_seconds(spread.bubble_s)} of {format_seconds(spread.total_s)}"
        )
    if spread.waiting_s > LEAST_SHARE * spread.total_s:
        lines.append(f"processes wait for each other at messages {format_seconds(spread.waiting_s)}")
    return (*lines, *map(describe_links, links))


def describe_links(links: Links) -> str:
    """`links: NVLink 4, datasheet`, with the assumptions."""
    text = f"links: {links.name}, {links.basis}"
    return f"{text}; {links.note}" if links.note else text


def describe_message(message: MessageTime) -> str:
    """`gradients summed, 41 MB in 2 messages: 30 ms, 21 ms of it hidden`."""
    traffic = message.traffic
    count = round(len(traffic.sizes) * traffic.times)
    plural = "s" if count != 1 else ""
    hidden_s = message.seconds - message.exposed_s
    hidden = format_seconds(hidden_s) if hidden_s > 0.01 * message.seconds else "none"
    return (
        f"{traffic.what}, {format_bytes(traffic.num_bytes)} in {count} message{plural}: "
        f"{format_seconds(message.seconds)}, {hidden} of it hidden"
    )


def why_slower(update: LayoutUpdate, best: LayoutUpdate, ratio: float) -> str:
    """Why a layout is slower: `1.40x the time: 12 ms more of messages that nothing hides, 3 ms more of …`.

    Args:
        update: one of its updates.
        best: one of the fastest layout's, of the same batch.
        ratio: its time of a sample over the fastest layout's [1].
    """
    parts = [
        (update.exposed_s - best.exposed_s, "messages that nothing hides"),
        (update.bubble_s - best.bubble_s, "stages waiting for each other"),
        (update.waiting_s - best.waiting_s, "processes waiting for each other at messages"),
        (update.overhead_s - best.overhead_s, COPIES_AND_HOOKS),
        (update.compute_s - update.bubble_s - (best.compute_s - best.bubble_s), "computing"),
    ]
    reasons = [
        f"{format_seconds(more_s)} more of {what}"
        for more_s, what in sorted(parts, reverse=True)
        if more_s > LEAST_SHARE * update.total_s
    ]
    return f"{ratio:.2f}x the time" + (f": {', '.join(reasons)} in an update" if reasons else "")
