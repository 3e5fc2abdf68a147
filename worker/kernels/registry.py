"""The registry of all kernels: their plain-torch references, and checks at start.

Every launched kernel is in `KERNELS` (Triton's) or `CPU_KERNELS` (the CPU's). The tests look for launches that are
missing here, corrupt each kernel in turn, and expect the start to reject it. `kernels = "reference"` runs none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kvforge.worker.attention import PagedAttention, ReferenceAttention
from kvforge.worker.attention.expanded_space import EXPANDED_HEADS_MAX
from kvforge.worker.attention.quantised import dequantise
from kvforge.worker.attention.selftest import AttentionShape
from kvforge.worker.attention.selftest import self_test as attention_test
from kvforge.worker.device.block_buffers import BlockCopies
from kvforge.worker.device.check import require_all_right
from kvforge.worker.device.device import Device
from kvforge.worker.sampling.sampler import SamplingState

from .decoder import FusedDecoder
from .experts import Experts
from .interface import LayerOperations
from .packed import packing_problem, weight_kind
from .plain import PlainOperations
from .prompt_reference import PlainPrompts
from .prompt_selftest import prompt_test, prompts_test
from .quantised import PlainInputQuantiser
from .recurrent import MixerStep
from .recurrent_selftest import recurrent_test, steps_test
from .router import route
from .selftest import quantising_test
from .selftest import self_test as layer_test
from .stored import StoredWeight


@dataclass(frozen=True)
class Serving:
    """The serving setup, as far as kernels depend on it.

    Attributes:
        device: The device.
        attention: Paged attention.
        shapes: Attention shapes of the layers.
        dtype: Dtype of the model.
        kv_dtype: Dtype of the pool.
        block_size: Tokens per KV block.
        vocab_size: Size of the vocabulary.
        fused: The fused form; None if transformers runs the layers.
        remembered_in: See `attention.selftest.self_test`.
        ranks: Processes that compute the model together.
        experts: A layer's experts; None if the model has none, or runs them without kernels.
        codes: Kinds of the weights that stay in codes, on a GPU (see `stored.Codes.kind`).
        steps: Steps of layers with a recurrent state that transformers runs.
        operations: The operations of these steps.
    """

    device: Device
    attention: PagedAttention
    shapes: tuple[AttentionShape, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    vocab_size: int
    fused: FusedDecoder | None
    remembered_in: Path | None = None
    ranks: int = 1
    experts: Experts | None = None
    codes: frozenset[str] = frozenset()
    steps: tuple[MixerStep, ...] = ()
    operations: LayerOperations | None = None


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        module: Full name of the module, which is imported on first use.
        name: Name of the launched function in `module`.
        reference: Computes the same in plain torch.
        check: Compares the kernel with the reference for a serving setup.
        hopper: Whether it runs only on NVIDIA's Hopper.
    """

    module: str
    name: str
    reference: Callable[..., Any]
    check: Callable[[Serving], None]
    hopper: bool = False

    @property
    def function(self) -> Any:
        """The launched function. Imports Triton."""
        return getattr(import_module(self.module), self.name)


@dataclass(frozen=True)
class CpuKernelEntry:
    """A CPU kernel. It is compiled for the CPU that runs it, and handles all dtypes and shapes.

    For module, name, reference and check see Kernel.
    """

    module: str
    name: str
    reference: Callable[..., Any]
    check: Callable[[Serving], None]


def check_kernels(serving: Serving) -> None:
    """Run the check of every kernel that may be launched.

    Raises:
        KernelError: Names the failing kernel.
        GpuError: The device failed.
    """
    every = dict.fromkeys(kernel.check for kernel in (*KERNELS, *CPU_KERNELS))
    alone = [check for check in every if check not in SIDE_BY_SIDE]
    require_all_right(serving.device, [partial(check, serving) for check in SIDE_BY_SIDE])
    for check in alone:
        check(serving)


def check_attention(serving: Serving) -> None:
    """Run the check of attention alone.

    Raises:
        KernelError: Names the failing kernel.
        GpuError: The device failed.
    """
    _attention(serving)


def _attention(serving: Serving) -> None:
    for shapes, kv_dtype in ((serving.shapes, serving.kv_dtype), (expanded_shapes(serving), serving.dtype)):
        attention_test(
            serving.attention,
            serving.device,
            shapes,
            dtype=serving.dtype,
            kv_dtype=kv_dtype,
            block_size=serving.block_size,
            remembered_in=serving.remembered_in,
        )


def expanded_shapes(serving: Serving) -> tuple[AttentionShape, ...]:
    """Return the shapes of attention over keys and values that are expanded from latents (`attention.expanded`)."""
    layers = serving.fused.layers if serving.fused is not None and serving.attention.expanded_spaces is not None else ()
    found: dict[AttentionShape, None] = {}
    for layer in layers:
        if layer.latent is None or not layer.latent.is_expandable:
            continue
        for heads in {min(layer.heads, EXPANDED_HEADS_MAX), layer.heads % EXPANDED_HEADS_MAX or EXPANDED_HEADS_MAX}:
            if heads <= layer.heads:
                found[AttentionShape(heads, heads, layer.head_size, layer.options)] = None
    return tuple(found)


def _layers(serving: Serving) -> None:
    if serving.fused is not None:
        layer_test(serving.fused, serving.device)


def _recurrent(serving: Serving) -> None:
    if serving.fused is not None:
        recurrent_test(serving.fused, serving.device)
        prompt_test(serving.fused, serving.device)
    elif serving.operations is not None:
        steps_test(serving.operations, serving.dtype, serving.steps, serving.device)
        by_token = [each for each in serving.steps if each.selective is not None]
        prompts_test(serving.operations, serving.dtype, by_token, serving.device)


def _experts(serving: Serving) -> None:
    if serving.experts is not None and serving.device.runs_kernels:
        from .experts_selftest import experts_test

        experts_test(serving.experts, serving.device)


def _stored(serving: Serving) -> None:
    if serving.codes and serving.device.runs_kernels:
        from .stored_selftest import stored_test

        stored_test(sorted(serving.codes), serving.dtype, serving.device, serving.experts is not None)


def _exchange(serving: Serving) -> None:
    if serving.fused is not None and serving.ranks > 1 and serving.device.runs_kernels:
        from .exchange_selftest import exchange_test

        exchange_test(serving.fused, serving.device, serving.ranks)


def _quantising(serving: Serving) -> None:
    if serving.fused is not None and "int8" in map(weight_kind, serving.fused.product_weights()):
        quantising_test(serving.device, serving.dtype)


def _tiles(serving: Serving) -> None:
    if _multiplies_itself(serving, torch.float32):
        from .tiles import tiles_test

        tiles_test(serving.device)


def _amx(serving: Serving) -> None:
    if _multiplies_itself(serving, torch.bfloat16):
        from .amx import amx_test

        amx_test(serving.device)


def _multiplies_itself(serving: Serving, dtype: torch.dtype) -> bool:
    """Return whether a kernel of the CPU may take oneDNN's place in products of `dtype`."""
    device = serving.device
    return serving.dtype == dtype and not device.cpu_kernels_problem and not packing_problem(device, dtype)


def _sampling(serving: Serving) -> None:
    if serving.device.runs_kernels or not serving.device.cpu_kernels_problem:
        from kvforge.worker.sampling.selftest import sampling_test

        sampling_test(serving.device, serving.vocab_size)


def _copies(serving: Serving) -> None:
    if serving.device.runs_kernels:
        from kvforge.worker.device.block_selftest import block_copies_test
        from kvforge.worker.sampling.selftest import copies_test

        copies_test(serving.device)
        block_copies_test(serving.device)


# Checks that may run at the same time; the first one, the fastest, loads Triton. The others share workspaces, or wait
# for other ranks.
SIDE_BY_SIDE = (_copies, _attention, _layers, _sampling)
KERNELS = (
    Kernel("kvforge.worker.attention.decode", "decode_kernel", ReferenceAttention.attend, _attention),
    Kernel("kvforge.worker.attention.shared_decode", "shared_decode_kernel", ReferenceAttention.attend, _attention),
    Kernel("kvforge.worker.attention.prefill", "prefill_portable", ReferenceAttention.attend, _attention),
    Kernel(
        "kvforge.worker.attention.prefill_hopper",
        "prefill_hopper",
        ReferenceAttention.attend,
        _attention,
        hopper=True,
    ),
    Kernel("kvforge.worker.attention.prefill_copy", "copy_kernel", dequantise, _attention, hopper=True),
    Kernel("kvforge.worker.attention.write", "write_kernel", ReferenceAttention.write_rotated, _attention),
    Kernel("kvforge.worker.attention.latent_decode", "latent_decode_kernel", ReferenceAttention.attend, _attention),
    Kernel("kvforge.worker.attention.latent_decode", "latent_merge_kernel", ReferenceAttention.attend, _attention),
    Kernel(
        "kvforge.worker.attention.latent_hopper",
        "latent_hopper_kernel",
        ReferenceAttention.attend,
        _attention,
        hopper=True,
    ),
    Kernel("kvforge.worker.attention.latent_prefill", "latent_prefill_kernel", ReferenceAttention.attend, _attention),
    Kernel("kvforge.worker.attention.latent_write", "latent_write_kernel", ReferenceAttention.write_latent, _attention),
    Kernel("kvforge.worker.kernels.norm", "embed_norm_kernel", PlainOperations.embed, _layers),
    Kernel("kvforge.worker.kernels.norm", "add_norm_kernel", PlainOperations.add_norm, _layers),
    Kernel("kvforge.worker.kernels.norm", "head_norm_kernel", PlainOperations.head_norm, _layers),
    Kernel("kvforge.worker.kernels.combine", "norm_kernel", PlainOperations.norm, _layers),
    Kernel("kvforge.worker.kernels.combine", "combine_kernel", PlainOperations.combine, _layers),
    Kernel("kvforge.worker.kernels.exchange", "add_norm_of_ranks_kernel", PlainOperations.add_norm, _exchange),
    Kernel("kvforge.worker.kernels.exchange", "sum_share_kernel", PlainOperations.add_norm, _exchange),
    Kernel("kvforge.worker.kernels.exchange", "norm_of_shares_kernel", PlainOperations.add_norm, _exchange),
    Kernel("kvforge.worker.kernels.exchange", "join_of_ranks_kernel", torch.cat, _exchange),
    Kernel("kvforge.worker.kernels.rotary", "rotary_kernel", PlainOperations.rotary, _layers),
    Kernel("kvforge.worker.kernels.activation", "activation_kernel", PlainOperations.gated, _layers),
    Kernel("kvforge.worker.kernels.xielu", "xielu_kernel", PlainOperations.activated, _layers),
    Kernel("kvforge.worker.kernels.linear", "linear_kernel", PlainOperations.linear, _layers),
    Kernel("kvforge.worker.kernels.by_head", "by_head_kernel", PlainOperations.by_head, _layers),
    Kernel("kvforge.worker.kernels.latent_inputs", "latent_inputs_kernel", PlainOperations.latent_inputs, _layers),
    Kernel("kvforge.worker.kernels.wide_linear", "wide_linear_kernel", PlainOperations.wide_linear, _layers),
    Kernel("kvforge.worker.kernels.recurrent_kernels", "convolve_kernel", PlainOperations.convolve, _recurrent),
    Kernel("kvforge.worker.kernels.recurrent_kernels", "delta_kernel", PlainOperations.advance_delta, _recurrent),
    Kernel("kvforge.worker.kernels.gated_norm", "gated_norm_kernel", PlainOperations.advance_delta, _recurrent),
    Kernel(
        "kvforge.worker.kernels.state_space_kernels",
        "state_space_kernel",
        PlainOperations.advance_state_space,
        _recurrent,
    ),
    Kernel(
        "kvforge.worker.kernels.state_space_kernels",
        "group_norm_kernel",
        PlainOperations.advance_state_space,
        _recurrent,
    ),
    Kernel(
        "kvforge.worker.kernels.selective_kernels",
        "selective_kernel",
        PlainOperations.advance_selective,
        _recurrent,
    ),
    Kernel(
        "kvforge.worker.kernels.prompt_selective", "selective_scan_kernel", PlainPrompts.advance_selective, _recurrent
    ),
    Kernel("kvforge.worker.kernels.prompt_convolution", "convolve_tiles_kernel", PlainPrompts.convolve, _recurrent),
    Kernel("kvforge.worker.kernels.prompt_convolution", "convolve_states_kernel", PlainPrompts.convolve, _recurrent),
    Kernel(
        "kvforge.worker.kernels.prompt_channel_pairs", "channel_pairs_kernel", PlainPrompts.advance_delta, _recurrent
    ),
    Kernel("kvforge.worker.kernels.prompt_delta", "delta_tiles_kernel", PlainPrompts.advance_delta, _recurrent),
    Kernel("kvforge.worker.kernels.prompt_delta", "delta_scan_kernel", PlainPrompts.advance_delta, _recurrent),
    Kernel(
        "kvforge.worker.kernels.prompt_state_space",
        "state_space_scan_kernel",
        PlainPrompts.advance_state_space,
        _recurrent,
    ),
    Kernel("kvforge.worker.kernels.project", "project_kernel", ReferenceAttention.write_rotated, _layers),
    Kernel("kvforge.worker.kernels.router_kernel", "route_kernel", route, _experts),
    Kernel("kvforge.worker.kernels.expert_sort", "rank_kernel", torch.sort, _experts),
    Kernel("kvforge.worker.kernels.expert_sort", "divide_kernel", torch.sort, _experts),
    Kernel("kvforge.worker.kernels.grouped", "grouped_kernel", PlainOperations.experts, _experts),
    Kernel("kvforge.worker.kernels.grouped", "sum_kernel", PlainOperations.experts, _experts),
    Kernel("kvforge.worker.kernels.stored_linear", "stored_kernel", StoredWeight.product, _stored),
    Kernel("kvforge.worker.kernels.stored_project", "stored_project_kernel", StoredWeight.product, _stored),
    Kernel("kvforge.worker.kernels.stored_experts", "stored_experts_kernel", PlainOperations.experts, _stored),
    Kernel("kvforge.worker.kernels.stored_hopper_linear", "stored_hopper_kernel", StoredWeight.product, _stored, True),
    Kernel(
        "kvforge.worker.kernels.stored_hopper_project", "project_hopper_kernel", StoredWeight.product, _stored, True
    ),
    Kernel(
        "kvforge.worker.kernels.stored_hopper_experts", "experts_hopper_kernel", PlainOperations.experts, _stored, True
    ),
    Kernel("kvforge.worker.sampling.kernels", "scan_kernel", SamplingState.sample, _sampling),
    Kernel("kvforge.worker.sampling.kernels", "merge_kernel", SamplingState.sample, _sampling),
    Kernel("kvforge.worker.sampling.kernels", "feed_kernel", SamplingState.feed, _sampling),
    Kernel("kvforge.worker.device.copies", "copy_kernel", torch.Tensor.copy_, _copies),
    Kernel("kvforge.worker.device.block_copies", "block_kernel", BlockCopies.gather, _copies),
)
CPU_KERNELS = (
    CpuKernelEntry("kvforge.worker.cpu.attention_kernel", "attend", ReferenceAttention.attend, _attention),
    CpuKernelEntry("kvforge.worker.cpu.kv_write", "write_rotated", ReferenceAttention.write_rotated, _attention),
    CpuKernelEntry("kvforge.worker.cpu.layer_kernels", "embed_norm", PlainOperations.embed, _layers),
    CpuKernelEntry("kvforge.worker.cpu.layer_kernels", "add_norm", PlainOperations.add_norm, _layers),
    CpuKernelEntry("kvforge.worker.cpu.layer_kernels", "head_norm", PlainOperations.head_norm, _layers),
    CpuKernelEntry("kvforge.worker.cpu.layer_kernels", "norm", PlainOperations.norm, _layers),
    CpuKernelEntry("kvforge.worker.cpu.layer_kernels", "gate", PlainOperations.gated, _layers),
    CpuKernelEntry("kvforge.worker.cpu.convolution_kernel", "convolve", PlainOperations.convolve, _recurrent),
    CpuKernelEntry("kvforge.worker.cpu.delta_kernel", "advance_delta", PlainOperations.advance_delta, _recurrent),
    CpuKernelEntry(
        "kvforge.worker.cpu.state_space_kernel",
        "advance_state_space",
        PlainOperations.advance_state_space,
        _recurrent,
    ),
    CpuKernelEntry(
        "kvforge.worker.cpu.state_space_kernel", "group_norm", PlainOperations.advance_state_space, _recurrent
    ),
    CpuKernelEntry(
        "kvforge.worker.cpu.selective_kernel", "advance_selective", PlainOperations.advance_selective, _recurrent
    ),
    CpuKernelEntry(
        "kvforge.worker.cpu.prompt_convolution_kernel", "convolve_prompts", PlainPrompts.convolve, _recurrent
    ),
    CpuKernelEntry("kvforge.worker.cpu.prompt_kernel", "advance_prompts", PlainPrompts.advance_delta, _recurrent),
    CpuKernelEntry("kvforge.worker.cpu.delta_kernel", "prepare_delta", PlainPrompts.advance_delta, _recurrent),
    CpuKernelEntry("kvforge.worker.cpu.delta_kernel", "finish_delta", PlainPrompts.advance_delta, _recurrent),
    CpuKernelEntry(
        "kvforge.worker.cpu.state_space_kernel", "prepare_spaces", PlainPrompts.advance_state_space, _recurrent
    ),
    CpuKernelEntry(
        "kvforge.worker.cpu.state_space_kernel", "finish_spaces", PlainPrompts.advance_state_space, _recurrent
    ),
    CpuKernelEntry("kvforge.worker.cpu.tile_kernel", "multiply_tiles", PlainOperations.linear, _tiles),
    CpuKernelEntry("kvforge.worker.cpu.amx_kernel", "multiply_amx", PlainOperations.linear, _amx),
    CpuKernelEntry("kvforge.worker.cpu.int8_kernels", "quantise", PlainInputQuantiser.quantise, _quantising),
    CpuKernelEntry("kvforge.worker.cpu.int8_kernels", "make_numbers", PlainInputQuantiser.make_numbers, _quantising),
    CpuKernelEntry("kvforge.worker.cpu.sampling_kernels", "choose", SamplingState.sample, _sampling),
    CpuKernelEntry("kvforge.worker.cpu.sampling_kernels", "draw", SamplingState.sample, _sampling),
)
