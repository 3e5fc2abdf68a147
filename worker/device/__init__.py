"""One face for CPU, CUDA and HIP, and what a kernel may ask of the chip. The lowest room: it knows none of the others.

device.py       Device: memory, what runs there, typed errors
queue.py        points in the device's queue, the way in and the way out
capture.py      graphs: work that is queued again in one call
target.py       what an architecture is to a kernel; targets.py: the table of them, with the tile sizes chosen for each
file_pages.py   pages of libraries that only loading needed
check.py        how a kernel is judged at a worker's start
host_kernel.py  kernels for the CPU, by Numba, on torch's threads; vector.py, rows.py: what they are made of
overlap.py      kernels that start before the one before them has ended; copies.py: small copies, as a kernel

Law: nobody outside asks which kind of device it is, only what it can do. All of it may be used from any other room.
"""
