"""The kernels for GPUs in Triton, behind the same signatures as the reference ones.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), slowly and on tensors of the CPU; so do
the tests.

`linear/` has dense layers over the kernels of `products.py` (in float8 `float8_products.py`, both for many
rows `tma_products.py`), `experts/` mixtures of experts, `attention/` attention, rotation and the KV write,
`recurrence/` layers with a state, `rows.py` norms and activations. `sampling/` scans logits (`row_scans.py`)
to choose tokens (`token_choice.py`, and `tail_search.py` for rows that their likeliest tokens do not decide)
after masks, bans, biases and penalties, and finds log-probabilities.

Wrappers check tensors and launch; no call waits for the device. What is launched is declared by `@kernel`
(`kernel.py`), so that `compile_only` can have all of a step's kernels compiled beside each other before one
is computed; it is launched before the last kernel has ended, and calls `await_previous` first. `device.py`
has what is different in the interpreter.
"""
