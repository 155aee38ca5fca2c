"""What each tenant of a model has been served, in tokens by weight: whose turn it is when requests wait.

Start-time fair queueing: who waits and was served least goes first; who comes back from idling is lifted to
the counter of whoever was served last, so that nobody banks idle time. Between tenants that wait all the
time, served tokens by weight differ by two requests at most. Pure bookkeeping: knows no requests, no workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

# whoever asked this long ago still counts among those who share
ACTIVE_S = 60.0
_RECOUNT_S = 1.0
# how often a tenant asks is a mean over so long
_ASKING_S = 10.0
# idle accounts kept at most; who is forgotten is lifted like a newcomer
_KEPT = 4096


@dataclass(slots=True)
class Account:
    """counter: weighted tokens served, divided by the tenant's weight; comparable between tenants only.

    weight: as it asked last. asking: sequences per second that it asked for, as of when it was seen last.
    """

    weight: float = 1.0
    counter: float = 0.0
    waiting: int = 0
    seen: float = 0.0
    asking: float = 0.0

    def rate(self, now: float) -> float:
        return self.asking * exp((self.seen - now) / _ASKING_S)


class FairShare:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._floor = 0.0
        self._active: list[tuple[str, Account]] = []
        self._active_until = float("-inf")

    def __len__(self) -> int:
        return len(self._accounts)

    def counter(self, tenant: str) -> float:
        return self._account(tenant).counter

    def waiting(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return account.waiting if account is not None else 0

    def weight(self, tenant: str) -> float:
        account = self._accounts.get(tenant)
        return account.weight if account is not None else 1.0

    def asks(self, tenant: str, sequences: int, now: float, weight: float = 1.0) -> None:
        """The tenant asks for something. weight: above 0; of tenants that wait, each is served so much."""
        account = self._account(tenant)
        account.weight = weight
        if not account.waiting:
            account.counter = max(account.counter, self._floor)
        account.asking = account.rate(now) + sequences / _ASKING_S
        account.seen = now

    def arrives(self, tenant: str) -> None:
        """What it asked for has to wait."""
        self._account(tenant).waiting += 1

    def leaves(self, tenant: str) -> None:
        """One of them waits no more, served or not."""
        self._account(tenant).waiting -= 1

    def served(self, tenant: str, tokens: float) -> None:
        account = self._account(tenant)
        self._floor = max(self._floor, account.counter)
        account.counter += tokens / account.weight

    def correct(self, tenant: str, tokens: float) -> None:
        """It took so many tokens more, or fewer, than was charged."""
        account = self._account(tenant)
        account.counter = max(0.0, account.counter + tokens / account.weight)

    def shared(self, now: float) -> bool:
        """Whether there is more than one tenant, among those who wait or were active lately."""
        return len(self._among(now)) > 1

    def claims(self, tenant: str, running: Mapping[str, int], now: float) -> float | None:
        """How many sequences a second are asked for by those who run less than a tenant, by weight.

        None where the tenant runs no more than its max-min fair share: nobody's share is more than what he
        runs, what he has waiting, and one more, and the others divide what that leaves. running: sequences
        by tenant.
        """
        own = running.get(tenant, 0) / self.weight(tenant)
        # if all were brought to the tenant's level, as far as they ask for it: what would be lacking
        lacking = asked = 0.0
        for name, account in self._among(now):
            runs, level = running.get(name, 0), own * account.weight
            lacking += min(runs + account.waiting + 1, level) - runs
            if runs < level:
                asked += account.rate(now)
        return asked if lacking > 0 else None

    def forget_idle(self, now: float) -> None:
        """Drop who has been idle for long, and of the others that idle all but the latest.

        Who comes again starts like a newcomer: at best that is worth one request.
        """
        accounts = self._accounts
        idle = sorted(
            (name for name, account in accounts.items() if not account.waiting),
            key=lambda name: accounts[name].seen,
        )
        surplus = len(idle) - _KEPT
        for position, name in enumerate(idle):
            if position < surplus or now - accounts[name].seen >= ACTIVE_S:
                del accounts[name]

    def _among(self, now: float) -> list[tuple[str, Account]]:
        if now >= self._active_until:
            self._active_until = now + _RECOUNT_S
            self._active = [
                (name, account)
                for name, account in self._accounts.items()
                if account.waiting or now - account.seen < ACTIVE_S
            ]
        return self._active

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(counter=self._floor)
            self._active_until = float("-inf")
        return account
