"""Opens the disk tier that a worker's configuration asks for."""

from __future__ import annotations

import hashlib

from kvforge.protocol.configuration import expand
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.config import WorkerConfig
from kvforge.worker.disk.copier import DiskCopier
from kvforge.worker.disk.copying import CopyingSettings
from kvforge.worker.disk.folder import DiskFolder
from kvforge.worker.disk.sealing import Sealer, read_key
from kvforge.worker.disk.segments import Geometry
from kvforge.worker.loading.model import LoadedModel

from .host_opening import layout_of, name_of
from .host_transfers import HostTransfers

DIGEST_BYTES = 16


def disk_layout(config: WorkerConfig, model: LoadedModel) -> str:
    """Describe all that determines the bytes of a block on the disk, apart from its tokens and their salt.

    The bytes of a rank's share also depend on the other ranks, which add to each layer: all ranks call this together.

    Raises:
        WorkerError: A rank is gone.
    """
    own = layout_of(config, model)
    if model.ranks is None:
        return own
    others = model.ranks.texts(hashlib.blake2b(own.encode(), digest_size=DIGEST_BYTES).hexdigest())
    return "\n".join((own, *others))


def open_disk_tier(config: WorkerConfig, layout: str, pool: KvPool, host: HostTransfers) -> DiskCopier | None:
    """Open the disk tier of a worker, or of one of its ranks, and start its process.

    Args:
        config: The worker's configuration.
        layout: As `disk_layout` returns it.
        pool: Its pool.
        host: Its host tier.

    Returns:
        The disk tier; None if none is configured.

    Raises:
        InvalidConfiguration: Names `disk_bytes`, `disk_dir` or `disk_key_file`.
        WorkerError: Another process has the folder, or the process did not start.
    """
    if not config.disk_bytes:
        return None
    key_file = str(expand(config.disk_key_file)) if config.disk_key_file else ""
    sealer = Sealer(read_key(key_file))
    folder = DiskFolder(expand(config.disk_dir), name_of(config))
    geometry = Geometry(pool.geometry.bytes_per_block, pool.geometry.block_size)
    segments = folder.open(layout, geometry, config.disk_bytes, sealer)
    settings = CopyingSettings(
        socket=-1,
        host=-1,
        host_blocks=host.file.blocks,
        around=str(folder.path),
        folder=str(segments.folder),
        identity=segments.identity.hex(),
        block_bytes=geometry.block_bytes,
        block_tokens=geometry.block_tokens,
        segment_bytes=geometry.segment_bytes,
        segments_max=segments.total // geometry.slots,
        bytes_max=config.disk_bytes,
        key_file=key_file,
    )
    segments.close()
    return DiskCopier(settings, host.file.fileno(), (folder.fileno(),))
