"""The kernels in C++ (native/), behind the same signatures as the reference ones.

They are there if Quire was installed where a C++ compiler is; `quire.kernels.dispatch` picks them then.
"""
