"""The last tokens of one request, with an index of their runs."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import NO_INT32, Int32Array

LENGTHS = (3, 2)  # of the looked-up runs of tokens, the longest first
FIRST_TOKENS = 256
# The token, while it waits and then, and for each length a place in the table and one in the chains.
TOKEN_BYTES = 4 * (2 + 2 * len(LENGTHS))
ONE_BY_ONE = 4  # to index a token by itself costs as much as this many that are indexed together
TOGETHER_MIN = 40  # fewer tokens are indexed one by one
WALK_MAX = 32  # entries of one bucket that are compared
MIX = secrets.randbits(64) | 1  # as in multiplicative hashing, and drawn anew: no prompt can fill one bucket by design
WORD = (1 << 64) - 1
NONE = -1
EMPTY = np.full(1, NONE, np.int32).data


class History:
    """The last tokens of a slot, at most `tokens_max`, with an index of their runs.

    New tokens wait until `catch_up` indexes them: steps of many rows propose nothing, and index nothing then.

    For each length of a run there is a hash table: `heads[bucket]` is the place behind the latest run of the bucket,
    and `chains[place]` the place behind the run before it. A run is indexed once a token follows it. `_mixed` are the
    hashes of the last token, the last two and the last three, which go on from token to token; those of more tokens
    than there are mean nothing.

    Args:
        tokens: [n] int32, the tokens so far.
        tokens_max: The most tokens to remember.
        most: The most tokens to propose.
    """

    def __init__(self, tokens: Int32Array, tokens_max: int, most: int) -> None:
        self._tokens_max, self._most = tokens_max, most
        self._waiting = array("i", tokens.tobytes())
        self._clear()

    @property
    def bytes(self) -> int:
        """Memory of the tokens and the index, when all are indexed."""
        return TOKEN_BYTES * self._size(self._count + len(self._waiting))

    @property
    def waiting(self) -> int:
        """How many tokens wait to be indexed."""
        return len(self._waiting)

    def remembered(self) -> list[int]:
        """Return the tokens."""
        return [*self._indexed().tolist(), *self._waiting]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        self._waiting.extend(tokens)
        if len(self._waiting) >= self._tokens_max:
            self._clear()

    def catch_up(self, most: int) -> int:
        """Index tokens that wait.

        Args:
            most: How many tokens, at most. An index that is full is made anew, whatever that takes.

        Returns:
            What that costs, in tokens that are indexed together.
        """
        waiting, cost = self._waiting, 0
        if self._count == self._room:
            cost = self._make_room()
        count = min(most, len(waiting), self._room - self._count)
        if count == len(waiting):
            self._waiting = array("i")
        else:
            self._waiting, waiting = waiting[count:], waiting[:count]
        if count < TOGETHER_MIN:
            self._write(waiting)
            return cost + ONE_BY_ONE * count
        first = self._count
        self._count += count
        self._tokens[first : self._count] = np.frombuffer(waiting, np.int32)
        self._index(first)
        return cost + count

    def _clear(self) -> None:
        """Forget the tokens that are indexed. Of too many that wait, the last half of the most stay."""
        if len(self._waiting) >= self._tokens_max:
            self._waiting = self._waiting[-self._tokens_max // 2 :]
        self._count = self._room = 0  # tokens that are indexed, and that the index has room for
        self._shift, self._threes = 64, EMPTY
        self._mixed = (0, 0, 0)

    def _indexed(self) -> npt.NDArray[np.int32]:
        return self._tokens[: self._count] if self._room else NO_INT32

    def _write(self, tokens: Sequence[int]) -> None:
        """Add tokens that there is room for. The next step of a GPU waits for this."""
        place, shift, view = self._count, self._shift, self._view
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
        self._count, self._mixed = place, (one, two, three)
        self._last = view[max(0, place - LENGTHS[0]) : place].tolist()

    def following(self, others: Iterable[History] = (), run_min: int = 0) -> list[int]:
        """Return the tokens that followed the latest earlier occurrence of the last tokens; none without one.

        The last three tokens are looked up first: in this history, then in the others; then the last two, in this
        history alone. Where the occurrence is so late that the history ends first, the drafted tokens themselves go
        on: a run that repeats is drafted to its full length. Tokens that wait to be indexed are not looked at.

        Args:
            others: Histories of other requests, in the order in which they are searched; this one is left out.
            run_min: The fewest last tokens to look up.
        """
        for length in LENGTHS:
            if not run_min <= length <= self._count:
                continue
            run, mixed = self._last[-length:], self._mixed[length - 1]
            place = self._behind(run, mixed)
            if place != NONE:
                return self._from(place)
            for other in others if length == LENGTHS[0] else ():
                # Most buckets are empty, and a call takes longer than the look.
                if other is self or other._threes[mixed >> other._shift] == NONE:
                    continue
                place = other._behind(run, mixed)
                if place != NONE:
                    return other._view[place : min(place + self._most, other._count)].tolist()
        return []

    def _from(self, place: int) -> list[int]:
        drafted: list[int] = self._tokens[place : min(place + self._most, self._count)].tolist()
        while len(drafted) < self._most:
            drafted.append(drafted[len(drafted) - (self._count - place)])
        return drafted

    def _behind(self, run: list[int], mixed: int) -> int:
        """Return the place behind the latest occurrence of a run that a token follows, or NONE."""
        if not self._room:
            return NONE
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

    def _size(self, count: int) -> int:
        """Return of how many tokens an index has room for that is made for `count`."""
        return min(self._tokens_max, max(FIRST_TOKENS, 1 << count.bit_length()))

    def _make_room(self) -> int:
        """Make the index anew, with room for the tokens that wait, and return how many tokens it has.

        A full index that cannot be larger keeps the last half of its tokens.
        """
        kept = self._indexed()
        if self._count == self._tokens_max:
            kept = kept[-self._tokens_max // 2 :]
        self._room = size = self._size(len(kept) + len(self._waiting))
        self._tokens, self._count = np.zeros(size, np.int32), len(kept)
        self._tokens[: self._count] = kept
        self._shift = 64 - (size.bit_length() - 1)
        self._heads = [np.full(size, NONE, np.int32) for _ in LENGTHS]
        self._chains = [np.full(size, NONE, np.int32) for _ in LENGTHS]
        # NumPy takes three times as long for a single element.
        self._view = self._tokens.data
        self._heads_view = [heads.data for heads in self._heads]
        self._threes = self._heads_view[0]
        self._chains_view = [chains.data for chains in self._chains]
        self._index(0)
        return self._count

    def _index(self, first: int) -> None:
        """Index the runs before the tokens from `first` on, as `_write` does one by one."""
        for length, heads, chains in zip(LENGTHS, self._heads, self._chains, strict=True):
            places = np.arange(max(first, length), self._count, dtype=np.int32)
            if not len(places):
                continue
            mixed, mix, begin = np.zeros(len(places), np.uint64), np.uint64(MIX), int(places[0]) - length
            for offset in range(begin, begin + length):
                mixed = mixed * mix + (self._tokens[offset : offset + len(places)].astype(np.uint64) + np.uint64(1))
            buckets = ((mixed * mix) >> np.uint64(self._shift)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            ordered, sorted_places = buckets[order], places[order]
            follows = ordered[1:] == ordered[:-1]
            chains[sorted_places[1:][follows]] = sorted_places[:-1][follows]
            earliest, latest = np.append(True, ~follows), np.append(~follows, True)
            chains[sorted_places[earliest]] = heads[ordered[earliest]]
            heads[ordered[latest]] = sorted_places[latest]
        self._last = self._tokens[max(0, self._count - LENGTHS[0]) : self._count].tolist()
        self._mixed = (_mixed(self._last[-1:]), _mixed(self._last[-2:]), _mixed(self._last[-3:]))


def _mixed(run: list[int]) -> int:
    """Return the hash of a run, unsigned 64 bit; its highest bits are the bucket."""
    mixed = 0
    for token in run:
        mixed = mixed * MIX + token + 1
    return (mixed * MIX) & WORD
