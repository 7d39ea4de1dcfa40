"""Paged attention, rotary embeddings and key scores in Triton.

Attention in `kernels/triton` is planned on the host, once for each step and shape of layers
(`attention_plan.py`): rows are cut into tiles of 16, 64 or 128, and where these are too few for a GPU, their
keys into spans, which a second kernel merges (`attention_items.py`); a recorded decode step's plan is derived
from the previous step's plan unless a sequence crosses a tile boundary (`attention_planner.py`). Experts get
tiles of rows by a plan that is made on the device (`expert_routing.py`); the host launches as many programs
as any choice can need. Selections of keys, and the lists of the tiles that are then visited, are made there,
too (`key_selection.py`). Nothing that changes from step to step is known to the compiler.
`tests/kernels/triton_kernels` runs the kernels in Triton's interpreter and compiles them for compute
capability 9.0; neither needs a GPU.


"""
