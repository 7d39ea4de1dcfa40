"""Requests that time out: while they wait for a slot, or altogether."""

from __future__ import annotations

import dataclasses

from quire.errors import RequestTimeoutError
from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.phases.request_finisher import RequestFinisher


@dataclasses.dataclass(eq=False)
class TimeoutPhase:
    """Sets the deadlines of requests, and ends those whose deadline has passed."""

    accounts: Accounts
    finisher: RequestFinisher

    def start(self, request: Request, now: float) -> None:
        """Set the deadlines of a request that the scheduler gets now, whenever it came."""
        config, deadlines = self.accounts.config, self.accounts.deadlines
        timeout = config.request_timeout if request.timeout is None else request.timeout
        queue_timeout = config.queue_timeout if request.queue_timeout is None else request.queue_timeout
        if timeout:
            deadlines.add(request.request_id, "total", now + timeout)
        if queue_timeout:
            deadlines.add(request.request_id, "queue", now + queue_timeout)

    def expire(self) -> None:
        """End the requests that have timed out."""
        accounts = self.accounts
        now = accounts.clock.now
        for request_id, kind in accounts.deadlines.expired(now):
            request = accounts.find(request_id)
            if request is None:
                continue
            what, own, default = (
                ("started", "queue_timeout", "SchedulerConfig.queue_timeout")
                if kind == "queue"
                else ("ended", "timeout", "SchedulerConfig.request_timeout")
            )
            seconds = round(now - request.arrival_time, 3)  # a timeout may be a few milliseconds
            error = (
                f"the request had not {what} after {seconds:g} s; raise its {own} if it has one of its own, "
                f"or {default}"
            )
            accounts.stats.num_timeouts += 1
            self.finisher.fail(request, error, RequestTimeoutError.__name__)
