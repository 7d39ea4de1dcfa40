"""The least that must work: a prompt goes through both processes and comes back as the right answer.

`make test-fast` runs this file alone, before each commit.
"""

from __future__ import annotations

import json
import sys

from subprocesses import run


def test_the_built_in_model_answers() -> None:
    command = [sys.executable, "-m", "quire.cli.main", "generate", "What is 27 + 58?", "--output", "-"]
    result = run(command)
    assert (result.returncode, result.stderr) == (0, "")
    [output] = json.loads(result.stdout)["outputs"]
    assert (output["text"], output["finish_reason"]) == ("85", "stop")
