"""How many drafts a step asks for: none while the runner says that there would be none."""

from __future__ import annotations

from collections.abc import Callable


class Drafting:
    """Pauses drafts for as many steps as the runner says.

    Nobody waits for the tokens of a step that no drafts follow, so the next one can be begun before they are
    known. A request that begins ends the pause.

    Args:
        length: tokens to propose per request, given the number of running requests.
    """

    def __init__(self, length: Callable[[int], int]) -> None:
        self._length = length
        self._num_paused = 0  # steps to come without drafts
        self._last_begin = -1  # number of the step that a request began in

    def wanted(self, step: int, num_running: int, *, samples: bool, begins: bool) -> int:
        """Return how many tokens to propose for each request after a step that is about to be launched.

        Args:
            step: its number.
            num_running: running requests.
            samples: whether one of them gets a token.
            begins: whether one of them begins in it, or resumes.
        """
        if begins:
            self._num_paused, self._last_begin = 0, step
        if not self._num_paused:
            return self._length(num_running)
        self._num_paused -= samples
        return 0

    def pause(self, step: int, num_steps: int) -> None:
        """Take that after `step`, no drafts would follow the next `num_steps` steps that sample."""
        if step >= self._last_begin:
            self._num_paused = num_steps
