"""/v1/completions: continue a text."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from kvforge.client.arguments import SAMPLES_MAX, token_array
from kvforge.client.prompt_stream import PromptStream
from kvforge.gateway.chat.prompts import NO_TOKENIZER
from kvforge.gateway.generate.answer import Piece
from kvforge.gateway.generate.generation import CompleteAnswer, Generation, Submission
from kvforge.gateway.generate.service import Model
from kvforge.gateway.generate.shape_checks import check_shape
from kvforge.gateway.http.encoding import encode
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.parse.events import Content, Event
from kvforge.gateway.replicas.stream import Stream
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array

from . import logprobs
from .bodies import DONE, EventEncoder, usage_of
from .call import Call, total
from .fields import check_ignored, requested_shape, sampling_of, stops_of
from .prompt_events import PromptEvents
from .request_body import Completion
from .unimplemented_fields import UNIMPLEMENTED

READER = Reader(Completion, UNIMPLEMENTED)
MAX_TOKENS = 16  # OpenAI's own default
PROMPTS_MAX = 128
KIND = "text_completion"
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the request. `text` is what `echo` repeats: the prompt as given or decoded, or ""."""

    ids: Int32Array
    text: str


async def prompts_of(asked: Completion, model: Model) -> list[Prompt]:
    """Return the prompts of a request.

    Raises:
        InvalidRequest: Names `prompt`.
    """
    given = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    ids = [token for token in given if isinstance(token, int)]
    if ids and len(ids) < len(given):
        raise InvalidRequest("prompt", "mixes token ids with texts or lists")
    several = [ids] if ids else [one for one in given if not isinstance(one, int)]
    if not 1 <= len(several) <= PROMPTS_MAX:
        raise InvalidRequest("prompt", f"holds {len(several)} prompts (expected 1 to {PROMPTS_MAX})")
    special = asked.add_special_tokens is not False
    return [await _prompt(one, model, special, bool(asked.echo), f"prompt[{at}]") for at, one in enumerate(several)]


async def _prompt(given: str | list[int], model: Model, special: bool, echo: bool, field: str) -> Prompt:
    if isinstance(given, str):
        ids = await model.prompts.text(given, special=special, field=field) if given else NO_TOKENS
        if not len(ids):
            raise InvalidRequest(field, "is empty; it needs at least one token")
        return Prompt(ids, given)
    ids = token_array(field, given)
    return Prompt(ids, await model.prompts.decode(ids, field) if echo else "")


@dataclass(slots=True)
class PromptPart:
    """The log-probabilities of a prompt: for `echo`, and in vLLM's format."""

    echoed: logprobs.EchoedLogprobs | None = None
    listed: list[dict[str, Any] | None] | None = None


class Completions:
    """One request to /v1/completions: a generation for each of its prompts."""

    @classmethod
    async def of(cls, call: Call, asked: Completion) -> Completions:
        """Check a request and tokenise its prompts.

        Raises:
            InvalidRequest: Names the field.
        """
        work = cls(call, asked)
        prompts = await prompts_of(asked, call.model)
        await check_shape(call.model.prompts, requested_shape(asked))
        work.use(prompts)
        return work

    def __init__(self, call: Call, asked: Completion) -> None:
        check_ignored(asked)
        if asked.suffix:
            raise InvalidRequest("suffix", "is not supported: the model only continues a prompt")
        self.call, self.asked = call, asked
        self.n = asked.n or 1
        self.best_of = asked.best_of if asked.best_of is not None else self.n
        self._check()
        self.logprobs = asked.logprobs
        self.returns_ids = bool(asked.return_token_ids) or not call.model.prompts.has_text
        self.prompts: list[Prompt] = []
        self.wanted: list[Submission] = []

    def use(self, prompts: list[Prompt]) -> None:
        """Set the prompts and build the submissions."""
        call, asked, self.prompts = self.call, self.asked, prompts
        call.names.shape = shape = requested_shape(asked)
        width = self._prompt_logprobs()
        if width is not None:
            field = "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"
            logprobs.check_size(field, sum(len(prompt.ids) for prompt in prompts), width)
        sampling = sampling_of(asked, asked.logprobs or 0, shape, width)
        most = MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        options = call.options(sampling, asked, most)
        self.wanted = [
            Submission(
                prompt=prompt.ids,
                options=options
                if at == 0 or not options.idempotency_key
                else replace(options, idempotency_key=f"{options.idempotency_key}/{at}"),
                text=lambda: call.model.prompts.stream(continues=True),
                count=self.best_of,
                stops=stops_of(asked),
                stop_tokens=frozenset(asked.stop_token_ids or ()),
                resume=call.resume,
            )
            for at, prompt in enumerate(self.prompts)
        ]

    def _check(self) -> None:
        asked = self.asked
        if asked.stop and not self.call.model.prompts.has_text:
            raise InvalidRequest("stop", f"{NO_TOKENIZER}, so stop strings cannot be matched: use stop_token_ids")
        if self.best_of < self.n:
            raise InvalidRequest("best_of", f"is {self.best_of}; it must be at least n, which is {self.n}")
        if self.best_of > SAMPLES_MAX:
            raise InvalidRequest("best_of", f"is {self.best_of}; the limit is {SAMPLES_MAX}")
        if asked.stream and self.best_of > self.n:
            raise InvalidRequest("best_of", "cannot be streamed: the best answers are known only at the end")
        if asked.max_tokens == 0 and self.best_of > 1:
            raise InvalidRequest("n", f"is {self.n} and best_of {self.best_of}; with max_tokens 0 both must be 1")

    @property
    def scores_echo(self) -> bool:
        """Whether the log-probabilities of the answer begin with those of the prompt."""
        return bool(self.asked.echo) and self.asked.logprobs is not None

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of the prompt are sent."""
        return self.scores_echo or self.asked.prompt_logprobs is not None

    def _prompt_logprobs(self) -> int | None:
        """Return how many of the most likely tokens to ask for in each place of the prompt; None: nothing of it."""
        echoed = self.asked.logprobs if self.scores_echo else None
        wanted = [count for count in (echoed, self.asked.prompt_logprobs) if count is not None]
        return max(wanted, default=None)

    async def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the complete response."""
        choices = []
        for at, (prompt, generation) in enumerate(zip(self.prompts, generations, strict=True)):
            answers = await generation.whole()
            scored = generation.answers[0].stream.prompt_logprobs
            part = await self._of_prompt(prompt, scored) if scored is not None else PromptPart()
            for place, answer in enumerate(self._best(answers)):
                choice = self._choice(at * self.n + place, prompt, answer, part)
                choices.append(msgspec.Raw(encode(choice)))  # smaller than its dictionaries
        usage = total(generations)
        return encode(
            {
                "id": self.call.name("cmpl", generations),
                "object": KIND,
                "created": int(time.time()),
                "model": self.call.model_name,
                "choices": choices,
                "usage": usage_of(usage),
            }
        )

    def _best(self, answers: list[CompleteAnswer]) -> list[CompleteAnswer]:
        if self.best_of == self.n:
            return answers
        # By the mean, as in vLLM and OpenAI's reference: "the highest log probability per token".
        return sorted(answers, key=lambda a: -float(np.mean(a.stream.logprobs)) if len(a.stream.logprobs) else 0.0)[
            : self.n
        ]

    async def _of_prompt(self, prompt: Prompt, scored: PromptStream) -> PromptPart:
        """Return the log-probabilities of a prompt in the forms that the request wants."""
        prompts, ids, part = self.call.model.prompts, prompt.ids.tolist(), PromptPart()
        if self.scores_echo:
            part.echoed = await logprobs.EchoedLogprobs.of(prompts, ids, scored, self.asked.logprobs or 0)
        if self.asked.prompt_logprobs is not None:
            part.listed = await logprobs.of_prompt(prompts, ids, scored, self.asked.prompt_logprobs)
        return part

    def _choice(self, index: int, prompt: Prompt, answer: CompleteAnswer, part: PromptPart) -> dict[str, Any]:
        text = prompt.text if self.asked.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": text + text_of(answer.events),
            "logprobs": None,
            "finish_reason": answer.reason,
        }
        if self.logprobs is not None:
            logs, _ = self.logs(answer.stream, 0, len(answer.stream.tokens), len(text))
            choice["logprobs"] = logs if part.echoed is None else part.echoed.before(logs)
        if part.listed is not None:
            choice["prompt_logprobs"] = part.listed
        if self.returns_ids:
            choice["token_ids"] = list(answer.stream.tokens)
            choice["prompt_token_ids"] = prompt.ids.tolist()
        return choice

    def logs(self, stream: Stream, start: int, end: int, offset: int) -> tuple[dict[str, Any], int]:
        """Return the log-probabilities of tokens [start, end), and the text offset of the next token."""
        prompts, most_likely = self.call.model.prompts, bool(self.logprobs)
        return logprobs.of_completion(prompts, stream, start, end, most_likely=most_likely, offset=offset)

    def events(self, generations: list[Generation]) -> CompletionEvents:
        """Return the response as a stream of events."""
        return CompletionEvents(self, generations)


class CompletionEvents:
    """The events of streamed answers; pieces that arrive together are one write."""

    def __init__(self, work: Completions, generations: list[Generation]) -> None:
        call, asked = work.call, work.asked
        options = asked.stream_options
        self._work, self._generations = work, generations
        self._usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        self._events = EventEncoder(
            call.name("cmpl", generations),
            KIND,
            int(time.time()),
            call.model_name,
            usage_null=self._usage,
            numbered=call.numbered and len(generations) == work.n == 1,
            counted=sum(len(prompt.ids) for prompt in work.prompts) if continuous else None,
        )
        self._plain = work.logprobs is None and not work.returns_ids
        self._offsets = [len(prompt.text) if asked.echo else 0 for prompt in work.prompts for _ in range(work.n)]
        self._echo = bool(asked.echo) and not work.scores and not call.resume
        self._scored = [self._events_of(prompt) for prompt in work.prompts] if work.scores and not call.resume else []

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return all(generation.over for generation in self._generations)

    def pop_events(self) -> bytes:
        """Return the events since the last call."""
        written, n = [], self._work.n
        if self._echo:
            self._echo = False
            for at, prompt in enumerate(self._work.prompts):
                written += [self._events.completion_text(at * n + place, prompt.text) for place in range(n)]
        for at, generation in enumerate(self._generations):
            if at < len(self._scored) and not self._scored[at].over:
                written += self._scores(at, generation)
                if not generation.answers[0].stream.error:
                    continue
            for piece in generation.pop_pieces():
                index = at * n + piece.index
                if not self._plain or piece.reason:
                    written.append(self._events.choice(self._choice(index, piece, generation), piece.end))
                elif piece.events:
                    written.append(self._events.completion_text(index, text_of(piece.events), piece.end))
        if self.over:
            written.append((self._events.usage(total(self._generations)) if self._usage else b"") + DONE)
        return written[0] if len(written) == 1 else b"".join(written)

    def _events_of(self, prompt: Prompt) -> PromptEvents:
        """Return the log-probabilities of a prompt as parts of the stream."""
        asked = self._work.asked
        echoed = asked.logprobs if self._work.scores_echo else None
        text = prompt.text if asked.echo else ""
        return PromptEvents(self._work.call.model.prompts, prompt.ids.tolist(), text, echoed, asked.prompt_logprobs)

    def _scores(self, at: int, generation: Generation) -> list[bytes]:
        """Return the next part of a prompt's log-probabilities for each of its choices, and ask to be called again."""
        part = self._scored[at].pop_part(generation.answers[0].stream)
        if part is None:
            return []
        generation.ring_again()
        n = self._work.n
        return [self._events.choice({"index": at * n + place, **part}) for place in range(n)]

    def _choice(self, index: int, piece: Piece, generation: Generation) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text_of(piece.events),
            "logprobs": None,
            "finish_reason": piece.reason or None,
        }
        stream = generation.answers[piece.index].stream
        end = min(piece.end, len(stream.tokens))
        if self._work.logprobs is not None:
            logs = self._work.logs(stream, piece.start, end, self._offsets[index])
            choice["logprobs"], self._offsets[index] = logs
        if self._work.returns_ids:
            choice["token_ids"] = list(stream.tokens[piece.start : end])
            if not piece.start:
                choice["prompt_token_ids"] = self._work.prompts[index // self._work.n].ids.tolist()
        return choice


def text_of(events: list[Event]) -> str:
    """Return the text of an answer that was not parsed."""
    return "".join(event.text for event in events if isinstance(event, Content))
