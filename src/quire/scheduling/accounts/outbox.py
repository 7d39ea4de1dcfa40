"""Messages of the next step to the runner, and outputs to clients that are no step's results."""

from __future__ import annotations

from collections.abc import Callable

from quire.request import Request
from quire.scheduling.outputs import EngineCoreOutput, EngineCoreOutputs
from quire.status import FinishReason
from quire.step import SchedulerOutput


class Outbox:
    """Messages to the runner and to clients that have not been sent."""

    def __init__(self) -> None:
        self._finished: list[str] = []
        self._preempted: list[str] = []
        self._notices: list[tuple[int, EngineCoreOutput]] = []  # (client, output)

    @property
    def is_empty(self) -> bool:
        """Whether no ended request and no output is left to be sent."""
        return not (self._finished or self._notices)

    def add_finished(self, request_id: str) -> None:
        """Tell the runner that a request has ended."""
        self._finished.append(request_id)

    def add_preempted(self, request_id: str) -> None:
        """Tell the runner that a request has been preempted."""
        self._preempted.append(request_id)

    def add_output(self, client_index: int, output: EngineCoreOutput) -> None:
        """Send a client an output."""
        self._notices.append((client_index, output))

    def add_error(self, request: Request, error: str, error_type: str, error_param: str | None) -> None:
        """Send a client the error with which a request, and each sequence of it, ended."""
        for sequence_id in request.beam_sequence_ids or (request.request_id,):
            output = EngineCoreOutput(
                sequence_id,
                [],
                finish_reason=FinishReason.ERROR,
                error=error,
                error_type=error_type,
                error_param=error_param,
            )
            self.add_output(request.client_index, output)

    def take_for_runner(self) -> tuple[list[str], list[str]]:
        """Return the requests that (ended, were preempted) since the last call."""
        finished, self._finished = self._finished, []
        preempted, self._preempted = self._preempted, []
        return finished, preempted

    def requeue(self, step: SchedulerOutput, still_true: Callable[[str], bool]) -> None:
        """Send a lost step's messages to the runner again, as far as they are still true."""
        self._finished += filter(still_true, step.finished_req_ids)
        self._preempted += filter(still_true, step.preempted_req_ids)

    def add_notices_to(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Move the outputs for clients into those of a step, by client."""
        for client, output in self._notices:
            outputs.setdefault(client, EngineCoreOutputs([])).outputs.append(output)
        self._notices.clear()
