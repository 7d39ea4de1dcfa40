"""What docs/datadist.md says is so, and its examples run, one after another as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

from quire.datadist import LLMStatusCode
from quire.datadist.interface import options
from quire.datadist.interface.options import DEFAULT_TCP_STREAMS
from quire.datadist.transports.tcp import MAX_STREAMS

PAGE = (Path(__file__).parents[2] / "docs" / "datadist.md").read_text(encoding="utf-8")
NEVER_RAISED = {
    "LLM_SUCCESS",
    "LLM_REQUEST_ALREADY_COMPLETED",
    "LLM_UNLINK_FAILED",
    "LLM_NO_FREE_BLOCK",
    "LLM_BLOCKS_OUT_OF_MEMORY",
    "LLM_OUT_OF_MEMORY",
}


def test_the_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict = {}
    for number, code in enumerate(examples):
        exec(compile(code, f"datadist.md: {number}", "exec"), namespace)
    assert namespace["tokens"] == [6, 7]
    assert namespace["p"].listen_port is None


def test_the_table_has_each_code_that_is_raised():
    in_table = set(re.findall(r"`(LLM_\w+)`", PAGE)) & {code.name for code in LLMStatusCode}
    assert in_table == {code.name for code in LLMStatusCode} - NEVER_RAISED


def test_the_codes_that_are_said_to_be_never_raised_are_not():
    source = Path(options.__file__).parents[1]
    text = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    for name in NEVER_RAISED - {"LLM_SUCCESS"}:
        assert f"LLMStatusCode.{name}" not in text


def test_the_options_are_on_the_page_with_their_defaults():
    own = [key for name, key in vars(options).items() if name.isupper() and str(key).startswith("quire.")]
    assert set(re.findall(r"^\| `(quire\.\w+)`", PAGE, re.MULTILINE)) == set(own)
    assert f"1 to {MAX_STREAMS}; the smaller of both sides | `{DEFAULT_TCP_STREAMS}` |" in PAGE
