"""How much service each tenant has had: virtual token counters.

After Sheng et al. 2024, "Fairness in Serving Large Language Models", in the variants that predict output
lengths and that weight tenants. A tenant pays for a request when it is admitted: for the prompt, and for as
much output as its requests have had on average, both divided by its weight. When the request leaves its slot,
the prediction is replaced by what it got. A tenant that had nothing waiting cannot save up: when it comes
back, it is lifted to the lowest counter of the tenants that wait, or, if none does, to that of the last one
that did.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable

from quire.request import Request
from quire.status import RequestStatus

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
FIRST_GUESS = 128.0  # output tokens, before any request has ended
LEARNING_RATE = 0.2  # of the mean output length: the last five requests or so, as in the paper
MAX_ACCOUNTS = 4096


@dataclasses.dataclass(slots=True)
class _Account:
    """A tenant: its counter, the mean length of its outputs in tokens, and how many requests it has where."""

    counter: float
    mean_output: float
    num_waiting: int = 0
    num_running: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.num_waiting > 0

    @property
    def is_idle(self) -> bool:
        return not (self.num_waiting or self.num_running)


class _ByCounter:
    """The accounts that belong here, the least counter first: a heap with entries that may be out of date."""

    def __init__(self, accounts: dict[str, _Account], belongs: Callable[[_Account], bool]) -> None:
        self._accounts = accounts
        self._belongs = belongs
        self._heap: list[tuple[float, str]] = []

    def file(self, tenant: str) -> None:
        """File a tenant again after a change of its account."""
        account = self._accounts[tenant]
        if self._belongs(account):
            heapq.heappush(self._heap, (account.counter, tenant))
            if len(self._heap) > 2 * len(self._accounts) + 16:
                self._heap = sorted(set(filter(self._is_current, self._heap)))

    def least(self) -> tuple[float, str] | None:
        """Return (counter, tenant) of the account with the lowest counter, if there is any."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _is_current(self, entry: tuple[float, str]) -> bool:
        account = self._accounts.get(entry[1])
        return account is not None and account.counter == entry[0] and self._belongs(account)


class VirtualTokenCounters:
    """Counters of the tenants that have requests, and of those that had lately.

    The counter of a tenant without requests is dropped once it would be lifted anyway when the tenant comes
    back. Of more than `MAX_ACCOUNTS`, those without requests are dropped, the least counter first.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._waiting = _ByCounter(self._accounts, lambda account: account.is_waiting)
        self._idle = _ByCounter(self._accounts, lambda account: account.is_idle)
        self._last_to_wait = ""
        self._counter_of_last_to_wait = 0.0
        self._mean_output = FIRST_GUESS
        self._changed: set[str] = set()  # tenants whose counters have changed, see `take_changed`
        self._charged: dict[str, float] = {}  # by request id: what was paid at admission, and is not settled

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, tenant: str) -> float:
        """Return a tenant's counter, in weighted tokens."""
        account = self._accounts.get(tenant)
        return self._floor() if account is None else account.counter

    def take_changed(self) -> set[str]:
        """Return the tenants whose counters have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def queued(self, tenant: str) -> None:
        """Count one more waiting request of the tenant."""
        self._forget_idle()
        account = self._account(tenant)
        if not account.is_waiting:
            account.counter = max(account.counter, self._floor())
            self._changed.add(tenant)
        account.num_waiting += 1
        self._waiting.file(tenant)

    def unqueued(self, tenant: str) -> None:
        """Count one waiting request of the tenant less."""
        account = self._accounts[tenant]
        account.num_waiting -= 1
        if not account.is_waiting:
            self._last_to_wait, self._counter_of_last_to_wait = tenant, account.counter
            self._idle.file(tenant)

    def charge(self, request: Request) -> None:
        """Let the tenant pay for a request that enters its slot.

        For one that was preempted it has paid already, as far as the request had come.
        """
        account = self._account(request.tenant)
        predicted = max(account.mean_output, float(len(request.output_token_ids)))
        if request.sampling_params.max_tokens is not None:
            predicted = min(predicted, float(request.sampling_params.max_tokens))
        paid = _price(request) if request.status is RequestStatus.PREEMPTED else 0.0
        cost = INPUT_WEIGHT * request.num_prompt_tokens + OUTPUT_WEIGHT * predicted
        self._charged[request.request_id] = cost
        account.num_running += 1
        self._pay(request, cost - paid)

    def settle(self, request: Request) -> None:
        """Replace the prediction by what the request has had, now that it has left its slot."""
        charged = self._charged.pop(request.request_id)
        account = self._accounts[request.tenant]
        account.num_running -= 1
        if request.status is not RequestStatus.PREEMPTED:
            num_output = len(request.output_token_ids)
            account.mean_output += LEARNING_RATE * (num_output - account.mean_output)
            self._mean_output += LEARNING_RATE * (num_output - self._mean_output)
        self._pay(request, _price(request) - charged)
        self._forget_idle()

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._floor(), self._mean_output)
        return account

    def _pay(self, request: Request, amount: float) -> None:
        tenant = request.tenant
        account = self._accounts[tenant]
        account.counter += amount / request.tenant_weight
        self._changed.add(tenant)
        if tenant == self._last_to_wait:
            self._counter_of_last_to_wait = account.counter
        self._waiting.file(tenant)
        self._idle.file(tenant)

    def _floor(self) -> float:
        """Return what a tenant that comes back is lifted to."""
        least = self._waiting.least()
        return self._counter_of_last_to_wait if least is None else least[0]

    def _forget_idle(self) -> None:
        floor = self._floor()
        while (least := self._idle.least()) is not None:
            counter, tenant = least
            if counter > floor and len(self._accounts) <= MAX_ACCOUNTS:
                return
            del self._accounts[tenant]
            self._changed.discard(tenant)


def _price(request: Request) -> float:
    """Return what a request has cost so far, in weighted tokens."""
    return INPUT_WEIGHT * request.num_prompt_tokens + OUTPUT_WEIGHT * len(request.output_token_ids)
