"""A gateway with scripted answers: the real application over a fake coordinator.

The tokenizer has a token for each byte, and special tokens for the markers of formats, so that any text can be an
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
import numpy as np
from starlette.applications import Starlette
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvforge.client.aio import AsyncClient, AsyncStreams
from kvforge.client.options import RequestOptions
from kvforge.client.prompt_stream import PromptStream
from kvforge.gateway.access import Access
from kvforge.gateway.anthropic.routes import Anthropic
from kvforge.gateway.app import unknown
from kvforge.gateway.batches import Batches
from kvforge.gateway.chat.prompt_cleaner import PromptCleaner
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Generation, Submission, WakeUp
from kvforge.gateway.generate.service import Load, Model
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.openai.background import Background
from kvforge.gateway.openai.routes import OpenAI
from kvforge.gateway.openai.stored import Stored
from kvforge.gateway.openapi.routes import routes as described
from kvforge.gateway.page.routes import routes as page_routes
from kvforge.gateway.parse import choose
from kvforge.gateway.storage import Storage
from kvforge.gateway.text.inline import InlineText, NoTexts
from kvforge.protocol.errors import Conflict, KvforgeError, SequenceNotFound
from kvforge.protocol.messages import Ended, Explanation, Int32Array, ModelInfo, Timings
from kvforge.text.tokenizer import Tokenizer

EOS = "<|im_end|>"
SPECIAL = (EOS, "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
NAME = "scripted"
FIRST_ID = 4096
TURNS = 20
CONTEXT = 4096


def tokenizer(template: str = HERMES) -> Tokenizer:
    """Return a tokenizer with a token for each byte. template: "": none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: at for at, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, chat_template=template or None)
    return Tokenizer(made, NAME)


class KeptSequences:
    """A fake of the part of `AsyncClient` that works on kept sequences.

    removed: those that were removed. kept: the time that each was given. gone: those that do not exist any more.
    """

    def __init__(self) -> None:
        self.removed: list[int] = []
        self.kept: dict[int, float] = {}
        self.gone: set[int] = set()

    def _check(self, sequence: int) -> None:
        if sequence in self.gone:
            raise SequenceNotFound(sequence, "its place was needed")

    async def remove(self, sequence: int) -> int:
        """Note the sequence."""
        self._check(sequence)
        self.removed.append(sequence)
        return 1

    async def keep(self, sequence: int, idle_ttl_s: float) -> None:
        """Note the time."""
        self._check(sequence)
        self.kept[sequence] = idle_ttl_s

    async def explain(self, *, sequence: int = 0, request: int = 0) -> Explanation:
        """Explain anything."""
        self._check(sequence)
        subject = f"sequence {sequence}" if sequence else f"request {request}"
        return Explanation(rid=1, subject=subject, sentences=("It is so.",), facts={})


@dataclass
class Script:
    """The outcome of requests.

    keyed: requests by their idempotency key; one that comes again takes the stream over.
    answers: the text of each request's answer in turn; EOS follows an answer with the reason "stop". reply: computes
    the answer to a prompt, in place of `answers`. stuck: whether the answer to a prompt never ends. step: tokens that
    arrive together. keeps: a request that asks for it leaves a sequence, numbered this much higher; 0: none.
    kinds: workers compute prompts and generated tokens differently. pinned_max: tokens that a request may pin.
    away: the refusal of what is computed ahead.
    error: the refusal, or the error after an answer's
    tokens.
    """

    answers: list[str] = field(default_factory=lambda: ["hello"])
    reason: str = "stop"
    step: int = 3
    cached: int = 0
    refusal: KvforgeError | None = None
    error: KvforgeError | None = None
    asked: list[tuple[list[int], int, RequestOptions]] = field(default_factory=list)
    finished_at: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    given: int = 0
    hang: bool = False
    reply: Callable[[str], str] | None = None
    stuck: Callable[[str], bool] | None = None
    keyed: dict[str, tuple[Stream, list[int], str]] = field(default_factory=dict)
    next_id: int = FIRST_ID
    keeps: int = 0
    kinds: bool = False
    pinned_max: int = 1 << 20
    away: KvforgeError | None = None
    sequences: KeptSequences = field(default_factory=KeptSequences)

    def resume(self) -> None:
        """Let requests with keys go on that hang at the end of their tokens."""
        self.hang = False
        for stream, _, _ in self.keyed.values():
            _soon(stream._step)


class Stream:
    """A fake `AsyncStream`."""

    def __init__(
        self, script: Script, request_id: int, prompt: int, ids: list[int], changed: Callable[[], None], reason: str
    ) -> None:
        self.request_id, self.error, self.ended = 0, None, cast(Ended | None, None)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.prompt_logprobs: PromptStream | None = None
        self._script, self._id, self._prompt, self._ids, self._changed = script, request_id, prompt, ids, changed
        self._reason = reason
        self.stuck = False
        self.sequence_id = 0
        self.pinned: tuple[int, ...] = ()
        self._limit: int | None = None
        self._gone = False
        self.failure: KvforgeError | None = None
        _soon(self._accept)

    @property
    def done(self) -> bool:
        return self.ended is not None or self.failure is not None

    def cancel(self) -> None:
        self._script.cancelled.append(self._id)
        self._gone = True

    def leave(self) -> None:
        self._script.left.append(self._id)
        self._gone = True

    def finish_at(self, tokens: int) -> None:
        self._script.finished_at.append(tokens)
        self._limit = tokens

    def taken_over(self) -> None:
        """Let another connection read the request."""
        if not (self._gone or self.done):
            self.error = self.failure = Conflict(f"request {self._id} is read by another connection now")
            self._changed()
        self._gone = True

    def _accept(self) -> None:
        if self._script.refusal is not None:
            self.error = self.failure = self._script.refusal
        else:
            self.request_id = self._id
            _soon(self._step)
        self._changed()

    def _step(self) -> None:
        if self._gone or self.done:
            return
        came = self._ids[len(self.tokens) : len(self.tokens) + self._script.step]
        if self._limit is None and came:
            self.tokens += came
            self._script.given += len(came)
            self.logprobs += [-0.5] * len(came)
            self.top_logprobs += [((token, -0.5), (token + 1, -1.5)) for token in came]
        elif self._script.error is not None:
            self.error = self.failure = self._script.error
        elif not (self._script.hang or self.stuck):
            self._end()
        self._changed()
        if not self.done and not ((self._script.hang or self.stuck) and not came):
            _soon(self._step)

    def _end(self) -> None:
        kept = len(self.tokens) if self._limit is None else self._limit
        cut = len(self.tokens) - kept
        for column in (self.tokens, self.logprobs, self.top_logprobs):
            del column[kept:]  # type: ignore[attr-defined]
        self.ended = Ended(
            request_id=self._id,
            reason="stop" if self._limit is not None else self._reason,
            generated_tokens=kept,
            prompt_tokens=self._prompt,
            cached_tokens=self._script.cached,
            timings=Timings(),
            cut_tokens=cut,
            sequence_id=self.sequence_id,
            pinned=self.pinned,
        )


def scored(prompt: Sequence[int], width: int) -> PromptStream:
    """Return the scripted log-probabilities of a prompt: token t has -t / 100 and rank 1, or 4 if it is odd."""
    stream = PromptStream(len(prompt) - 1)
    for token in prompt[1:]:
        stream.tokens.append(token)
        stream.logprobs.append(-token / 100)
        stream.ranks.append(4 if token % 2 else 1)
        best = token if token % 2 == 0 else token + 1
        stream.top_logprobs.append(tuple((best + 2 * i, -best / 100 - i) for i in range(width)))
    return stream


def _soon(call: Callable[[], None], turns: int = TURNS) -> None:
    """Wait until the waiters notified earlier have run."""
    loop = asyncio.get_running_loop()
    loop.call_soon(*((_soon, call, turns - 1) if turns else (call,)))


class Streams:
    """A fake `AsyncStreams`."""

    def __init__(self, script: Script, spoken: Tokenizer) -> None:
        self._script, self._spoken = script, spoken

    def submit_samples(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> tuple[Stream, ...]:
        """Return the next answers of the script."""
        script = self._script
        if options.ahead and script.away is not None:
            raise script.away
        script.asked.append((prompt.tolist(), count, options))
        key, streams = options.idempotency_key, []
        spoken = ""
        if script.reply is not None or script.stuck is not None:
            spoken = self._spoken.stream(continues=True, keep=frozenset(SPECIAL)).push(prompt.tolist())
        if key in script.keyed:
            before, ids, reason = script.keyed[key]
            before.taken_over()
            again = Stream(script, before._id, len(prompt), ids, changed, reason)
            again.sequence_id = before.sequence_id
            script.keyed[key] = again, ids, reason
            return (again,)
        for _ in range(count):
            if script.reply is not None:
                text = script.reply(spoken)
            else:
                text = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            ids = self._spoken.encode(text, special=False)
            reason = "length" if len(ids) > options.max_tokens else script.reason
            ids = ids[: options.max_tokens]
            if reason == "stop" and options.max_tokens:
                ids += self._spoken.encode(EOS, special=False)
            streams.append(Stream(script, script.next_id, len(prompt), ids, changed, reason))
            streams[-1].sequence_id = script.keeps + script.next_id if script.keeps and options.keep_s else 0
            share = script.pinned_max
            streams[-1].pinned = tuple(min(tokens, share) // 16 * 16 for tokens, _ in options.pins)
            streams[-1].stuck = script.stuck is not None and script.stuck(spoken)
            width = options.sampling.prompt_logprobs if options.sampling is not None else None
            if width is not None and len(streams) == 1:
                streams[0].prompt_logprobs = scored(prompt.tolist(), width)
            script.next_id += 1
            if key:
                script.keyed[key] = streams[-1], ids, reason
        return tuple(streams)


def at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits, with or without an event loop."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


class Service:
    """A fake `kvforge.gateway.generate.service.Service`."""

    def __init__(
        self,
        script: Script,
        spoken: Tokenizer,
        hygiene: PromptCleaner | None = None,
        context: int = CONTEXT,
        tool_format: str = "",
        *,
        has_tokenizer: bool = True,
    ) -> None:
        info = ModelInfo(
            name=NAME, source="", architecture="none", fingerprint="0", vocab_size=512, context_tokens_max=context
        )
        prompts = Prompts(spoken.table(), InlineText(spoken), hygiene)
        format_ = choose(spoken.chat_template, tool_format)
        if not has_tokenizer:
            prompts, format_ = Prompts(None, NoTexts(), hygiene), choose("")
        at_once(prompts.look(format_.write_calls))
        self.model = self.known = Model(info, (NAME, "other"), prompts, 1, format_)
        self.reason = ""
        self.started = 0
        self.kept, self._script = script.sequences, script
        self._streams = Streams(script, spoken)

    def client_of(self, replica: str) -> AsyncClient:
        """See the original."""
        return cast(AsyncClient, self.kept)

    async def load(self, within_s: float) -> Load | None:
        """See the original. Nothing is known."""
        return None

    def start(self, wanted: Submission, bell: WakeUp, session: str = "") -> Generation:
        """See the original."""
        wanted = replace(wanted, ahead=wanted.ahead if self._script.kinds else 0)
        return Generation(cast(AsyncStreams, self._streams), wanted, bell)


def application(
    script: Script,
    settings: Settings | None = None,
    template: str = HERMES,
    context: int = CONTEXT,
    *,
    has_tokenizer: bool = True,
    storage: Storage | None = None,
    started: Callable[[Background], None] = lambda background: None,
) -> Starlette:
    """Return the application with both APIs.

    context: token limit of a prompt and its answer. storage: of stored responses, files and batches. started: called
    with what follows background responses.
    """
    settings = settings or Settings()
    hygiene, format_ = PromptCleaner(settings.strip, settings.move), settings.tool_format
    service = cast(Any, Service(script, tokenizer(template), hygiene, context, format_, has_tokenizer=has_tokenizer))
    guard = Guard(Access(settings))
    background = Background(service, Stored(storage, settings.storage), settings) if storage is not None else None
    if background is not None:
        started(background)
    apis = [*OpenAI(service, settings, background).routes(guard), *Anthropic(service, settings).routes(guard)]
    if storage is not None:
        apis += Batches(service, storage, settings).routes(guard)
    return Starlette(routes=[*apis, *described()], exception_handlers={404: unknown, 405: unknown})


class Coordinator:
    """A fake of the part of `AsyncClient` that the page uses: every request is finished and explained."""

    async def cancel(self, request: int) -> None: ...
    async def drain(self, deadline_s: float | None = None) -> None: ...
    async def explain(self, **subject: Any) -> Explanation:
        return Explanation(rid=1, subject=str(subject), sentences=("It is so.",), facts={})


def page() -> Starlette:
    """Return the paths of the page, open to everyone."""
    played = cast(AsyncClient, Coordinator())
    return Starlette(routes=[*page_routes(lambda: played, allowed=lambda request, right: None), *described()])


def client(app: Starlette) -> httpx.AsyncClient:
    """Return an HTTP client of the application, without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def ask(app: Starlette, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    """Send one POST. body: a JSON value, or bytes."""

    async def post() -> httpx.Response:
        async with client(app) as http:
            if isinstance(body, bytes):
                return await http.post(path, content=body, headers=headers)
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(post())


def prompt_text(script: Script, at: int = -1) -> str:
    """Return the prompt of a request, including special tokens."""
    ids: Sequence[int] = script.asked[at][0]
    spoken = tokenizer()
    return spoken.stream(continues=True, keep=frozenset(SPECIAL)).push(np.array(ids).tolist())
