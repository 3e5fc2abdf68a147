"""The configurations of every kernel in the worker's registry. Tests find a kernel without an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvforge.worker.device.target import Target
from kvforge.worker.kernels.registry import KERNELS, Kernel

from . import (
    attention,
    experts,
    latent_layers,
    latents,
    layers,
    recurrent,
    recurrent_prompts,
    selective,
    state_space,
    stored,
)
from .compilation import Configuration

Declared = Callable[[Target], list[Configuration]]
# By (module below `kvforge.worker`, name of the launched function): every configuration that is launched on a target.
DECLARED: dict[tuple[str, str], Declared] = {
    ("attention.decode", "decode_kernel"): attention.decode_configurations,
    ("attention.shared_decode", "shared_decode_kernel"): attention.shared_configurations,
    ("attention.prefill", "prefill_portable"): attention.prefill_configurations,
    ("attention.prefill_hopper", "prefill_hopper"): attention.hopper_configurations,
    ("attention.prefill_copy", "copy_kernel"): attention.copy_configurations,
    ("attention.write", "write_kernel"): attention.write_configurations,
    ("attention.latent_decode", "latent_decode_kernel"): latents.decode_configurations,
    ("attention.latent_decode", "latent_merge_kernel"): latents.merge_configurations,
    ("attention.latent_hopper", "latent_hopper_kernel"): latents.hopper_configurations,
    ("attention.latent_prefill", "latent_prefill_kernel"): latents.prefill_configurations,
    ("attention.latent_write", "latent_write_kernel"): latents.write_configurations,
    ("kernels.norm", "embed_norm_kernel"): layers.embed_configurations,
    ("kernels.norm", "add_norm_kernel"): layers.sum_configurations,
    ("kernels.norm", "head_norm_kernel"): layers.head_norm_configurations,
    ("kernels.combine", "norm_kernel"): layers.norm_configurations,
    ("kernels.combine", "combine_kernel"): layers.combine_configurations,
    ("kernels.exchange", "add_norm_of_ranks_kernel"): layers.exchange_configurations,
    ("kernels.exchange", "sum_share_kernel"): layers.share_configurations,
    ("kernels.exchange", "norm_of_shares_kernel"): layers.shares_norm_configurations,
    ("kernels.exchange", "join_of_ranks_kernel"): layers.join_configurations,
    ("kernels.rotary", "rotary_kernel"): layers.rotary_configurations,
    ("kernels.activation", "activation_kernel"): layers.activation_configurations,
    ("kernels.xielu", "xielu_kernel"): layers.xielu_configurations,
    ("kernels.linear", "linear_kernel"): layers.linear_configurations,
    ("kernels.by_head", "by_head_kernel"): latent_layers.by_head_configurations,
    ("kernels.latent_inputs", "latent_inputs_kernel"): latent_layers.input_configurations,
    ("kernels.wide_linear", "wide_linear_kernel"): latent_layers.wide_configurations,
    ("kernels.recurrent_kernels", "convolve_kernel"): recurrent.convolve_configurations,
    ("kernels.recurrent_kernels", "delta_kernel"): recurrent.delta_configurations,
    ("kernels.gated_norm", "gated_norm_kernel"): recurrent.gated_norm_configurations,
    ("kernels.state_space_kernels", "state_space_kernel"): state_space.state_space_configurations,
    ("kernels.state_space_kernels", "group_norm_kernel"): state_space.group_norm_configurations,
    ("kernels.selective_kernels", "selective_kernel"): selective.step_configurations,
    ("kernels.prompt_selective", "selective_scan_kernel"): selective.prompt_configurations,
    ("kernels.prompt_convolution", "convolve_tiles_kernel"): recurrent_prompts.convolution_configurations,
    ("kernels.prompt_convolution", "convolve_states_kernel"): recurrent_prompts.convolution_state_configurations,
    ("kernels.prompt_channel_pairs", "channel_pairs_kernel"): recurrent_prompts.pairs_configurations,
    ("kernels.prompt_delta", "delta_tiles_kernel"): recurrent_prompts.tiles_configurations,
    ("kernels.prompt_delta", "delta_scan_kernel"): recurrent_prompts.scan_configurations,
    ("kernels.prompt_state_space", "state_space_scan_kernel"): recurrent_prompts.spaces_configurations,
    ("kernels.project", "project_kernel"): layers.project_configurations,
    ("kernels.router_kernel", "route_kernel"): experts.route_configurations,
    ("kernels.expert_sort", "rank_kernel"): experts.rank_configurations,
    ("kernels.expert_sort", "divide_kernel"): experts.divide_configurations,
    ("kernels.grouped", "grouped_kernel"): experts.grouped_configurations,
    ("kernels.grouped", "sum_kernel"): experts.sum_configurations,
    ("kernels.stored_linear", "stored_kernel"): stored.stored_configurations,
    ("kernels.stored_project", "stored_project_kernel"): stored.stored_project_configurations,
    ("kernels.stored_experts", "stored_experts_kernel"): stored.stored_experts_configurations,
    ("kernels.stored_hopper_linear", "stored_hopper_kernel"): stored.hopper_configurations,
    ("kernels.stored_hopper_project", "project_hopper_kernel"): stored.hopper_project_configurations,
    ("kernels.stored_hopper_experts", "experts_hopper_kernel"): stored.hopper_experts_configurations,
    ("sampling.kernels", "scan_kernel"): layers.scan_configurations,
    ("sampling.kernels", "merge_kernel"): layers.merge_configurations,
    ("sampling.kernels", "feed_kernel"): layers.feed_configurations,
    ("device.copies", "copy_kernel"): layers.copy_configurations,
    ("device.block_copies", "block_kernel"): layers.block_configurations,
}


def configurations_of(kernel: Kernel, target: Target) -> list[Configuration]:
    """Return the configurations of a kernel for `target`; none if the kernel does not run there."""
    return DECLARED[kernel.module.removeprefix("kvforge.worker."), kernel.name](target)


def every_configuration(target: Target) -> Iterator[Configuration]:
    """Yield the configurations of all kernels for `target`, in the registry's order."""
    for kernel in KERNELS:
        yield from configurations_of(kernel, target)
