"""Builds a model with transformers and fills in exactly the weights of its files."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from kvforge.models.config_checks import DEQUANTISED, PLAIN_MODEL
from kvforge.models.files import stored_tensors
from kvforge.protocol.errors import KvforgeError, ModelNotFound, UnsupportedModel
from kvforge.worker.device.device import Device, as_worker_error
from kvforge.worker.device.ranks import Ranks

from .code_packer import codes_problem
from .composite import config_for, is_composite, is_removed, model_class, text_part
from .description import Family
from .early_checks import EarlyChecks
from .families import family_of, family_of_class
from .formats import check_scales, complete_dtype, dequantise, forget_format, format_of_folder
from .gguf import noted_names
from .gguf_config import check_rotation
from .lazy_compiler import less_of_torch
from .library_errors import refusing, sentence
from .probe import foresee
from .progress import Progress, ProgressBars, bars_to
from .published import PARSERS, parse_format
from .quantised_reader import Published
from .rehearsal import check_memory, drop_removed_parts, rehearse
from .report import check_experts, check_finite, check_unpacked, reject_mismatches, reported
from .source import Source
from .streamed_files import reading_order, reads_in_parallel, streamed
from .weight_stream import WeightStream
from .wide_values import widen_values

log = logging.getLogger("worker")
NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


def build(
    source: Source,
    config: Any,
    dtype: torch.dtype,
    device: Device,
    progress: Progress,
    seed: int,
    ranks: Ranks | None = None,
    expert_parallel: bool = False,
    early: EarlyChecks | None = None,
    packs_codes: bool = False,
) -> Any:
    """Build the transformers model with its weights, in eval mode, on `device`, with eager attention.

    Args:
        source: The model's files.
        config: Its transformers configuration.
        dtype: Dtype of the weights.
        device: Device of the weights.
        progress: Called with fractions from 0 to 1.
        seed: Seed of random weights.
        ranks: The group of ranks; only this rank's part is read (see `split`).
        expert_parallel: Whether ranks divide the experts among them, not each expert.
        early: Checks that begin with the reading of weights, where these are read in parallel.
        packs_codes: Whether weights in codes are packed for a CPU afterwards.

    Returns:
        The model.

    Raises:
        UnsupportedModel: Names tensors that are missing, left over, of another shape or not finite.
        ModelNotFound: The files cannot be read.
        WorkerError: There is not enough memory.
        GpuError: There is not enough memory on the GPU.
    """
    passes = 2 if source.format == "gguf" else 1  # read, then assigned
    with bars_to(progress, passes) as bars, less_of_torch(), refusing(source.name, "transformers cannot build it"):
        try:
            published = _published(source, config, dtype, device, packs_codes)
            if ranks is not None or published is not None or source.part is not None:
                from .split import build_split  # imports accelerate

                module = build_split(source, config, dtype, device, ranks, progress, seed, expert_parallel, published)
            elif source.format == "dummy":
                module = _dummy(config, dtype, device, seed)
            else:
                module = _load(source, config, dtype, device, bars, early)
            module = widen_values(text_part(module.to(device.torch_device).eval(), _name(source, config)))
        except OSError as error:
            raise ModelNotFound(str(source.path), f"its weights cannot be read: {sentence(error)}") from error
        except KvforgeError:
            raise
        except Exception as error:  # not a decoder, or inconsistent sizes: transformers raises many errors for these
            raise _typed(error, source, config, device, bars) from error
    module.requires_grad_(False)
    return module


def _published(source: Source, config: Any, dtype: torch.dtype, device: Device, packs_codes: bool) -> Published | None:
    """Return the format of a folder's weights if kvforge reads it itself; None: transformers reads the weights.

    Raises:
        UnsupportedModel: Neither does.
    """
    values = format_of_folder(source.folder, config) if source.format == "safetensors" else None
    if values is None or values["quant_method"] not in PARSERS:
        return None
    family = _family_of_text(config, source.name) if is_composite(config) else family_of_class(model_class(config))
    packs_codes = packs_codes and not (family is not None and family.mixers)  # such models are not packed
    keeps = packs_codes or (device.runs_kernels and not codes_problem(device, dtype))
    is_described = family is not None
    # transformers reads whole blocks and whole checkpoints only
    reads_all = source.part is None and (family is None or family.latent is None)
    if values["quant_method"] in DEQUANTISED and not (keeps and is_described) and reads_all:
        return None
    found = parse_format(values, source.name)
    if not is_described:
        problem = f"its weights are quantised ({found.label}), and {config.model_type} has no described layers"
        raise UnsupportedModel(source.name, f"{problem}, which alone serve them: {PLAIN_MODEL}")
    forget_format(config)
    log.info("%s: %s, %s", source.name, found.label, "kept as stored" if keeps else f"dequantised to {dtype}")
    return Published(found, keeps)


def _family_of_text(config: Any, model: str) -> Family | None:
    """Return the declaration of the text part of a composite model; None if there is none.

    None also where transformers cannot build it without weights: what it dequantises itself is served then.
    """
    cls, plain = model_class(config), copy.deepcopy(config)
    forget_format(plain)
    try:
        with torch.device("meta"):
            whole = cls._from_config(config_for(cls, plain), attn_implementation="eager")
        return family_of(text_part(whole, model))
    except Exception as error:  # noqa: BLE001 - foreign code without weights; the load reports the fault
        log.info("%s: its text part is not known: %s: %s", model, type(error).__name__, sentence(error))
        return None


def _name(source: Source, config: Any) -> str:
    return str(config.model_type) if source.format == "dummy" else source.name


def _dummy(config: Any, dtype: torch.dtype, device: Device, seed: int) -> Any:
    cls = model_class(config)
    # Created on the target device: a CPU takes minutes for what a GPU does in a second.
    with device.random_state(), device.torch_device:
        torch.manual_seed(seed)
        return cls._from_config(config_for(cls, config), dtype=dtype, attn_implementation="eager")


def _load(
    source: Source, config: Any, dtype: torch.dtype, device: Device, bars: ProgressBars, early: EarlyChecks | None
) -> Any:
    """Load the weights from files.

    Raises:
        UnsupportedModel: The weights do not match the configuration.
        Exception: Any error of transformers.
    """
    stored = stored_tensors(source.model_files) if source.format == "safetensors" else {}
    removed: set[str] = set()
    check_experts(stored, source.name)
    cls = model_class(config)
    config = config_for(cls, config)
    method = ""
    if source.format == "safetensors":
        method = dequantise(config, source.name)
        check_scales(method, config, stored, source.name)
        bars.measure = lambda: ("comparing weights with the configuration", 0.0)
        rehearsed = rehearse(cls, config, stored, dtype, source.name)
        bars.measure = None
        if rehearsed is not None:
            check_unpacked(rehearsed, stored, source.name, method)
            check_memory(rehearsed, device, source.name)
            removed = {name for name in stored if is_removed(rehearsed, name)}
            text = widen_values(text_part(rehearsed, source.name))
            shapes = foresee(text, device)
            if early is not None and shapes:
                early.prepare(text, shapes)
            del rehearsed, text
    header = source.gguf_header if source.format == "gguf" else None
    stream = None
    if source.format == "safetensors" and not method and reads_in_parallel(device):
        stream = WeightStream(source.model_files.weights, device, reading_order(stored, removed))
    with reported() as report, noted_names(header, source.name) as names, streamed(stream, bars, early):
        try:
            module = cls.from_pretrained(
                source.folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True if source.format == "safetensors" else None,
                ignore_mismatched_sizes=True,  # they are in the report
                **source.keywords,
            )
        except Exception:
            reject_mismatches(report, source.name, names.of)
            raise
    drop_removed_parts(report, module)
    if method:
        complete_dtype(module, dtype)
    if source.format == "gguf":
        names.complete(report, source.gguf_header)
    reject_mismatches(report, source.name, names.of)
    check_unpacked(module, stored, source.name, method)
    if source.format == "gguf":
        check_rotation(source, module)
    check_finite(module, source.name, names.of)
    if source.format == "gguf" and device.runs_kernels and not codes_problem(device, dtype):
        from .gguf_levels import keep_levels

        if family_of_class(type(module)) is not None:  # its layers are described, and multiply codes
            keep_levels(module, source, names.stored, dtype, device.torch_device)
    return module


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, perhaps because of another process."""
    return any(words in str(error).lower() for words in NO_MEMORY)


def _typed(error: Exception, source: Source, config: Any, device: Device, bars: ProgressBars) -> KvforgeError:
    """Return the worker's error for a failure that a retry may avoid; any other failure is the model's."""
    worker_error = as_worker_error(error, f"loading {source.name}", device)
    if lacks_memory(error) or worker_error.code != "worker_error":
        return worker_error
    at = f"its tensor {bars.current}: " if bars.current else ""
    return UnsupportedModel(_name(source, config), f"{at}transformers cannot build it: {sentence(error)}")
