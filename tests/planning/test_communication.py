"""What processes tell each other: volumes of each layout, and what of them arithmetic hides."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.layouts.base import BUCKET_BYTES, FIRST_BUCKET_BYTES, Traffic, gradient_buckets
from stoker.layouts.replicas import replicated_traffic, summed_after
from stoker.layouts.shards import AXIS, sharding_groups
from stoker.planning.model.communication import loss_traffic, message_times, num_meetings, waited_for
from stoker.records import Layout
from tests.planning.spreading import PARTS, links, messages, parameter


def seconds(
    traffic: Traffic, *, overlap: float = 0.0, forward_s: float = 0.0, backward_s: float = 0.0
) -> tuple[float, float]:
    """In all, and of that what shows [s]."""
    found = message_times(
        (traffic,),
        Layout(replicas=2),
        lambda size, _: links(size, overlap=overlap),
        forward_s=forward_s,
        backward_s=backward_s,
        passes=1,
    )
    return found[0].seconds, found[0].exposed_s


def test_buckets_are_filled_in_the_order_of_registration_and_summed_in_the_opposite_one() -> None:
    """The first registered fill the small bucket, which is summed last; a tensor is never cut."""
    quarter = 2**16  # scalars of a quarter of a MiB
    many = [parameter(str(number), quarter) for number in range(120)]
    found = gradient_buckets(many)
    assert found[-1] == FIRST_BUCKET_BYTES
    assert found[-2] == BUCKET_BYTES
    assert sum(found) == 120 * 2**18
    large = parameter("large", 40 * 2**18)
    assert gradient_buckets([large, many[0]]) == (2**18, 40 * 2**20)


def test_replicas_sum_their_gradients_once_however_many_passes_there_are() -> None:
    """All trained bytes, and which parameters were used."""
    gradients, used = replicated_traffic(PARTS.parameters)
    assert gradients.num_bytes == PARTS.trained_bytes
    assert used.num_bytes == 4 * len(PARTS.parameters)


def test_replicas_of_a_tensor_group_sum_the_part_that_each_process_holds() -> None:
    """Divided matrices count half, what each process has whole counts whole."""
    gradients, *_ = (one for one in messages(Layout(replicas=2, tensor=2)) if one.what == "gradients summed")
    assert gradients.num_bytes == 4 * (10 * 8 + 5 * 8) + 4 * 4 * 16 * 8 // 2


def test_shards_gather_in_each_pass_and_blocks_twice_where_they_let_go() -> None:
    """Root once, blocks twice; kept gathered, all of it once a pass, and gradients once an update."""
    whole = PARTS.trained_bytes
    root = 4 * (10 * 8 + 6 * 8)  # the head's five rows are padded to six
    sizes = sharding_groups(PARTS, Layout(shards=2))
    assert sizes == (root, 4 * 256, 4 * 256)
    gathered, again, scattered, _ = messages(Layout(shards=2), 3)
    assert gathered.num_bytes == 3 * sum(sizes)
    assert again.num_bytes == 3 * 2 * 4 * 256
    assert scattered.num_bytes == 3 * sum(sizes)
    assert sum(sizes) == whole + 4 * 8
    kept = messages(Layout(shards=2, reshard=False), 3)
    assert [one.num_bytes for one in kept[:2]] == [3 * sum(sizes), sum(sizes)]


def test_frozen_parameters_are_gathered_and_have_no_gradients_to_sum() -> None:
    """Only the second block's down is trained: its bytes alone are scattered, and over replicas its part of them."""
    trained = "blocks.1.down.weight"
    parameters = tuple(dataclasses.replace(one, is_trained=one.name == trained) for one in PARTS.parameters)
    parts = dataclasses.replace(PARTS, parameters=parameters)
    sizes = sharding_groups(parts, Layout(shards=2))
    gathered, again, scattered, _ = messages(Layout(shards=2), 3, parts)
    assert (gathered.num_bytes, again.num_bytes) == (3 * sum(sizes), 3 * sum(sizes[1:]))
    assert (scattered.sizes, scattered.num_bytes) == ((4 * 128,), 3 * 4 * 128)
    *_, summed = messages(Layout(replicas=2, shards=2), 1, parts)
    assert summed.sizes == (4 * 64,)
    less = [AXIS.message_bytes(one, Layout(shards=2), is_on_cpu=False) for one in (PARTS, parts)]
    assert less[0] - less[1] == 2 * (sizes[1] - 4 * 128)


def test_hybrid_shards_sum_their_parts_over_replicas() -> None:
    """A shard's part of the gradients, once an update."""
    *_, summed = messages(Layout(replicas=2, shards=2), 1)
    assert (summed.collective, summed.axis) == ("all-reduce", "replicas")
    assert summed.num_bytes == sum(sharding_groups(PARTS, Layout(shards=2))) // 2


def test_groups_lie_as_far_apart_as_the_mesh_says() -> None:
    """The last axis is the closest together."""
    layout = Layout(stages=2, replicas=2, shards=2, tensor=4)
    assert layout.group("tensor") == (4, 1)
    assert layout.group("shards") == (2, 4)
    assert layout.group("replicas") == (2, 8)
    assert layout.group("data") == (4, 4)
    assert layout.group("stages") == (2, 16)


def test_messages_of_the_backward_pass_hide_behind_what_is_left_of_it() -> None:
    """Of two seconds of messages in two buckets, the last one's second shows; without overlap all does."""
    traffic = Traffic(
        what="gradients", collective="all-reduce", axis="replicas", sizes=(10**9, 10**9), overlaps="backward"
    )
    assert seconds(traffic, backward_s=4.0) == (2.0, 2.0)
    assert seconds(traffic, backward_s=4.0, overlap=1.0) == pytest.approx((2.0, 1.0))
    assert seconds(traffic, backward_s=4.0, overlap=0.5) == pytest.approx((2.0, 1.5))
    assert seconds(traffic, backward_s=0.0, overlap=1.0) == pytest.approx((2.0, 2.0))


def test_messages_of_blocks_hide_behind_the_block_before() -> None:
    """The first gather shows, the others as far as a block takes less than they do."""
    traffic = Traffic(
        what="parameters", collective="all-gather", axis="replicas", sizes=(10**9,) * 4, overlaps="forward blocks"
    )
    assert seconds(traffic, forward_s=40.0, overlap=1.0) == pytest.approx((4.0, 1.0))
    assert seconds(traffic, forward_s=2.0, overlap=1.0) == pytest.approx((4.0, 1.0 + 3 * 0.5))


def test_what_passes_beside_the_same_blocks_shares_them() -> None:
    """Of a second gathered and a second summed during each block, one of 1.5 s hides 1.5 s, not twice one."""
    kinds = [
        Traffic(
            what=collective,
            collective=collective,
            axis="replicas",
            sizes=(10**9,) * 4,
            times=2,
            overlaps="backward blocks",
        )
        for collective in ("all-gather", "reduce-scatter")
    ]
    gathered, summed = message_times(
        kinds, Layout(replicas=2), lambda size, _: links(size, overlap=1.0), forward_s=1e9, backward_s=12.0, passes=2
    )
    assert (gathered.seconds, summed.seconds) == (8.0, 8.0)
    assert gathered.exposed_s == pytest.approx(2 * 1.0)
    assert summed.exposed_s == pytest.approx(2 * (1.0 + 3 * 0.5))


def test_what_nothing_can_stand_beside_shows() -> None:
    """Partial outputs are waited for."""
    traffic = Traffic(what="outputs", collective="all-reduce", axis="replicas", sizes=(10**9,), times=3)
    assert seconds(traffic, forward_s=9.0, backward_s=9.0, overlap=1.0) == pytest.approx((3.0, 3.0))


def test_without_streams_nothing_passes_beside_blocks() -> None:
    """Gradients of replicas go in threads, and may still."""
    gathered, *_ = waited_for(messages(Layout(shards=2), 1))
    assert gathered.overlaps == "nothing"
    gradients, _ = waited_for(replicated_traffic(PARTS.parameters))
    assert gradients.overlaps == "backward"


def test_processes_meet_at_every_message_that_follows_arithmetic() -> None:
    """Replicas at the end of an update; shards at each of three gathers, two more backward, and three scatters too."""
    assert num_meetings((loss_traffic(), *replicated_traffic(PARTS.parameters))) == 1
    assert num_meetings((loss_traffic(), *summed_after(PARTS.parameters))) == 1
    kinds = {
        (layout.reshard, passes): num_meetings(waited_for(messages(layout, passes)))
        for layout in (Layout(shards=2), Layout(shards=2, reshard=False))
        for passes in (1, 3)
    }
    assert kinds == {(True, 1): 9, (True, 3): 25, (False, 1): 7, (False, 3): 13}
