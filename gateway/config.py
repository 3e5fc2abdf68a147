"""A gateway's configuration: one frozen structure, validated once."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvforge.client.arguments import PRIORITY_MAX
from kvforge.protocol import logs
from kvforge.protocol.configuration import convert, expand, read_toml
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.salts import OWNER_END
from kvforge.protocol.transport import client_endpoint, default_runtime_dir

GENERATE, SEE, ADMIN = RIGHTS = ("generate", "see", "admin")
PROCESSES_MAX = 64
REPLICAS_MAX = 256
TEXTS_WAITING_MAX = 1 << 16
SECONDS = (
    *("head_s", "body_s", "keep_alive_s", "write_s", "drain_s", "answer_s", "failover_s"),
    *("text_s", "template_s", "ping_s"),
)
# What Claude Code writes before its system prompt: a hash that differs in each call.
BILLING = r"^x-anthropic-billing-header:[^\n]*\n*"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key of [keys.NAME]; `kvforge keys api FILE` makes one.

    hash: "sha256:" and the hexadecimal digest of the key. tenant: whose requests it makes. rights: generate; see
    (metrics and the live page); admin (cancel and drain there). priority_max: of its requests. requests_per_minute,
    tokens_per_minute: 0: no limit; tokens are those of prompts that were computed and of answers. expires: a date and
    time with a zone, as TOML has it.
    """

    hash: str
    tenant: str = "default"
    rights: tuple[str, ...] = (GENERATE,)
    priority_max: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    expires: datetime | None = None


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of [replicas.NAME]: a coordinator with its workers.

    runtime_dir, endpoint, server_key, key_file: as at the top of the file; one of the first two is given.
    """

    runtime_dir: str = ""
    endpoint: str = ""
    server_key: str = ""
    key_file: str = ""

    @property
    def coordinator(self) -> str:
        """Where it is."""
        return self.endpoint or client_endpoint(expand(self.runtime_dir))


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a gateway can be told.

    runtime_dir: where the coordinator's socket is. endpoint: `tcp://HOST:PORT` of one that is reached over a network.
    server_key: the coordinator's public key then. key_file: this gateway's own keys then.
    host, port: where to serve; port 0: any that is free. processes: how many serve that one port.
    answer_s: so long a replica has to say what it holds of a prompt (of a request with a key, which may run there,
    failover_s); who does not is left out until it is heard of.
    failover_s: after so long without a replica its requests are computed by another.
    names: what requests may call the model; the first is what it is called in lists. Empty: as the worker calls it.
    tokenizer: a path or a name; "": where the worker has its model. chat_template: a Jinja file in place of the model's
    own. tool_format: how the model writes calls of tools; "": as its chat template says.
    open: without [keys], serve others than this host too. hosts: names of this host that browsers may use, beside
    localhost and addresses. cors_origins: pages of others that may call this gateway; "*": any.
    body_bytes_max, head_bytes_max: of a request. body_fields_max: fields of a request's JSON, those within fields too.
    head_s, body_s: for it to come. keep_alive_s: an idle connection.
    write_s: after so long without reading, a client is given up. drain_s: for streams to end when it is told to.
    text_bytes_max: bytes of a prompt's text; 0: what the model's longest context can hold of the vocabulary's longest
    token. text_memory_bytes_max: memory that rendering and tokenising one prompt, or checking one shape, may take.
    text_processes: prompts and shapes that are worked on at once, in processes of their own. text_waiting_max: prompts
    and shapes that wait for them; more are refused (429). text_s: time for a prompt to be rendered and tokenised, or a
    shape to be checked, its wait included. template_s: processor time of the chat template.
    ping_s: longest silence of a stream; then a comment is sent (an event `ping` where Anthropic's API has it).
    log_level: debug, info, warning or error. log_format: text, or json: one document a line.
    strict_fields: refuse fields and tools that nothing here reads, by name, instead of ignoring them.
    strip: regular expressions of what agents put in front of their prompts and change with each call: it is left out.
    move: the same, but it is moved to the end of the system prompt, so that what follows it is found in the prefix
    cache.
    """

    runtime_dir: str = ""
    endpoint: str = ""
    server_key: str = ""
    key_file: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = 1
    replicas: dict[str, Replica] = {}
    answer_s: float = 0.5
    failover_s: float = 3.0
    names: tuple[str, ...] = ()
    tokenizer: str = ""
    chat_template: str = ""
    tool_format: str = ""
    open: bool = False
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    keys: dict[str, Key] = {}
    strict_fields: bool = False
    strip: tuple[str, ...] = (BILLING,)
    move: tuple[str, ...] = ()
    body_bytes_max: int = 32 << 20
    body_fields_max: int = 200_000
    head_bytes_max: int = 64 << 10
    text_bytes_max: int = 0
    text_memory_bytes_max: int = 1 << 30
    text_processes: int = 2
    text_waiting_max: int = 256
    text_s: float = 30.0
    template_s: float = 2.0
    ping_s: float = 15.0
    head_s: float = 10.0
    body_s: float = 60.0
    keep_alive_s: float = 75.0
    write_s: float = 60.0
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        logs.check(self.log_level, self.log_format)
        if not 0 <= self.port < 1 << 16:
            raise InvalidConfiguration("port", f"is {self.port}; it must be 0 to 65535")
        if not 1 <= self.processes <= PROCESSES_MAX:
            raise InvalidConfiguration("processes", f"is {self.processes}; it must be 1 to {PROCESSES_MAX}")
        for name in ("body_bytes_max", "body_fields_max", "head_bytes_max", "text_bytes_max", "text_memory_bytes_max"):
            if name == "text_bytes_max" and not self.text_bytes_max:
                continue
            if getattr(self, name) < 1024:
                raise InvalidConfiguration(name, f"is {getattr(self, name)}; it must be at least 1024")
        if not 1 <= self.text_processes <= PROCESSES_MAX:
            raise InvalidConfiguration("text_processes", f"is {self.text_processes}; it must be 1 to {PROCESSES_MAX}")
        if not 1 <= self.text_waiting_max <= TEXTS_WAITING_MAX:
            problem = f"is {self.text_waiting_max}; it must be 1 to {TEXTS_WAITING_MAX}"
            raise InvalidConfiguration("text_waiting_max", problem)
        for name in SECONDS:
            if not 0 < getattr(self, name) <= 86_400:
                raise InvalidConfiguration(name, "must be more than 0 and at most 86400 seconds")
        for name in ("strip", "move"):
            for at, pattern in enumerate(getattr(self, name)):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise InvalidConfiguration(f"{name}[{at}]", f"is no regular expression: {error}") from None
        for name, key in self.keys.items():
            _check(f"keys.{name}", key)
        for name, replica in self.replicas.items():
            if bool(replica.endpoint) == bool(replica.runtime_dir):
                raise InvalidConfiguration(f"replicas.{name}", "needs one of endpoint and runtime_dir, and not both")
        if len(self.replicas) > REPLICAS_MAX:
            raise InvalidConfiguration("replicas", f"has {len(self.replicas)}; there may be {REPLICAS_MAX}")
        given = [name for name in ("endpoint", "server_key", "key_file") if getattr(self, name)]
        if self.replicas and given:
            raise InvalidConfiguration(given[0], "is given, and [replicas] too, which say where each coordinator is")
        if not self.keys and not self.open and not is_local(self.host):
            problem = f"is {self.host}, which others reach too, and there are no [keys]"
            raise InvalidConfiguration(
                "host",
                f"{problem}: make one with `kvforge keys api` (or give `kvforge up` an --api-key), or set open = true",
            )

    @property
    def coordinator(self) -> str:
        """Where the coordinator is."""
        if self.endpoint:
            return self.endpoint
        return client_endpoint(self.folder)

    @property
    def folder(self) -> Path:
        """Where a coordinator on this machine has its socket and its tables."""
        return expand(self.runtime_dir) if self.runtime_dir else default_runtime_dir().absolute()


TABLES: dict[str, type[Key | Replica]] = {"keys": Key, "replicas": Replica}


def is_local(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def load_settings(path: Path | None, keys: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Read a TOML file.

    Args:
        path: None: the defaults.
        keys: more of [keys.NAME].

    Raises:
        InvalidConfiguration: it names the file or the key.
    """
    values = read_toml(path) if path is not None else {}
    if keys and isinstance(values.get("keys", {}), dict):
        values["keys"] = {**keys, **values.get("keys", {})}
    try:
        return convert(values, Settings)
    except InvalidConfiguration as error:
        table, several, _ = str(error.field).partition("[...]")
        if not several or table not in TABLES:
            raise
        # Of a table of tables msgspec does not say which.
        for name, inner in values[table].items():
            try:
                convert(inner, TABLES[table])
            except InvalidConfiguration as wrong:
                problem = wrong.message.removeprefix(f"{wrong.field}: ")
                raise InvalidConfiguration(f"{table}.{name}.{wrong.field}", problem) from None
        raise


def _check(field: str, key: Key) -> None:
    if not _HASH.fullmatch(key.hash):
        problem = 'is "sha256:" and 64 hexadecimal digits: `kvforge keys api` makes it'
        raise InvalidConfiguration(f"{field}.hash", problem)
    if not key.tenant or OWNER_END in key.tenant:
        raise InvalidConfiguration(f"{field}.tenant", "must be a name of one line")
    if wrong := sorted({*key.rights} - {*RIGHTS}):
        raise InvalidConfiguration(f"{field}.rights", f"holds {wrong[0]!r}; there are {', '.join(RIGHTS)}")
    if not -PRIORITY_MAX <= key.priority_max <= PRIORITY_MAX:
        raise InvalidConfiguration(f"{field}.priority_max", f"must be -{PRIORITY_MAX} to {PRIORITY_MAX}")
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(key, name) < 0:
            raise InvalidConfiguration(f"{field}.{name}", "must be 0 (no limit) or more")
    if key.expires is not None and key.expires.tzinfo is None:
        problem = f"has no zone; write {key.expires.replace(tzinfo=UTC).isoformat()}"
        raise InvalidConfiguration(f"{field}.expires", problem)
