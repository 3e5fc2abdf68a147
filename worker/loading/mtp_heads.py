"""Loads the multi-token prediction module of a checkpoint as a head that drafts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from safetensors import safe_open

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention.hidden_states import hidden_shape
from kvforge.worker.attention.pool import KvGeometry
from kvforge.worker.kernels.packed import stored_bytes

from .configuration import read_config
from .heads import DraftHead, Front, MtpFront
from .model import LoadedModel
from .mtp import front_tensors, names_of
from .source import Source, find_source

STD = 0.02  # standard deviation of random weights


def load_mtp_head(
    source: str | Path, model: LoadedModel, load_format: str, seed: int, load_layer: Callable[[], LoadedModel]
) -> DraftHead:
    """Load the module of a checkpoint.

    Args:
        source: The checkpoint, as given for the model.
        model: The model, loaded.
        load_format: As given for the model.
        seed: Seed of random weights.
        load_layer: Loads the module's layer, as `load_model` does with `mtp`.

    Returns:
        The head.

    Raises:
        InvalidConfiguration: Names `draft_model`: the checkpoint has no such module, or the model shows no hidden
            states.
        KvforgeError: As raised by `load_layer`.
    """
    refuse_unfit(model, "mtp")
    found = find_source(source, load_format)
    front = _front(found, model, seed)
    layer = load_layer()
    if layer.fused is None:
        problem = f"'mtp', but the layer of the module of {model.info.name} could not be described: leave it out"
        raise InvalidConfiguration("draft_model", problem)
    return head_of(model, layer, front, f"the MTP module of {model.info.name}")


def head_of(model: LoadedModel, layer: LoadedModel, front: Front, name: str) -> DraftHead:
    """Return a head of a loaded layer, which shares the model's embeddings and vocabulary head."""
    assert model.fused is not None and layer.fused is not None, "described models only"
    decoder = replace(layer.fused, table=model.fused.table, head=model.fused.head)
    digest = hashlib.sha256(layer.info.fingerprint.encode())
    for tensor in front.tensors():
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    info = structs.replace(layer.info, name=name, fingerprint=digest.hexdigest())
    own = [*front.tensors(), *(weight for each in decoder.layers for weight in each.product_weights())]
    return DraftHead(
        info=info,
        geometry=with_hidden(layer.geometry, len(decoder.final_norm.weight)),
        device=model.device,
        vocab_size=model.vocab_size,
        model=model.fused,
        decoder=decoder,
        front=front,
        bytes=sum(map(stored_bytes, own)),
    )


def with_hidden(geometry: KvGeometry, size: int) -> KvGeometry:
    """Return the layout of a head: its K and V, and behind them hidden states of `size` numbers."""
    return replace(geometry, layers=(*geometry.layers, hidden_shape(size)))


def refuse_unfit(model: LoadedModel, setting: str) -> None:
    """Refuse a model with hidden states that heads cannot read.

    Raises:
        InvalidConfiguration: Names `draft_model`.
    """
    problem = ""
    if model.fused is None:
        problem = f"{model.info.name} runs transformers' own layers, and heads read described ones"
    if problem:
        raise InvalidConfiguration("draft_model", f"{setting!r}, but {problem}: leave it out")


def _front(source: Source, model: LoadedModel, seed: int) -> MtpFront:
    """Read, or make up, what the module computes before its layer."""
    assert model.fused is not None, "described models only"
    place = model.device.torch_device
    config = read_config(source)
    if source.format == "dummy":
        hidden = len(model.fused.final_norm.weight)
        with model.device.random_state():
            torch.manual_seed(seed)
            projection = torch.randn(hidden, 2 * hidden).mul_(STD)
        tensors = [torch.ones(hidden), torch.ones(hidden), projection]
        hidden_first = False
    else:
        hidden_first = names_of(source, config).hidden_first
        names = [*front_tensors(source, config)]
        tensors = [tensor.to(model.dtype) for tensor in read_tensors(source, names)]
        for name, tensor in zip(names, tensors, strict=True):
            if not bool(tensor.isfinite().all()):
                problem = f"the tensor {name} of {source.name} holds NaN or infinity: use another checkpoint"
                raise InvalidConfiguration("draft_model", f"'mtp', but {problem}")
    token_norm, hidden_norm, projection = (tensor.to(place, model.dtype) for tensor in tensors)
    own = replace(model.fused.final_norm, weight=token_norm)  # of the model's kind: that of Qwen3-Next adds 1
    return MtpFront(own, replace(own, weight=hidden_norm), projection, hidden_first)


def read_tensors(source: Source, names: list[str]) -> list[torch.Tensor]:
    """Return tensors of a folder's files by their names, on the CPU."""
    found: dict[str, torch.Tensor] = {}
    for path in source.model_files.weights:
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in names if name in file.keys()}  # noqa: SIM118
    return [found[name] for name in names]
