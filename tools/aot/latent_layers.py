"""Configurations of the kernels around attention over latents, and of routers in float32: see `aot_attention`."""

from __future__ import annotations

from itertools import product

import torch

from kvforge.worker.device.target import Target
from kvforge.worker.kernels.by_head import FEW_TOKENS, by_head
from kvforge.worker.kernels.latent_inputs import latent_inputs
from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.wide_linear import FEW_MAX, wide_linear

from .compilation import BF16, DTYPE_NAMES, F16, F32, Configuration, distinct, launched_on, meta_tensor
from .specialise import recorded

FLOATS = (BF16, F16, F32)
# Heads, numbers of a query without rotation and with it, of a latent, and of a value.
MODELS = {
    "DeepSeek": (16, 128, 64, 512, 128),
    "GLM-4.7 Flash": (20, 192, 64, 512, 256),
    "MiniCPM 3": (40, 64, 32, 256, 64),
    "odd sizes": (5, 24, 8, 72, 40),
}
RECURRENT_GEMMA = (10, 256)  # heads of the gates, and channels of a head
TOKENS = (1, FEW_TOKENS + 1)
ROUTERS = ((64, 2048), (128, 4096), (256, 7168), (8, 1000))


def by_head_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `by_head_kernel` on `target`: to latents, from them, and to gates of RG-LRU.

    torch has the others.
    """
    if not target.matrix:
        return []
    made = [_by_head(target, *each) for each in product(FLOATS[:2], MODELS, TOKENS, ("absorb", "expand"))]
    return distinct([*made, *(_gates(target, *each) for each in product(FLOATS[:2], TOKENS))])


def input_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_inputs_kernel` on `target`."""
    return distinct(_inputs(target, *each) for each in product(FLOATS, MODELS))


def wide_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `wide_linear_kernel` on `target`, of routers."""
    tokens = (1, FEW_MAX + 1)
    return distinct(_wide(target, *each) for each in product(FLOATS[:2], ROUTERS, tokens, (False, True)))


def _wide(target: Target, dtype: torch.dtype, sizes: tuple[int, int], tokens: int, biased: bool) -> Configuration:
    n, k = sizes
    weight, bias = meta_tensor(n, k, dtype=F32), meta_tensor(n, dtype=F32) if biased else None
    with recorded(target) as launched:
        wide_linear(launched_on(target), meta_tensor(tokens, k, dtype=dtype), weight, bias)
    label = f"router {DTYPE_NAMES[dtype]} {n} x {k} {tokens} tokens{' biased' * biased}"
    return Configuration(label, launched[0], matrix=False)


def _by_head(target: Target, dtype: torch.dtype, model: str, tokens: int, which: str) -> Configuration:
    heads, plain, rotated, latent, value = MODELS[model]
    matrices = meta_tensor(heads, plain + value, latent, dtype=dtype)
    keys, values = matrices[:, :plain], matrices[:, plain:]
    if which == "absorb":
        x = meta_tensor(tokens, heads, plain + rotated, dtype=dtype)[..., :plain]
        output = meta_tensor(tokens, heads, latent + rotated, dtype=dtype)[..., :latent]
        weight = keys
    else:
        x, weight, output = meta_tensor(tokens, heads, latent, dtype=dtype), values.transpose(1, 2), None
    with recorded(target) as launched:
        by_head(launched_on(target), x, weight, output)
    return Configuration(f"{which} {DTYPE_NAMES[dtype]} {model} {tokens} tokens", launched[0], matrix=True)


def _gates(target: Target, dtype: torch.dtype, tokens: int) -> Configuration:
    heads, channels = RECURRENT_GEMMA
    x, weight = (
        meta_tensor(*shape, dtype=dtype) for shape in ((tokens, heads, channels), (heads, channels, 2 * channels))
    )
    with recorded(target) as launched:
        by_head(launched_on(target), x, weight)
    return Configuration(f"gates {DTYPE_NAMES[dtype]} RecurrentGemma {tokens} tokens", launched[0], matrix=True)


def _inputs(target: Target, dtype: torch.dtype, model: str) -> Configuration:
    heads, plain, rotated, latent, _ = MODELS[model]
    queries = meta_tensor(1, heads, plain + rotated, dtype=dtype)[..., plain:]
    absorbed = meta_tensor(1, heads, latent + rotated, dtype=dtype)[..., latent:]
    own, angles = meta_tensor(1, latent + rotated, dtype=dtype), meta_tensor(1, rotated, dtype=dtype)
    norm = Norm(meta_tensor(latent, dtype=dtype), 1e-6)
    with recorded(target) as launched:
        latent_inputs(launched_on(target), own, queries, norm, angles, angles, absorbed)
    return Configuration(f"inputs of latents {DTYPE_NAMES[dtype]} {model}", launched[0], matrix=False)
