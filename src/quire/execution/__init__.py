"""Running one step: from a `SchedulerOutput` to a `ModelRunnerOutput`.

`model_runner.ModelRunner` is the entry point; it keeps the persistent batch, builds the ragged batch of a
step, runs the decoder and asks the `Sampler` for tokens. Importing this package loads nothing; its modules
load torch.

Weights, buffers and KV are where the kernels are (`KernelSet.device`). A step is planned on the host: its
`AttentionBatch` is in host memory, and what the device needs of it is copied once for each forward pass
(`AttentionBatch.on_device`). The device chooses the tokens, too, where its kernels can (`KernelSet.sampling`
is a `TokenChoice`), and keeps the last one of each slot: the next step's inputs are taken from there
(`execution/sampling/sampler.py`), and `execute` returns a `StepInFlight` that has the tokens once
they have arrived. What grammars and constraints change in the logits goes there as lists
(`execution/sampling/constraints.py`); of a banned sequence that the next token but one may complete, the
device looks whether the last token is the one that comes before. Penalties need the tokens before, which the
device counts as it chooses them, and the drafts before each row; where the host has discarded or replaced
tokens, `DevicePenalties` has them counted again. The host waits only for connectors that do not save before
tokens are known (`KVConnector.saves_before_tokens`; the tiers do). With cache eviction, it waits for each
step's scores, which come from the device at once (`execution/eviction/cache_evictor.py`), but not for its
tokens. Whose KV of a step is invalid, and may not be stored, is a `StepVerdict`
(`execution/failed_requests.py`), which waits for the tokens when it is asked.

Decode steps, and small ones with prompts (`ModelRunner.max_captured_tokens`, which the profile run
measures), are captured as graphs and replayed (`execution/step_graphs.py`): a step's arrays are then made of
its `AttentionBatch` by the functions that the kernels gave when the step was first computed, copied at once
to places that stay the same, and sizes are rounded up. Sampling is captured separately
(`execution/sampling/captured_choice.py`), for logits at the address where such a step leaves them, for each
combination of drawn, penalized, masked and edited rows. `tests/execution/test_step_graphs.py` replays on a
tape of operations what a GPU would from a CUDA graph. `KernelSet.experts` decides how experts are held and
computed; `ExpertByExpert` computes one after the other, and waits for the device to learn which were chosen;
kernels of their own compute all in one call.
`KernelSet.gated_linear` turns a dense layer into the gated one that begins a feed-forward layer; kernels may
gate products before they are stored. `tests/execution/test_step_on_device.py` runs steps on torch's meta
device, which shows that nothing is mixed.

**Speculation.** Drafts are tokens of the plan like any others: a request with d of them samples at d + 1
positions, and the scheduler takes back those that were not accepted. The output equals that without drafts,
sampled tokens included, because each position draws with its own random number, and a draft stays only if it
is the token drawn there. docs/speculation.md has the rule, the sources of drafts and their length.
"""
