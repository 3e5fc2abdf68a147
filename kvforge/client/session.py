"""The state of a client's session across its connections, without any input or output.

Bytes arrive through `receive`. The end of a connection arrives through `interrupt` if another connection will follow,
else through `lost`. Messages to send are returned. `Client` and `AsyncClient` are two shells around this.

Invariants:

- The session drops a command or request that has ended; a caller that holds its Pending or Track keeps the data.
- `track.tokens[i]` is the token at offset `track.start + i`. A repeated row is ignored; a missing one ends that request
  with an error.
- A request that is accepted after its caller gave up is cancelled. A command with a key, or one that repeated an
  earlier command, keeps its requests, because these can be found again.
- A stream that was paused because this client reads slowly is resumed by an Attach of the session itself.
- If the coordinator knows the session's name on a new connection, unanswered commands are sent again with their rids
  and get their lost replies, and streams are resumed. If it has forgotten the session, only repeatable commands are
  sent again; the outcome of the others is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvforge.protocol.codec import Decoder, InvalidMessage
from kvforge.protocol.errors import Conflict, CoordinatorUnavailable, KvforgeError, ProtocolError, restore
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    Accepted,
    Attach,
    Attached,
    Cancel,
    Done,
    Message,
    Refused,
    Stream,
    Submit,
    Welcome,
)

from .argument_names import in_terms_of_arguments
from .pending import PendingCommand, RequestStream
from .prompt_stream import PromptStream

NAME_BYTES = 16
SEEDS = 1 << 64
# Fewer than the replies that a coordinator keeps per client by default, so that a repeated command is executed once.
UNANSWERED_MAX = 1000
NO_OFFSET = 1 << 32  # larger than any offset


class ClientSession:
    """Matches replies and tokens to the commands and requests that wait for them.

    Attributes:
        name: Identifies this client on its next connection.
        welcome: The coordinator's Welcome; None without a connection.
        interrupted: The connection was lost, and the state here waits for the next one.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.name = os.urandom(NAME_BYTES).hex()
        self.boot = ""
        self.welcome: Welcome | None = None
        self.interrupted = False
        self._decoder = Decoder(CLIENT_REPLIES)
        self._pending: dict[int, PendingCommand] = {}
        # Several tracks for a request only after another attach from an earlier offset.
        self._tracks: dict[int, list[RequestStream]] = {}
        # Requests with a restarting stream, and the rid of the Attach. Rows before its reply are outdated.
        self._resuming: dict[int, int] = {}
        # The offset where a stream restarts, until its token arrives. Rows before it are outdated.
        self._due: dict[int, int] = {}
        # For restarted streams: the offset after the last received token.
        self._anew: dict[int, int] = {}
        self._last_rid = 0

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ids of requests that have not ended."""
        return tuple(self._tracks)

    def new_rid(self) -> int:
        """Return a new number for a command of this session."""
        self._last_rid += 1
        return self._last_rid

    def tracked(self, request_id: int, offset: int) -> RequestStream | None:
        """Return the stream of a running request that starts at `offset` or earlier, else None."""
        return next((track for track in self._tracks.get(request_id, ()) if track.start <= offset), None)

    def has_room(self, rid: int) -> bool:
        """Return whether the command `rid` may be sent: the number of unanswered commands is limited."""
        return rid - next(iter(self._pending), rid) < UNANSWERED_MAX

    def expect(self, rid: int, expects: type[Message], what: str, count: int = 1) -> PendingCommand:
        """Register a command that is about to be sent.

        Args:
            rid: The number of the command.
            expects: The type of its reply.
            what: The command's name for errors.
            count: The number of requests that it starts.
        """
        pending = self._pending[rid] = PendingCommand(rid, expects, what, count)
        return pending

    def forget(self, pending: PendingCommand) -> list[Message]:
        """Drop a command, and cancel the requests that it started or will start.

        Requests that existed before it are kept, and so are those of a command with a key, which finds them again.

        Returns:
            Messages to send.
        """
        if pending.keyed:
            return []  # its reply is still expected and registers the requests
        if pending.expects is Accepted and pending.sent is not None and not pending.done:
            pending.abandoned = True  # sent again if its reply is lost; then cancelled
            return []
        self._pending.pop(pending.rid, None)
        if not isinstance(pending.reply, Accepted) or pending.reply.repeated:
            return []
        return self.cancel(track.request_id for track in pending.tracks if not track.done)

    def receive(self, frames: Sequence[bytes | memoryview]) -> list[Message]:
        """Process one message.

        Returns:
            Messages to send.

        Raises:
            ProtocolError: The message is not one that a coordinator may send. The connection is then unusable.
        """
        try:
            message = self._decoder.decode(frames)
        except InvalidMessage as error:
            raise ProtocolError(str(error)) from None
        if isinstance(message, Stream):
            return self._stream(message)
        return self._reply(message)

    def interrupt(self) -> None:
        """Handle the end of a connection that will be followed by another one: all waiting commands keep waiting."""
        self.welcome = None
        self.interrupted = True
        for of_streams in (self._resuming, self._due, self._anew):
            of_streams.clear()
        for pending in tuple(self._pending.values()):
            if pending.resumes or pending.expects is Welcome:
                del self._pending[pending.rid]
        for request_id, tracks in tuple(self._tracks.items()):
            for track in tracks:
                track.settle()
            if all(track.done for track in tracks):  # a signal handler had interrupted this
                self._drop(request_id)

    def lost(self, error: KvforgeError) -> None:
        """Handle the final end of a connection: all waiting commands fail with `error`. Received tokens are kept."""
        self.welcome = None
        self.interrupted = False
        # A new name: the coordinator's state for the old one ends with its lease.
        self.name = os.urandom(NAME_BYTES).hex()
        waiting = list(self._pending.values())
        self._pending.clear()
        self._resuming.clear()
        for pending in waiting:
            pending.error = error
            pending.wake()
        for request_id in tuple(self._tracks):
            self._fail(request_id, error)

    def _reply(self, message: Message) -> list[Message]:
        rid: int = getattr(message, "rid", -1)
        if rid == 0 and isinstance(message, Refused) and self._pending:
            # The coordinator could not read the rid. It answers in order, so the refusal is of the oldest command.
            rid = next(iter(self._pending))
        pending = self._pending.get(rid)
        if pending is None:
            return self._late(message)
        replies: list[Message] = []
        if isinstance(message, Refused):
            error = restore(message.error.code, message.error.message, message.error.fields)
            pending.error = in_terms_of_arguments(error, pending.what)
        elif not isinstance(message, pending.expects):
            got = type(message).__name__
            pending.error = ProtocolError(f"the coordinator answered {pending.what} with {got}")
        else:
            replies = self._answer(pending, message)
        if pending.error is not None and pending.resumes:
            self._resuming.pop(pending.resumes, None)
            self._fail(pending.resumes, pending.error)
        pending.wake()
        self._pending.pop(rid, None)
        return replies

    def _late(self, message: Message) -> list[Message]:
        """Process the reply to a command that was dropped."""
        if isinstance(message, Accepted) and not message.repeated:
            return self.cancel(range(message.request_id, message.request_id + message.count))
        if isinstance(message, Attached):
            return self._moved(message.request_id, message.offset, message.rid)
        return []

    def _answer(self, pending: PendingCommand, message: Message) -> list[Message]:
        """Process the expected reply to a command."""
        if isinstance(message, Accepted):
            return self._accepted(pending, message)
        pending.reply = message
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if not isinstance(message, Attached):
            return []
        if not pending.resumes:
            pending.tracks = (self._track(message.request_id, message.seed, message.offset),)
        if pending.resent:  # rows after the lost reply are lost too
            return [self._resume(message.request_id)]
        return self._moved(message.request_id, message.offset, message.rid)

    def _welcomed(self, message: Welcome) -> list[Message]:
        """Start a connection. Return the messages to send first: commands in their order, then streams."""
        self.welcome, self.boot = message, message.boot
        self.interrupted = False
        messages: list[Message] = []
        for pending in tuple(self._pending.values()):
            if pending.sent is None:  # its caller will send it
                continue
            if message.resumed or pending.repeatable:
                pending.resent = True
                messages.append(pending.sent)
                continue
            del self._pending[pending.rid]
            pending.error = _unknown_outcome(pending.what, self.endpoint)
            pending.wake()
        return messages + [self._resume(request_id, ours=message.resumed) for request_id in self._tracks]

    def _accepted(self, pending: PendingCommand, message: Accepted) -> list[Message]:
        if pending.abandoned:
            return self._late(message)
        ids = range(message.request_id, message.request_id + message.count)
        if message.count != pending.count:
            problem = f"started {message.count} requests for a {pending.what} of {pending.count}"
            pending.error = ProtocolError(f"the coordinator {problem}; is it a kvforge of another version?")
            return [] if message.repeated else self.cancel(ids)
        pending.reply = message
        prompts = [_prompt_of(pending.sent), *[None] * (message.count - 1)]
        pending.tracks = tuple(self._track(id_, (message.seed + i) % SEEDS, 0, prompts[i]) for i, id_ in enumerate(ids))
        if pending.resent and not message.repeated:  # tokens may have been sent to the lost connection
            return [self._resume(request_id) for request_id in ids]
        for track in pending.tracks if message.repeated else ():
            first = -track.prompt.total if track.prompt is not None else 0
            self._moved(track.request_id, first, message.rid)
        return []

    def _track(self, request_id: int, seed: int, start: int, prompt: PromptStream | None = None) -> RequestStream:
        """Return the track of a request from `start`, or its prompt, on: an existing one, else a new one."""
        track = self.tracked(request_id, start)
        if track is None or (prompt is not None and track.prompt is None):
            track = RequestStream(request_id, seed, start, prompt)
            self._tracks.setdefault(request_id, []).append(track)
        return track

    def _moved(self, request_id: int, offset: int, rid: int) -> list[Message]:
        """Note that the command `rid` restarted a stream at `offset`.

        If a track lacks earlier tokens, the stream is restarted once more.
        """
        if self._resuming.get(request_id) == rid:
            del self._resuming[request_id]
        if request_id not in self._tracks:
            return []
        self._due[request_id] = self._anew[request_id] = offset
        behind = any(track.due < offset for track in self._tracks[request_id])
        return [self._resume(request_id)] if behind else []

    def _resume(self, request_id: int, *, ours: bool = True) -> Message:
        """Return an Attach for the first token that one of the request's tracks lacks.

        Args:
            request_id: The request.
            ours: The coordinator knows that this client reads it. Another client that has taken it meanwhile then keeps
                it.
        """
        rid = self.new_rid()
        self._pending[rid] = PendingCommand(rid, Attached, "Attach", resumes=request_id)
        self._resuming[request_id] = rid
        self._due[request_id] = NO_OFFSET
        offset = min(track.due for track in self._tracks[request_id])
        return Attach(rid=rid, request_id=request_id, offset=offset, resume=ours)

    def cancel(self, request_ids: Iterable[int]) -> list[Message]:
        """Return the commands that cancel requests. They are repeated until they are answered."""
        commands = [Cancel(rid=self.new_rid(), request_id=request_id) for request_id in request_ids]
        for command in commands:
            self.expect(command.rid, Done, "Cancel").sent = command
        return list(commands)

    def _fail(self, request_id: int, error: KvforgeError) -> None:
        """End a request with `error` for its readers, after the tokens received so far."""
        for track in self._tracks.get(request_id, ()):
            track.error = error
            track.wake()
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        """Forget a request."""
        self._due.pop(request_id, None)
        self._anew.pop(request_id, None)
        self._tracks.pop(request_id, None)

    def _stream(self, message: Stream) -> list[Message]:
        # First, since rows in the same message may follow the missing ones.
        paused = [id_ for id_ in message.paused if id_ in self._tracks and id_ not in self._resuming]
        replies = [self._resume(request_id) for request_id in paused]
        touched: dict[RequestStream, None] = {}
        replies += self._rows(message, touched)
        for ended in message.ended:
            if ended.request_id in self._resuming:
                continue
            anew = self._anew.get(ended.request_id)
            for track in self._tracks.get(ended.request_id, ()):
                track.end(ended, anew)
                touched[track] = None
            self._drop(ended.request_id)
        for track in touched:
            track.wake()
        for request_id in message.taken:
            if request_id not in self._resuming:
                problem = f"request {request_id} is read by another connection now"
                self._fail(request_id, Conflict(f"{problem}; attach again to take it back"))
        return replies

    def _rows(self, message: Stream, touched: dict[RequestStream, None]) -> list[Message]:
        """Store tokens and note the touched tracks; return messages to send because rows are missing."""
        columns = (message.request_ids, message.offsets, message.tokens, message.logprobs)
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            raise ProtocolError(f"stream: its columns have different lengths {sorted(lengths)}")
        broken: list[Message] = []
        tracks_of, due_of, anew_of = self._tracks, self._due, self._anew
        rows = zip(*(column.tolist() for column in columns), _tops(message), strict=True)
        ranks = message.ranks.tolist()
        if ranks and len(ranks) != len(message.tokens):
            raise ProtocolError(f"stream: ranks has {len(ranks)} entries, tokens {len(message.tokens)}")
        for at, (request_id, offset, token_id, logprob, top) in enumerate(rows):
            if due_of and (due := due_of.get(request_id)) is not None:
                if offset != due:
                    continue
                del due_of[request_id]
            if anew_of and anew_of.get(request_id) == offset:
                anew_of[request_id] = offset + 1
            if offset < 0:
                row = (offset, token_id, logprob, ranks[at] if ranks else 0, top)
                broken += self._prompt_row(request_id, row, touched)
                continue
            # No track: this client gave up on the request, or found its stream broken.
            for track in tracks_of.get(request_id, ()):
                tokens = track.tokens
                reach = track.start + len(tokens)
                if offset == reach:
                    tokens.append(token_id)
                    track.logprobs.append(logprob)
                    track.top_logprobs.append(top)
                    touched[track] = None
                elif offset > reach:  # neither the next row nor a repeated one
                    broken += self._break(track, track.gap(f"token {reach} was due and token {offset} came"))
        return broken

    def _prompt_row(
        self,
        request_id: int,
        row: tuple[int, int, float, int, tuple[tuple[int, float], ...]],
        touched: dict[RequestStream, None],
    ) -> list[Message]:
        """Store the log-probability of a prompt token; return messages to send because rows are missing."""
        broken: list[Message] = []
        for track in self._tracks.get(request_id, ()):
            try:
                if track.add_prompt(*row):
                    touched[track] = None
            except ProtocolError as error:
                broken += self._break(track, error)
        return broken

    def _break(self, track: RequestStream, error: ProtocolError) -> list[Message]:
        # A new list, because the caller iterates over the old one.
        left = [other for other in self._tracks[track.request_id] if other is not track]
        if left:
            self._tracks[track.request_id] = left
        else:
            self._drop(track.request_id)
        track.error = error
        track.wake()
        return self.cancel((track.request_id,))


def _prompt_of(sent: Message | None) -> PromptStream | None:
    """Return the place for the log-probabilities that a Submit wants of its prompt, or None."""
    if not isinstance(sent, Submit) or sent.sampling.prompt_logprobs is None:
        return None
    return PromptStream(sent.prompt.size - 1)


def _unknown_outcome(what: str, endpoint: str) -> CoordinatorUnavailable:
    """Return the error of a command that may or may not have been executed."""
    problem = f"the connection to {endpoint} was lost before {what} was answered, and the session has expired"
    hints = {
        "Submit": "if it was accepted, it ends with its lease; a call with a key can be repeated",
        "Append": "check the sequence's length before appending again",
    }
    hint = hints.get(what, "check the state that it was to change before repeating the call")
    return CoordinatorUnavailable(f"{problem}: its outcome is unknown; {hint}")


def _tops(message: Stream) -> list[tuple[tuple[int, float], ...]]:
    """Return the most likely tokens of each row of a stream. Raises ProtocolError if the columns do not match."""
    rows, counts = len(message.tokens), message.top_counts
    if not len(counts) and not len(message.top_tokens) and not len(message.top_logprobs):
        return [()] * rows
    total = int(counts.sum(dtype="int64"))
    lengths = {total, len(message.top_tokens), len(message.top_logprobs)}
    if len(counts) != rows or min(counts.tolist(), default=0) < 0 or len(lengths) > 1:
        raise ProtocolError(f"stream: its top columns have lengths {len(counts)} and {sorted(lengths)}")
    pairs = list(zip(message.top_tokens.tolist(), message.top_logprobs.tolist(), strict=True))
    ends = counts.cumsum().tolist()
    return [tuple(pairs[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]
