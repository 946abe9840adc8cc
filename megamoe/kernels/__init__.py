"""Triton kernels of the staging path.

One kernel family a file; device functions are shared through `numerics` and `routing`. Nothing here
imports the reference. Importing this package imports nothing heavy: triton is imported by the kernel
modules, which `megamoe.staging` loads on first use.
"""
