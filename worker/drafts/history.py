"""The last tokens of one request, with an index of their runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import Int32Array

LENGTHS = (3, 2)  # of the looked-up runs of tokens, the longest first
FIRST_TOKENS = 256
TOKEN_BYTES = 4 * (1 + 2 * len(LENGTHS))  # the token, and for each length a place in the table and one in the chains
WALK_MAX = 32  # entries of one bucket that are compared: a prompt may be written so that its runs share a bucket
MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, as in Fibonacci hashing
WORD = (1 << 64) - 1
NONE = -1


class History:
    """The last tokens of a slot, at most `tokens_max`, with an index of their runs.

    For each length of a run there is a hash table: `heads[bucket]` is the place behind the latest run of the bucket,
    and `chains[place]` the place behind the run before it. A run is indexed once a token follows it. `_mixed` are the
    hashes of the last token, the last two and the last three, which go on from token to token; those of more tokens
    than there are mean nothing.
    """

    def __init__(self, tokens: Int32Array, tokens_max: int, most: int) -> None:
        self._tokens_max, self._most, self.count = tokens_max, most, 0
        self._mixed = (0, 0, 0)
        self._load(tokens[-tokens_max // 2 :] if len(tokens) >= tokens_max else tokens)

    @property
    def bytes(self) -> int:
        """Memory of the tokens and the index."""
        return self.tokens.nbytes + sum(table.nbytes for table in (*self._heads, *self._chains))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        done = 0
        while done < len(tokens):
            if self.count == len(self.tokens):
                kept = self.tokens[self.count // 2 :] if self.count == self._tokens_max else self.tokens
                self._load(kept.copy())
            part = tokens[done : done + len(self.tokens) - self.count]
            self._write(part)
            done += len(part)

    def _write(self, tokens: Sequence[int]) -> None:
        """Add tokens that there is room for. The next step of a GPU waits for this."""
        place, shift, view = self.count, self._shift, self._view
        (threes, twos), (older_threes, older_twos) = self._heads_view, self._chains_view
        one, two, three = self._mixed
        for token in tokens:
            if place >= 3:
                bucket = three >> shift
                older_threes[place], threes[bucket] = threes[bucket], place
            if place >= 2:
                bucket = two >> shift
                older_twos[place], twos[bucket] = twos[bucket], place
            view[place] = token
            place += 1
            mixed = (token + 1) * MIX & WORD
            one, two, three = mixed, (one * MIX + mixed) & WORD, (two * MIX + mixed) & WORD
        self.count, self._mixed = place, (one, two, three)
        self._last = view[max(0, place - LENGTHS[0]) : place].tolist()

    def following(self, others: Iterable[History] = (), run_min: int = 0) -> list[int]:
        """Return the tokens that followed the latest earlier occurrence of the last tokens; none without one.

        The last three tokens are looked up first: in this history, then in the others; then the last two, in this
        history alone. Where the occurrence is so late that the history ends first, the drafted tokens themselves go
        on: a run that repeats is drafted to its full length.

        Args:
            others: Histories of other requests, in the order in which they are searched.
            run_min: The fewest last tokens to look up.
        """
        for length in LENGTHS:
            if not run_min <= length <= self.count:
                continue
            run, mixed = self._last[-length:], self._mixed[length - 1]
            place = self._behind(run, mixed)
            if place != NONE:
                return self._from(place)
            for other in others if length == LENGTHS[0] else ():
                place = other._behind(run, mixed)
                if place != NONE:
                    return other.tokens[place : min(place + self._most, other.count)].tolist()
        return []

    def _from(self, place: int) -> list[int]:
        drafted: list[int] = self.tokens[place : min(place + self._most, self.count)].tolist()
        while len(drafted) < self._most:
            drafted.append(drafted[len(drafted) - (self.count - place)])
        return drafted

    def _behind(self, run: list[int], mixed: int) -> int:
        """Return the place behind the latest occurrence of a run that a token follows, or NONE."""
        length = len(run)
        which = LENGTHS.index(length)
        place, chains, tokens = self._heads_view[which][mixed >> self._shift], self._chains_view[which], self._view
        for _ in range(WALK_MAX):
            if place == NONE:
                break
            if tokens[place - 1] == run[-1] and tokens[place - length : place].tolist() == run:
                return place
            place = chains[place]
        return NONE

    def _load(self, tokens: npt.NDArray[np.int32]) -> None:
        """Replace the tokens, with room for more, and index them anew."""
        size = min(self._tokens_max, max(FIRST_TOKENS, 1 << len(tokens).bit_length()))
        self.tokens, self.count = np.zeros(size, np.int32), len(tokens)
        self.tokens[: self.count] = tokens
        self._shift = 64 - (size.bit_length() - 1)
        self._heads = [np.full(size, NONE, np.int32) for _ in LENGTHS]
        self._chains = [np.full(size, NONE, np.int32) for _ in LENGTHS]
        for length, heads, chains in zip(LENGTHS, self._heads, self._chains, strict=True):
            self._index(length, heads, chains)
        # NumPy takes three times as long for a single element.
        self._view = self.tokens.data
        self._heads_view = [heads.data for heads in self._heads]
        self._chains_view = [chains.data for chains in self._chains]
        self._last = self.tokens[max(0, self.count - LENGTHS[0]) : self.count].tolist()
        self._mixed = (_mixed(self._last[-1:]), _mixed(self._last[-2:]), _mixed(self._last[-3:]))

    def _index(self, length: int, heads: npt.NDArray[np.int32], chains: npt.NDArray[np.int32]) -> None:
        """Index all runs of a length, as `extend` does one by one."""
        places = np.arange(length, self.count, dtype=np.int32)
        if not len(places):
            return
        mixed, mix = np.zeros(len(places), np.uint64), np.uint64(MIX)
        for offset in range(length):
            mixed = mixed * mix + (self.tokens[offset : offset + len(places)].astype(np.uint64) + np.uint64(1))
        buckets = ((mixed * mix) >> np.uint64(self._shift)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        ordered, sorted_places = buckets[order], places[order]
        follows = ordered[1:] == ordered[:-1]
        chains[sorted_places[1:][follows]] = sorted_places[:-1][follows]
        latest = np.append(~follows, True)
        heads[ordered[latest]] = sorted_places[latest]


def _mixed(run: list[int]) -> int:
    """Return the hash of a run, unsigned 64 bit; its highest bits are the bucket."""
    mixed = 0
    for token in run:
        mixed = mixed * MIX + token + 1
    return (mixed * MIX) & WORD
