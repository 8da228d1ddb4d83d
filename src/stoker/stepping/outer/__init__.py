"""Training over slow links: sites that make updates of their own and come together after an interval."""

from stoker.stepping.outer.rounds import Exchanged, Outer
from stoker.stepping.outer.shares import SiteSplit, samples_here, shares

__all__ = ["Exchanged", "Outer", "SiteSplit", "samples_here", "shares"]
