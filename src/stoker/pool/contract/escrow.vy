# pragma version 0.4.3
# pragma evm-version cancun
"""
@title Escrow of a Stoker pool
@license Apache-2.0
@notice Holds a renter's deposit and an agent's bond for the time of a lease, and the Merkle roots of the pool's log.
    Amounts are whole micro-credits: 10**-6 of a credit, or the smallest unit of a token with 6 decimals.

    A lease is known by the hash of its terms, which each call repeats: the contract stores one word for a lease, its
    state, and terms cannot be mistaken, squatted on or changed.

        open (renter) -> accept (agent) -> settle (anyone, with the arbiter's verdict and the renter's voucher)
              |                         -> claim  (agent, after the deadline, with the voucher alone)
              `-> refund (renter)       -> refund (renter or agent, CLAIM_S after the deadline)

    Payouts stay in `balances` until their owner withdraws them: no receiver can block another one's settlement.
"""

from ethereum.ercs import IERC20
from ethereum.ercs import IERC20Detailed

struct Terms:
    renter: address
    agent: address
    cosigner: address  # whose signature agrees to seconds: the renter's, or that of whom it names
    name: bytes32  # hash of the pool, the renter's key there, and the lease's name
    rate_per_hour: uint256
    deposit: uint256
    bond: uint256
    deadline: uint256  # [s since 1970] until then only the arbiter's verdict settles

event Granted:
    account: indexed(address)
    amount: uint256

event Deposited:
    account: indexed(address)
    amount: uint256

event Withdrawn:
    account: indexed(address)
    amount: uint256

event Opened:
    lease: indexed(bytes32)
    renter: indexed(address)
    agent: indexed(address)
    terms: Terms

event Accepted:
    lease: indexed(bytes32)

event Settled:
    lease: indexed(bytes32)
    pay: uint256
    slashed: uint256
    fees: uint256

event Anchored:
    last: indexed(uint256)
    first: uint256
    root: bytes32

FUNDED: constant(uint256) = 1
RUNNING: constant(uint256) = 2
SETTLED: constant(uint256) = 3
MOST: constant(uint256) = 10**15  # micro-credits of one amount, as in the pool's log
MOST_VERIFIERS: constant(uint256) = 64
LONGEST_S: constant(uint256) = 400 * 86400  # no deposit is held for longer by a slip of the deadline
CLAIM_S: constant(uint256) = 7 * 86400
DOMAIN: constant(bytes32) = keccak256(
    "EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)
VOUCHER: constant(bytes32) = keccak256("Voucher(bytes32 lease,uint256 runningSeconds)")
VERDICT: constant(bytes32) = keccak256(
    "Verdict(bytes32 lease,uint256 pay,uint256 slashed,address[] verifiers,uint256[] fees)"
)

arbiter: public(immutable(address))
token: public(immutable(IERC20))  # empty: internal credits, which the arbiter grants and nobody can withdraw

balances: public(HashMap[address, uint256])
states: public(HashMap[bytes32, uint256])
roots: public(HashMap[uint256, bytes32])  # by the number of the last event
anchored: public(uint256)


@deploy
def __init__(judge: address, coin: address):
    assert judge != empty(address), "no arbiter"
    if coin != empty(address):
        assert staticcall IERC20Detailed(coin).decimals() == 6, "decimals"
    arbiter = judge
    token = IERC20(coin)


# ---------------------------------------------------------------------------------------------------------- balances


@external
def grant(account: address, amount: uint256):
    """@notice Make internal credits, where there is no token: the arbiter alone."""
    assert msg.sender == arbiter, "arbiter only"
    assert token.address == empty(address), "a token pays"
    assert amount <= MOST, "amount"
    self.balances[account] += amount
    log Granted(account=account, amount=amount)


@external
@nonreentrant
def deposit(amount: uint256):
    """@notice Bring tokens, which the caller has approved before."""
    self._pull(msg.sender, amount)
    self.balances[msg.sender] += amount


@external
@nonreentrant
def withdraw(amount: uint256):
    """@notice Take tokens out of the caller's balance."""
    assert token.address != empty(address), "internal credits"
    assert self.balances[msg.sender] >= amount, "balance"
    self.balances[msg.sender] -= amount
    log Withdrawn(account=msg.sender, amount=amount)
    assert extcall token.transfer(msg.sender, amount, default_return_value=True), "transfer"


@internal
def _pull(account: address, amount: uint256):
    assert token.address != empty(address), "balance"
    before: uint256 = staticcall token.balanceOf(self)
    assert extcall token.transferFrom(account, self, amount, default_return_value=True), "transfer"
    assert staticcall token.balanceOf(self) == before + amount, "token takes a fee"
    log Deposited(account=account, amount=amount)


@internal
def _take(account: address, amount: uint256):
    """What a lease needs comes out of the account's balance, and what is missing there from its tokens."""
    held: uint256 = self.balances[account]
    if held >= amount:
        self.balances[account] = held - amount
    else:
        self.balances[account] = 0
        self._pull(account, amount - held)


# ------------------------------------------------------------------------------------------------------------- leases


@external
@nonreentrant
def open(terms: Terms):
    """@notice The renter puts its deposit into escrow."""
    assert msg.sender == terms.renter, "renter only"
    assert terms.agent != empty(address) and terms.agent != terms.renter, "agent"
    assert terms.cosigner != empty(address), "cosigner"
    assert max(terms.rate_per_hour, max(terms.deposit, terms.bond)) <= MOST, "amount"
    assert block.timestamp < terms.deadline and terms.deadline <= block.timestamp + LONGEST_S, "deadline"
    lease: bytes32 = keccak256(abi_encode(terms))
    assert self.states[lease] == 0, "opened before"
    self.states[lease] = FUNDED
    self._take(terms.renter, terms.deposit)
    log Opened(lease=lease, renter=terms.renter, agent=terms.agent, terms=terms)


@external
@nonreentrant
def accept(terms: Terms):
    """@notice The agent puts up its bond."""
    assert msg.sender == terms.agent, "agent only"
    assert block.timestamp < terms.deadline, "deadline"
    lease: bytes32 = keccak256(abi_encode(terms))
    assert self.states[lease] == FUNDED, "not funded"
    self.states[lease] = RUNNING
    self._take(terms.agent, terms.bond)
    log Accepted(lease=lease)


@external
def settle(
    terms: Terms, pay: uint256, slashed: uint256, verifiers: DynArray[address, MOST_VERIFIERS],
    fees: DynArray[uint256, MOST_VERIFIERS], verdict: Bytes[65], running_s: uint256, voucher: Bytes[65],
):
    """
    @notice Pay as the arbiter judged, and no more than the voucher agreed to. Anyone may send it.
    @param pay To the agent, for its seconds; 0 needs no voucher.
    @param slashed Of the bond, to the renter; a lease of which a bond is cut pays nothing.
    @param fees To verifiers, out of the deposit.
    """
    lease: bytes32 = keccak256(abi_encode(terms))
    assert len(verifiers) == len(fees), "fees"
    digest: bytes32 = keccak256(abi_encode(
        VERDICT, lease, pay, slashed, keccak256(slice(abi_encode(verifiers), 64, 32 * len(verifiers))),
        keccak256(slice(abi_encode(fees), 64, 32 * len(fees))),
    ))
    assert self._signer(digest, verdict) == arbiter, "verdict"
    bond: uint256 = self._bond(lease, terms)
    if pay != 0:
        assert pay <= self._agreed(lease, terms, running_s, voucher), "more than the voucher"
        assert slashed == 0, "pay and slash"
    assert slashed <= bond, "more than the bond"
    left: uint256 = terms.deposit
    for i: uint256 in range(len(fees), bound=MOST_VERIFIERS):
        assert fees[i] <= left, "more than the deposit"
        left -= fees[i]
        self.balances[verifiers[i]] += fees[i]
    assert pay <= left, "more than the deposit"
    self._end(lease, terms, pay, left - pay + slashed, bond - slashed, slashed, terms.deposit - left)


@external
def claim(terms: Terms, running_s: uint256, voucher: Bytes[65]):
    """@notice After the deadline, where no verdict came: the agent is paid by the voucher alone."""
    assert msg.sender == terms.agent, "agent only"
    assert block.timestamp >= terms.deadline, "deadline"
    lease: bytes32 = keccak256(abi_encode(terms))
    assert self.states[lease] == RUNNING, "not running"
    pay: uint256 = min(terms.deposit, self._agreed(lease, terms, running_s, voucher))
    self._end(lease, terms, pay, terms.deposit - pay, terms.bond, 0, 0)


@external
def refund(terms: Terms):
    """@notice Deposit and bond go back: before the agent accepted, or where it claimed nothing for CLAIM_S."""
    lease: bytes32 = keccak256(abi_encode(terms))
    bond: uint256 = self._bond(lease, terms)
    if self.states[lease] == FUNDED:
        assert msg.sender == terms.renter, "renter only"
    else:
        assert msg.sender == terms.renter or msg.sender == terms.agent, "renter or agent only"
        assert block.timestamp >= terms.deadline + CLAIM_S, "deadline"
    self._end(lease, terms, 0, terms.deposit, bond, 0, 0)


@internal
@view
def _bond(lease: bytes32, terms: Terms) -> uint256:
    """What the agent has put up for a lease that is not settled."""
    assert self.states[lease] == FUNDED or self.states[lease] == RUNNING, "no such lease"
    return terms.bond if self.states[lease] == RUNNING else 0


@internal
@view
def _agreed(lease: bytes32, terms: Terms, running_s: uint256, voucher: Bytes[65]) -> uint256:
    """Pay for the seconds of a voucher, rounded down as the pool's log does."""
    assert running_s <= LONGEST_S, "seconds"
    assert self._signer(keccak256(abi_encode(VOUCHER, lease, running_s)), voucher) == terms.cosigner, "voucher"
    return running_s * terms.rate_per_hour // 3600


@internal
def _end(
    lease: bytes32, terms: Terms, pay: uint256, to_renter: uint256, to_agent: uint256, slashed: uint256, fees: uint256,
):
    self.states[lease] = SETTLED
    self.balances[terms.agent] += pay + to_agent
    self.balances[terms.renter] += to_renter
    log Settled(lease=lease, pay=pay, slashed=slashed, fees=fees)


@internal
@view
def _signer(content: bytes32, signature: Bytes[65]) -> address:
    """Who signed (EIP-712); the empty address: nobody. The chain's number is read anew, for a chain that forks."""
    if len(signature) != 65:
        return empty(address)
    domain: bytes32 = keccak256(
        abi_encode(DOMAIN, keccak256("Stoker escrow"), keccak256("1"), chain.id, self)
    )
    digest: bytes32 = keccak256(concat(x"1901", domain, content))
    r: uint256 = convert(slice(signature, 0, 32), uint256)
    s: uint256 = convert(slice(signature, 32, 32), uint256)
    v: uint256 = convert(slice(signature, 64, 1), uint256)
    return ecrecover(digest, v, r, s)


# -------------------------------------------------------------------------------------------------------------- roots


@external
def anchor(first: uint256, last: uint256, root: bytes32):
    """@notice The Merkle root of the log's events `first` to `last`; each event is under one root, and none is changed."""
    assert msg.sender == arbiter, "arbiter only"
    assert first <= last and (first == self.anchored + 1 or self.anchored == 0), "does not follow"
    self.anchored = last
    self.roots[last] = root
    log Anchored(last=last, first=first, root=root)
