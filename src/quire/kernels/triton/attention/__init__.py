"""Paged attention, rotary embeddings and key scores in Triton.

A plan is made on the host, once for each step and shape of layers (`plan.py`): rows are cut into tiles of 16,
64 or 128, and where these are too few for a GPU, their keys into spans, which a second kernel merges
(`items.py`); the plan of a captured decode step is derived from the previous step's unless a sequence crosses
a tile boundary (`plan.py`). A token that sees later ones is planned as a causal one at the last place that it
sees (`items.py`). Selections of keys, and the lists of the tiles that are then visited, are made on the
device (`key_selection.py`). Nothing that changes from step to step is known to the compiler.
"""
