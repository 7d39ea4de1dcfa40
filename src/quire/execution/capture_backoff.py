"""Back-off after a failed graph capture: memory may have been short for a moment only."""

from __future__ import annotations

MIN_STEPS = 256
"""Of the first pause; each further one has twice as many."""


class CaptureBackoff:
    """Counts the steps between a failed attempt and the next one, replayed steps included.

    It counts steps and not seconds, so that ranks that compute the same steps do the same.
    """

    def __init__(self) -> None:
        self._num_steps = MIN_STEPS
        self._num_left = 0

    def allows_attempt(self) -> bool:
        """Return whether a capture may be attempted; called once for each step."""
        self._num_left = max(0, self._num_left - 1)
        return not self._num_left

    def begin(self) -> None:
        """Start the back-off."""
        self._num_left = self._num_steps
        self._num_steps *= 2
