"""Opens the host file that a worker's configuration asks for."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from kvforge import __version__
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device.device import Device
from kvforge.worker.device.host_memory import LockedPieces, registrar_of
from kvforge.worker.host_file import FoundFile, HostFile, find_file, host_path
from kvforge.worker.loading.beside import DraftSource
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.serving_kernels import multiplied_by

from .host_placement import HostPlacement
from .host_transfers import HostTransfers

LAYERS_VERSION = 5  # raised when layers of any model compute K and V with other bits than before
log = logging.getLogger("worker")


class HostAhead:
    """The host file of an earlier worker, which is page-locked while this one starts.

    Attributes:
        found: The file.
        pieces: Its memory.
    """

    def __init__(self, found: FoundFile, pieces: LockedPieces) -> None:
        self.found, self.pieces = found, pieces
        pieces.begin_ahead()

    def end(self) -> None:
        """Lock no more pieces. Call it before a copy uses the file."""
        if self.pieces.end_ahead():
            log.info("host tier: %d of %d pieces were page-locked meanwhile", *self.pieces.counts)

    def close(self) -> None:
        """Give the file up."""
        self.pieces.close()
        self.found.close()


def begin_host_tier(config: WorkerConfig, device: Device) -> HostAhead | None:
    """Begin to lock the memory of the host file that an earlier worker has left.

    Args:
        config: The worker's configuration.
        device: Its device.

    Returns:
        The file; None where nothing needs to be locked, or there is no file of this size.

    Raises:
        InvalidConfiguration: Names `host_dir`.
    """
    registrar = registrar_of(device)
    if not config.host_bytes or registrar is None:
        return None
    found = find_file(host_path(config.host_dir, config.runtime_path, name_of(config)))
    if found is None:
        return None
    if found.blocks != config.host_bytes // found.block_bytes:
        found.close()
        return None
    HostPlacement(device).place(found.mapped.map.octets, True)  # a page that is locked cannot be moved
    return HostAhead(found, LockedPieces(registrar, found.mapped.memory, found.block_bytes))


def open_host_tier(
    config: WorkerConfig, model: LoadedModel, pool: KvPool, ahead: HostAhead | None = None
) -> HostTransfers | None:
    """Open the host file of a worker.

    Args:
        config: The worker's configuration.
        model: Its model.
        pool: Its pool.
        ahead: What `begin_host_tier` returned. It is closed here if it has another layout.

    Returns:
        The copies from and to the file; None if none is configured.

    Raises:
        InvalidConfiguration: Names `host_bytes` or `host_dir`.
        WorkerError: Another process has the file.
    """
    if not config.host_bytes:
        return None
    geometry = pool.geometry
    blocks = config.host_bytes // geometry.bytes_per_block
    if not blocks:
        problem = f"{config.host_bytes} bytes hold no block; one takes {geometry.bytes_per_block}"
        raise InvalidConfiguration("host_bytes", problem)
    path, layout = host_path(config.host_dir, config.runtime_path, name_of(config)), layout_of(config, model)
    if ahead is not None and not ahead.found.fits(layout, blocks, geometry.bytes_per_block):
        ahead.close()
        ahead = None
    opened = ahead.found if ahead is not None else None
    placement = HostPlacement(model.device)
    huge = config.host_huge_pages
    file = HostFile(path, layout, blocks, geometry.bytes_per_block, opened=opened, place=placement.place, huge=huge)
    lies, content = placement.describe(file), "with its content" if file.found else "empty"
    log.info("host tier: %d blocks in %s, %s; %s", blocks, path, content, lies)
    host = HostTransfers(pool, file, ahead.pieces if ahead is not None else None)
    host.placement = lies
    while not file.found and host.lock_next():
        pass  # no sequence waits for an empty file: better the start takes longer than the steps that fill it
    return host


def name_of(config: WorkerConfig) -> str:
    """Return the name under which a worker's files are found: of one of several ranks, with its rank."""
    return config.name if config.ranks == 1 else f"{config.name}\n{config.rank}"


def layout_of(config: WorkerConfig, model: LoadedModel) -> str:
    """Describe all that determines the bytes of a block, apart from its tokens and their salt.

    Versions count, because another kernel may round otherwise; so does the device.
    """
    parts = {
        "model": model.info.fingerprint,
        "dtype": model.info.dtype,
        "weights": model.info.weight_dtype,
        "context": model.info.context_tokens_max,
        "geometry": replace(model.geometry, draft_states=0),  # these are in no block of the pool
        "device": model.device.name,
        "kinds": model.wants_kinds,
        "attention": config.attention,
        "kernels": config.kernels,
        "products": multiplied_by(model),  # a CPU's by AMX and oneDNN's without it differ
        "determinism": config.determinism,
        **draft_parts(model.draft),
        "kvforge": __version__,
        "layers": LAYERS_VERSION,
        "torch": torch.__version__,
    }
    if config.ranks > 1:
        parts |= {"rank": config.rank, "ranks": config.ranks, "expert_parallel": config.expert_parallel}
        parts |= {"collectives": config.collectives}
    return "\n".join(f"{name}: {value}" for name, value in parts.items())


def draft_parts(draft: DraftSource | None) -> dict[str, object]:
    """Return what determines a draft model's bytes of a block; nothing without one. Its layout is the model's."""
    if draft is None:
        return {}
    info = draft.info
    parts = {"model": info.fingerprint, "dtype": info.dtype, "weights": info.weight_dtype}
    return {f"draft {name}": value for name, value in (parts | {"context": info.context_tokens_max}).items()}
