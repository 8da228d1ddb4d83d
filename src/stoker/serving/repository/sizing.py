"""How many instances of a model, and threads in each, where nobody has measured what is best."""

from __future__ import annotations

from dataclasses import replace

from stoker.records import ServiceSettings

CORES_PER_INSTANCE = 4
"""One instance for so many cores: a few threads shorten a lone request, more instances answer several at once."""


def sized(settings: ServiceSettings, cores: int) -> ServiceSettings:
    """`settings` with both numbers chosen: instances × threads never exceed the usable cores unless they were given.

    >>> [(s.instances, s.threads) for s in (sized(ServiceSettings(), cores) for cores in (1, 2, 4, 8, 32))]
    [(1, 1), (1, 2), (1, 4), (2, 4), (8, 4)]
    """
    instances, threads = settings.instances, settings.threads
    if instances is None:
        instances = max(1, cores // (threads or CORES_PER_INSTANCE))
    if threads is None:
        threads = max(1, cores // instances)
    return replace(settings, instances=instances, threads=threads)
