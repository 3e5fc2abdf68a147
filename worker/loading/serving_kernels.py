"""The kernels that serve a model, and the reasons why faster ones do not: for the log and for `kvforge health`."""

from __future__ import annotations

from collections import Counter

from kvforge.worker.attention import AttentionOptions, ReferenceAttention
from kvforge.worker.attention.pool import LayerShape
from kvforge.worker.kernels import PlainOperations
from kvforge.worker.kernels.packed import PackedOperations, is_packed, own_product, packing_problem, weight_kind
from kvforge.worker.kernels.recurrent import form_of_prompts
from kvforge.worker.kernels.recurrent_selftest import steps_of
from kvforge.worker.kernels.stored import code_name

from .mixer_prompts import Described
from .model import LoadedModel
from .probe import attending

WANTED = "attention = 'reference'"
NONE_ATTENDS = "no layer attends"
HOST_SAMPLING = "Numba; plain torch for filters, penalties and log-probabilities"
LENGTH_MAX = 500  # the coordinator's limit is 1000


def serving_kernels(model: LoadedModel) -> dict[str, str]:
    """Describe the kernels of decode, prefill, layers and sampling. Different layers are all listed."""
    geometry = model.geometry
    decodes: dict[str, None] = {}
    prefills: dict[str, None] = {}
    for shape, options in attending(model.module, geometry):
        decode, prefill = _attention(model, shape, options)
        decodes[decode], prefills[prefill] = None, None
    kernels = {
        "decode": "; ".join(decodes) or NONE_ATTENDS,
        "prefill": "; ".join(prefills) or NONE_ATTENDS,
        "layers": _layers(model),
        "sampling": _sampling(model),
        "determinism": model.info.determinism,
    }
    if geometry.states:
        kernels["states"] = _states(model)
    if geometry.window:
        kept = sum(shape.window > 0 for shape in geometry.layers)
        kernels["windows"] = f"{kept} of {len(geometry.layers)} layers keep the KV of {geometry.window} tokens"
    if model.ranks is not None:
        kernels["ranks"] = model.ranks.describe()
    return {what: kernel[:LENGTH_MAX] for what, kernel in kernels.items()}


def _states(model: LoadedModel) -> str:
    """Describe what runs the layers with a recurrent state."""
    layers = len({tensor.layer for tensor in model.geometry.states})
    steps, operations = [*model.context.steps.values()], model.context.operations
    if model.fused is not None:
        steps, operations = steps_of(model.fused), model.fused.operations
    if not steps:
        return f"transformers' own: {layers} layers, one row after the other"
    by = "Triton"
    if isinstance(operations, PlainOperations):
        by = "Numba" if operations.kernels else "plain torch"
    own = "" if len(steps) == layers else f", {layers - len(steps)} of them transformers' own"
    served = [each for each in steps if isinstance(each, Described) and (each.selective or model.fused is not None)]
    chunked = operations is not None and any(form_of_prompts(each, operations, model.dtype) for each in served)
    how = "token by token" if by == "Numba" or steps[0].selective is not None else "in chunks"
    prompts = f"{by}, {how}" if chunked else "transformers' own"
    return f"generated tokens: {by}, all rows together; prompts: {prompts}; {layers} layers{own}"


def _sampling(model: LoadedModel) -> str:
    if model.device.runs_kernels:
        return "Triton"
    return _plain(model) if model.device.cpu_kernels_problem else HOST_SAMPLING


def _attention(model: LoadedModel, shape: LayerShape, options: AttentionOptions) -> tuple[str, str]:
    attention, geometry = model.context.attention, model.geometry
    if not isinstance(attention, ReferenceAttention):
        return attention.describe(
            *(shape.head_size, model.dtype, geometry.dtype.torch_dtype, geometry.block_size, options),
            latent=shape.latent,
        )
    problem = "" if model.device.runs_kernels else model.device.cpu_kernels_problem
    return (f"plain torch: {problem or WANTED}",) * 2


def _layers(model: LoadedModel) -> str:
    if model.fused is None:
        text = f"transformers' own: {model.info.architecture} is run one operation at a time"
        by = multiplied_by(model)
        return f"{text}; {by}, weights packed at load" if by else text
    if isinstance(model.fused.operations, PackedOperations):
        between = "; Numba between the products" if model.fused.operations.kernels else ""
        head = "" if is_packed(model.fused.head.weight) else "; the head, tied to the embedding, in plain torch"
        counts = Counter(weight_kind(weight) for weight in model.fused.product_weights())
        kinds = ", ".join(f"{count} of {kind}" for kind, count in counts.items() if kind)
        packed = f"weights quantised at load: {kinds}" if kinds else f"weights packed at load{head}"
        return f"{multiplied_by(model)}, {packed}{between}"
    if not isinstance(model.fused.operations, PlainOperations):
        counts = Counter(filter(None, map(code_name, model.fused.product_weights())))
        kinds = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
        return f"Triton; weights multiplied as they are stored: {kinds}" if kinds else "Triton"
    return f"plain torch: {packing_problem(model.device, model.dtype)}"


def multiplied_by(model: LoadedModel) -> str:
    """Return what multiplies packed weights; "" if there are none."""
    owners = [own_product(weight) for weight in model.packed_weights()]
    return " and ".join(sorted({"oneDNN" if own is None else own.name for own in owners}))


def _plain(model: LoadedModel) -> str:
    return "plain torch: " + (
        f"{model.device.name} runs no kernels" if model.device.kernels else "kernels = 'reference'"
    )
