"""The pool: other people's machines, lent by the hour, paid from escrow, checked by replay.

The names that the command line uses load at their first use: they need the libraries of extras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.pool.agent import Agent as Agent
    from stoker.pool.agent import Lending as Lending
    from stoker.pool.agent import determinism_class as determinism_class
    from stoker.pool.agent import lent_devices as lent_devices
    from stoker.pool.answers import read_offer as read_offer
    from stoker.pool.client import PoolAddress as PoolAddress
    from stoker.pool.client import PoolClient as PoolClient
    from stoker.pool.contract.custody import ChainSettings as ChainSettings
    from stoker.pool.contract.custody import Custody as Custody
    from stoker.pool.contract.custody import differing_roots as differing_roots
    from stoker.pool.contract.escrow_contract import EscrowContract as EscrowContract
    from stoker.pool.contract.escrow_contract import connected as connected
    from stoker.pool.contract.signers import signer_of as signer_of
    from stoker.pool.direct_exchange import joined_peer as joined_peer
    from stoker.pool.escrow import credits_text as credits_text
    from stoker.pool.escrow import short as short
    from stoker.pool.events import CREDIT as CREDIT
    from stoker.pool.events import Deposited as Deposited
    from stoker.pool.events import Disputed as Disputed
    from stoker.pool.events import Event as Event
    from stoker.pool.events import Founded as Founded
    from stoker.pool.events import TeamMade as TeamMade
    from stoker.pool.events import canonical as canonical
    from stoker.pool.forecasting import leases_before as leases_before
    from stoker.pool.forecasting import rank_for_job as rank_for_job
    from stoker.pool.hardware_proof import HardwareProof as HardwareProof
    from stoker.pool.hardware_proof import LocalDevice as LocalDevice
    from stoker.pool.hardware_proof import probed_bytes as probed_bytes
    from stoker.pool.hardware_proof import prove_hardware as prove_hardware
    from stoker.pool.hardware_proof import prove_together as prove_together
    from stoker.pool.isolation import Host as Host
    from stoker.pool.isolation import Limits as Limits
    from stoker.pool.isolation import best_isolation as best_isolation
    from stoker.pool.keys import data_folder as data_folder
    from stoker.pool.keys import own_key as own_key
    from stoker.pool.keys import read_key as read_key
    from stoker.pool.lease_replay import evidence_of as evidence_of
    from stoker.pool.lease_replay import replay_lease as replay_lease
    from stoker.pool.link_probe import MeasuredLink as MeasuredLink
    from stoker.pool.link_probe import measured_link as measured_link
    from stoker.pool.log import audit as audit
    from stoker.pool.matching import ISOLATIONS as ISOLATIONS
    from stoker.pool.matching import Needs as Needs
    from stoker.pool.matching import Ranking as Ranking
    from stoker.pool.matching import listed_offers as listed_offers
    from stoker.pool.matching import offer_word as offer_word
    from stoker.pool.matching import worth_probing as worth_probing
    from stoker.pool.overview import event_words as event_words
    from stoker.pool.owners_use import LentGpu as LentGpu
    from stoker.pool.owners_use import limited_power as limited_power
    from stoker.pool.serve import serve_pool as serve_pool
    from stoker.pool.shown_lease import ShownLease as ShownLease
    from stoker.pool.state import State as State

__getattr__ = on_first_use(__name__, __file__)
