"""`stoker pool contract …`: a pool's money on a chain: made, looked at, brought in and taken out."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console

from stoker import pool
from stoker.cli.pool import KeyName, PoolWord, client_of, pool_errors
from stoker.cli.terminal import AsJson, print_document
from stoker.errors import BadJob
from stoker.units import parse_money

contract_app = typer.Typer(help="A pool's money in a contract on a chain.", no_args_is_help=True, add_completion=False)
Chain = Annotated[
    str, typer.Option("--chain", metavar="URL", envvar="STOKER_CHAIN", help="A node's JSON-RPC, such as your own.")
]
ChainKey = Annotated[
    str,
    typer.Option(
        "--chain-key", metavar="FILE", envvar="STOKER_CHAIN_KEY", help="Your key there, or URL#ADDRESS of a signer."
    ),
]
Contract = Annotated[str, typer.Option("--contract", metavar="ADDRESS", help="The contract.")]
Amount = Annotated[str, typer.Argument(metavar="AMOUNT", help="Such as 5usd; 1usd is a credit, or a token.")]


def _contract(chain: str, contract: str, key: str = "") -> pool.EscrowContract:
    return pool.ChainSettings(url=chain, contract=contract, key=key).connected()


def _micro(amount: str) -> int:
    return round(parse_money(amount, "AMOUNT") * 1e6)


@contract_app.command("deploy")
def deploy(
    chain: Chain,
    chain_key: ChainKey,
    token: Annotated[
        str, typer.Option("--token", metavar="ADDRESS", help="Real money: an ERC-20 token with 6 decimals.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Make a contract whose arbiter is your key: the pool's operator does, once. Without --token: internal credits."""
    with pool_errors():
        made = pool.EscrowContract.deployed(pool.connected(chain), pool.signer_of(chain_key), token=token)
        if as_json:
            print_document({"contract": made.address, "account": made.account, "arbiter": made.arbiter})
        else:
            print(made.address)


@contract_app.command("show")
def show(
    chain: Chain,
    contract: Contract,
    address: Annotated[str, typer.Argument(metavar="[ADDRESS]", help="Whose balance and leases.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show a contract: its arbiter, its money, its last root; of an address, its balance and its leases."""
    with pool_errors():
        there = _contract(chain, contract)
        document: dict[str, Any] = {
            "account": there.account,
            "arbiter": there.arbiter,
            "token": there.token,
            "anchored": there.anchored(),
        }
        if address:
            leases = {lease.lease: lease for lease in (*there.leases(renter=address), *there.leases(agent=address))}
            document |= {
                "balance": there.balance(address),
                "leases": [
                    {
                        "lease": f"0x{lease.hex()}",
                        "state": there.state(lease),
                        "renter": terms.renter,
                        "agent": terms.agent,
                        "deposit": terms.deposit,
                        "bond": terms.bond,
                        "deadline_s": terms.deadline_s,
                    }
                    for lease, terms in leases.items()
                ],
            }
        if as_json:
            print_document(document)
            return
        console = Console(highlight=False)
        console.print(f"contract  {there.account}, arbiter {there.arbiter}", soft_wrap=True)
        console.print(f"money     {'token ' + there.token if there.token else 'internal credits'}", soft_wrap=True)
        console.print(f"roots     up to event {document['anchored']}")
        if address:
            console.print(f"balance   {pool.credits_text(document['balance'])}")
        for lease in document.get("leases", ()):
            until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(lease["deadline_s"]))
            money = f"deposit {pool.credits_text(lease['deposit'])}, bond {pool.credits_text(lease['bond'])}"
            said = f"{lease['state']}, {money}, deadline {until} UTC"
            console.print(f"lease     {lease['lease']}  {said}", soft_wrap=True)


@contract_app.command("grant")
def grant(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Who gets them.")],
    amount: Amount,
    chain: Chain,
    contract: Contract,
    chain_key: ChainKey,
) -> None:
    """As the arbiter of a contract without a token, make internal credits for an address."""
    with pool_errors():
        print(_contract(chain, contract, chain_key).grant(address, _micro(amount)).transaction)


@contract_app.command("approve")
def approve(amount: Amount, chain: Chain, contract: Contract, chain_key: ChainKey) -> None:
    """Let the contract take as much of the token as your leases and bonds need."""
    with pool_errors():
        print(_contract(chain, contract, chain_key).approve(_micro(amount)).transaction)


@contract_app.command("withdraw")
def withdraw(
    chain: Chain,
    contract: Contract,
    chain_key: ChainKey,
    amount: Annotated[str, typer.Argument(metavar="[AMOUNT]", help="Such as 5usd; without it: all.")] = "",
) -> None:
    """Take tokens out of your balance in the contract."""
    with pool_errors():
        there = _contract(chain, contract, chain_key)
        assert there.signer is not None
        print(there.withdraw(_micro(amount) if amount else there.balance(there.signer.address)).transaction)


@contract_app.command("refund")
def refund(chain: Chain, contract: Contract, chain_key: ChainKey) -> None:
    """As a renter, take back every deposit that no agent has accepted yet: also of leases that the pool never took."""
    with pool_errors():
        there = _contract(chain, contract, chain_key)
        assert there.signer is not None
        for terms in there.leases(renter=there.signer.address):
            if there.state(terms.lease) == "funded":
                print(f"0x{terms.lease.hex()}: {there.refund(terms).transaction}")


@contract_app.command("settle")
def settle(
    lease_id: Annotated[str, typer.Argument(metavar="LEASE", help="Its name in the pool.")],
    address: PoolWord = None,
    key: KeyName = "default",
) -> None:
    """Bring a lease's verdict to the contract; without one, take what the contract gives: a claim, or a refund.

    For when the pool itself does not. STOKER_CHAIN and STOKER_CHAIN_KEY name the chain and your key of it.
    """
    with pool_errors():
        client = client_of(address, key)
        rules, lease = client.rules(), client.lease(lease_id)
        if not rules.contract:
            raise BadJob("the money of this pool is in its log, and settled there")
        custody = pool.Custody.of_member(rules, client.address.key)
        if lease.verdict:
            sent, what = custody.bring(lease, bytes.fromhex(lease.verdict)), "settled"
        else:
            sent, what = custody.get_back(lease), "got back"
        state = custody.contract.state(custody.terms(lease).lease)
        print(
            f"lease {lease_id} is {state} on the chain"
            + (
                f": {what} by {sent.transaction}"
                if sent
                else "; there is no verdict, and its deadline is not over"
                if state == "running"
                else ""
            )
        )
