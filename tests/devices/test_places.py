from __future__ import annotations

import pytest

from stoker.devices import planned_devices, resolve_place
from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.cluster import catalogue_links
from stoker.errors import NoDevice
from stoker.records import Device

CPU = Device(name="cpu", kind="cpu", model="AMD EPYC", cores=2, memory_bytes=2**34, fast_dtypes=("fp32",))


def gpu(index: int, model: str) -> Device:
    """An attached GPU of a model."""
    return Device(
        name=f"cuda:{index}", kind="cuda", index=index, model=model, cores=0, memory_bytes=2**36, fast_dtypes=("fp32",)
    )


H200, A100 = gpu(0, "NVIDIA H200"), gpu(1, "NVIDIA A100-SXM4-40GB")
LAPTOP, SERVER = (CPU,), (H200, A100, CPU)


@pytest.mark.parametrize(
    ("word", "attached", "device"),
    [
        ("here", LAPTOP, CPU),
        ("here", SERVER, H200),
        ("cpu", SERVER, CPU),
        ("cuda", SERVER, H200),
        ("cuda:1", SERVER, A100),
        ("h200", SERVER, H200),
        (" H200 ", SERVER, H200),
        ("a100", SERVER, A100),
        ("a100-40", SERVER, A100),
        ("1xhere", LAPTOP, CPU),
    ],
)
def test_words_that_mean_an_attached_device(word, attached, device):
    """Words for the best device, a kind, a number, a model and an alias find it."""
    assert resolve_place(word, attached) is device


def test_known_but_not_attached_says_what_it_is_and_what_is_here():
    """Somebody who asks for an H100 on a laptop learns its memory, what is here, and the way out."""
    with pytest.raises(NoDevice) as caught:
        resolve_place("h100", LAPTOP)
    assert "NVIDIA H100 SXM, 80.0 GiB" in caught.value.message
    assert "not attached" in caught.value.message
    assert "AMD EPYC, 16.0 GiB" in caught.value.message
    assert "--on here" in caught.value.remedy


def test_the_other_memory_size_is_another_device():
    """A machine with the 40 GB model does not pass for one with 80 GB."""
    with pytest.raises(NoDevice, match="NVIDIA A100 SXM 80 GB"):
        resolve_place("a100-80", SERVER)


@pytest.mark.parametrize("word", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_without_a_gpu(word):
    """The error names the word and lists what is attached."""
    with pytest.raises(NoDevice, match=rf"{word} is not attached.*cpu = AMD EPYC"):
        resolve_place(word, LAPTOP)


def test_an_unknown_word_gets_the_nearest():
    """A slip of the finger is met with the word that was meant."""
    with pytest.raises(NoDevice) as caught:
        resolve_place("h20o", SERVER)
    assert "'h20o'" in caught.value.message
    assert "Did you mean 'h200'" in caught.value.remedy
    assert "`here` is cuda:0" in caught.value.remedy
    assert len(caught.value.remedy) < 120  # not the whole catalogue


@pytest.mark.parametrize(("word", "single"), [("2xhere", "here"), ("8xH200", "h200")])
def test_several_devices_are_understood_and_refused(word, single):
    """The word for several devices is not taken for a typing error: it is refused with what works now."""
    with pytest.raises(NoDevice) as caught:
        resolve_place(word, SERVER)
    assert f"asks for {word[0]} devices" in caught.value.message
    assert f"--on {single}" in caught.value.remedy


def test_several_names_are_refused_where_one_is_wanted():
    """Planning compares devices, training takes one: no device is called by both names."""
    with pytest.raises(NoDevice, match="'here,l4' names 2 devices, where one is wanted") as caught:
        resolve_place("here,l4", SERVER)
    assert caught.value.remedy == "`stoker plan JOB --on here,l4` compares them; then name one, such as `--on here`."


@pytest.mark.parametrize("word", ["0xhere", "2xh20o", "", "x", "2x", "cuda:", "cuda:x", "here here"])
def test_nonsense_is_refused(word):
    """Whatever is typed, the answer is an error with a remedy and exit code 2."""
    with pytest.raises(NoDevice) as caught:
        resolve_place(word, SERVER)
    assert caught.value.remedy
    assert caught.value.exit_code == 2


def test_nothing_attached_is_an_error_with_a_remedy():
    """Even an empty list of devices gives a sentence."""
    with pytest.raises(NoDevice, match="Attached: nothing") as caught:
        resolve_place("here", ())
    assert "machine" in caught.value.remedy


KNOWN = builtin_catalogue()


def planned(words: str, attached=LAPTOP) -> list[str]:
    """The names of the places that words mean."""
    return [place.name for place in planned_devices(words, attached, KNOWN)]


def test_devices_to_plan_for_need_not_be_here():
    """The words of the issue: names, aliases without dashes, and what is here."""
    places = planned_devices("h100, a100-80g,L4,rtx4090,here", LAPTOP, KNOWN)
    assert [place.name for place in places] == ["h100", "a100-80", "l4", "rtx-4090", "cpu"]
    assert [place.is_here for place in places] == [False, False, False, False, True]
    assert places[0].hardware.dense_flops["bf16"] == 989.4e12
    assert places[0].entry is KNOWN.find("h100")[0]
    assert (places[4].device, places[4].entry) == (CPU, None)


def test_a_model_that_is_attached_is_planned_for_as_it_is_here():
    """`h200` on a machine with one is that GPU; `a100` is the one that is there, and both where none is."""
    (place,) = planned_devices("h200", SERVER, KNOWN)
    assert (place.name, place.device, place.is_here) == ("cuda:0", H200, True)
    assert planned("a100", SERVER) == ["cuda:1"]
    assert planned("a100") == ["a100-80", "a100-40"]


def test_a_number_of_devices_stands_before_their_name():
    """`8xh100` is eight of them, `4xa100` four of either memory; words of one device are as they were."""
    places = planned_devices("8xH100,h100,4xa100", LAPTOP, KNOWN)
    assert [place.name for place in places] == ["8xh100", "h100", "4xa100-80", "4xa100-40"]
    assert [place.count for place in places] == [8, 1, 4, 4]
    assert places[0].device.memory_bytes == places[1].device.memory_bytes == places[0].memory_bytes_each
    assert {place.count for place in planned_devices("2xall", LAPTOP, KNOWN)} == {2}


def test_processes_on_this_cpu_share_its_cores_and_memory():
    """As many as asked for, more than there are cores too, then with one thread each."""
    (two,) = planned_devices("2xhere", LAPTOP, KNOWN)
    assert (two.name, two.device, two.count) == ("2xcpu", CPU, 2)
    assert (two.cores_each, two.memory_bytes_each) == (1, 2**33)
    (four,) = planned_devices("4xcpu", LAPTOP, KNOWN)
    assert four.cores_each == 1
    assert four.limited_to(2**32).memory_bytes_each == 2**30


def test_gpus_here_are_as_many_as_are_attached():
    """Two of one model are a place of two; of more than that, or of two models, the error says what there is."""
    twins = (H200, gpu(1, "NVIDIA H200"), CPU)
    (place,) = planned_devices("2xhere", twins, KNOWN)
    assert (place.name, place.cores_each, place.memory_bytes_each) == ("2xcuda:0", 0, 2**36)
    with pytest.raises(NoDevice, match=r"asks for 2 GPUs; attached: one NVIDIA H200") as caught:
        planned_devices("2xhere", SERVER, KNOWN)
    assert "2xcpu" in caught.value.remedy
    (elsewhere,) = planned_devices("8xh200", SERVER, KNOWN)
    assert (elsewhere.name, elsewhere.is_here) == ("8xh200", False)


def links_of(words: str, size: int, attached=LAPTOP, *, network: str | None = None) -> tuple[str, float]:
    """The slowest level between neighbours at a place, and its rate [bytes/s]."""
    (place,) = planned_devices(words, attached, KNOWN, network=network)
    links = catalogue_links(place.entry, size, cluster=place.cluster)
    return links.name, 1 / links.cost("point-to-point").beta_s_per_byte


def test_gpus_here_are_joined_like_those_of_the_same_machine_elsewhere() -> None:
    """A bridge joins pairs, wherever they are; what the user says of links is taken for those here too."""
    a40 = [*(gpu(index, "NVIDIA A40") for index in range(4)), CPU]
    assert links_of("4xhere", 4, a40) == links_of("4xa40", 4) != links_of("4xa40", 2)
    assert links_of("4xhere", 2, a40) == links_of("4xa40", 2)
    assert links_of("4xhere", 2, a40, network="domain=1")[0] == "PCI Express"


def test_gpus_here_stand_in_one_machine() -> None:
    """As many as are attached, more than eight too; over them no network is needed."""
    rtx = [*(gpu(index, "NVIDIA GeForce RTX 4090") for index in range(10)), CPU]
    (place,) = planned_devices("10xhere", rtx, KNOWN)
    assert (place.name, place.cluster.node_devices) == ("10xcuda:0", 10)
    assert links_of("10xhere", 10, rtx)[0] == "PCI Express"


def test_each_place_once():
    """However often it is named, and by whatever word."""
    assert planned("l4,l4,L4, here,cpu") == ["l4", "cpu"]


def test_all_is_what_can_be_planned_for():
    """NVIDIA's GPUs and CPUs; no AMD GPU and no TPU, for which there is no time model."""
    names = planned("all")
    assert len(names) >= 35
    assert {"h100", "rtx-3090", "epyc-9654"} <= set(names)
    assert not {"mi300x", "tpu-v5e"} & set(names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("h100,h20o", "no device named 'h20o'"),
        ("0xh100", "asks for 0 devices"),
        ("2xcuda", "cuda is not attached"),
        ("8xh20o", "no device named 'h20o'"),
        ("h100,mi300x", "no time model for AMD"),
        ("l4,cuda:3", "cuda:3 is not attached"),
        ("", "names no device"),
        (" , ", "names no device"),
    ],
)
def test_words_that_cannot_be_planned_for(words, said):
    """The word that is wrong is named, with a remedy and exit code 2."""
    with pytest.raises(NoDevice, match=said) as caught:
        planned_devices(words, LAPTOP, KNOWN)
    assert caught.value.remedy
    assert caught.value.exit_code == 2


def test_a_limit_of_memory_is_what_a_place_then_has() -> None:
    """More than there is changes nothing; less is all that plans may use."""
    place = next(iter(planned_devices("l4", ())))
    there = place.device.memory_bytes
    assert place.limited_to(None) == place.limited_to(2.0 * there) == place
    limited = place.limited_to(6e9)
    assert limited.device.memory_bytes == limited.hardware.device.memory_bytes == 6_000_000_000
    assert (limited.name, limited.entry) == (place.name, place.entry)
    assert (place.is_limited, limited.is_limited) == (False, True)


def test_machines_times_devices_are_counted_together() -> None:
    """`2x8xh100` is what clusters are called; machines of this machine are refused with what works."""
    (place,) = planned_devices("2x8xh100", LAPTOP)
    assert (place.name, place.count, place.cluster.node_devices) == ("16xh100", 16, 8)
    (place,) = planned_devices("4x4xh100", LAPTOP)
    assert (place.name, place.count, place.cluster.node_devices, place.cluster.cards) == ("4x4xh100", 16, 4, 4)
    with pytest.raises(NoDevice, match="'here' is this machine") as caught:
        planned_devices("2x8xhere", LAPTOP)
    assert "--on 16xhere`" in caught.value.remedy


def test_a_number_that_does_not_fill_machines_is_refused() -> None:
    """Twelve H100 are one machine and a half; the remedy has both whole numbers, and `3x4xh100` is a way out."""
    with pytest.raises(NoDevice, match="12 devices do not fill machines of 8") as caught:
        planned_devices("12xh100", LAPTOP)
    assert "--on 8xh100 or 16xh100" in caught.value.remedy
    assert planned_devices("3x4xh100", LAPTOP)[0].count == 12
    assert planned_devices("4xh100", LAPTOP)[0].count == 4
