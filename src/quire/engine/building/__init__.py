"""Builds an engine from its configuration.

`on_one_device` (`engine/devices.py`) decides at start-up which device and which kernels `auto` stands for,
and refuses what an engine on a GPU cannot do yet. On one, the memory plan is of the GPU's memory, and the
cache does not grow: it is planned again (`engine/building/measurement.py`) after a runner on a few blocks has
computed the largest steps (`execution/profile_run.py`) and `CudaMemory` has seen what torch took for them. So
weights are loaded before the scheduler is made.
"""
