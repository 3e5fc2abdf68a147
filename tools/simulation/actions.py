"""Actions of a simulated run: plain tuples, drawn from a seed, replayed from a list, printed as text.

An action is (time_us, verb, who, *parameters). Parameters are explicit and execution draws nothing, so a list of
actions is a complete scenario. Labels name things ("r3", "s2"). An action on a label without an id has no effect, so
any action may be left out of a scenario.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Any

from tools.simulation.crashes import AFTER, BEFORE, TORN, WHOLE
from tools.simulation.draws import Draws
from tools.simulation.model import DEADLY, poison
from tools.simulation.settings import SAMPLES_MAX, TENANTS, Settings

Action = tuple[Any, ...]

# share of tree searches: a sequence, its forks, and requests on all sequences at once
TREE_SHARE = 0.02
# share of requests that several clients attach to at once
TUG_SHARE = 0.004
# share of prompts with several answers; the first is cancelled, and the same command is sent again
SAMPLES_SHARE = 0.01
# share of forks that are written to and removed at once, so that a pending copy becomes unnecessary
CREATE_AND_FORK_SHARE = 0.004
# share of writes to a sequence on which a request runs or waits to resume
APPEND_WHILE_RUNNING_SHARE = 0.01
# share of snapshots among the deaths of the coordinator
CUT_SHARE = 0.5
# share of deaths with a cancel right before, so that a step in flight has ended rows
CANCEL_SHARE = 0.4
# share of follow-up requests with an earlier answer in the prompt, in worlds that compute prompts and answers
# differently
TALK, TALK_SHARE = "talk", 0.06
# how a follow-up request goes on: with the whole text alone, on the kept sequence, and whether it keeps its own
TURNS = ((False, False), (False, True), (True, True), (True, True), (True, False))
# conversations of kept turns, and cuts of the kept sequences between two of these
CONVERSATION_SHARE, KEEP_MS = 0.1, 200
REWIND, REWIND_SHARE = "rewind", 0.4
WIPE = "wipe"
# answers that are computed as prompts
AHEAD, AHEAD_SHARE = "ahead", 0.2
# requests that pin the beginning of their prompts, and for how long
PINS_SHARE, PINS_MS = 0.15, (1, 20, 200)
COORDINATOR = "k"
WALL_JUMPS_S = (0.0, 0.0, -86_400.0, 3_600.0, 31_536_000.0)  # jumps of the wall clock while no coordinator runs
# verb: weight
MIX = {
    "submit": 22,
    "submit_on": 6,
    "again": 2,
    "attach": 2,
    "cancel": 5,
    "finish": 3,
    "get": 4,
    "list": 2,
    "stats": 2,
    "health": 1,
    "create": 7,
    "append": 9,
    "fork": 5,
    "info": 2,
    "tokens": 3,
    "remove": 6,
    "block": 1,
    "ref": 3,
    "unref": 3,
    "explain": 2,
    "purge": 1,
    "hostile": 4,
    "disconnect": 1,
    "goodbye": 1,
    "connect": 4,
    "stall": 0.7,
    "kill": 1,
    "hang": 0.3,
    "garble": 1,
}
SCORES_SHARE = 0.15  # of the requests want log-probabilities of their prompts
# faults that look like the crash of a worker
DEATHS = ("kill", "hang", "garble")
HOSTILE = (
    "zero_tokens",
    "no_prompt",
    "vocabulary",
    "too_long",
    "temperature",
    "tenant",
    "stops",
    "attach_unknown",
    "deadline",
    "priority",
    "key",
    "many",
    "unknown_request",
    "unknown_sequence",
    "twice",
    "counts",
    "block_range",
    "count_max",
    "explain_nothing",
    "bytes",
    "tag",
    "frames",
)


class ActionDrawer:
    """Draws actions from a seed, from the settings and its own labels alone.

    The coordinator's deaths come from the stream `deaths`; conversations, pins and log-probabilities of prompts come
    from others, so that all other actions are the same as in a world without them.
    """

    def __init__(self, settings: Settings, random: Random, deaths: Random | None = None) -> None:
        self._settings, self._random, self._deaths = settings, random, deaths or Draws("deaths")
        self._pins = Draws(f"pins/{settings.gap_us}/{settings.step_us}/{settings.workers}")
        self._talks = Draws(f"talks/{settings.gap_us}/{settings.step_us}/{settings.workers}")
        self._jumps = Draws(f"jumps/{settings.gap_us}/{settings.step_us}/{settings.workers}")
        self._stands = Draws(f"stands/{settings.gap_us}/{settings.step_us}/{settings.workers}")
        self._scores = Draws(f"scores/{settings.gap_us}/{settings.step_us}/{settings.workers}")
        self._wipes = Draws(f"wipes/{settings.gap_us}/{settings.step_us}/{settings.workers}")
        self._requests = self._sequences = 0
        shared = [[self._token() for _ in range(settings.context)] for _ in range(3)]
        self._stems = shared
        self._owner: dict[str, str] = {}
        self._keyed: list[str] = []

    def actions(self) -> Iterator[Action]:
        """Yield actions without end, with non-decreasing times."""
        every = self._with_talks() if self._settings.kinds else self._everyday()
        if self._settings.wipe_gap_us:
            every = self._with_wipes(every)
        if self._settings.stand_gap_us:
            every = self._with_standstills(every)
        if not self._settings.crash_gap_us:
            yield from every
            return
        dies_us, *death = self._death(0)
        for action in every:
            while dies_us <= action[0]:
                if self._deaths.random() < CANCEL_SHARE:
                    number = self._requests - int(self._deaths.expovariate(0.3))
                    yield (max(0, dies_us - self._settings.short_us), "cancel", "c0", f"r{max(0, number)}")
                yield (dies_us, *death)
                dies_us, *death = self._death(dies_us)
            yield action

    def _with_standstills(self, actions: Iterator[Action]) -> Iterator[Action]:
        """Add stops of the coordinator's process to the actions."""
        random, gap_us = self._stands, self._settings.stand_gap_us
        stands_us = int(random.expovariate(1.0) * gap_us)
        for action in actions:
            if stands_us <= action[0]:
                for_us = random.choice((1_000, 10_000, 100_000))
                gives_up = tuple(random.random() < 0.5 for _ in range(3))
                yield (stands_us, "stand", COORDINATOR, for_us, gives_up)
                # Commands wait in the sockets meanwhile; more than a few dozen add nothing new.
                stands_us += for_us + 1 + int(random.expovariate(1.0) * gap_us)
            yield action

    def _with_wipes(self, actions: Iterator[Action]) -> Iterator[Action]:
        """Add wipes of tenants to the actions, some twice."""
        random, wipes_us = self._wipes, 0
        for action in actions:
            if wipes_us <= action[0]:
                tenant = random.choice(TENANTS)
                for _ in range(random.choice((1, 1, 2))):
                    yield (wipes_us, WIPE, f"c{random.randrange(self._settings.clients)}", tenant)
                wipes_us = action[0] + 1 + int(random.expovariate(1.0) * self._settings.wipe_gap_us)
            yield action

    def _with_talks(self) -> Iterator[Action]:
        random = self._talks
        later: list[Action] = []
        for action in self._everyday():
            while later and later[0][0] <= action[0]:
                yield later.pop(0)
            yield action
            if random.random() < TALK_SHARE:
                earlier = f"r{max(0, self._requests - int(random.expovariate(0.3)))}"
                yield self._talk(action[0], earlier, 0, random.choice(TURNS))
            if random.random() < AHEAD_SHARE:
                client = f"c{random.randrange(self._settings.clients)}"
                earlier = f"r{max(0, self._requests - int(random.expovariate(0.3)))}"
                self._requests += 1
                yield (action[0], AHEAD, client, f"r{self._requests}", earlier)
            if random.random() < CONVERSATION_SHARE:
                more = self._conversation(action[0]) if random.random() < 0.6 else self._cut_and_continued(action[0])
                later = sorted([*later, *more], key=lambda each: each[0])

    def _talk(self, at_us: int, earlier: str, less: int, turn: tuple[bool, bool]) -> Action:
        """Return the next turn of a conversation, which leaves out the last `less` tokens of the earlier one."""
        random = self._talks
        self._requests += 1
        client = f"c{random.randrange(self._settings.clients)}"
        text = tuple(random.randrange(self._settings.vocabulary - 1) for _ in range(random.randint(1, 4)))
        return (at_us, TALK, client, f"r{self._requests}", earlier, less, text, random.randint(1, 6), turn)

    def _conversation(self, at_us: int) -> Iterator[Action]:
        """Yield turns that keep their sequences, each on the one before or on its beginning, and cuts between them."""
        random, settings = self._talks, self._settings
        pause_us = 4 * settings.short_us + 2 * settings.turn_us + 12 * settings.step_us
        self._requests += 1
        client, label = f"c{random.randrange(settings.clients)}", f"r{self._requests}"
        size = random.randint(1, max(1, settings.context // 3))
        prompt = tuple(random.randrange(settings.vocabulary - 1) for _ in range(size))
        more = (("keep_ms", KEEP_MS),)
        yield (at_us, "submit", client, (label,), prompt, random.randint(1, 4), None, (), random.choice(TENANTS), more)
        for _ in range(random.randint(1, 3)):
            at_us += pause_us
            if random.random() < REWIND_SHARE:
                yield (at_us, REWIND, client, label, random.randint(1, 4))
                at_us += pause_us // 4
            action = self._talk(at_us, label, random.choice((0, 0, 1, 3)), (True, True))
            yield action
            if random.random() < 0.7:
                label = action[3]

    def _cut_and_continued(self, at_us: int) -> Iterator[Action]:
        """Yield a sequence that is continued, cut off, and continued with other tokens."""
        random, settings = self._talks, self._settings
        pause_us = 4 * settings.short_us + 2 * settings.turn_us + 12 * settings.step_us
        client = f"c{random.randrange(settings.clients)}"
        label = self._new_sequence(client)
        most = max(1, settings.context // 4)
        prompt = tuple(random.randrange(settings.vocabulary - 1) for _ in range(random.randint(1, 2 * most)))
        yield (at_us, "create", client, label, prompt, random.choice(TENANTS), KEEP_MS, "")
        for _ in range(2):
            at_us += pause_us
            self._requests += 1
            text = tuple(random.randrange(settings.vocabulary - 1) for _ in range(random.randint(1, most)))
            yield (at_us, "submit_on", client, f"r{self._requests}", label, text, random.randint(1, most), ())
            at_us += random.choice((pause_us, pause_us // 4))  # a request that still runs is not cut
            yield (at_us, REWIND, client, label, random.randint(1, 2 * most))

    def _death(self, at_us: int) -> Action:
        """Return a death of the coordinator or a snapshot."""
        random = self._deaths
        at_us += 1 + int(random.expovariate(1.0) * self._settings.crash_gap_us)
        if random.random() < CUT_SHARE:
            return (at_us, "cut", COORDINATOR)
        how = random.choice((BEFORE, TORN, AFTER, AFTER, AFTER))
        part = random.randrange(WHOLE) if how == TORN else int(random.expovariate(0.5))
        back_us = random.choice((100, 1_000, 8_000))
        return (at_us, "crash", COORDINATOR, how, part, back_us, self._jumps.choice(WALL_JUMPS_S))

    def _everyday(self) -> Iterator[Action]:
        at_us = 0
        for i in range(self._settings.clients):
            yield (0, "connect", f"c{i}", False)
        mix = {verb: weight for verb, weight in MIX.items() if not (self._settings.deadly and verb in DEATHS)}
        verbs, weights = list(mix), list(accumulate(mix.values()))
        total, last = float(weights[-1]), len(verbs) - 1
        parameters = {verb: getattr(self, f"_{verb}") for verb in verbs}
        while True:
            at_us += int(self._random.expovariate(1.0) * self._settings.gap_us)
            if self._random.random() < TREE_SHARE:
                for action in self._tree(at_us):
                    at_us = action[0]
                    yield action
                continue
            if self._random.random() < TUG_SHARE:
                label = self._request()
                for _ in range(3):
                    yield (at_us, "attach", self._client(), label, -1)
                continue
            if self._random.random() < SAMPLES_SHARE:
                for action in self._samples(at_us):
                    at_us = action[0]
                    yield action
                continue
            if self._random.random() < CREATE_AND_FORK_SHARE:
                for action in self._create_and_fork(at_us):
                    at_us = action[0]
                    yield action
                continue
            if self._random.random() < APPEND_WHILE_RUNNING_SHARE:
                for action in self._append_while_running(at_us):
                    at_us = action[0]
                    yield action
                continue
            verb = verbs[bisect(weights, self._random.random() * total, 0, last)]  # equivalent to `choices`
            yield (at_us, verb, *parameters[verb]())

    # ----------------------------------------------------------------------------------------------------- parameters

    def _client(self) -> str:
        return f"c{self._random.randrange(self._settings.clients)}"

    def _worker(self) -> str:
        return f"w{self._random.randrange(len(self._settings.workers))}"

    def _token(self) -> int:
        return self._random.randrange(self._settings.vocabulary - 1)

    def _text(self, size: int) -> tuple[int, ...]:
        """Return tokens: often the start of a shared stem, sometimes cut off by other tokens."""
        stem = self._random.choice(self._stems)[:size]
        if self._random.random() < 0.5:
            at = self._random.randrange(size + 1)
            stem = [*stem[:at], *(self._token() for _ in range(size - at))]
        if self._random.random() < 0.01 and stem:
            stem[self._random.randrange(size)] = poison(self._settings.vocabulary)
        return tuple(stem)

    def _size(self, share: float = 1.0) -> int:
        return self._random.randint(1, max(1, int(self._settings.context * share) - 2))

    def _tenant(self) -> str:
        return self._random.choice(TENANTS)

    def _request(self) -> str:
        """Return a request's label, mostly a recent one."""
        return f"r{max(0, self._requests - int(self._random.expovariate(0.3)))}"

    def _sequence(self) -> str:
        return f"s{max(0, self._sequences - int(self._random.expovariate(0.3)))}"

    def _new_sequence(self, client: str) -> str:
        self._sequences += 1
        label = f"s{self._sequences}"
        self._owner[label] = client
        return label

    def _of(self, label: str) -> str:
        """Return the client that acts on a sequence, mostly its owner."""
        return self._owner.get(label, "c0") if self._random.random() < 0.9 else self._client()

    def _tree(self, at_us: int) -> Iterator[Action]:
        """Yield forks that write different tokens at the same time, where their parent's last block is half full."""
        client = self._client()
        root = self._new_sequence(client)
        settings, later_us = self._settings, 4 * self._settings.short_us + 2 * self._settings.turn_us
        yield (at_us, "create", client, root, self._text(self._size(0.5)), self._tenant(), 100, "")
        at_us += later_us
        self._requests += 1
        yield (at_us, "submit_on", client, f"r{self._requests}", root, (), 1, ())
        at_us += later_us + 4 * settings.step_us
        leaves = tuple(self._new_sequence(client) for _ in range(self._random.choice((1, 2))))
        yield (at_us, "fork", client, root, leaves)
        at_us += later_us
        for label in (root, *leaves):
            self._requests += 1
            yield (at_us, "submit_on", client, f"r{self._requests}", label, (self._token(),), 4, ())

    def _samples(self, at_us: int) -> Iterator[Action]:
        """Yield several answers to one prompt, the cancel of the first one, and the same command again, twice."""
        client, settings = self._client(), self._settings
        labels = tuple(f"r{self._requests + 1 + i}" for i in range(SAMPLES_MAX - 1))
        self._requests += len(labels)
        more = (("count", len(labels)), ("key", f"key of {labels[0]}"))
        yield (at_us, "submit", client, labels, self._text(self._size(0.8)), 2, None, (), self._tenant(), more)
        at_us += 2 * settings.short_us + 2 * settings.turn_us
        yield (at_us, "cancel", client, labels[0])
        for _ in range(2):
            at_us += 8 * settings.step_us
            yield (at_us, "again", client, labels[0], True)

    def _create_and_fork(self, at_us: int) -> Iterator[Action]:
        """Yield a sequence with KV; then, without a pause, its fork, a token for the fork, and the removal of both."""
        client, settings = self._client(), self._settings
        root = self._new_sequence(client)
        self._requests += 1
        yield (at_us, "create", client, root, self._text(self._size(0.7)), self._tenant(), 100, "")
        at_us += 4 * settings.short_us + 2 * settings.turn_us
        yield (at_us, "submit_on", client, f"r{self._requests}", root, (), 1, ())
        at_us += 4 * settings.short_us + 2 * settings.turn_us + 4 * settings.step_us
        leaf = self._new_sequence(client)
        yield (at_us, "fork", client, root, (leaf,))
        at_us += 2 * settings.short_us + settings.turn_us
        yield (at_us, "append", client, ((leaf, (self._token(),)),))
        yield (at_us, "remove", client, (root, leaf))

    def _append_while_running(self, at_us: int) -> Iterator[Action]:
        """Yield a long request on a sequence, and appends to the sequence meanwhile, which must all be refused."""
        client, settings = self._client(), self._settings
        label = self._new_sequence(client)
        self._requests += 1
        yield (at_us, "create", client, label, self._text(self._size(0.5)), self._tenant(), 5, "")
        at_us += 2 * settings.short_us + settings.turn_us
        yield (at_us, "submit_on", client, f"r{self._requests}", label, (), self._size(0.4), ())
        for _ in range(4):
            at_us += 2 * settings.step_us
            yield (at_us, "append", client, ((label, (self._token(),)),))

    # ---------------------------------------------------------------------------------------------------------- verbs

    def _submit(self) -> Action:
        size = self._size()
        most = self._settings.context - size
        seed = self._random.randrange(1 << 64) if self._random.random() < 0.5 else None
        stops = tuple(self._token() for _ in range(self._random.choice((0, 0, 1, 3))))
        answer = self._random.randint(1, max(1, most))
        count = self._random.randint(2, SAMPLES_MAX) if self._random.random() < 0.08 else 1
        labels = tuple(f"r{self._requests + 1 + i}" for i in range(count))
        self._requests += count
        more = self._more(labels[0], ("count", count) if count > 1 else None)
        if self._settings.scores and self._scores.random() < SCORES_SHARE:
            more = (*more, ("prompt_logprobs", self._scores.choice((0, 1, 3))))
            if count == 1 and self._scores.random() < 0.5:
                answer = 0
        if self._pins.random() < PINS_SHARE:
            count = self._pins.randint(1, 2)
            pins = tuple((self._pins.randint(1, size), self._pins.choice(PINS_MS)) for _ in range(count))
            more = (*more, ("pins", pins))
        return (self._client(), labels, self._prompt(size), answer, seed, stops, self._tenant(), more)

    def _prompt(self, size: int) -> tuple[int, ...]:
        """Return a prompt; in a deadly world, now and then one that crashes workers."""
        if self._settings.deadly and self._random.random() < 0.06:
            return (poison(self._settings.vocabulary),) * DEADLY
        return self._text(size)

    def _submit_on(self) -> Action:
        self._requests += 1
        label, sequence = f"r{self._requests}", self._sequence()
        text = self._text(self._random.randint(0, 3))
        return (self._of(sequence), label, sequence, text, self._size(0.4), self._more(label, None))

    def _more(self, label: str, count: tuple[str, int] | None) -> tuple[tuple[str, Any], ...]:
        """Return rare options: most requests have none, some have several."""
        random = self._random.random
        more: list[tuple[str, Any]] = [count] if count else []
        if random() < 0.3:
            more.append(("stream", False))
        if self._settings.batches and random() < self._settings.batches:
            more.append(("priority", -100))
        elif random() < 0.2:
            priority = self._random.choice((-2, 1, 5))
            more.append(("priority", -100 if priority == -2 and self._requests % 2 else priority))  # that of a batch
        if random() < 0.15:
            more.append(("logprobs", self._random.choice((1, 2, 4))))
        if random() < 0.06:
            more.append(("deadline_ms", self._random.choice((1, 5, 30, 100))))
        if random() < 0.04:
            more.append(("first_token_ms", self._random.choice((1, 5, 30))))
        if random() < 0.08:
            more.append(("detached", True))
        if random() < 0.15:
            more.append(("key", f"key of {label}"))
            self._keyed.append(label)
        return tuple(more)

    def _again(self) -> Action:
        label = self._random.choice(self._keyed[-4:]) if self._keyed else "r0"
        return (self._client(), label, self._random.random() < 0.8)

    def _attach(self) -> Action:
        return (self._client(), self._request(), self._random.choice((-1, -1, 0, 1, 3)))

    def _stall(self) -> Action:
        return (self._client(), self._random.choice((0, 1, 3)), self._random.randint(500, 80_000))

    def _hang(self) -> Action:
        return (self._worker(),)

    def _cancel(self) -> Action:
        return (self._client(), self._request())

    def _finish(self) -> Action:
        return (self._client(), self._random.randrange(8), self._random.choice((-1, 0, 0, 1, 2)))

    def _get(self) -> Action:
        return (self._client(), self._request(), self._random.random() < 0.7)

    def _list(self) -> Action:
        return (self._client(), self._random.randint(1, 8))

    def _stats(self) -> Action:
        return (self._client(),)

    _health = _stats

    def _create(self) -> Action:
        client = self._client()
        ttl_ms = self._random.choice((0, 0, 5, 100))
        size = self._random.choice((0, self._size(0.7)))
        salt = self._random.choice(("", "", "", "shared"))
        return (client, self._new_sequence(client), self._text(size), self._tenant(), ttl_ms, salt)

    def _append(self) -> Action:
        labels = sorted({self._sequence() for _ in range(self._random.choice((1, 1, 2, 3)))})
        return (self._of(labels[0]), tuple((label, self._text(self._size(0.2))) for label in labels))

    def _fork(self) -> Action:
        parent = self._sequence()
        client = self._of(parent)
        return (client, parent, tuple(self._new_sequence(client) for _ in range(self._random.choice((1, 1, 2)))))

    def _info(self) -> Action:
        return (self._client(), self._sequence())

    _tokens = _info

    def _remove(self) -> Action:
        labels = sorted({self._sequence() for _ in range(self._random.choice((1, 2)))})
        return (self._of(labels[0]), tuple(labels))

    def _block(self) -> Action:
        return (self._client(), self._random.randrange(sum(self._settings.workers)))

    def _ref(self) -> Action:
        holder = self._random.choice(("x", "y", "z"))
        generation = self._random.choice((-1, -1, self._random.randrange(3)))
        return (self._client(), self._random.randrange(sum(self._settings.workers)), holder, generation)

    _unref = _ref

    def _explain(self) -> Action:
        kind = self._random.choice(("block", "request", "sequence", "tenant"))
        subject = {
            "block": self._random.randrange(sum(self._settings.workers)),
            "request": self._request(),
            "sequence": self._sequence(),
            "tenant": self._tenant(),
        }[kind]
        return (self._client(), kind, subject)

    def _purge(self) -> Action:
        return (self._client(), self._random.choice((0, 10, 1000)))

    def _hostile(self) -> Action:
        return (self._client(), self._random.choice(HOSTILE), self._sequence())

    def _disconnect(self) -> Action:
        return (self._client(),)

    _goodbye = _disconnect

    def _connect(self) -> Action:
        return (self._client(), self._random.random() < 0.7)

    def _kill(self) -> Action:
        return (self._worker(), self._random.randint(1, 30_000))

    def _garble(self) -> Action:
        return (self._worker(), self._random.choice(("vocabulary", "missing", "step", "epoch")))


def text(action: Action) -> str:
    """Return an action as one line of text."""
    at_us, verb, *rest = action
    words = " ".join(part if isinstance(part, str) else repr(part) for part in rest)
    return f"{at_us / 1000:9.3f} ms  {verb:<11} {words}"
