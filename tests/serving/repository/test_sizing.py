"""Instances and threads where they were not chosen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.records import ServiceSettings
from stoker.serving.repository.model_settings import sized

_CHOICE = st.none() | st.integers(1, 64)


@given(cores=st.integers(1, 256), instances=_CHOICE, threads=_CHOICE)
def test_given_numbers_stay_and_the_cores_are_enough(cores: int, instances: int | None, threads: int | None) -> None:
    """What was chosen is kept; what was not never asks for more cores than there are, unless one thread does."""
    found = sized(ServiceSettings(instances=instances, threads=threads), cores)
    assert instances in {None, found.instances}
    assert threads in {None, found.threads}
    assert found.instances is not None
    assert found.threads is not None
    if instances is None and threads is None:
        assert found.instances * found.threads <= cores
    elif threads is None:
        assert found.instances * found.threads <= max(cores, found.instances)
    elif instances is None:
        assert found.instances * found.threads <= max(cores, found.threads)
