"""Carries out actions on the simulated clients and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvforge.protocol.messages import (
    GENERATED,
    Append,
    Attach,
    Cancel,
    CreateSequence,
    Explain,
    FinishAt,
    Fork,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    ListRequests,
    PurgeFinished,
    RefBlock,
    RemoveSequences,
    Rewind,
    SamplingParams,
    Submit,
    UnrefBlock,
    WipeTenant,
)
from tools.simulation.actions import AHEAD, COORDINATOR, DEATHS, KEEP_MS, MIX, REWIND, TALK, WIPE, Action
from tools.simulation.clients import PROBE
from tools.simulation.settings import tenant_of

if TYPE_CHECKING:
    from tools.simulation.clients import SimulatedClient
    from tools.simulation.world import World

UNKNOWN = 1 << 40


def int32(values: Any) -> Any:
    """Return an int32 array."""
    return np.array(values, np.int32)


class Performer:
    """Performs actions, with one method per verb."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._verbs = {
            verb: getattr(self, f"_{verb}") for verb in (*MIX, TALK, REWIND, AHEAD, WIPE) if verb not in DEATHS
        }
        self._keyed: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
        self._tenants: dict[str, str] = {}  # tenants of requests without a sequence

    def perform(self, action: Action) -> None:
        """Perform an action, or nothing if it makes no sense any more."""
        at_us, verb, who, *parameters = action
        if who == COORDINATOR:
            getattr(self._world, verb)(*parameters)
            return
        if who.startswith("w"):
            ranks = [label for label in self._world.workers if label.partition(".")[0] == who]
            worker = self._world.workers.get(ranks[at_us % len(ranks)] if ranks else who)
            if worker is not None:
                self._worker(worker, verb, parameters)
            return
        client = self._world.clients.get(who)
        if client is not None:
            self._verbs[verb](client, *parameters)

    @staticmethod
    def _worker(worker: Any, verb: str, parameters: list[Any]) -> None:
        if verb == "kill":
            worker.kill(parameters[0])
        elif verb == "hang":
            worker.hangs = True
        else:
            worker.garble = parameters[0]

    def _acting(self, client: SimulatedClient, tenant: str, chance: int) -> str:
        """Return the tenant for a client's action: a restricted client mostly uses its own."""
        bound = self._world.settings.bound.get(client.name)
        return tenant if bound is None or chance % 8 == 0 else bound

    def _id(self, label: str) -> int | None:
        return self._world.id_of(label)

    # ----------------------------------------------------------------------------------------------------- connection

    def _connect(self, client: SimulatedClient, resume: bool) -> None:
        client.connect(resume)

    def _stall(self, client: SimulatedClient, room: int, for_us: int) -> None:
        client.stall(room)
        connection = client.connection
        if connection is not None:
            self._world.clock.after(for_us, connection.read_on)

    def _disconnect(self, client: SimulatedClient) -> None:
        client.disconnect()

    def _goodbye(self, client: SimulatedClient) -> None:
        client.goodbye()

    # ------------------------------------------------------------------------------------------------------- requests

    def _submit(
        self,
        client: SimulatedClient,
        labels: tuple[str, ...],
        prompt: tuple[int, ...],
        answer: int,
        seed: int | None,
        stops: tuple[int, ...],
        tenant: str,
        more: tuple[tuple[str, Any], ...],
    ) -> None:
        fields = {"max_tokens": answer, "tenant": self._acting(client, tenant, len(prompt)), "prompt": int32(prompt)}
        fields.update(more)
        wanted = {name: fields.pop(name) for name in ("logprobs", "prompt_logprobs") if name in fields}
        fields["sampling"] = SamplingParams(temperature=0.7, seed=seed, stop_tokens=stops, **wanted)
        self._tenants.update(dict.fromkeys(labels, fields["tenant"]))
        self._send_submit(client, labels, fields)

    def _talk(
        self,
        client: SimulatedClient,
        label: str,
        earlier: str,
        less: int,
        text: tuple[int, ...],
        answer: int,
        turn: tuple[bool, bool],
    ) -> None:
        """Submit the next turn of a conversation: the earlier prompt, its answer, and a text.

        Args:
            client: the sender.
            label: the label of the request.
            earlier: the label of the earlier request.
            less: how many of its last tokens the prompt leaves out.
            text: the text.
            answer: the length of the answer.
            turn: whether it continues the sequence of the earlier request, and whether it keeps its own.
        """
        found, tenant = self._id(earlier), self._tenants.get(earlier)
        if found is not None and tenant is not None:
            oracle = self._world.oracle(found)
            before = [*oracle.prompt, *oracle.tokens[: oracle.answer_size]]
            prompt = [*before[: max(0, len(before) - less)], *text]
            prompt = prompt[: self._world.settings.context - answer]
            self._tenants[label] = tenant
            continues = self._world.ledger.requests[found].kept_id if turn[0] else 0
            more = {"continues": continues, "keep_ms": KEEP_MS * turn[1]}
            # The ids of generated tokens are a client's, without marks.
            ids = int32([token % GENERATED for token in prompt])
            client.send(Submit, (label,), max_tokens=answer, tenant=tenant, prompt=ids, **more)

    def _ahead(self, client: SimulatedClient, label: str, earlier: str) -> None:
        """Let an earlier prompt and its answer be computed as a prompt."""
        found, tenant = self._id(earlier), self._tenants.get(earlier)
        if found is not None and tenant is not None:
            oracle = self._world.oracle(found)
            prompt = [token % GENERATED for token in (*oracle.prompt, *oracle.tokens[: oracle.answer_size])]
            prompt = prompt[: self._world.settings.context - 1]
            client.send(Submit, (label,), max_tokens=1, tenant=tenant, prompt=int32(prompt), ahead=True)

    def _send_submit(self, client: SimulatedClient, labels: tuple[str, ...], fields: dict[str, Any]) -> None:
        if "key" in fields:
            self._keyed[labels[0]] = (labels, fields)
        client.send(Submit, labels, **fields)

    def _submit_on(
        self,
        client: SimulatedClient,
        label: str,
        sequence: str,
        prompt: tuple[int, ...],
        answer: int,
        more: tuple[tuple[str, Any], ...],
    ) -> None:
        found = self._id(sequence)
        if found is not None:
            fields = {"max_tokens": answer, "sequence_id": found, "prompt": int32(prompt), **dict(more)}
            fields["sampling"] = SamplingParams(logprobs=fields.pop("logprobs", 0))
            self._send_submit(client, (label,), fields)

    def _again(self, client: SimulatedClient, label: str, same: bool) -> None:
        """Reuse the key of an earlier command, with the same command or a different one."""
        found = self._keyed.get(label)
        if found is not None:
            labels, fields = found
            client.send(Submit, labels, **(fields if same else {**fields, "max_tokens": fields["max_tokens"] + 1}))

    def _attach(self, client: SimulatedClient, label: str, offset: int) -> None:
        """Attach at the client's own offset, or at another one that may be invalid."""
        found = self._id(label)
        if found is not None and offset < 0:
            client.send(Attach, (PROBE,), request_id=found, offset=client.readings.at(found))
        elif found is not None:
            client.send(Attach, (PROBE,), request_id=found, offset=offset)

    def _cancel(self, client: SimulatedClient, label: str) -> None:
        found = self._id(label)
        if found is not None:
            client.send(Cancel, request_id=found)

    def _finish(self, client: SimulatedClient, which: int, back: int) -> None:
        """Finish a stream before its last `back` tokens; -1 asks for one token more than has arrived."""
        begun = [request_id for request_id in client.readings.unfinished() if client.readings.at(request_id)]
        if begun:
            found = begun[which % len(begun)]
            client.send(FinishAt, request_id=found, tokens=max(1, client.readings.at(found) - back))

    def _get(self, client: SimulatedClient, label: str, with_tokens: bool) -> None:
        found = self._id(label)
        if found is not None:
            client.send(GetRequest, request_id=found, with_tokens=with_tokens)

    def _list(self, client: SimulatedClient, count: int) -> None:
        client.send(ListRequests, count_max=count)

    def _stats(self, client: SimulatedClient) -> None:
        client.send(GetStats)

    def _health(self, client: SimulatedClient) -> None:
        client.send(GetHealth)

    def _purge(self, client: SimulatedClient, older_than_ms: int) -> None:
        client.send(PurgeFinished, older_than_ms=older_than_ms)

    def _wipe(self, client: SimulatedClient, tenant: str) -> None:
        client.send(WipeTenant, tenant=tenant)

    # ------------------------------------------------------------------------------------------------------ sequences

    def _create(
        self, client: SimulatedClient, label: str, tokens: tuple[int, ...], tenant: str, ttl_ms: int, salt: str
    ) -> None:
        acting = self._acting(client, tenant, len(tokens))
        client.send(CreateSequence, (label,), tenant=acting, salt=salt, idle_ttl_ms=ttl_ms, tokens=int32(tokens))

    def _append(self, client: SimulatedClient, parts: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        known = [(self._id(label), tokens) for label, tokens in parts if self._id(label) is not None]
        if known:
            client.send(
                Append,
                sequence_ids=np.array([sequence for sequence, _ in known], np.int64),
                counts=int32([len(tokens) for _, tokens in known]),
                tokens=int32([token for _, tokens in known for token in tokens]),
            )

    def _fork(self, client: SimulatedClient, parent: str, labels: tuple[str, ...]) -> None:
        found = self._id(parent)
        if found is not None:
            client.send(Fork, labels, sequence_id=found, count=len(labels))

    def _rewind(self, client: SimulatedClient, subject: str, back: int) -> None:
        """Cut a client's sequence, or the one that a request left, off before its last tokens."""
        found, ledger = self._id(subject), self._world.ledger
        if found is not None and subject.startswith("r"):
            found = ledger.requests[found].kept_id
        if found in ledger.sequences:
            length = max(0, len(ledger.sequences[found].tokens) - back)
            client.send(Rewind, sequence_id=found, length=length)

    def _info(self, client: SimulatedClient, label: str) -> None:
        found = self._id(label)
        if found is not None:
            client.send(GetSequence, sequence_id=found)

    def _tokens(self, client: SimulatedClient, label: str) -> None:
        found = self._id(label)
        if found is not None:
            client.send(GetTokens, sequence_id=found)

    def _remove(self, client: SimulatedClient, labels: tuple[str, ...]) -> None:
        known = [self._id(label) for label in labels if self._id(label) is not None]
        if known:
            client.send(RemoveSequences, sequence_ids=np.array(known, np.int64))

    # --------------------------------------------------------------------------------------------------------- blocks

    def _block(self, client: SimulatedClient, block: int) -> None:
        client.send(GetBlock, block_id=block)

    def _ref(self, client: SimulatedClient, block: int, holder: str, generation: int) -> None:
        client.send(RefBlock, block_id=block, holder=holder, generation=generation, tenant=tenant_of(holder))

    def _unref(self, client: SimulatedClient, block: int, holder: str, generation: int) -> None:
        client.send(UnrefBlock, block_id=block, holder=holder, generation=generation)

    def _explain(self, client: SimulatedClient, kind: str, subject: Any) -> None:
        if kind in ("request", "sequence"):
            subject = self._id(subject)
        if subject is not None:
            client.send(Explain, **{kind if kind == "tenant" else f"{kind}_id": subject})

    # ------------------------------------------------------------------------------------------------- invalid commands

    def _hostile(self, client: SimulatedClient, how: str, sequence: str) -> None:
        """Send a command that must be refused in every state."""
        settings = self._world.settings
        one = int32([1])
        known = self._id(sequence)
        two = np.array([known or UNKNOWN] * 2, np.int64)
        many = int32([0] * (settings.context + 1))
        commands: dict[str, tuple[Any, dict[str, Any]]] = {
            "zero_tokens": (Submit, {"max_tokens": 0, "prompt": one}),
            "no_prompt": (Submit, {"max_tokens": 1}),
            "vocabulary": (Submit, {"max_tokens": 1, "prompt": int32([settings.vocabulary + (1 << 20)])}),
            "too_long": (Submit, {"max_tokens": 1, "prompt": many}),
            "temperature": (Submit, {"max_tokens": 1, "prompt": one, "sampling": SamplingParams(temperature=-1.0)}),
            "tenant": (Submit, {"max_tokens": 1, "prompt": one, "tenant": ""}),
            "stops": (Submit, {"max_tokens": 1, "prompt": one, "sampling": SamplingParams(stop_tokens=(-5,))}),
            "attach_unknown": (Attach, {"request_id": UNKNOWN}),
            "deadline": (Submit, {"max_tokens": 1, "prompt": one, "deadline_ms": -1}),
            "priority": (Submit, {"max_tokens": 1, "prompt": one, "priority": 1000}),
            "key": (Submit, {"max_tokens": 1, "prompt": one, "key": "\n"}),
            "many": (Submit, {"max_tokens": 1, "prompt": one, "count": 1000}),
            "unknown_request": (Cancel, {"request_id": UNKNOWN}),
            "unknown_sequence": (GetTokens, {"sequence_id": UNKNOWN}),
            "twice": (Append, {"sequence_ids": two, "counts": int32([1, 1]), "tokens": int32([1, 1])}),
            "counts": (Append, {"sequence_ids": two, "counts": int32([0, 2]), "tokens": int32([1, 1])}),
            "block_range": (GetBlock, {"block_id": settings.blocks_max + 1}),
            "count_max": (ListRequests, {"count_max": 0}),
            "explain_nothing": (Explain, {}),
        }
        raw = {
            "bytes": [b"\xc1\x00garbage"],
            "tag": [b"\x81\xa1t\xa4step"],
            "frames": [b"\x81\xa1t\xa6submit", b"123", b"", b""],
        }
        if how in raw:
            client.send_raw(raw[how])
        else:
            cls, fields = commands[how]
            client.send(cls, (PROBE,) if cls is Attach else ("never",), **fields)
