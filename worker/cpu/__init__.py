"""The CPU's kernels: compiled by Numba, run by torch's own threads, called with addresses and sizes.

kernel.py            compiles and caches a kernel, packs its arguments and runs it
vector.py, rows.py   building blocks: vectors of float32, and rows of numbers in any dtype
attention_kernel.py  attention over the paged KV; kv_write.py: rotary embedding and KV write
layer_kernels.py     norms and gate of a decoder layer
convolution_kernel.py, delta_kernel.py   steps of layers with a recurrent state
tile_kernel.py       float32 products with weights in oneDNN's layout; amx_kernel.py: bfloat16 products in AMX's tiles
int8_kernels.py      conversions around an int8 product; int8_inputs.py: the same for tensors
sampling_kernels.py  greedy rows and draws; sampling.py: the same for tensors

The rooms above choose them: `attention.cpu_attention`, `kernels.cpu_operations`, `kernels.tiles`, `kernels.amx`,
`kernels.quantised` and `sampling.sampler`. Law: nothing here knows those rooms, or the device.
"""
