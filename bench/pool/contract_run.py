"""A training run whose money is in a contract on a local chain, by the commands that people type.

    python -m bench.pool.contract_run --anvil node_modules/.bin/anvil [--output FILE]

Anvil is a node of Ethereum's in one process (npm: @foundry-rs/anvil, or Foundry). The operator deploys a contract and
serves a pool; one agent runs the job, another one replays its blocks; then the log is held against the contract: roots,
balances, and the transactions that the job took. Needs bubblewrap.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stoker.pool.client import PoolClient
from stoker.pool.contract.custody import Custody
from stoker.pool.contract.escrow_contract import EscrowContract, connected
from stoker.pool.contract.signers import signer_of
from stoker.pool.escrow import CHAIN_PREFIX
from stoker.pool.events import CREDIT
from stoker.pool.keys import own_key
from stoker.records.codec import to_json

ROOT = Path(__file__).resolve().parents[2]
PORT = 18546
# Accounts that every anvil has money for, by the keys that its documentation prints.
KEYS = {
    "operator": "ac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80",
    "renter": "59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d",
    "ox": "5de4111afa1a4b94908f83103eb1f1706367c2e68ca870fc3fb9a804cdab365a",
    "owl": "7c852118294e51e653712a81e05800f419141751be58f605c371e15141b007a6",
}


def main() -> int:
    """Run it; 0 if log and chain agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--anvil", required=True)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-chain-"))).resolve()
        folder.chmod(0o755)
        url = f"http://127.0.0.1:{PORT}"
        environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "keys"),
            "STOKER_RUNS": str(folder / "runs"),
            "STOKER_CACHE": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
            "STOKER_CHAIN": url,
        }
        os.environ["XDG_CONFIG_HOME"] = environment["XDG_CONFIG_HOME"]
        for name, digits in KEYS.items():
            (folder / name).write_text(digits)
            (folder / name).chmod(0o600)

        def of(name: str) -> dict[str, str]:
            return {**environment, "STOKER_CHAIN_KEY": str(folder / name)}

        def run(name: str, *words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "stoker", *words],
                cwd=ROOT,
                env=of(name),
                check=False,
                capture_output=True,
                text=True,
            )
            print(f"$ stoker {' '.join(words)}\n{done.stdout}{done.stderr}", flush=True)
            if done.returncode:
                sys.exit(f"ended with {done.returncode}")
            return done.stdout

        def start(name: str, *words: str, by: str = "") -> Path:
            log = folder / f"{name}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(words, cwd=ROOT, env=of(by or name), stdout=file, stderr=file)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return log

        start("anvil", given.anvil, "--port", str(PORT), by="operator")
        until(lambda: (folder / "anvil.log").read_text().count("Listening"))
        contract = run("operator", "pool", "contract", "deploy").strip()
        log = start(
            "pool",
            sys.executable,
            "-m",
            "stoker",
            "pool",
            "serve",
            "--port",
            "0",
            "--folder",
            str(folder / "control"),
            "--chain",
            url,
            "--contract",
            contract,
            "--money-in-contract",
            by="operator",
        )
        address = until(lambda: re.search(r"stoker pool: (\S+)", log.read_text()))[1]
        environment["STOKER_POOL"] = address
        chain_keys = {name: signer_of(str(folder / name)) for name in KEYS}
        members = [word for name in ("renter", "ox", "owl") for word in ("--grant", f"{own_key(name).public}=0")]
        run("operator", "pool", "wallet", "--folder", str(folder / "control"), *members)
        for name in ("renter", "ox", "owl"):
            run("operator", "pool", "contract", "grant", chain_keys[name].address, "5usd", "--contract", contract)
        for name in ("ox", "owl"):
            start(
                name,
                sys.executable,
                "-m",
                "stoker",
                "pool",
                "offer",
                "--price",
                "0.20usd/h" if name == "ox" else "0.40usd/h",
                "--name",
                name,
                "--key",
                name,
                "--folder",
                str(folder / f"{name}-agent"),
                "--isolation",
                "bubblewrap",
                "--memory",
                "2GiB",
                "--disk",
                "1GiB",
                "--cores",
                "1",
                "--beat",
                "2",
                "--no-measure",
            )
        client = PoolClient(address)
        until(lambda: sum(one["is_present"] for one in client.state("offers")) == 2)
        run(
            "renter",
            "train",
            "examples/pool_job.py",
            "--set",
            f"epochs={given.epochs}",
            "--on",
            "pool:ox/cpu",
            "--max-cost",
            "0.5usd",
            "--time-limit",
            "10min",
            "--place-option",
            "key=renter",
            "--place-option",
            "block=4s",
            "--place-option",
            "window=30s",
            "--place-option",
            "verify=100%",
        )
        name = client.leases()[0].lease_id
        until(lambda: client.lease(name).state == "final", 120)
        there = Custody(EscrowContract(connected(url), contract), client.address.key)
        lease = client.lease(name)
        until(lambda: there.contract.state(there.terms(lease).lease) == "settled", 120)
        result = outcome(there.contract, client, chain_keys, lease.lease_id)
        run("operator", "pool", "contract", "show", "--contract", contract, chain_keys["renter"].address)
        print(json.dumps(result, indent=1))
        if given.output:
            given.output.write_text(json.dumps(result, indent=1) + "\n")
        return 0 if result["log and chain agree"] else 1


def outcome(contract: EscrowContract, client: PoolClient, keys: dict[str, Any], lease_id: str) -> dict[str, Any]:
    """What each address has by the chain and by the log, and the transactions of the job."""
    lease, balances = to_json(client.lease(lease_id)), client.state("balances")["balances"]
    by_chain = {name: contract.balance(key.address) for name, key in keys.items()}
    by_log = {
        name: 5 * CREDIT * (name != "operator") + balances.get(CHAIN_PREFIX + key.address, 0)
        for name, key in keys.items()
    }
    web3, sent = contract.web3, []
    for number in range(web3.eth.block_number + 1):
        for transaction in web3.eth.get_block(number, full_transactions=True)["transactions"]:
            gas = web3.eth.get_transaction_receipt(transaction["hash"])["gasUsed"]
            sender = next((name for name, key in keys.items() if key.address == transaction["from"].lower()), "?")
            sent.append({"from": sender, "gas": gas, "bytes": len(transaction["input"])})
    return {
        "client": str(web3.client_version),
        "lease": {name: lease[name] for name in ("state", "paid_s", "rate_per_hour", "deposit", "bond", "settlement")},
        "blocks": len(lease["commitments"]),
        "replays": [one["equal"] for one in lease["challenges"]],
        "by chain [micro-credits]": by_chain,
        "by log [micro-credits]": by_log,
        "log and chain agree": by_chain == by_log,
        "transactions": sent,
    }


def until(is_there: Any, limit_s: float = 60.0) -> Any:
    """What `is_there` returns once that is true."""
    end = time.monotonic() + limit_s
    while not (found := is_there()):
        if time.monotonic() > end:
            sys.exit(f"not within {limit_s:.0f} s")
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
