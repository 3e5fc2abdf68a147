"""Devices: one interface for CPU, CUDA and HIP, with the properties that kernels ask for.

device.py       Device: memory, capabilities, typed errors
queue.py        events in the device's queue, asynchronous copies to and from it
staged_copies.py   bytes from files to the device through fixed host buffers
capture.py      graphs: work that is queued again with one call
target.py       an architecture as kernels see it; targets.py: the table of architectures, with their tile sizes
file_pages.py   releases pages of libraries that only loading needed
check.py        judges kernels at a worker's start, many at once; compilation.py: counts what is compiled
block_buffers.py   whole blocks of a pool as rows of bytes with checksums; block_copies.py: its kernel
host_memory.py  page-locks memory of a file, piece by piece; side_queue.py: a second queue for copies
overlap.py      kernels that start before the previous one has ended; copies.py: small copies, as a kernel

Law: code outside never asks for the kind of device, only for its capabilities. Every package above `cpu`
may use all of this one.
"""
