"""Ahead-of-time compilation of the worker's Triton kernels, for GPUs that are not present. Needs no GPU.

configurations.py   every configuration of every kernel of `kvforge.worker.kernels.registry`
attention.py, layers.py, experts.py   these configurations: launches of the functions that a worker calls
specialise.py       the compilation that Triton performs for a launch
compilation.py      compiles one configuration, and reads its resources from the assembly
results.py          the results of all compilations, kept in tests/data/compiled (`python -m tools.aot.results`)
__main__.py         `python -m tools.aot`: compiles all of them

The worker does not import this package, and no wheel contains it.
"""
