"""Drafts: what workers propose, what steps verify, and what a request learns.

A worker proposes the next tokens of a row with each result. While proposals wait, and while a step that verifies some
is in flight, the group has one step in flight: the next one is planned from results alone, with all rows. Rows that no
proposal concerns lose nothing but the overlap of two steps.

A row with k drafts computes 1 + k tokens. Drafts behind the last block of their row get blocks if some are free or
cached and the step takes nothing from others; otherwise they end with that block. The result has 1 to 1 + k tokens.
What is computed then ends at the last token, so that the KV of a rejected draft is never indexed, and a later step
overwrites it. Blocks without an accepted token are given back with the result.

A step has as many drafts as pay, by each request's own chances (`draft_choice`). A draft model proposes where a step
asks for it (`draft_asks`); lookup, which costs nothing, proposes with every result.

A recurrent state is behind the last accepted draft, exactly, and cannot be cut back. Such rows have no draft that is a
stop token: what is accepted behind it would be in the state. Their drafts end where a checkpoint is wanted too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import GENERATED, SamplingParams, StepResult
from kvforge.protocol.salts import tenant_salt

from ..cache.groups import Group, SentStep
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.model_drafts import own_chance, own_counts
from ..cache.sequences import ONE, Slots, Tokens
from ..requests.request import UNKNOWN, Request
from ..requests.table import RequestTable
from ..sizes import DRAFT_HISTORY_TOKENS
from . import draft_asks, draft_choice
from .draft_chances import GROUP_OF, Chances, doubted, learned, observed
from .rows import RunningRows

ChosenDrafts = Mapping[int, tuple[int, ...]]  # by slot
NO_DRAFTS: ChosenDrafts = {}
Proposal = tuple[int, int, tuple[int, ...], Request]  # slot, run, tokens, and the request that they are for


class Drafts:
    """Keeps the proposals of workers, and chooses the drafts of steps."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable, rows: RunningRows) -> None:
        self._cache, self._requests, self._rows = cache, requests, rows
        limits = cache.limits.schedule
        self._most, self._step_tokens_max = limits.drafts_max, limits.step_tokens_max
        self._rows_max = cache.limits.draft_rows_max

    def check(self, group: Group, result: StepResult) -> None:
        """Check the proposals of a result.

        Raises:
            ProtocolError: They are malformed, or of rows that have no token in the result.
        """
        # Sums and bounds of a list take a fifth of the time of those of so small an array.
        slots, counts = result.draft_slots.tolist(), result.draft_counts.tolist()
        tokens = result.draft_tokens.tolist()
        if len(slots) != len(counts) or sum(counts) != len(tokens):
            raise ProtocolError("step_result: draft_slots, draft_counts and draft_tokens differ in length")
        if counts and not 1 <= min(counts) <= max(counts) <= group.drafts:
            raise ProtocolError(f"step_result: draft_counts must be 1 to the announced drafts = {group.drafts}")
        distinct = set(slots)
        if len(distinct) != len(slots) or not distinct <= set(result.slots.tolist()):
            raise ProtocolError("step_result: draft_slots must be distinct rows with a token in this result")
        if tokens and not 0 <= min(tokens) <= max(tokens) < group.model.vocab_size:
            raise ProtocolError(f"step_result: a draft outside the vocabulary of {group.model.vocab_size}")
        if not 0 <= result.draft_model_rows <= (len(slots) if group.sent[0].message.propose else 0):
            raise ProtocolError("step_result: draft_model_rows counts rows of draft_slots, of a step with propose")

    def take(self, group: Group, sent: SentStep, result: StepResult) -> None:
        """Keep the proposals of a result for rows that still run, if they may pay; older ones of its rows are void."""
        waited = bool(group.proposals)
        if sent.message.propose:
            self._take_asked(group, sent, result)
            return
        self._take(group, sent, result)
        if waited and not group.proposals:
            draft_choice.put_off(group)

    def _take_asked(self, group: Group, sent: SentStep, result: StepResult) -> None:
        """Keep the proposals of a step that asked for some. No other step is in flight, and they cost nothing more."""
        self._forget_older(group, sent, result)
        counts = result.draft_counts[: result.draft_model_rows]
        if counts.size:
            passes = int(counts.max())
            group.model_drafts.took(result.draft_us, passes)
            if group.model_drafts.trying:
                draft_asks.tried(group, sent.slots.size, passes, result.draft_us)
        elif not result.draft_slots.size:  # the model failed, or its rows are too many
            draft_asks.put_off(group, sent.slots.size)
        if self._room(group) < 1:
            return
        proposed = self._proposed(sent, result)
        for (slot, run, tokens, request), most in zip(proposed, self._wanted_of(group, proposed), strict=True):
            if not request.draft_by_model:
                group.expected.setdefault(slot, (run, 0, tokens))
            if most > 0 and (request.draft_by_model or request.draft_chance != UNKNOWN):
                group.proposals[slot] = tokens[:most]
        if group.proposals:
            group.steady = None

    def _proposed(self, sent: SentStep, result: StepResult) -> list[Proposal]:
        """Return the proposals of a result for rows that still run."""
        s, slots, live = self._cache.sequences, result.draft_slots, self._requests.live
        tokens, end, found = result.draft_tokens.tolist(), 0, list[Proposal]()
        runs = dict(zip(sent.slots.tolist(), sent.runs.tolist(), strict=True))
        own = (self._rows.run[slots].tolist(), s.running[slots].tolist(), s.request[slots].tolist())
        rows = zip(slots.tolist(), result.draft_counts.tolist(), *own, strict=True)
        for number, (slot, count, run, is_running, request_id) in enumerate(rows):
            first, end = end, end + count
            if is_running and run == runs[slot]:
                request = live[request_id]
                request.draft_by_model = number < result.draft_model_rows
                found.append((slot, run, tuple(tokens[first:end]), request))
        return found

    def _forget_older(self, group: Group, sent: SentStep, result: StepResult) -> None:
        """Forget the proposals of rows that have a token in a result, and compare those that were only expected."""
        if group.proposals:
            for slot in sent.sampled.tolist():
                group.proposals.pop(slot, None)
        if group.expected:
            self._observe(group, sent, result)

    def _take(self, group: Group, sent: SentStep, result: StepResult) -> None:
        self._forget_older(group, sent, result)
        if not result.draft_slots.size or (room := self._room(group)) < 1:
            return
        kept, requests, going_on = dict[int, tuple[int, ...]](), dict[int, Request](), 0
        proposed = self._proposed(sent, result)
        for (slot, run, tokens, request), most in zip(proposed, self._wanted_of(group, proposed), strict=True):
            going_on += slot in group.expected
            group.expected.setdefault(slot, (run, 0, tokens))
            if most > 0 and (request.draft_chance != UNKNOWN or not group.row_costs.is_known):
                kept[slot], requests[slot] = tokens[:most], request
        waits = group.next_step < group.drafts_from
        if not kept or (waits and sent.step_id % draft_choice.LOOK_EVERY):
            return
        slots = self._with_states(group, [*kept], room)
        each = room // len(slots)
        wanted = {slot: min(each, len(kept[slot])) for slot in sorted(slots)}  # in the order of a plan
        chances = {slot: self._chances(group, requests[slot]) for slot in slots}
        if draft_choice.pays(group, group.running, wanted, chances, goes_on=2 * going_on >= len(kept)):
            group.proposals |= kept
            group.steady = None
            if waits:
                group.drafts_from = group.draft_wait = 0

    def _observe(self, group: Group, sent: SentStep, result: StepResult) -> None:
        """Compare the tokens of a result with what was expected of rows that had no drafts."""
        s, step, expected = self._cache.sequences, sent.message, group.expected
        rows = zip(step.slots.tolist(), step.drafts.tolist(), strict=True) if step.drafts.size else ()
        drafted = {slot for slot, count in rows if count}
        for slot, token in zip(result.slots.tolist(), result.tokens.tolist(), strict=True):
            if (found := expected.pop(slot, None)) is None or slot in drafted:
                continue
            run, place, tokens = found
            if run != self._rows.run[slot] or not s.running[slot]:
                continue
            request, is_right = self._requests.live[int(s.request[slot])], token == tokens[place]
            self._know(group, request, observed(self._looked_up(group, request), place, is_right))
            if is_right and place + 1 < len(tokens):
                expected[slot] = run, place + 1, tokens

    def _know(self, group: Group, request: Request, chances: Chances) -> None:
        """Give a request new chances, and move those of its group."""
        request.draft_chance, request.draft_later = first, later = chances
        group.draft_chance += (first - group.draft_chance) // GROUP_OF
        group.draft_later += (later - group.draft_later) // GROUP_OF

    def most(self, group: Group) -> int:
        """Return how many tokens the group's worker may propose for a row; 0: none."""
        return min(group.drafts, self._most)

    def shared(self, slot: int) -> int:
        """Return the number of a row's tenant and salt: rows with the same one may be drafted from each other.

        A wipe of the tenant gives it another one: no later row is drafted from those of before.

        Args:
            slot: The slot of the row.

        Returns:
            0 if no row may be drafted from others.
        """
        if not self._cache.limits.schedule.drafts_shared:
            return 0
        s, owner = self._cache.sequences, int(self._cache.sequences.tenant[slot])
        own = f"{int(s.salt[slot])}:{self._cache.wipes.tag_of(owner)}"
        return self._cache.hasher.salt(tenant_salt(self._cache.tenants.names[owner], own))

    def _room(self, group: Group) -> int:
        """Return how many rows of a step are left for drafts if all rows of the group take part."""
        room = self._rows_max - group.running if self._most else 0
        return min(room, group.draft_states) if group.state_blocks else room

    def _wanted_of(self, group: Group, proposed: Sequence[Proposal]) -> list[int]:
        return self._wanted(group, [each[0] for each in proposed], [each[2] for each in proposed])

    def _wanted(self, group: Group, slots: Sequence[int], proposals: Sequence[Sequence[int]]) -> list[int]:
        """Return how many drafts of each row's proposal may be verified next; 0 or less for none.

        Args:
            group: The group.
            slots: The slots of the rows, [n].
            proposals: What is proposed for each, [n].
        """
        s, rows, most = self._cache.sequences, np.array(slots, np.int64), self.most(group)
        length = s.length[rows] + s.pending[rows]
        left = (self._rows.limit[rows] - length - ONE).tolist()
        wanted = [min(most, room, len(tokens)) for room, tokens in zip(left, proposals, strict=True)]
        if group.state_blocks:
            each = zip(slots, (length - ONE).tolist(), proposals, wanted, strict=True)
            wanted = [
                self._over_state(group, slot, start, tokens[:count]) if count > 0 else count
                for slot, start, tokens, count in each
            ]
        return wanted

    def _over_state(self, group: Group, slot: int, start: int, proposal: Sequence[int]) -> int:
        """Return how many drafts of a row with a recurrent state may be verified, if its next token is at `start`."""
        stops = frozenset(self._rows.stops[slot].tolist())
        count = next((place for place, token in enumerate(proposal) if token in stops), len(proposal))
        size = self._cache.sequences.block_size
        if start // size == (start + count) // size:
            return count
        wanted = self._cache.checkpoints.following(group, slot, int(self._rows.base[slot]), start)
        return min(count, wanted - start - 1)

    def _with_states(self, group: Group, slots: list[int], room: int) -> list[int]:
        """Return the slots that may have drafts: where there are fewer states than slots, those of the likeliest."""
        if 0 < room < len(slots) and group.state_blocks:
            return sorted(slots, key=lambda slot: -self._chances(group, self._request(slot))[0])[:room]
        return slots

    def _request(self, slot: int) -> Request:
        return self._requests.live[int(self._cache.sequences.request[slot])]

    def _chances(self, group: Group, request: Request) -> Chances:
        """Return the chances of a request, or of its group's requests while it has none."""
        return self._modelled(group, request) if request.draft_by_model else self._looked_up(group, request)

    def _modelled(self, group: Group, request: Request) -> Chances:
        model, own = group.model_drafts, (request.draft_good, request.draft_expected)
        return own_chance(model.first, *own), own_chance(model.later, *own)

    def _looked_up(self, group: Group, request: Request) -> Chances:
        if request.draft_chance == UNKNOWN:
            return doubted((group.draft_chance, group.draft_later))
        return request.draft_chance, request.draft_later

    def ask(self, group: Group, slots: Slots, verifies: bool) -> int:
        """Return how many tokens the draft model proposes for each row of the next step; 0: none.

        Args:
            group: The group, with a draft model.
            slots: The rows that sample, [n]; none has prompt tokens.
            verifies: Whether the step verifies drafts.
        """
        room, s = self._room(group), self._cache.sequences
        left = self._rows.limit[slots] - s.length[slots] - s.pending[slots]
        most = min(group.model_drafts.most, self.most(group), max(1, room // slots.size), int(left.max()) - 1)
        if room < 1 or most < 1:
            return 0
        each = [self._modelled(group, self._requests.live[request]) for request in s.request[slots].tolist()]
        mean = sum(first for first, _ in each) // slots.size, sum(later for _, later in each) // slots.size
        return draft_asks.ask(group, slots.size, most, mean, verifies, int(left.sum()) // slots.size)

    def choose(self, group: Group, decodes: Slots, prefilling: bool, may_reserve: bool) -> ChosenDrafts:
        """Return the drafts that the next step verifies, and drop all proposals. No step is in flight.

        Args:
            group: The group.
            decodes: Rows with room for one more token, [n].
            prefilling: The step may have prompt tokens too, and at least half of what decodes leave is theirs.
            may_reserve: Nothing else asks for blocks, so drafts may get some for this step.
        """
        s, proposals = self._cache.sequences, group.proposals
        proposed = [slot for slot in decodes.tolist() if slot in proposals]
        room = self._room(group)
        if prefilling:
            left = self._step_tokens_max - decodes.size
            room = min(room, left // 2, left - group.prompt_chunk)  # any less is no chunk of a state
        proposed = self._with_states(group, proposed, room)
        rows = np.array(proposed, np.int64)
        assert not np.count_nonzero(s.pending[rows]), "a row with drafts awaits a token"
        # How many drafts the blocks of each row hold behind its next token.
        inside = dict(zip(proposed, (s.used[rows] * s.block_size - s.length[rows] - ONE).tolist(), strict=True))
        requests, each = s.request[rows].tolist(), room // max(1, len(proposed))
        wanted, chances, asked = dict[int, int](), dict[int, Chances](), False
        counts = self._wanted(group, proposed, [proposals[slot] for slot in proposed])
        for slot, count, request_id in zip(proposed, counts, requests, strict=True):
            most = min(each, count) if may_reserve else min(each, count, inside[slot])
            if most > 0:
                request = self._requests.live[request_id]
                wanted[slot], chances[slot] = most, self._chances(group, request)
                asked = asked or request.draft_by_model
        chosen = draft_choice.choose(group, decodes.size, wanted, chances, asked=asked) if wanted else {}
        short = {slot: count for slot, count in chosen.items() if count > inside[slot]}
        for slot in self._without_blocks(group, short) if short else ():
            chosen[slot] = inside[slot]
        drafts = {slot: proposals[slot][:count] for slot, count in chosen.items() if count}
        proposals.clear()
        return drafts

    def _without_blocks(self, group: Group, counts: Mapping[int, int]) -> list[int]:
        """Give rows blocks for so many drafts; return those that get none."""
        s, without = self._cache.sequences, list[int]()
        rows = np.array([*counts], np.int64)
        lengths = s.length[rows] + ONE + np.array([*counts.values()])
        tenants = s.tenant[rows].tolist()
        for tenant in dict.fromkeys(tenants):
            own = [at for at, other in enumerate(tenants) if other == tenant]
            if not self._cache.tables.grow_to(group, rows[own], lengths[own]):
                for at in own:
                    if len(own) == 1 or not self._cache.tables.grow_to(group, rows[at : at + 1], lengths[at : at + 1]):
                        without.append(int(rows[at]))
        return without

    def learn(self, group: Group, requests: Sequence[Request], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Adapt the chances of [n] requests to a result.

        Args:
            group: The group.
            requests: The requests.
            drafted: How many drafts of each were verified.
            accepted: How many of each became tokens.
        """
        for request, tried, good in zip(requests, drafted, accepted, strict=True):
            request.drafted_tokens += tried
            request.accepted_tokens += good
            if request.draft_by_model:
                right, expected = group.model_drafts.learned(tried, good)
                own = own_counts(request.draft_good + right, request.draft_expected + expected)
                request.draft_good, request.draft_expected = own
            else:
                self._know(group, request, learned(self._looked_up(group, request), tried, good))
            request.draft_count = tried
        tried, good = sum(drafted), sum(accepted)
        self._requests.drafts_total += len(requests)
        self._requests.drafted_tokens_total += tried
        self._requests.accepted_drafts_total += good
        group.drafted_total += tried
        group.accepted_total += good


def history_sizes(sampling: SamplingParams, prompt: int, answer: int, drafts: int) -> tuple[int, int]:
    """Return how many tokens a worker gets of the ends of a prompt and of an answer when a row begins.

    Args:
        sampling: The sampling parameters: penalties and grammars need a part, whole.
        prompt: Tokens of the prompt.
        answer: Tokens of the answer.
        drafts: The most tokens that the worker may propose for the row.
    """
    of_prompt = prompt if sampling.repetition_penalty != 1.0 else 0
    of_answer = answer if sampling.counts_answer else 0
    if drafts:
        of_prompt = max(of_prompt, min(prompt, DRAFT_HISTORY_TOKENS))
        of_answer = max(of_answer, min(answer, DRAFT_HISTORY_TOKENS))
    return of_prompt, of_answer


def ordered(decodes: Slots, drafts: ChosenDrafts) -> tuple[Slots, Slots]:
    """Return rows of a step, those with drafts last, and how many tokens each has: [n] each."""
    counts = ONE + draft_counts(decodes, drafts)
    if np.count_nonzero(counts > ONE) == counts.size:
        return decodes, counts
    order = np.argsort(counts > 1, kind="stable")
    return decodes[order], counts[order]


def draft_counts(slots: Slots, drafts: ChosenDrafts) -> Slots:
    """Return how many drafts each of [n] rows has."""
    return np.array([len(drafts.get(slot, ())) for slot in slots.tolist()], np.int64)


def place(tokens: Tokens, slots: Slots, drafts: ChosenDrafts, marked: bool) -> Tokens:
    """Return the input tokens of a step with the drafts of each row behind its own token.

    Args:
        tokens: The rows' own tokens, row after row.
        slots: The rows, [n].
        drafts: The drafts by slot.
        marked: Generated tokens have GENERATED added.
    """
    # Rows with drafts have one token of their own and come before the chunks of prompts, as each row before them.
    found, rows = list[int](), max(place for place, slot in enumerate(slots.tolist()) if slot in drafts) + 1
    for slot, token in zip(slots[:rows].tolist(), tokens[:rows].tolist(), strict=True):
        found.append(token)
        if slot in drafts:
            found += [draft | GENERATED for draft in drafts[slot]] if marked else drafts[slot]
    first = np.array(found, np.int32)
    return first if rows == tokens.size else np.concatenate((first, tokens[rows:]))
