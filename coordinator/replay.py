"""python -m coordinator.replay FOLDER [--until EVENT] [--explain request=ID]: the state at any point of a journal.

Reads and changes nothing; the coordinator that writes the journal may be running. Events are counted from the last
snapshot on, since what was before it is not kept.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from pathlib import Path

import msgspec

from kvforge.protocol.errors import InvalidRequest, KvforgeError, NotFound
from kvforge.protocol.exits import OK, status_of
from kvforge.protocol.messages import Explain, Explanation

from .core.events import Boot, ClientFull, FromClient, FromWorker
from .core.machine import Machine
from .journal.entries import Entry
from .journal.recovery import Replay

SUBJECTS = ("request", "sequence", "block", "tenant")


def main(arguments: list[str] | None = None) -> int:
    """Prints what a journal says. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvforge replay", description=__doc__)
    parser.add_argument("journal", type=Path, metavar="FOLDER", help="state_dir of a coordinator")
    parser.add_argument("--until", type=int, metavar="EVENT", help="stop before this event, counted from 1 [the end]")
    parser.add_argument("--events", type=int, default=5, metavar="N", help="show so many events before that [5]")
    parser.add_argument(
        "--explain", action="append", default=[], metavar="SUBJECT=ID", help="request, sequence, block or tenant"
    )
    options = parser.parse_args(arguments)
    try:
        print("\n".join(told(options.journal, options.until, options.events, options.explain)))
    except KvforgeError as error:
        print(f"kvforge replay: {error}", file=sys.stderr)
        return status_of(error)
    return OK


def told(folder: Path, until: int | None, events: int, subjects: list[str]) -> list[str]:
    """The lines. Raises NotFound where there is no journal, InvalidRequest, JournalCorrupt."""
    asked = [_explain(subject) for subject in subjects]
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    replay, last = Replay(folder), deque[str](maxlen=max(0, events))

    def over(entry: Entry) -> bool:
        if until is not None and replay.entries + 1 >= until:
            return True
        last.append(f"  {replay.entries + 1} at {entry.now_us / 1e6:.6f} s: {_name(entry)}")
        return False

    replay.run(over)
    machine = replay.machine
    if machine is None:
        raise NotFound(f"{folder} holds no journal that has begun")
    if until is not None and replay.entries + 1 < until:
        raise InvalidRequest("until", f"the journal ends after event {replay.entries}")
    lines = [
        f"after event {replay.entries} at {replay.now_us / 1e6:.6f} s, boot {machine.boot}",
        *last,
        *_state(machine),
    ]
    if replay.torn is not None:
        path, end, more = replay.torn
        lines.append(f"{path.name} ends with {more} bytes behind byte {end} that are no whole record")
    for name, message in zip(subjects, asked, strict=True):
        reply = machine.explainer.explain("", message)
        assert isinstance(reply, Explanation)
        lines += [f"{name}:", *(f"  {sentence}" for sentence in reply.sentences)]
    return lines


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
    """Its kind and what it names: no token of anybody."""
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
