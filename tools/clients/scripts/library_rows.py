"""Rows of `LLM.embed` for texts from standard input, both as JSON; run with Quire's own Python."""

import json
import sys

from embedding_checks import MODEL

from quire import LLM

with LLM(MODEL) as llm:
    rows = [output.outputs.data.tolist() for output in llm.embed(json.load(sys.stdin))]
print(json.dumps(rows))
