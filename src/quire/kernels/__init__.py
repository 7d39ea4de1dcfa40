"""Compute primitives, one signature each. Import them from `quire.kernels.dispatch`, which picks the version.

This package stays light so that importing it costs nothing; `reference` and `attention` import torch.
"""
