"""Parsing of model answers: reasoning, content and tool calls, in the formats that models were trained on.

A protocol translates its fields into a `ToolUse` (`dialogue/calls/tools.py`): which tools there are, which
may be called, and whether one must be. `formats.FORMATS` is the table of formats. Each has a *notation*,
which does two things with the same syntax: it reads calls, as a generator that waits wherever it needs more
text (`IncomingText`), and it writes the grammar that makes a model call. `AnswerParser` runs the reading side
and emits events, which a protocol translates back; `structure_of_answer` makes the grammar, an ordinary
`StructuredOutputsParams` to the engine. The engine knows nothing of tools. In most formats calls are between
marks (`MarkedCallFormat`, `MarkedAnswer`). In harmony, reasoning, content and calls are all messages, read by
`HarmonyMessages`. `reasoning.REASONING_FORMATS` is the table of the marks around the reasoning that precedes
all that; the end of the prompt tells whether the answer begins with it (`expected_reasoning`). A grammar
applies after it, and a budget ends it, as a grammar of its own (`grammar/reasoning.py`): free up to the mark
that ends it, or one forced token after another. In harmony, a bridge of forced tokens leads from there to the
next message. Marks that are special tokens are shown in a request's text although others are skipped.
"""
