"""How the end of a process is put into words."""

import pytest

from quire.engine.exit_status import describe_end


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with code 3"),
        (-9, "was killed by SIGKILL"),
        (-7, "was killed by SIGBUS: a file"),
        (-40, "was killed by signal 40"),
    ],
)
def test_every_end_has_words(code: int, words: str) -> None:
    assert describe_end(code).startswith(words)
