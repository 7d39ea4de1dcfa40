"""The kernels in C++ (native/), behind the same signatures as the reference ones.

They are there if Quire was installed where a C++ compiler is; `quire.kernels.dispatch` picks them then.

`native/` is the C++ behind `kernels/cpu`: *rooms* (`native/src/kernels`), each compiled once for each
instruction set into a namespace of its own (AMX has only products and attention of its own, and the rest from
AVX-512 with BF16), tables of functions (`dispatch.cpp`) from which the process takes the best one, a pool of
threads, and bindings that take addresses. `kernels/cpu` checks what the addresses are made of: a call's
tensors each time, the arrays of a step once (`step_bounds.py`). docs/cpu.md has the layouts and the reasons.
"""
