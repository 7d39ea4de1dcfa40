"""The phases of a step: arrivals, admission, running requests, commit, and results.

*The running requests* (`running.py`): beams that have advanced are put into their slots; the token
budget is assigned in the order of service; blocks are freed until the new ones fit; the tables grow. Blocks
are freed the cheapest way first: drafts are dropped, then what a still waiting request has loaded, then a
victim is preempted (docs/policies.md), and at last all pins are broken.

*The waiting requests* (`admission.py`): from the head of the queue, in order, until one does not fit.
Nothing is admitted in a step that has preempted, or whose first request waits for blocks. Each request begins
with what is already there: its load, the prompt of a sibling, or cached blocks and those that this step
fills. A request that lacks blocks that another request is loading is passed over until they have arrived. If
nothing runs, the head starts regardless of the admission policy. Requests whose grammar, prompt or KV is not
ready yet wait beside the queue (`waiting.py`) and do not block others. The queue goes by when a request came
(`arrival_time`, which the front or a router gives, bounded by the clock). The sequences of one call are a
*flow*: one of them that has not run is in the queue, the others line up behind it (`ready_queue.py`), and
`FlowShares` (`flow_shares.py`) bounds the tokens of a large flow while others are there. The server hands the
engine a call's prompts in portions of `2 * max_num_seqs` sequences, when all have been prepared.

**Results.** `update_from_output()` applies the results of steps in the order in which they were planned
(`results.py`): messages from the connector, counts and tokens, grammars, full blocks, beams, drafts, and then
the outputs, with every finished request ended. Requests that ended or were preempted in the meantime are
skipped: their tokens are discarded.

**Siblings.** The sequences of one request with `n` or `best_of` share its prompt. The first computes it; the
others wait beside the queue until it has its first token, and then begin with its blocks: full blocks are
shared, a last block that is not full is copied (`SchedulerOutput.block_copies`), and only the last prompt
token is computed again. If the first is preempted or ends before that, the others queue like any other
request and use what the prefix cache has.

**Beam search.** A search has one slot for each beam, from admission to the end, whether the beam is alive or
not; its beams run together or not at all. `beam_search.py` knows only tokens and scores, and decides which
beams continue with which token. `beams.py` turns that into blocks: a beam that continues in another's slot is
a *fork* (`ForkData`), which shares the parent's full blocks and gets a copy of the block that both would
write to next. The runner gets the token that the search chose (`ChosenTokens`) in place of the one it
sampled. Only the prompt's blocks become findable for others. A preempted search starts over. docs/sampling.md
has the parameters.
"""
