"""Gas of a job in the pool's contract, and random calls that look for money made or lost.

    python -m bench.pool.contract [--chain URL] [--calls 10000]

Without --chain in an EVM in this process (py-evm by eth-tester); with it by a node's own accounts, which then signs, as
`anvil` does. Random calls are made without blocks, against a model that says what has to be taken: see
`tests/pool/test_contract.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stoker.pool.contract.escrow_contract import IN_PROCESS, EscrowContract, Sent, Terms, connected, lease_name
from stoker.pool.contract.signers import RemoteSigner, Signer
from stoker.pool.events import CREDIT
from tests.pool.quick_chain import signers

RESULTS = Path(__file__).parents[1] / "results"


def gas_of_jobs(url: str) -> dict[str, Any]:
    """Gas of every transaction [gas], and the time of one job's three with their signatures [ms]."""
    web3 = connected(url)
    keys: list[Signer] = [*signers(4)]
    if url != IN_PROCESS:
        keys = [RemoteSigner(url, account) for account in web3.eth.accounts[:4]]
    arbiter, renter, agent, verifier = keys
    before = web3.eth.block_number
    judge = EscrowContract.deployed(web3, arbiter)
    deployed = web3.eth.get_block(before + 1, full_transactions=False)["gasUsed"]
    by = {key.address: EscrowContract(web3, judge.address, key) for key in keys}
    found: dict[str, Any] = {"deploy": deployed, "grant": judge.grant(renter.address, 1000 * CREDIT).gas}
    judge.grant(agent.address, 1000 * CREDIT)

    def terms(name: str) -> Terms:
        return Terms(
            renter=renter.address,
            agent=agent.address,
            cosigner=renter.address,
            deposit=2 * CREDIT,
            bond=CREDIT,
            name=lease_name("a" * 64, "b" * 64, name),
            rate_per_hour=CREDIT // 2,
            deadline_s=judge.now_s() + 9 * 86400,
        )

    def job(name: str, num_fees: int) -> dict[str, int]:
        own = terms(name)
        fees = [(f"0x{number + 7:040x}", 1000) for number in range(num_fees)]
        sent: dict[str, Callable[[], Sent]] = {
            "open": lambda: by[renter.address].open(own),
            "accept": lambda: by[agent.address].accept(own),
            "settle": lambda: by[verifier.address].settle(
                own,
                pay=CREDIT // 2,
                slashed=0,
                fees=fees,
                running_s=3600,
                verdict=judge.verdict(own.lease, pay=CREDIT // 2, slashed=0, fees=fees),
                voucher=by[renter.address].voucher(own.lease, 3600),
            ),
        }
        return {name: call().gas for name, call in sent.items()}

    job("first", 0)  # the first one makes balances
    start = time.perf_counter()
    found["job"] = job("second", 0)
    found["job_ms"] = round(1000 * (time.perf_counter() - start), 1)
    found["job_total"] = sum(found["job"].values())
    found["job with 10 verifiers, new addresses"] = job("third", 10)
    found["job with 10 verifiers, known addresses"] = job("fourth", 10)
    unused = terms("unused")
    by[renter.address].open(unused)
    found["refund"] = by[renter.address].refund(unused).gas
    judge.anchor(1, 10, "ab" * 32)
    found["anchor"] = judge.anchor(11, 20, "cd" * 32).gas
    client = getattr(web3, "client_version", "")
    return {"client": str(client), "chain": judge.account.split(":")[1], "gas": found}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chain", default=IN_PROCESS, metavar="URL")
    parser.add_argument("--calls", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("web3", "py-evm", "eth-tester")},
        **gas_of_jobs(given.chain),
    }
    if given.calls:
        from tests.pool.test_contract import drive  # noqa: PLC0415 - needs py-evm

        start = time.perf_counter()
        result["random calls"] = {
            "calls": given.calls,
            "seed": given.seed,
            "taken and refused": dict(drive(given.calls, given.seed)),
            "seconds": round(time.perf_counter() - start, 1),
            "checked after each": "sum of money, and what a model of the contract says",
        }
    text = json.dumps(result, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
