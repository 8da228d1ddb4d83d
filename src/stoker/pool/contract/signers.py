"""Keys of a chain: who signs a pool's transactions, vouchers and verdicts. The control plane never has a user's.

A key is a file that this user alone may read (64 hexadecimal digits, or a keystore as wallets write it, whose
passphrase is in STOKER_CHAIN_PASSPHRASE), or stays with another program that signs: `URL#ADDRESS` of Clef, Web3Signer,
a hardware wallet's bridge or a node that has the account.

Source: Web3 Secret Storage Definition, version 3 (keystores); EIP-712 (typed data); Ethereum's JSON-RPC methods
`eth_sendTransaction` and `eth_signTypedData_v4`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from eth_account import Account
from eth_account.signers.local import LocalAccount
from web3 import Web3
from web3.types import TxParams

from stoker.errors import BadJob, BadRun
from stoker.pool.keys import secret_text

PASSPHRASE = "STOKER_CHAIN_PASSPHRASE"  # noqa: S105 - the variable's name
_REMOTE = re.compile(r"(https?://[^#]+)#(0x[0-9a-fA-F]{40})")
_HEX_KEY = re.compile(r"(0x)?[0-9a-fA-F]{64}")

Typed = dict[str, Any]
"""Typed data as EIP-712 has it: types, domain, primary type and message."""


class Signer(Protocol):
    """An account of a chain that can act."""

    address: str
    """In lower case."""

    def sign(self, typed: Typed) -> bytes:
        """The signature of typed data: r, s, v; 65 bytes."""
        ...

    def send(self, web3: Web3, transaction: TxParams) -> bytes:
        """Sign a transaction and send it; its hash."""
        ...


class FileSigner:
    """A key in this process's memory."""

    def __init__(self, account: LocalAccount) -> None:
        self._account = account
        self.address = account.address.lower()

    def __repr__(self) -> str:
        """Without the key."""
        return f"FileSigner({self.address})"

    def sign(self, typed: Typed) -> bytes:
        """As `Signer` says; the same content has the same signature (RFC 6979)."""
        return bytes(self._account.sign_typed_data(full_message=typed).signature)

    def send(self, web3: Web3, transaction: TxParams) -> bytes:
        """As `Signer` says."""
        signed = self._account.sign_transaction(cast("dict[str, Any]", transaction))
        return bytes(web3.eth.send_raw_transaction(signed.raw_transaction))


class RemoteSigner:
    """A key that another program holds, and asks its owner about, at a URL that speaks JSON-RPC."""

    def __init__(self, url: str, address: str) -> None:
        self._web3 = Web3(Web3.HTTPProvider(url, request_kwargs={"timeout": 120}))  # a person may have to agree
        self.address = address.lower()

    def sign(self, typed: Typed) -> bytes:
        """As `Signer` says."""
        document = json.loads(json.dumps(typed, default=lambda value: "0x" + bytes(value).hex()))
        answer = self._web3.manager.request_blocking(
            cast("Any", "eth_signTypedData_v4"), [Web3.to_checksum_address(self.address), document]
        )
        return bytes.fromhex(str(answer).removeprefix("0x"))

    def send(self, web3: Web3, transaction: TxParams) -> bytes:
        """As `Signer` says; the other program sends it, to the chain that it is set up for."""
        return bytes(self._web3.eth.send_transaction(transaction))


def signer_of(word: str, environ: Mapping[str, str] = os.environ) -> Signer:
    """The signer that `FILE` or `URL#ADDRESS` names.

    Raises:
        BadRun: the file is readable by others, holds no key, or its passphrase is wrong.
        BadJob: the word has neither form.
    """
    if match := _REMOTE.fullmatch(word):
        return RemoteSigner(match[1], match[2])
    if "://" in word:
        raise BadJob(f"the signer {word} names no account", remedy="The form is URL#0xADDRESS.")
    path = Path(word).expanduser()
    text = secret_text(path, "the chain's key")
    try:
        if _HEX_KEY.fullmatch(text):
            return FileSigner(Account.from_key(text))
        return FileSigner(Account.from_key(Account.decrypt(json.loads(text), environ.get(PASSPHRASE, ""))))
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise BadRun(
            f"{path} holds no key of a chain, or {PASSPHRASE} is not its passphrase",
            remedy="Wanted 64 hexadecimal digits, or a keystore in JSON.",
        ) from problem
