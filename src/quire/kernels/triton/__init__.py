"""The kernels for GPUs in Triton, behind the same signatures as the reference ones.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), slowly and on tensors of the CPU; so do
the tests.

`kernels/triton` holds kernels for GPUs (docs/gpu.md): norms and activations (`rows.py`), rotation and the KV
write (`rotary.py`), dense layers (`linear.py` over the kernels of `products.py`, in float8 `float8_linear.py`
over `float8_products.py`, both for many rows over `tma_products.py`; with gates `gated_linear.py`), experts
(`experts.py`; `expert_matrices.py` holds those of a layer as dense layers are held) and scans of logits
(`row_scans.py`), with which tokens are chosen (`token_choice.py`, and `tail_search.py` for rows that their
likeliest tokens do not decide), after masks, bans and biases (`logit_changes.py`) and penalties
(`penalties.py`, by the counts of `SeenTokens`), and log-probabilities found (`logprobs.py`). Wrappers check
tensors and launch; no call waits for the device. What is launched is declared by `@kernel` (`kernel.py`), so
that `compile_only` can have all of a step's kernels compiled beside each other before one is computed; it is
launched before the last kernel has ended, and calls `await_previous` first. `device.py` has what is different
in Triton's interpreter, where tests and, with `TRITON_INTERPRET=1`, engines run them.


"""
