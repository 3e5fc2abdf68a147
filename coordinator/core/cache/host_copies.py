"""Copies between a group's pool and its host tier, ordered by steps.

*Down*: a cached block that is evicted from the device is copied to a host block. Its content is intact until the next
step writes the device block, so that step copies it before all else. The entry can be hit once the step's result
acknowledges the copy. The blocks before it are copied with it, although they are still on the device: without them, the
entry would be of no use to a worker's successor.

*Up*: a sequence that moves in takes device blocks for the host entries behind its device hits, and the next step fills
them before it computes. `Sequences.scheduled` counts these tokens at once, `computed` when the result acknowledges the
copy: until then nothing indexes or shares the blocks, whatever the results of earlier steps say.

Window blocks and checkpoints are copied like KV blocks: when they are evicted, alone or with the entry that they hang
on, and before the step that brings a sequence back computes.

A read may not find what was saved: the result says so, the entry is dropped, and its sequence begins again without it.

A result that does not acknowledge exactly the copies of its step ends the worker. If the worker is lost, the entries of
copies in flight are dropped, those that were read too: a read that ended the worker is not tried again.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import MISSED_CHECKSUM, MISSED_TAG, NO_INT32, Int32Array

from .blocks import KV, BlockIds, Blocks
from .costs import StepCosts
from .disk_copies import DiskCopies
from .hashing import Hashes
from .host_node import NO_HOST_BLOCK, HostNode
from .host_parts import CHECKPOINT, part_tokens, part_value
from .host_tier import HostTier
from .host_yield import needed_yield
from .paced_reads import PacedReads, blocks_of_step
from .prefix_cache import PrefixCache, Tokens, root_key
from .sequences import Sequences

COPY_NUMBERS = 4  # block, host block, and the halves of the tag
READS_MAX = 1 << 16  # of one step: bounds its message; what is beyond is computed
WIPES_MAX = 16  # of one step, whose worker overwrites them itself
WRITES_MAX = 4096  # of one step; blocks evicted beyond are lost, as they are without a tier


class HostLoad(msgspec.Struct):
    """Tokens of a sequence that a step brings from the host.

    Attributes:
        end: The sequence has KV of so many tokens then.
        step: The step; 0 until it is sent.
        nodes: The entries that it reads.
        paced: No request waits for them, and several steps carry them. `step` is the last one.
    """

    end: int
    step: int = 0
    nodes: tuple[int, ...] = ()
    paced: bool = False


class SentCopies(msgspec.Struct, frozen=True):
    """The host copies of a step in flight: nodes that it writes and reads, and blocks that it wipes."""

    step: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    wipes: tuple[int, ...] = ()


class HostCopies:
    """The host copies of one group.

    Attributes:
        tier: The books of the worker's file.
        index: The prefix index of the pool.
        writes: Copies that the next step carries: device block -> node.
        reads: Copies that the next step carries: device block -> node, which has a reader more for each.
        paced: Copies that no request waits for; each step carries a few.
        loads: By slot: what a sequence gets from the host.
        sent: Copies of steps in flight, the oldest first.
        write_costs: The measured cost of copies to the host by their blocks.
        read_costs: The same of those from it.
        disk: Copies between this tier and the disk tier; None if the worker has none.
        compute_costs: The measured cost of steps by their prompt tokens: those of the group.
        reused: For each block of the pool, the generation in which it was used again; see `host_yield`.
    """

    def __init__(
        self, tier: HostTier, index: PrefixCache, blocks: Blocks, base: int, count: int, sight: int = 0
    ) -> None:
        """Create the copies of a pool.

        Args:
            tier: The books of its worker's file.
            index: Its prefix index.
            blocks: The blocks of all pools.
            base: Its first block.
            count: How many it has.
            sight: How many blocks of a sequence are in sight of its last token in layers with a window.
        """
        self.tier, self.index, self._blocks, self._base, self._sight = tier, index, blocks, base, sight
        self.compute_costs = StepCosts()
        self.reused = np.full(count, -1, np.int32)
        self.writes: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        self.paced = PacedReads()
        self.loads: dict[int, HostLoad] = {}
        self.sent: deque[SentCopies] = deque()
        self.write_costs, self.read_costs = StepCosts(), StepCosts()
        self.disk: DiskCopies | None = None

    @property
    def pending(self) -> bool:
        """Whether the next step carries copies."""
        return bool(self.writes or self.reads or self.tier.to_wipe or self.paced.waiting)

    def wipe(self, tag: int) -> int:
        """Drop the entries of a tenant: see `HostTier.wipe`. Copies to the host that are not sent yet are not made."""
        unsent = [block for block, node_id in self.writes.items() if self.tier.nodes[node_id].tag == tag]
        for block in unsent:
            self.tier.drop(self.writes.pop(block))
        return self.tier.wipe(tag)

    # ---------------------------------------------------------------------------------------------------------- down

    def save(self, block: int) -> None:
        """Copy an indexed block that is about to be evicted to the host, with those before it that are not there yet.

        A block that lost its prefix in the index cannot be hit and is not saved. One that was used once is skipped
        while copies of such blocks are not read.
        """
        once, owner = not self.is_reused(block), self._blocks.owner.item(block)
        if once and not self.tier.yields.share_of(owner).copying:
            self._skip(block, owner)
            return
        node_id = self.node_of(block)
        if node_id is None:
            self.tier.unsaved_total += 1
            return
        self._save_chain(block, node_id)
        node = self.tier.nodes.get(node_id)
        if once and node is not None and node.block != NO_HOST_BLOCK:
            node.once = True
            self.tier.yields.evicted(owner, self.needed_yield)

    def save_parts(self, key: int, ids: tuple[int, ...], number: int) -> None:
        """Copy window blocks or a checkpoint that are about to be evicted, with the blocks of their prefix.

        Those that were used once are copied while such blocks are. Of window blocks, only those in sight of the last
        block of a chain: a later turn goes on there, and others can be computed from them.

        Args:
            key: The entry that they hang on.
            ids: The blocks.
            number: The number of the first: 0, or CHECKPOINT.
        """
        if not self.is_reused(ids[0]):
            if not self.tier.yields.share_of(self.owner_of(ids[0])).copying:
                return
            if number < CHECKPOINT and not self.ends_in_sight(key):
                return
        node_id = self.node_of(key & 0xFFFFFFFF)
        if node_id is None:
            return
        self._save_chain(key & 0xFFFFFFFF, node_id)
        node = self.tier.nodes.get(node_id)
        if node is not None and node.block != NO_HOST_BLOCK:
            self.write_parts(node_id, ids, number)

    def write_parts(self, node_id: int, ids: tuple[int, ...], number: int) -> None:
        """Add parts of an entry that are not on the host to the copies of the next step, as far as there is room.

        Args:
            node_id: The entry, which has a block.
            ids: The blocks of the parts.
            number: The number of the first.
        """
        tier = self.tier
        sources, parts = list[int](), list[int]()
        for each, source in enumerate(ids, number):
            part = tier.add_part(node_id, each)
            if part is None:
                tier.unsaved_total += 1
                break
            if tier.nodes[part].block != NO_HOST_BLOCK:
                tier.use(part)
                continue
            sources.append(source)
            parts.append(part)
        self.write(sources, parts)

    def _save_chain(self, block: int, node_id: int) -> None:
        """Copy a block and those before it, up to one that is on the host."""
        tier, index = self.tier, self.index
        nodes, alive = tier.nodes, index.alive
        if nodes[node_id].block != NO_HOST_BLOCK:
            tier.use(node_id)
            return
        key = index.key(block)
        sources, chain = list[int](), list[int]()
        while node_id > 0 and alive(key) and nodes[node_id].entry == key and nodes[node_id].block == NO_HOST_BLOCK:
            at = key & 0xFFFFFFFF
            sources.append(at)
            chain.append(node_id)
            node_id, key = nodes[node_id].parent, index.parent_of(at)
        before = nodes[node_id].block if node_id > 0 else NO_HOST_BLOCK
        written = self.write(sources, chain, before, backwards=True)
        if written == len(chain) and node_id > 0 and alive(key) and nodes[node_id].entry == key:
            tier.use(node_id)

    def write(
        self,
        sources: list[int],
        node_ids: list[int],
        behind: int = NO_HOST_BLOCK,
        room: int = 0,
        backwards: bool = False,
    ) -> int:
        """Add blocks to the copies of the next step, as far as there is room, and give them neighbours.

        Args:
            sources: Device blocks, [n].
            node_ids: Their nodes, which have no blocks, [n]. Those that get none are pruned.
            behind: As for `HostTier.give_blocks`.
            room: Likewise.
            backwards: Likewise.

        Returns:
            How many are copied, from the first.
        """
        tier, writes, most = self.tier, self.writes, WRITES_MAX - len(self.writes)
        owners = [self._blocks.owner.item(source) for source in sources[:most]]
        given = tier.give_blocks(node_ids[:most], owners, behind, room, backwards)
        if given == len(node_ids):
            writes.update(zip(sources, node_ids, strict=True))
            return given
        writes.update(zip(sources[:given], node_ids[:given], strict=True))
        tier.unsaved_total += 1
        for each in node_ids[given:]:
            if each in tier.nodes:  # otherwise it went with one behind it
                tier.prune(each)
        return given

    def _skip(self, block: int, owner: int) -> None:
        """Make no copy of a block that is about to be evicted, and remember it."""
        tier, index = self.tier, self.index
        if not index.alive(index.parent_of(block)):
            tier.unsaved_total += 1
            return
        value = index.hash_of(block)
        tier.yields.evicted(owner, self.needed_yield)
        if not self._note_copy(tier, block, value) and (
            self.disk is None or not self._note_copy(self.disk.tier, block, value)
        ):
            tier.yields.skip(value, owner)

    def _note_copy(self, lower: HostTier, block: int, value: int) -> bool:
        """Note that a block is evicted which was used once. Return False if a lower tier has no copy of it."""
        if not lower.has_hash(value):  # nearly always
            return False
        node_id = lower.find(value, self.index.tokens_of(block).tobytes())
        if node_id is None or lower.nodes[node_id].block == NO_HOST_BLOCK:
            return False
        lower.use(node_id)
        lower.nodes[node_id].once = True
        return True

    def needed_yield(self) -> int:
        """Return the share of copies that must be read for copies to pay, as `needed_yield`."""
        return needed_yield(self.write_costs, self.read_costs, self.compute_costs, self._blocks.block_size)

    def is_reused(self, block: int) -> bool:
        """Return whether a block was used again."""
        return self.reused.item(block - self._base) == self._blocks.generation.item(block)

    def reuse(self, ids: BlockIds) -> None:
        """Note blocks that are used again, or will be: [n]. They are copied to the host when they are evicted."""
        self.reused[ids - self._base] = self._blocks.generation[ids]

    def note_computed(self, ids: npt.NDArray[np.integer], values: Hashes) -> None:
        """Note blocks that were filled, with their hashes: [n]. If they were skipped before, they are reused."""
        if self.tier.yields.skipped:
            places = self.tier.yields.computed_again(values.tolist())
            if places:
                self.reuse(ids[places].astype(np.int64))

    def node_of(self, block: int) -> int | None:
        """Return the node of an indexed block, made with those of its ancestors if it is new; None for none."""
        index, tier = self.index, self.tier
        path: list[tuple[int, int, bytes]] = []
        key = index.key(block)
        while key >= 0:
            if not index.alive(key):
                return None
            at = key & 0xFFFFFFFF
            value, tokens = index.hash_of(at), index.tokens_of(at).tobytes()
            known = tier.find(value, tokens)
            if known is not None and tier.nodes[known].entry == key:
                key = known
                break
            path.append((key, value, tokens))
            key = index.parent_of(at)
        parent = key
        for entry, value, tokens in reversed(path):
            found = tier.add(parent, value, tokens)
            if found is None:
                tier.prune(parent)
                return None
            tier.nodes[found].entry = entry
            parent = found
        return parent

    def ends_in_sight(self, key: int) -> bool:
        """Return whether the last entry behind one is so near that layers with a window see both."""
        return self.index.ends_within(key, self._sight)

    def has_holder(self, block: int) -> bool:
        """Return whether a device block is held."""
        return self._blocks.refcount.item(block) > 0

    def owner_of(self, block: int) -> int:
        """Return the tenant that is charged for a device block, and will be for its copy."""
        return int(self._blocks.owner[block])

    def entry_of(self, block: int) -> HostNode | None:
        """Return the node with the content of a device block; None if it has none, or is not indexed."""
        index = self.index
        if self._blocks.kind[block] != KV or not index.alive(index.key(block)):
            return None
        node_id = self.tier.find(index.hash_of(block), index.tokens_of(block).tobytes())
        return None if node_id is None else self.tier.nodes[node_id]

    def part_entry_of(self, key: int, number: int) -> HostNode | None:
        """Return the node with the content of a window block or of a block of a checkpoint; None if there is none.

        Args:
            key: The entry that it hangs on.
            number: The number of the part.
        """
        entry = self.entry_of(key & 0xFFFFFFFF)
        found = None if entry is None else self.tier.find(part_value(entry.value, number), part_tokens(number))
        return None if found is None else self.tier.nodes[found]

    def kind_of(self, block: int) -> int:
        """Return the kind of a device block."""
        return int(self._blocks.kind[block])

    # ------------------------------------------------------------------------------------------------------------ up

    def match(self, salt: int, tokens: Tokens, hashes: Hashes, first: int, end: int) -> tuple[int, ...]:
        """Return the nodes of the host entries behind the first `first` blocks of a prefix, up to block `end`."""
        end = min(end, first + READS_MAX - len(self.reads))
        return self.tier.match(root_key(salt), tokens, hashes, first, end)

    def hold(self, nodes: tuple[int, ...]) -> None:
        """Keep entries that are going to be read."""
        for node_id in nodes:
            self.tier.hold(node_id)

    def unhold(self, nodes: tuple[int, ...]) -> None:
        """Give up entries that were held and are not read."""
        for node_id in nodes:
            self.tier.release(node_id)

    def load(self, slot: int, nodes: tuple[int, ...], targets: list[int], end: int, *, paced: bool = False) -> None:
        """Make the next step copy held entries to device blocks of a sequence.

        Args:
            slot: The slot of the sequence.
            nodes: The entries, [n].
            targets: Its device blocks, [n].
            end: How many tokens of the sequence have KV then.
            paced: No request waits for it: the next steps carry a few of the copies each.
        """
        reads = dict(zip(targets, nodes, strict=True))
        if paced:
            self.paced.begin(slot, reads)
        else:
            self.reads.update(reads)
        self.reuse(np.array(targets, np.int64))
        for node_id in nodes:
            self.tier.wanted(node_id)
            if self.disk is not None:
                self.disk.read_above(node_id)
        self.loads[slot] = HostLoad(end, nodes=nodes, paced=paced)

    def hurry(self, slot: int) -> None:
        """Let the next step carry all copies of a sequence that are left: a request waits for it."""
        if self.paced.slot == slot:
            self.reads.update(self.paced.pop(len(self.paced.waiting)))

    def forget(self, slot: int) -> None:
        """Do not count what a sequence gets from the host: it gave its blocks up, or goes on from fewer tokens."""
        self.loads.pop(slot, None)
        if self.paced.slot == slot:
            self.unhold(tuple(self.paced.pop(len(self.paced.waiting)).values()))

    def cancel(self, block: int) -> None:
        """Do not read into a device block that lost its holders before the step was sent."""
        node_id = self.reads.pop(block, None)
        if node_id is not None:
            self.tier.release(node_id)

    # --------------------------------------------------------------------------------------------------------- steps

    def flush(self, step: int, running: int = 0) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return and clear what a step carries, as `Step.host_writes`, `Step.host_reads` and `Step.host_wipes`.

        Args:
            step: The step.
            running: Rows of the group, which do not wait for copies that no request waits for.
        """
        if not self.pending:
            return NO_INT32, NO_INT32, NO_INT32
        if self.paced.waiting:
            self.reads.update(self.paced.pop(blocks_of_step(running, self.compute_costs, self.read_costs)))
        wipes = self.tier.next_wipes(WIPES_MAX)
        self.sent.append(SentCopies(step, tuple(self.writes.values()), tuple(self.reads.values()), tuple(wipes)))
        for slot, load in self.loads.items():
            if slot != self.paced.slot:
                load.step = load.step or step
        copies = self._copies_of(self.writes), self._copies_of(self.reads), np.array(wipes, np.int32)
        self.writes.clear()
        self.reads.clear()
        return copies

    def _copies_of(self, pending: dict[int, int]) -> Int32Array:
        """Return copies as a step carries them, by host blocks: the worker moves neighbours together."""
        nodes = self.tier.nodes
        copies = np.zeros((len(pending), COPY_NUMBERS), np.int32)
        copies[:, 0] = list(pending)
        copies[:, 1] = [nodes[node_id].block for node_id in pending.values()]
        copies[:, 2:] = (
            np.array([nodes[node_id].value for node_id in pending.values()], "<u8").view("<i4").reshape(-1, 2)
        )
        return copies[copies[:, 1].argsort(kind="stable")].reshape(-1)

    def due(self, step: int) -> Int32Array | None:
        """Return the host blocks of a step's writes, reads and wipes: [n] int32; None for a step without any."""
        if not self.sent or self.sent[0].step != step:
            return None
        sent, nodes = self.sent[0], self.tier.nodes
        writes, reads = (sorted(nodes[node_id].block for node_id in ids) for ids in (sent.writes, sent.reads))
        return np.array([*writes, *reads, *sent.wipes], np.int32)

    def missed(self, step: int, missed: Int32Array) -> list[int]:
        """Record the entries that a step did not find on the host. Call it before `step_done`.

        Args:
            step: The step.
            missed: As in `StepResult.host_missed`.

        Returns:
            The slots with wrong KV, in order.

        Raises:
            ValueError: The step did not read these blocks.
        """
        tier, nodes = self.tier, self.tier.nodes
        reads = self.sent[0].reads if self.sent and self.sent[0].step == step else ()
        at = {nodes[node_id].block: node_id for node_id in reads}
        pairs = missed.reshape(-1, 2).tolist() if missed.size % 2 == 0 else [(-1, 0)]
        for block, reason in pairs:
            if block not in at or reason not in (MISSED_TAG, MISSED_CHECKSUM):
                raise ValueError(f"block {block}, reason {reason}")
        damaged = {at[block] for block, _ in pairs}
        for node_id in damaged:
            tier.damage(node_id)
        tags = sum(reason == MISSED_TAG for _, reason in pairs)
        tier.missed_tags_total += tags
        tier.missed_checksums_total += len(pairs) - tags
        slots = [
            slot
            for slot, load in self.loads.items()
            if (load.step == step or load.paced) and not damaged.isdisjoint(load.nodes)
        ]
        for slot in slots:
            del self.loads[slot]
        return sorted(slots)

    def measured(self, step: int, write_us: int, read_us: int) -> None:
        """Record how long the copies of a step took; 0: they were not measured. Call it before `step_done`."""
        if not self.sent or self.sent[0].step != step:
            return
        sent = self.sent[0]
        for costs, blocks, took_us in (
            (self.write_costs, len(sent.writes), write_us),
            (self.read_costs, len(sent.reads), read_us),
        ):
            if blocks and took_us > 0:
                costs.add(blocks, took_us)

    def step_done(self, step: int, sequences: Sequences) -> None:
        """Record that a step has made its copies: entries can be hit, and sequences have the KV that it brought."""
        if not self.sent or self.sent[0].step != step:
            return
        sent, tier = self.sent.popleft(), self.tier
        for block in sent.wipes:
            tier.wiped(block)
        for node_id in sent.writes:
            wiped = tier.nodes[node_id].wiped
            tier.written(node_id)
            if self.disk is not None and not wiped:
                self.disk.want(node_id)
        tier.loaded_total += sum(not tier.nodes[node_id].damaged for node_id in sent.reads)
        for node_id in sent.reads:
            tier.release(node_id)
        for slot in [slot for slot, load in self.loads.items() if load.step == step]:
            sequences.computed[slot] = self.loads.pop(slot).end

    def lost(self) -> None:
        """The worker is lost: drop the entries of copies in flight, and give the file back."""
        tier = self.tier
        self.hurry(self.paced.slot)
        if self.disk is not None:
            self.disk.lost()
        for node_id in self.writes.values():
            tier.drop(node_id)
        for node_id in self.reads.values():
            tier.release(node_id)
        for sent in self.sent:
            for node_id in sent.writes:
                tier.drop(node_id, quarantine=True)
            for node_id in dict.fromkeys(sent.reads):
                node = tier.nodes.get(node_id)
                if node is not None and node.block != NO_HOST_BLOCK:
                    tier.drop(node_id)
        self.writes.clear()
        self.reads.clear()
        self.loads.clear()
        self.sent.clear()
        tier.wipes_lost()
        tier.epoch = 0

    # ---------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self, sequences: Sequences, pool: int) -> None:
        """Check that each copy that is pending or in flight has its block, and that nothing else uses a block."""
        tier = self.tier
        readers: dict[int, int] = {}
        writes = [*self.writes.values(), *(node_id for sent in self.sent for node_id in sent.writes)]
        reads = [*self.reads.values(), *(node_id for sent in self.sent for node_id in sent.reads)]
        reads += self.paced.waiting.values()
        assert bool(self.paced.waiting) == (self.paced.slot in self.loads), "reads that no request waits for"
        if self.disk is not None:
            self.disk.check_invariants()
            reads.extend(self.disk.held_nodes())
            writes.extend(self.disk.filled_nodes())
        assert tier.wiping == {block for sent in self.sent for block in sent.wipes}, "host blocks that steps wipe"
        for node_id in reads:
            readers[node_id] = readers.get(node_id, 0) + 1
        assert all(self.index.find(value) is None for value in tier.yields.skipped), "a skipped block is there again"
        assert len(set(writes)) == len(writes), "a host block is written twice"
        for node_id, node in tier.nodes.items():
            assert node.readers == readers.get(node_id, 0), "readers of a host block"
            if node.block != NO_HOST_BLOCK:
                assert node.written != (node_id in writes), "a host block is neither written nor in the making"
        for slot, load in self.loads.items():
            assert sequences.pool[slot] == pool, "a sequence that moved out gets KV from the host"
            assert sequences.computed[slot] < load.end <= sequences.scheduled[slot], "tokens that come from the host"
