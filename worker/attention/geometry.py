"""The layout of a KV pool: its layers, and the bytes of a block.

Memory is layer-major: K and V of each layer have a tensor of their own. For models with recurrent states, and for those
with layers that keep a window, it is page-major: the K and V of several layers of a block lie together in one *page*.

A page of a model without windows has the K and V of all layers, so that it can hold a part of a sequence's state
instead. In a model with windows, a page has the K and V of as many layers as attend to all tokens. A block of
these layers is one page; a block of the others is `window_pages` pages, which the sequence gives up once no later
token can see them. So both kinds share one pool.

With a draft model, each block has the K and V of that model too (`KvGeometry.beside`), in layer-major memory of its
own, and the ids of generated tokens (see `draft_backlog`).

Invariant: every byte count comes from `KvGeometry.bytes_per_block`, in exact integers with a 64-bit bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kvforge.protocol.errors import InvalidConfiguration

from .states import StateLayout, StateTensor

BYTES_MAX = 2**63 - 1
# Rows that one proposal of a draft model serves, and the most tokens of each. Its scratch blocks are for this many.
DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX = 64, 16
TOKEN_BYTES = 4  # of a stored token id


@dataclass(frozen=True)
class KvDtype:
    """Storage format of K and V. scale_bytes: bytes of a float32 scale per token and head, for each of K and V."""

    name: str
    itemsize: int
    scale_bytes: int
    torch_dtype: torch.dtype


KV_DTYPES: dict[str, KvDtype] = {
    dtype.name: dtype
    for dtype in (
        KvDtype("float32", 4, 0, torch.float32),
        KvDtype("float16", 2, 0, torch.float16),
        KvDtype("bfloat16", 2, 0, torch.bfloat16),
        KvDtype("int8", 1, 4, torch.int8),
        KvDtype("fp8", 1, 4, torch.float8_e4m3fn),
    )
}


@dataclass(frozen=True)
class LayerShape:
    """The memory of one layer.

    Attributes:
        kv_heads: KV heads.
        head_size: Numbers of a head.
        shared_with: Index of an earlier layer of the same shape with the same K and V, which has the memory of both;
            None: memory of its own.
        latent: A token has one latent of this many numbers, with its rotary key behind it, and they are K; the latent
            is V as well (see KvLayer). There is one KV head then. 0: K and V are stored apart.
        window: The layer keeps K and V only of tokens that a later one can see, which are the last `window` (see
            `windows`). 0: it keeps those of all tokens.
    """

    kv_heads: int
    head_size: int
    shared_with: int | None = None
    latent: int = 0
    window: int = 0

    @property
    def stored(self) -> int:
        """How often the numbers of a head are stored: 2 for K and V, 1 for a latent."""
        return 1 if self.latent else 2


@dataclass(frozen=True)
class KvGeometry:
    """Layout of a block: `block_size` tokens of K and V for every layer. Layers may differ in shape.

    Attributes:
        layers: The layers that attend.
        block_size: Tokens per block.
        kv_dtype: A name in `KV_DTYPES`.
        states: The recurrent state of a sequence, for models that have one.
        beside: The layout of the draft model's K and V in the same blocks; None without a draft model. It is
            layer-major, and has the same block size.
        draft_states: How many states of drafted tokens a step can write, in memory behind the pool's blocks (see
            `states`). 0: steps have no drafts, or there are no states.
        keeps_tokens: Whether the id of each generated token lies in its slot, 4 bytes each: so it is beside a model.

    With states or windows, all layers have the same shape, apart from their windows. With states they have memory of
    their own. All windows are equal, and at least one layer has none.

    Raises:
        InvalidConfiguration: Names the invalid field: block_size, layers, kv_heads, head_size, latent, shared_with,
            window, kv_dtype, bytes_per_block.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    kv_dtype: str
    states: tuple[StateTensor, ...] = ()
    beside: KvGeometry | None = None
    draft_states: int = 0
    keeps_tokens: bool = False

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidConfiguration("kv_dtype", f"{self.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
        require_positive("layers", len(self.layers))
        require_positive("block_size", self.block_size)
        for shape in self.layers:
            require_positive("kv_heads", shape.kv_heads)
            require_positive("head_size", shape.head_size)
            if shape.latent and not (0 < shape.latent <= shape.head_size and shape.kv_heads == 1):
                problem = (
                    f"{shape.latent} of {shape.kv_heads} KV heads of {shape.head_size}: expected a part of one head"
                )
                raise InvalidConfiguration("latent", problem)
        for index, shape in enumerate(self.layers):
            shared = shape.shared_with
            if shared is not None and not (
                0 <= shared < index and self.layers[shared] == replace(shape, shared_with=None)
            ):
                problem = (
                    f"layer {index} cannot share the memory of layer {shared}: expected an earlier layer of its shape"
                )
                raise InvalidConfiguration("shared_with", problem)
        if self.is_paged:
            self._check_pages()
        if self.beside is not None:
            self._check_beside(self.beside)
        if self.bytes_per_block > BYTES_MAX:
            raise InvalidConfiguration("bytes_per_block", f"{self.bytes_per_block} does not fit in 64 bits")
        if self.states:
            assert self.state_layout is not None  # checks the size of a page

    def _check_pages(self) -> None:
        """Check that all K and V of a block are equal parts of pages."""
        windows = {shape.window for shape in self.layers}
        if min(windows) != 0 or len(windows) > 2:
            problem = f"layers have windows of {sorted(windows)} tokens: expected one size, and a layer without any"
            raise InvalidConfiguration("window", problem)
        first = replace(self.layers[0], window=0)
        reason = "a model with recurrent states" if self.states else "a model that keeps windows"
        for index, shape in enumerate(self.layers):
            alike = replace(shape, window=0, shared_with=shape.shared_with if self.states else None)
            if alike != first:
                problem = f"layer {index} is {shape}, the first {self.layers[0]}: {reason} needs equal layers"
                raise InvalidConfiguration("layers", problem)

    def _check_beside(self, beside: KvGeometry) -> None:
        """Check that a draft model's K and V fit into the same blocks."""
        if beside.block_size != self.block_size:
            problem = f"the draft model has {beside.block_size} tokens of a block, the model {self.block_size}"
            raise InvalidConfiguration("block_size", problem)
        if beside.is_paged or beside.beside is not None:
            problem = (
                "the geometry of a draft model is page-major, or has another: expected one without states and windows"
            )
            raise InvalidConfiguration("beside", problem)

    def joined(self, beside: KvGeometry) -> KvGeometry:
        """Return the layout of these blocks with those of a draft model, which is loaded alone, in them."""
        return replace(self, beside=replace(beside, keeps_tokens=True))

    @property
    def scratch_blocks(self) -> int:
        """Blocks that a draft model alone has behind those of the pool; 0 without one.

        Drafted tokens behind the last block of their row have their K and V there: no sequence owns these.
        """
        return DRAFT_ROWS_MAX * self.scratch_per_row if self.beside is not None else 0

    @property
    def scratch_per_row(self) -> int:
        """Scratch blocks of one row that a draft model proposes for."""
        return -(-DRAFT_TOKENS_MAX // self.block_size)

    @property
    def window(self) -> int:
        """Tokens of the window that some layers keep; 0: all layers keep all tokens."""
        return max(shape.window for shape in self.layers)

    @property
    def is_paged(self) -> bool:
        """Whether memory is page-major."""
        return bool(self.states) or self.window > 0

    @cached_property
    def state_layout(self) -> StateLayout | None:
        """The places of a sequence's state in its pages; None for a model without one."""
        apart = self.dtype.scale_bytes * self._heads_per_token * self.block_size  # scales, in memory of their own
        apart += 0 if self.beside is None else self.beside.bytes_per_block
        return StateLayout(self.states, self.bytes_per_block - apart) if self.states else None

    @property
    def state_blocks(self) -> int:
        """Blocks that a sequence's state takes; 0 for a model without one."""
        return self.state_layout.pages if self.state_layout is not None else 0

    @property
    def spare_blocks(self) -> int:
        """Blocks of memory that belong to no sequence, behind those of the pool.

        Spare rows of captured graphs have their states in the first one, drafted tokens theirs in the others.
        """
        return 1 + self.draft_states * self.state_blocks if self.states else 0

    @property
    def draft_state_bytes(self) -> int:
        """Bytes of the states behind drafted tokens."""
        return self.draft_states * self.state_blocks * self.bytes_per_block

    @property
    def entries_per_block(self) -> int:
        """Entries of a layer's K and V tensors from one block to the next: see the module."""
        return len(self._owners(0)) * self.layers[0].stored if self.is_paged else 1

    @property
    def window_pages(self) -> int:
        """Pages of a block of all layers that keep a window; 0: there are none."""
        return -(-len(self._owners(self.window)) // len(self._owners(0))) if self.window else 0

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where each layer's K lies, in page-major memory: (part, entry).

        Part 0 is the page of the layers without a window, part 1 + q is page q of those with one.
        """
        found: list[tuple[int, int]] = []
        own, counted = len(self._owners(0)), {False: 0, True: 0}
        for shape in self.layers:
            if shape.shared_with is not None:
                found.append(found[shape.shared_with])
                continue
            number = counted[shape.window > 0]
            counted[shape.window > 0] += 1
            found.append((number // own + (shape.window > 0), number % own * shape.stored))
        return tuple(found)

    def _owners(self, window: int) -> list[LayerShape]:
        """Return the layers with this window and memory of their own."""
        return [shape for shape in self.layers if shape.window == window and shape.shared_with is None]

    @property
    def _heads_per_token(self) -> int:
        """Heads that a block stores for each of its tokens."""
        return sum(shape.stored * shape.kv_heads for shape in self._owners(0))

    @classmethod
    def uniform(cls, *, layers: int, kv_heads: int, head_size: int, block_size: int, kv_dtype: str) -> KvGeometry:
        """Return the geometry of `layers` equal layers.

        Raises:
            InvalidConfiguration: Names the invalid field.
        """
        require_positive("layers", layers)
        if layers > 1 << 20:  # a tuple of 2**60 shapes would exhaust memory before any bound is checked
            raise InvalidConfiguration("layers", f"{layers} is more than {1 << 20}")
        return cls((LayerShape(kv_heads, head_size),) * layers, block_size, kv_dtype)

    @property
    def dtype(self) -> KvDtype:
        """The storage format."""
        return KV_DTYPES[self.kv_dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block.

        That is 2 (K and V) x sum over layers of kv_heads x (head_size x itemsize + scale bytes) x block_size. A layer
        with latents stores them once instead of twice, and one that shares another one's memory adds nothing. Layers
        that keep a window add nothing either: a block of theirs is `window_pages` blocks.

        For equal layers without scales: 2 x layers x kv_heads x head_size x block_size x itemsize. Quantised dtypes
        (int8, fp8) store one float32 scale per token and head, for K and for V: 4 bytes beside head_size bytes. A draft
        model's bytes are added, with 4 bytes for the id of each token.
        """
        dtype = self.dtype
        own = self._owners(0)
        per_token = sum(s.stored * s.kv_heads * (s.head_size * dtype.itemsize + dtype.scale_bytes) for s in own)
        per_token += TOKEN_BYTES * self.keeps_tokens
        return per_token * self.block_size + (0 if self.beside is None else self.beside.bytes_per_block)

    @property
    def _scratch_bytes(self) -> int:
        return 0 if self.beside is None else self.scratch_blocks * self.beside.bytes_per_block

    def bytes_for(self, blocks: int) -> int:
        """Return the bytes of a pool of `blocks` blocks, of its spare ones, and of a draft model's scratch blocks.

        Raises:
            InvalidConfiguration: Names `blocks`.
        """
        require_positive("blocks", blocks)
        total = (blocks + self.spare_blocks) * self.bytes_per_block + self._scratch_bytes
        if total > BYTES_MAX:
            raise InvalidConfiguration("blocks", f"{blocks} blocks take {total} bytes, which do not fit in 64 bits")
        return total

    def blocks_for(self, memory_bytes: int) -> int:
        """Return the most blocks that fit into `memory_bytes`.

        Raises:
            InvalidConfiguration: Not even one fits.
        """
        require_positive("memory_bytes", memory_bytes)
        left = min(memory_bytes, BYTES_MAX) - self._scratch_bytes
        blocks = left // self.bytes_per_block - self.spare_blocks
        if blocks < 1:
            spare = f" beside {self.spare_blocks} spare ones" if self.spare_blocks else ""
            if self.beside is not None:
                spare += f" beside {self._scratch_bytes} bytes of the draft model's scratch blocks"
            problem = f"{memory_bytes} bytes hold no block{spare}; one takes {self.bytes_per_block}"
            raise InvalidConfiguration("memory_bytes", problem)
        return blocks


def require_positive(field: str, value: int) -> None:
    """Check that a value is an integer of at least 1.

    Raises:
        InvalidConfiguration: Names `field`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidConfiguration(field, f"must be an integer, not {value!r}")
    if value < 1:
        raise InvalidConfiguration(field, f"must be at least 1, not {value}")
