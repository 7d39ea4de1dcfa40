"""The kernels for GPUs in Triton, behind the same signatures as the reference ones.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), slowly and on tensors of the CPU; so do
the tests.
"""
