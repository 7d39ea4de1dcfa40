"""Structured output: grammars, their compilation, and the tokens they allow.

A request with `structured_outputs` waits in `WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR` while llguidance compiles
its grammar in one of two threads (`grammar/`). Tenants take turns (`compilation.py`), so that one with many
grammars delays its own; of a tenant's, the smallest and the oldest take turns. A grammar is first compiled in
a fork of low priority (`trials.py`), with 0.03 s of computing time and 256 MiB; one that takes longer waits
for others of that kind only, and is then given 0.5 s at the lowest priority. Only then is it compiled in the
thread: some kilobytes of JSON schema can take minutes and all memory, and what llguidance compiles cannot be
sent to another process. Equal specifications share one compilation, and those used last are kept, up to
`max_grammar_cache_bytes` (the memory that the fork has written to while compiling counts as the
size, 0.7 MB for a small one, of which it keeps less). A grammar that cannot be compiled ends only the
requests that asked for it. Each step, `get_grammar_bitmask()` gives the runner one bitmask for each position
where a request samples, drafts included: the grammar is advanced over the drafts and rolled back. Drafts that
the grammar does not allow are cut off before they are planned. The end-of-sequence token is allowed where the
grammar may end. Masks are made of the bytes that tokens have in the text (`token_bytes.py`,
`grammar/llguidance_tokens.py`), of the engine's own tokenizer, so that mask and grammar agree for any; what
only special tokens spell is spelled with others. GBNF becomes Lark in `grammar/gbnf/`. A grammar may be quick
to compile and slow to follow (`s: s s | "a"`); masks are computed between steps, so the computing time of
each grammar is limited (`time_limit.py`).
"""
