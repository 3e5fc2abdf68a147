"""Operations of a decoder layer around and including its small matrix products, and the registry of all kernels.

`interface.LayerOperations` defines the operations, and choice.py chooses the implementation for a device:

- `plain.py`: in plain torch.
- `fused.py`: one Triton kernel per operation (norm.py, rotary.py, activation.py, linear.py, project.py,
  router_kernel.py), and for experts a sort (expert_sort.py) and grouped products (grouped.py). Weights in codes of 8
  or 4 bits (stored.py) are multiplied by kernels (stored_linear.py, stored_project.py, stored_experts.py) that unpack
  them (stored_unpack.py). Steps of layers with a recurrent state (recurrent.py): recurrent_kernels.py, and
  state_space_kernels.py (state_space.py), and gated_norm.py. Their prompts, in chunks (prompt_rows.py,
  prompt_reference.py): prompt_convolution.py, prompt_delta.py (with prompt_channel_pairs.py for Kimi delta attention),
  prompt_state_space.py (prompt_operations.py).
- `packed.py`: as plain.py, with oneDNN's packed products where a CPU gains by them (quantised.py: with fewer bits;
  row_counts.py: allowed row counts; packed_table.py: an embedding read from the packed head).
- `cpu_operations.py`: as packed.py, with one Numba kernel of `kvforge.worker.cpu` per operation between products, those
  of products (tiles.py: float32; amx.py: bfloat16 with AMX), and prepared steps of a few decodes (cpu_decoder.py).

decoder.py is a whole model made of these operations. For layers that transformers runs, torch_functions.py replaces
torch's functions and experts.py computes experts, as grouped products or one by one (expert_loop.py).

registry.py     every Triton kernel of the worker, including those of attention, sampling and copies
selftest.py     compares the kernels of this package with plain torch, at a worker's start; recurrent_selftest.py and
                prompt_selftest.py: those of layers with a recurrent state

Law: the registry declares every launched kernel with its plain-torch reference and its check; `tools/aot` declares its
configurations and compiles them for GPUs that are not present. Code outside calls `choose_operations`,
`decoder.FusedDecoder` and `registry.check_kernels`.
"""

from .choice import choose_operations
from .interface import HEAD_SIZE_MAX, HIDDEN_MAX, SLAB, LayerOperations
from .plain import PlainOperations

__all__ = ["HEAD_SIZE_MAX", "HIDDEN_MAX", "SLAB", "LayerOperations", "PlainOperations", "choose_operations"]
