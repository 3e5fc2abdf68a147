"""Show the state at any point of a journal: `kvforge replay FOLDER [--until EVENT] [--explain request=ID]`.

This only reads, and a coordinator may be writing the journal meanwhile. Events are counted from the last snapshot,
since earlier ones are not kept. For a damaged journal, everything before the damage is shown.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from kvforge.protocol.platforms import leave

    leave("`kvforge replay`")

import os
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvforge.process.parser import Parser
from kvforge.protocol.errors import InvalidRequest, JournalCorrupt, KvforgeError, NotFound
from kvforge.protocol.exits import OK, status_of
from kvforge.protocol.messages import Explain, Explanation

from .core.events import Boot, ClientFull, FromClient, FromWorker
from .core.machine import Machine
from .journal.entries import Entry, Reader
from .journal.identity import unpack_head
from .journal.log import segments
from .journal.records import read
from .journal.recovery import Replay
from .journal.unwritten import FILE as UNWRITTEN
from .journal.unwritten import read_unwritten

OPEN_TRIES = 10
SUBJECTS = ("request", "sequence", "block", "tenant")


def main(arguments: list[str] | None = None) -> int:
    """Print the state of a journal. Return the exit status."""
    parser = Parser(prog="kvforge replay", description=__doc__)
    parser.add_argument("journal", type=Path, metavar="FOLDER", help="state_dir of a coordinator")
    parser.add_argument("--until", type=int, metavar="EVENT", help="stop before this event, counted from 1 [the end]")
    parser.add_argument("--events", type=int, default=5, metavar="N", help="number of preceding events to show [5]")
    parser.add_argument(
        "--explain", action="append", default=[], metavar="SUBJECT=ID", help="request, sequence, block or tenant"
    )
    options = parser.parse_args(arguments)
    try:
        lines, damage = replay_report(options.journal, options.until, options.events, options.explain)
        print("\n".join(lines), flush=True)
        if damage is not None:
            raise damage
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KvforgeError as error:
        print(f"kvforge replay: {error}", file=sys.stderr)
        return status_of(error)
    return OK


def replay_report(
    folder: Path, until: int | None, events: int, subjects: list[str]
) -> tuple[list[str], JournalCorrupt | None]:
    """Return the lines to print, and the damage behind the point they describe, if any.

    Raises:
        NotFound: There is no journal.
        InvalidRequest: An argument is invalid.
        JournalCorrupt: The journal is damaged from its beginning.
    """
    asked = [_explain(subject) for subject in subjects]
    if until is not None and until < 1:
        raise InvalidRequest("until", f"events are counted from 1: it is {until}")
    replay = _opened(folder)
    began = "the beginning" if replay.machine is None else f"the snapshot at {replay.now_us / 1e6:.6f} s"
    last, damage = _run(replay, until, events)
    machine = replay.machine
    if machine is None:
        raise damage or NotFound(f"{folder} holds no journal that has begun")
    if until is not None and replay.entries + 1 < until:
        raise damage or InvalidRequest("until", f"the journal ends after event {replay.entries}")
    try:
        state = _state(machine)
    except Exception as error:  # noqa: BLE001 - as above, of the state
        raise damage or _inconsistent(replay, "the state contradicts itself", error) from None
    lines = [
        f"after event {replay.entries} at {replay.now_us / 1e6:.6f} s{_of_day(replay)}, boot {machine.boot}",
        f"events are counted from {began}",
        *last,
        *state,
    ]
    if replay.torn is not None:
        path, end, more = replay.torn
        lines.append(f"{path.name} ends with {more} bytes after byte {end} that are not a complete record:")
        lines.append("  a coordinator died while it wrote them, or is writing them now")
    if (unwritten := read_unwritten(folder)) is not None:
        first, count = unwritten.first, len(unwritten.payloads)
        lines.append(f"{UNWRITTEN} holds {count} of the last turn, from record {first} on: the next start adds them")
    for name, message in zip(subjects, asked, strict=True):
        reply = machine.explainer.explain("", message)
        assert isinstance(reply, Explanation)
        lines += [f"{name}:", *(f"  {sentence}" for sentence in reply.sentences)]
    return lines, damage


def _run(replay: Replay, until: int | None, events: int) -> tuple[deque[str], JournalCorrupt | None]:
    """Apply the events before `until`. Return lines about the last ones, and the damage that ended the replay."""
    last = deque[str](maxlen=max(0, events))

    def over(entry: Entry) -> bool:
        if until is not None and replay.entries + 1 >= until:
            return True
        last.append(f"  {replay.entries + 1} at {entry.now_us / 1e6:.6f} s: {_name(entry)}")
        return False

    try:
        replay.run(over)
    except JournalCorrupt as error:
        if until is None or replay.entries + 1 < until:
            return last, error
    except Exception as error:  # noqa: BLE001 - a folder that was made by others: whatever a record makes the core raise
        return last, _inconsistent(replay, f"record {replay.number} cannot be applied", error)
    return last, None


def _inconsistent(replay: Replay, problem: str, error: Exception) -> JournalCorrupt:
    """Return the error for a journal with intact files but inconsistent content."""
    return JournalCorrupt(replay.folder.name, 0, problem=f"{problem} ({type(error).__name__}: {error})")


def _opened(folder: Path) -> Replay:
    """Open the journal at its snapshot. A running coordinator may replace that meanwhile, hence the retries."""
    try:
        next(folder.iterdir(), None)
    except FileNotFoundError:
        raise NotFound(f"there is no folder {folder}") from None
    except NotADirectoryError:
        raise NotFound(f"{folder} is a file: name the folder that it is in, a coordinator's state_dir") from None
    except OSError as error:
        raise NotFound(f"{folder} cannot be read: {error.strerror}") from None
    for _ in range(OPEN_TRIES):
        with suppress(FileNotFoundError):
            return Replay(folder)
    raise NotFound(f"{folder} changes faster than it can be read")


def _of_day(replay: Replay) -> str:
    """Return the approximate time of day of the last applied event, from the modification times of the files."""
    for first, path in reversed(segments(replay.folder).items()):
        try:
            written_s, data = path.stat().st_mtime, memoryview(path.read_bytes())
            head = unpack_head(data, path.name)
            records = list(read(data, first, path.name, head[1], head[0].before)) if head is not None else []
        except (OSError, JournalCorrupt):
            return ""
        if records:
            *_, last = Reader().entries(records[-1].payload)
            at = datetime.fromtimestamp(written_s - (last.now_us - replay.now_us) / 1e6, UTC)
            return f" (about {at:%Y-%m-%d %H:%M:%S} UTC)"
    return ""


def _explain(subject: str) -> Explain:
    kind, _, value = subject.partition("=")
    if kind not in SUBJECTS or not value or (kind != "tenant" and not value.isdecimal()):
        raise InvalidRequest("explain", f"is {subject!r}; it must be one of {', '.join(SUBJECTS)}, then = and an id")
    if kind == "tenant":
        return Explain(rid=0, tenant=value)
    return msgspec.structs.replace(Explain(rid=0), **{f"{kind}_id": int(value)})


def _name(entry: Entry) -> str:
    event = entry.event
    kind = type(event).__name__
    if isinstance(event, FromClient):
        return f"client {event.client}: {_message(event.message)}"
    if isinstance(event, FromWorker):
        return f"worker connection {event.worker}: {_message(event.message)}"
    if isinstance(event, Boot):
        return f"Boot {event.boot}"
    if isinstance(event, ClientFull):
        return f"ClientFull: client {event.client}"
    fields = ", ".join(f"{name}={getattr(event, name)!r}" for name in event.__struct_fields__ if name != "session")
    return f"{kind} {fields}".rstrip()


def _message(message: object) -> str:
    """Return a message's kind and the names in it, but no tokens."""
    named = ("request_id", "sequence_id", "block_id", "step_id", "name", "tenant", "max_tokens", "count", "key")
    fields = [f"{name}={getattr(message, name)!r}" for name in named if getattr(message, name, None)]
    return " ".join([type(message).__name__, *fields])


def _state(machine: Machine) -> list[str]:
    requests, s = machine.requests, machine.cache.sequences
    lines = [
        f"requests: {len(requests.live)} have not ended, {len(requests.finished)} have and are known; "
        f"sequences of clients: {int(s.owned.sum())}; clients: {len(machine.clients)}"
    ]
    for worker in machine.workers.values():
        group = worker.group
        if group is None:
            lines.append(f"worker {worker.name}: {worker.phase}")
            continue
        steps = ", ".join(str(sent.step_id) for sent in group.sent) or "none"
        away = ", away" if group.away else ""
        lines.append(
            f"worker {worker.name}{away}: {group.pool.count} blocks, {group.running} rows, steps sent: {steps}"
        )
    lines += [
        f"  request {request.id}: {request.state}, {request.tenant_name}, prompt {request.prompt_tokens}"
        for request in requests.live.values()
    ]
    machine.check_invariants()
    return [*lines, "every invariant holds"]


if __name__ == "__main__":
    sys.exit(main())
