"""Loads a model from a name or a path, and verifies that it computes what it should."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, cast

import torch
from msgspec import structs

from kvforge.protocol.errors import InvalidConfiguration, KernelError, KvforgeError, UnsupportedModel, WorkerError
from kvforge.protocol.messages import ModelInfo
from kvforge.worker.attention import choose_attention
from kvforge.worker.attention.bare_pages import bare_page
from kvforge.worker.attention.pool import KV_DTYPES, KvGeometry
from kvforge.worker.attention.states import kept_as
from kvforge.worker.attention.windows import WindowLimits, choose_geometry
from kvforge.worker.device.device import Device, as_worker_error
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.device.targets import check_dtypes
from kvforge.worker.kernels import LayerOperations, PlainOperations, choose_operations
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.experts import Experts
from kvforge.worker.kernels.packed import QUANTISED_WAY_OUT, WAY_OUT, PackedOperations
from kvforge.worker.kernels.registry import Serving, check_kernels
from kvforge.worker.kernels.selftest import self_test as layers_test
from kvforge.worker.kernels.stored import code_name, codes_of

from .answer_ends import eos_tokens
from .build import build, lacks_memory
from .code_packer import CodePacker, codes_made
from .coded_parts import has_codes
from .configuration import model_dtype, read_config
from .determinism import FAST_WAY_OUT, attends_in_plain_torch, describe_determinism, make_batch_invariant
from .early_checks import EarlyChecks
from .families import counts_positions, latent_of, needs_description
from .fingerprint import fingerprint, joined_digest
from .forward_context import ForwardContext
from .fusion import fuse, is_known
from .gguf_reading import gguf_read_once
from .library_errors import sentence
from .mixers import described_steps, mixers_of
from .model import LoadedModel
from .mtp import mtp_part
from .probe import bind_layers, bound_options, bound_shapes
from .progress import Progress
from .quantisation import Packer, Quantisation, WeightPacker, choose_quantisation
from .rope import context_tokens
from .row_independence import first_experts, make_mixers_steady, make_rows_steady
from .sampling_defaults import model_sampling
from .source import Source, find_source
from .verification import Reference, verify

log = logging.getLogger(__name__)
STATE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Arguments = ParamSpec("Arguments")


def _refusing_all(load: Callable[Arguments, LoadedModel]) -> Callable[Arguments, LoadedModel]:
    """Convert foreign exceptions to UnsupportedModel, because a restart would meet them again.

    Failures of the device keep their type, because a restart may help.
    """

    @functools.wraps(load)
    def run(*given: Arguments.args, **named: Arguments.kwargs) -> LoadedModel:
        try:
            return load(*given, **named)
        except (KvforgeError, KeyboardInterrupt, GeneratorExit) as error:
            if not _is_foreign(error, cast(Device, named["device"])):
                raise
            source = str(given[0] if given else named["source"])
            raise UnsupportedModel(Path(source).name or source, str(error)) from error
        except BaseException as error:
            source, device = str(given[0] if given else named["source"]), cast(Device, named["device"])
            log.info("loading %s failed with a foreign error", source, exc_info=True)
            typed = as_worker_error(error, f"loading {source}", device)
            if typed.code != "worker_error":
                raise typed from error
            problem = f"it cannot be loaded: {type(error).__name__}: {sentence(error)}"
            raise UnsupportedModel(Path(source).name or source, problem) from error

    return run


def _is_foreign(error: BaseException, device: Device) -> bool:
    """Return whether a worker error comes from a library and would recur: on a CPU, any except a lack of memory."""
    if not isinstance(error, WorkerError) or error.code != "worker_error" or isinstance(error.__cause__, KvforgeError):
        return False
    if isinstance(error.__cause__, (RecursionError, NotImplementedError)):
        return True
    return device.computes_on_cores and error.__cause__ is not None and not lacks_memory(error)


@_refusing_all
def load_model(
    source: str | Path,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    weight_dtype: str = "dtype",
    device: Device,
    block_size: int,
    kv_dtype: str = "auto",
    state_dtype: str = "float32",
    attention: str = "auto",
    progress: Progress = lambda _phase, _fraction: None,
    seed: int = 0,
    context_tokens_max: int = 0,
    ranks: Ranks | None = None,
    expert_parallel: bool = False,
    windows: WindowLimits | None = None,
    mtp: bool = False,
) -> LoadedModel:
    """Load a model, and verify that it computes the same as transformers' own layers and attention.

    Args:
        source: A GGUF file, a Hugging Face folder, or (load_format "dummy") a config.json or a folder with one.
        load_format: One of LOAD_FORMATS.
        dtype: float32, float16, bfloat16, or auto (see `loading.model_dtype`).
        weight_dtype: Bits of the weights (see `loading.quantisation`).
        device: The device that computes.
        block_size: Tokens per KV block.
        kv_dtype: A name in `KV_DTYPES`, or auto (that of the weights).
        state_dtype: The dtype in which recurrent states that a layer computes in float32 are kept: one of STATE_DTYPES.
        attention: See `choose_attention`.
        progress: Called with a phase in a few words and the fraction of the whole load, 0 to 1, never falling.
        seed: Seed of random weights.
        context_tokens_max: Positions to serve; 0: the model's context length (see `loading.rope`).
        ranks: The group of ranks that compute the model together; all load it at the same time.
        expert_parallel: Whether ranks divide the experts of a mixture among them, not each expert.
        windows: The coordinator's limits of windows; None: all layers keep all tokens.
        mtp: Load the layer of the checkpoint's multi-token prediction module, as a model of one layer (see `mtp`).

    Returns:
        The loaded model.

    Raises:
        ModelNotFound: There is no such model.
        UnsupportedModel: Names the architecture.
        InvalidConfiguration: A setting is invalid: load_format, dtype, weight_dtype, kv_dtype, attention, block_size,
            context_tokens_max or expert_parallel.
        KernelError: A kernel is wrong or does not compile.
        WorkerError: There is not enough memory.
        GpuError: There is not enough memory on the GPU.
    """
    progress("reading the configuration", 0.0)
    found = find_source(source, load_format)
    with gguf_read_once():
        config = read_config(found)
        if mtp:
            found, config = mtp_part(found, config)
        served_tokens = context_tokens(config, context_tokens_max)
        torch_dtype = model_dtype(dtype, config, found, device)
        quantisation = choose_quantisation(weight_dtype, found, config, torch_dtype, device)
        dtype_name = str(torch_dtype).removeprefix("torch.")
        kv_dtype = dtype_name if kv_dtype == "auto" else kv_dtype
        # Raises errors in the settings before the slow load.
        KvGeometry.uniform(layers=1, kv_heads=1, head_size=1, block_size=block_size, kv_dtype=kv_dtype)
        if device.runs_kernels:
            check_dtypes(device, torch_dtype, KV_DTYPES[kv_dtype].torch_dtype)
        chosen = choose_attention(device, attention)

        progress("loading weights", 0.05)
        early = EarlyChecks(device, attention, torch_dtype, KV_DTYPES[kv_dtype].torch_dtype, block_size)
        try:
            module = build(
                *(found, config, torch_dtype, device, lambda p, f: progress(p, 0.05 + 0.8 * f), seed),
                ranks=ranks,
                expert_parallel=expert_parallel,
                early=early,
                packs_codes=quantisation is not None and quantisation.as_stored,
            )
        except BaseException:
            early.end()
            raise

    if quantisation is not None and (not is_known(module) or mixers_of(module)):
        _refuse_quantising(weight_dtype, module)
        quantisation = None

    progress("checking weights", 0.87)
    stored_as = dtype_name if quantisation is None else f"{dtype_name} {quantisation.digest}"
    is_latent = latent_of(module) is not None
    digest = fingerprint(module, f"{stored_as} latents" if is_latent else stored_as)  # other KV, and other rounding
    if ranks is not None:
        digest = joined_digest(ranks.texts(digest))
    progress("checking kernels", 0.9)
    context = ForwardContext(chosen)
    bound = bind_layers(module, context, served_tokens, device)
    shapes, states = bound.shapes, kept_as(bound.states, STATE_DTYPES[state_dtype])
    if states != bound.states:
        digest = hashlib.sha256(f"{digest} states {state_dtype}".encode()).hexdigest()
    if shapes:
        geometry = KvGeometry(shapes, block_size, kv_dtype, states)
        geometry = choose_geometry(geometry, [each.window for each in bound_options(module)], windows, served_tokens)
    else:  # there is nothing to quantise
        geometry = KvGeometry((bare_page(states, block_size, dtype_name),), block_size, dtype_name, states)
    stored = geometry.dtype.torch_dtype
    kinds = bound_shapes(module, shapes)
    operations = choose_operations(device, torch_dtype)
    packs = isinstance(operations, PackedOperations)
    first = PlainOperations() if packs else operations
    later = packs or quantisation is not None
    fused = fuse(module, bound_options(module), first, context.attention, ranks=ranks, is_packed_later=later)
    if fused is None and has_codes(module):
        raise UnsupportedModel(
            found.name, "its weights are quantised, and its layers could not be described: see the log"
        )
    if fused is None and counts_positions(module):
        problem = "its attention computes positions from the length of a transformers cache, and it is not described"
        raise UnsupportedModel(found.name, problem)
    if fused is None and is_latent:
        problem = "its attention over latents could not be described, and nothing else serves it: see the log"
        raise UnsupportedModel(found.name, problem)
    vocab_size = int(module.get_input_embeddings().num_embeddings)
    checked = replace(fused, operations=operations) if fused is not None else None  # plain until it is packed
    count = ranks.count if ranks is not None else 1
    experts = first_experts(module, operations, fused) if device.runs_kernels else None
    if fused is None:
        context.steps, context.operations = described_steps(module), operations
    serving = Serving(
        *(device, chosen, kinds, torch_dtype, stored, block_size, vocab_size, checked),
        steps=tuple(context.steps.values()),
        operations=operations,
        ranks=count,
        experts=experts,
        codes=_codes_of(fused, quantisation, device),
    )
    early.end()
    check_kernels(serving)
    del checked, experts, serving
    device.release_cached()
    architecture = type(module).__name__
    info = ModelInfo(
        name=found.name,
        source=str(found.path),
        architecture=architecture,
        fingerprint=digest,
        vocab_size=vocab_size,
        context_tokens_max=served_tokens,
        eos_tokens=eos_tokens(found, config, module),
        sampling=model_sampling(found),
        dtype=dtype_name,
        weight_dtype=kept_in(fused, dtype_name) if quantisation is None else quantisation.kind,
        state_dtype=state_dtype if any(each.dtype == torch.float32 for each in states) else "",
        kv_layout="latents" if is_latent else "K and V" if shapes else "states",
    )
    model = LoadedModel(
        info=info,
        geometry=geometry,
        device=device,
        dtype=torch_dtype,
        vocab_size=info.vocab_size,
        module=module,
        context=context,
        accepts_logits_to_keep="logits_to_keep" in inspect.signature(module.forward).parameters,
        fused=fused,
        ranks=ranks,
        prompt_chunk=bound.prompt_chunk,
    )
    progress("comparing with transformers", 0.93)
    with device.errors("comparing the model with transformers' own"):
        try:
            reference = verify(model)
        except UnsupportedModel as error:
            if fused is None and context.steps:
                log.warning("%s; running its recurrent layers row by row", error)
                context.steps = {}
            elif fused is None or quantisation is not None or needs_description(module) or has_codes(module):
                raise
            else:
                log.warning("%s; running its layers one operation at a time", error)
                model = replace(model, fused=None)
            reference = verify(model)
    packer = None if model.fused is None else _packer(operations, quantisation, found, model.module)
    if packer is not None:
        progress("packing weights", 0.95)
        fused, model = None, replace(model, fused=None)  # no reference may keep the unpacked weights
        model = _packed(model, packer, reference)
    elif (model.fused is None or bound.states) and device.steady and not attends_in_plain_torch(model):
        progress("making rows independent", 0.95)
        _make_row_independent(model, operations, reference)
    progress("comparing rows alone and in company", 0.97)
    with device.errors("comparing products of few tokens with those of many"):
        problem = make_batch_invariant(model, operations)
        info = structs.replace(info, determinism=describe_determinism(problem))
        model = replace(model, info=info, unsteady=problem)
    device.release_cached()
    progress("model loaded", 1.0)
    return model


def kept_in(fused: FusedDecoder | None, dtype: str) -> str:
    """Return the name of the format that most bytes of multiplied weights are stored in; `dtype` if they are plain."""
    sizes: dict[str, int] = {}
    for weight in () if fused is None else fused.product_weights():
        name = code_name(weight) or dtype
        sizes[name] = sizes.get(name, 0) + weight.numel()
    return max(sizes, key=lambda name: sizes[name], default=dtype)


def _codes_of(fused: FusedDecoder | None, quantisation: Quantisation | None, device: Device) -> frozenset[str]:
    """Return the kinds of codes that kernels will multiply, as stored in the files or made at load."""
    found = (
        set() if fused is None else {each.kind for each in map(codes_of, fused.product_weights()) if each is not None}
    )
    if quantisation is not None and device.runs_kernels:
        return frozenset(found) | codes_made(quantisation.kind)
    return frozenset(found)


def _packer(
    operations: LayerOperations, quantisation: Quantisation | None, source: Source, module: Any
) -> WeightPacker | None:
    """Return what packs the weights for `operations`; None if they multiply the weights as they are."""
    if isinstance(operations, PackedOperations):
        return Packer(operations, quantisation, source, module)
    return None if quantisation is None else CodePacker(operations, quantisation.kind, module)


def _packed(model: LoadedModel, packer: WeightPacker, reference: Reference) -> LoadedModel:
    """Pack the weights of a verified model, and verify it again.

    Quantised weights differ from the originals by the quantisation error, so they are not compared with these, but with
    transformers' own layers over the dequantised numbers. Each quantised matrix was checked by itself.

    Raises:
        KernelError: The packed model computes wrong results.
        WorkerError: There is not enough memory.
    """
    with model.device.errors("packing weights"):
        options = bound_options(model.module)
        fused = fuse(model.module, options, packer.operations, model.context.attention, packer, model.ranks)
        make_mixers_steady(model.module, packer.operations, model.device)
        model.device.release_cached()
        model = replace(model, fused=fused)
        if fused is not None and isinstance(packer, CodePacker):
            _check_shapes(model, fused)
        try:
            verify(model, reference, quantised=packer.quantises)
        except UnsupportedModel as error:
            what, way_out = ("quantised", QUANTISED_WAY_OUT) if packer.quantises else ("packed", WAY_OUT)
            raise KernelError(f"with {what} weights: {error}; {way_out}") from error
    return model


def _check_shapes(model: LoadedModel, fused: FusedDecoder) -> None:
    """Compare the products of the first layer, the head and the experts with plain torch, in their own shapes.

    Raises:
        KernelError: Names the kernel and the shape.
    """
    layers_test(fused, model.device)
    mixture = next(filter(None, (layer.mixture for layer in fused.layers)), None)
    if mixture is not None:
        from kvforge.worker.kernels.experts_selftest import experts_test  # imports triton

        each = Experts(None, fused.operations, mixture.matrices, mixture.activation, mixture.interleaved)
        experts_test(each, model.device)


def _make_row_independent(model: LoadedModel, operations: LayerOperations, reference: Reference) -> None:
    """Replace parts of a verified model by row-independent ones, and verify it again.

    Raises:
        KernelError: The changed model computes wrong results.
        WorkerError: There is not enough memory.
    """
    with model.device.errors("replacing parts of the model"):
        steady = make_rows_steady if model.fused is None else make_mixers_steady
        steady(model.module, operations, model.device)
        model.device.release_cached()
        try:
            verify(model, reference)
        except UnsupportedModel as error:
            raise KernelError(f"with parts that compute each row by itself: {error}; {FAST_WAY_OUT}") from error


def _refuse_quantising(weight_dtype: str, module: Any) -> None:
    """Reject the quantisation of a model with layers that are transformers' own; `auto` accepts it unquantised.

    Raises:
        InvalidConfiguration: `weight_dtype` asks for quantisation.
    """
    name = type(module).__name__
    problem = f"{name} runs transformers' own layers, which cannot be quantised"
    if mixers_of(module):
        problem = f"{name} has layers with a recurrent state, and such models are not quantised at load"
    if weight_dtype != "auto":
        raise InvalidConfiguration("weight_dtype", f"{weight_dtype!r}: {problem}; use 'dtype'")
    log.info("weight_dtype: %s", problem)
