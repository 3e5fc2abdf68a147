"""A gateway's configuration: one frozen structure, validated once."""

from __future__ import annotations

import ipaddress
import os
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
from kvforge.protocol.transport import client_endpoint, default_runtime_dir, default_state_dir

GENERATE, SEE, ADMIN = RIGHTS = ("generate", "see", "admin")
PROCESSES_MAX = 64
REPLICAS_MAX = 256
TEXTS_WAITING_MAX = 1 << 16
NO_STORAGE = "none"
STORAGE_SCHEMES = ("sqlite:", "postgresql://", "postgres://")
AHEAD_TOKENS_MAX = 1 << 24
RETENTION_MAX_S = 10 * 366 * 86_400.0
SEQUENCE_MAX_S = 30 * 86_400.0  # as the coordinator allows
SECONDS = (
    *("head_s", "body_s", "keep_alive_s", "write_s", "drain_s", "answer_s", "failover_s"),
    *("text_s", "template_s", "ping_s"),
)
# Claude Code prepends a hash to its system prompt that differs in each call and would defeat the prefix cache.
BILLING = r"^x-anthropic-billing-header:[^\n]*\n*"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key, [keys.NAME]; `kvforge keys api FILE` creates one.

    Attributes:
        hash: "sha256:" and the hexadecimal SHA-256 digest of the key.
        tenant: The tenant that requests with this key belong to.
        rights: generate; see (metrics and the live page); admin (cancel and drain on the live page).
        priority_max: The highest priority of its requests.
        requests_per_minute, tokens_per_minute: Rate limits; 0 for none. Computed prompt tokens and generated tokens
            count, cached prompt tokens do not.
        expires: A TOML date and time with a zone.
    """

    hash: str
    tenant: str = "default"
    rights: tuple[str, ...] = (GENERATE,)
    priority_max: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    expires: datetime | None = None


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A coordinator with its workers, [replicas.NAME].

    Attributes:
        runtime_dir, endpoint, server_key, key_file: As at the top of the file; give exactly one of runtime_dir and
            endpoint.
    """

    runtime_dir: str = ""
    endpoint: str = ""
    server_key: str = ""
    key_file: str = ""

    @property
    def coordinator(self) -> str:
        """The ZeroMQ endpoint of the coordinator."""
        return self.endpoint or client_endpoint(expand(self.runtime_dir))


class StorageSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the APIs store, [storage].

    Attributes:
        url: "": SQLite in `state_dir`; `sqlite:PATH`; `postgresql://USER@HOST/DATABASE`, for several gateways; "none":
            nothing is stored.
        retention_s: How long a response or a conversation is kept after its last use, a file after its upload, and a
            batch with its output after its end.
        tenant_bytes_max: The bytes that a tenant may store. What it used longest ago is removed first.
        sequence_s: How long the coordinator keeps the tokens and KV of a stored response for a response that continues
            it, after its last use; 0: not at all. `limits.kept_per_tenant_max` of the coordinator bounds their number.
        lease_s: How soon another gateway continues the background responses and batches of one that died.
        answer_s: How long the database may take for a call.
    """

    url: str = ""
    retention_s: float = 30 * 86_400.0
    tenant_bytes_max: int = 1 << 30
    sequence_s: float = 600.0
    lease_s: float = 10.0
    answer_s: float = 10.0

    def __post_init__(self) -> None:
        if self.url not in ("", NO_STORAGE) and not self.url.startswith(STORAGE_SCHEMES):
            schemes = ", ".join(f"{scheme}..." for scheme in STORAGE_SCHEMES)
            raise InvalidConfiguration("storage.url", f'is {self.url!r}; expected "", "{NO_STORAGE}", {schemes}')
        if self.url == "sqlite:":
            raise InvalidConfiguration("storage.url", "names no file; expected sqlite:PATH")
        for name, least, most in (
            ("retention_s", 1.0, RETENTION_MAX_S),
            ("sequence_s", 0.0, SEQUENCE_MAX_S),
            ("lease_s", 0.1, 3600.0),
            ("answer_s", 0.1, 3600.0),
        ):
            if not least <= getattr(self, name) <= most:
                problem = f"is {getattr(self, name):g}; it must be {least:g} to {most:g}"
                raise InvalidConfiguration(f"storage.{name}", problem)
        if self.tenant_bytes_max < 1024:
            problem = f"is {self.tenant_bytes_max}; it must be at least 1024"
            raise InvalidConfiguration("storage.tenant_bytes_max", problem)


class BatchesSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches, [batches].

    Attributes:
        file_bytes_max: The limit of one uploaded file in bytes.
        tenant_file_bytes_max: The bytes of all files of a tenant, beyond which an upload is refused. Its stored objects
            together are limited by `storage.tenant_bytes_max`.
        lines_max: The requests of one batch.
        tenant_batches_max: Batches of a tenant in progress at once; further ones are refused (429).
        in_flight_max: Lines that one gateway process has in progress at once. It uses fewer while the service has no
            free rows.
        beside_share: The share of the service's rows that batches may use while other requests run, and for ten
            seconds after. More rows make every step longer, and so the answers of the others slower.
    """

    file_bytes_max: int = 200 << 20
    tenant_file_bytes_max: int = 512 << 20
    lines_max: int = 100_000
    tenant_batches_max: int = 16
    in_flight_max: int = 256
    beside_share: float = 0.0625

    def __post_init__(self) -> None:
        for name, least, most in (
            ("file_bytes_max", 1024, 1 << 40),
            ("tenant_file_bytes_max", 1024, 1 << 50),
            ("lines_max", 1, 10_000_000),
            ("tenant_batches_max", 1, 10_000),
            ("in_flight_max", 1, 65_536),
            ("beside_share", 0.001, 1.0),
        ):
            if not least <= getattr(self, name) <= most:
                problem = f"is {getattr(self, name)}; it must be {least:g} to {most:g}"
                raise InvalidConfiguration(f"batches.{name}", problem)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a gateway.

    Attributes:
        runtime_dir: The directory of the coordinator's socket.
        state_dir: The directory of what is stored; "": `gateway` in systemd's STATE_DIRECTORY, or else in the directory
            of the coordinator's journal.
        endpoint: `tcp://HOST:PORT` of a coordinator on another machine.
        server_key: The public key of the coordinator at `endpoint`.
        key_file: This gateway's own key pair for `endpoint`.
        host, port: The address to listen on; port 0 picks a free one.
        processes: The number of processes that share the port.
        ahead_tokens_max: An answer of a chat with at most this many tokens is computed as a prompt after its end, while
            nothing else is to be done, so that the next turn finds it cached; 0: none. For workers that compute
            prompts and generated tokens differently.
        answer_s: How long a replica may take to report its cached prefix of a prompt (failover_s for a request with an
            idempotency key, which may already run there); a replica that takes longer is skipped until it answers
            again.
        failover_s: How long a replica may be unreachable before its requests move to another one.
        names: The model names that requests may use; the first one is listed. Empty: the worker's name of the model.
        tokenizer: A path or a name; "": the directory from which the worker loads the model.
        chat_template: A Jinja file that replaces the model's own template.
        tool_format: The format of the model's tool calls; "": derived from its chat template.
        open: Without [keys], accept requests from other hosts too.
        hosts: Host names that browsers may use for this service, besides localhost and IP addresses.
        cors_origins: Origins of other web pages that may call this gateway; "*": any.
        body_bytes_max, head_bytes_max: The limits of a request's body and head.
        body_fields_max: The limit of fields in a request's JSON, nested ones included.
        head_s, body_s: How long a client may take to send the head and the body.
        keep_alive_s: How long an idle connection stays open.
        write_s: How long a slow consumer may read nothing before the gateway drops its connection.
        drain_s: How long streams may continue after the gateway was asked to stop.
        text_bytes_max: The limit of a prompt's text; 0: the longest context times the longest token of the vocabulary.
        text_memory_bytes_max: The memory limit for rendering and tokenising one prompt, or compiling one grammar.
        text_processes: The number of helper processes that render, tokenise and compile grammars.
        text_waiting_max: How many prompts and grammars may wait for a helper process; further ones are refused (429).
        text_s: The time limit for rendering and tokenising a prompt, or compiling a grammar, queueing included.
        template_s: The limit of CPU time for the chat template.
        ping_s: The longest silence of a stream; a comment is sent then (Anthropic's API: a `ping` event).
        log_level: debug, info, warning or error.
        log_format: text, or json (one document a line).
        strict_fields: Refuse unknown fields and unsupported tools instead of ignoring them.
        strip: Regular expressions of text that agents prepend to a prompt and change with each call; it is removed.
        move: As `strip`, but the text moves to the end of the system prompt, so that the rest hits the prefix cache.
    """

    runtime_dir: str = ""
    state_dir: str = ""
    endpoint: str = ""
    server_key: str = ""
    key_file: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = 1
    replicas: dict[str, Replica] = {}
    ahead_tokens_max: int = 8192
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
    storage: StorageSection = StorageSection()
    batches: BatchesSection = BatchesSection()
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
        if not 0 <= self.ahead_tokens_max <= AHEAD_TOKENS_MAX:
            problem = f"is {self.ahead_tokens_max}; it must be 0 to {AHEAD_TOKENS_MAX}"
            raise InvalidConfiguration("ahead_tokens_max", problem)
        if not 1 <= self.text_processes <= PROCESSES_MAX:
            raise InvalidConfiguration("text_processes", f"is {self.text_processes}; it must be 1 to {PROCESSES_MAX}")
        if not 1 <= self.text_waiting_max <= TEXTS_WAITING_MAX:
            problem = f"is {self.text_waiting_max}; it must be 1 to {TEXTS_WAITING_MAX}"
            raise InvalidConfiguration("text_waiting_max", problem)
        for name in SECONDS:
            if not 0 < getattr(self, name) <= 86_400:
                problem = f"must be more than 0 and at most 86400 seconds, not {getattr(self, name):g}"
                raise InvalidConfiguration(name, problem)
        for name in ("strip", "move"):
            for at, pattern in enumerate(getattr(self, name)):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise InvalidConfiguration(f"{name}[{at}]", f"invalid regular expression: {error}") from None
        for name, key in self.keys.items():
            _check(f"keys.{name}", key)
        for name, replica in self.replicas.items():
            if bool(replica.endpoint) == bool(replica.runtime_dir):
                raise InvalidConfiguration(f"replicas.{name}", "needs exactly one of endpoint and runtime_dir")
        if len(self.replicas) > REPLICAS_MAX:
            raise InvalidConfiguration(
                "replicas", f"has {len(self.replicas)} entries; at most {REPLICAS_MAX} are allowed"
            )
        given = [name for name in ("endpoint", "server_key", "key_file") if getattr(self, name)]
        if self.replicas and given:
            raise InvalidConfiguration(given[0], "cannot be combined with [replicas]: set it for each replica")
        if not self.keys and not self.open and not is_local(self.host):
            problem = f"is {self.host}, which is reachable from other hosts, but there are no [keys]"
            raise InvalidConfiguration(
                "host",
                f"{problem}: create a key with `kvforge keys api`, pass --api-key to `kvforge up`, or set open = true",
            )

    @property
    def coordinator(self) -> str:
        """The ZeroMQ endpoint of the coordinator."""
        if self.endpoint:
            return self.endpoint
        return client_endpoint(self.folder)

    @property
    def folder(self) -> Path:
        """The runtime directory of a coordinator on this machine: its socket and shared tables."""
        return expand(self.runtime_dir) if self.runtime_dir else default_runtime_dir().absolute()

    @property
    def storage_url(self) -> str:
        """The database of what is stored, `sqlite:PATH` or `postgresql://...`; "" if nothing is."""
        url = self.storage.url
        if url == NO_STORAGE:
            return ""
        if url.startswith("sqlite:"):
            return f"sqlite:{expand(url.removeprefix('sqlite:'))}"
        if url:
            return url
        if self.state_dir:
            folder = expand(self.state_dir)
        elif unit := os.environ.get("STATE_DIRECTORY"):  # systemd's StateDirectory=, the only writable one
            folder = Path(unit.partition(":")[0]) / "gateway"
        else:
            folder = default_state_dir(self.folder) / "gateway"
        return f"sqlite:{folder / 'stored.sqlite'}"


TABLES: dict[str, type[Key | Replica]] = {"keys": Key, "replicas": Replica}


def is_local(host: str) -> bool:
    """Return whether `host` is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def load_settings(path: Path | None, keys: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Read a TOML file.

    Args:
        path: The file; None for the defaults.
        keys: Further entries of [keys].

    Raises:
        InvalidConfiguration: The file cannot be read, or a key is invalid; the error names it.
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
        # msgspec's error does not name the entry of a table of tables: convert them one by one to find it.
        for name, inner in values[table].items():
            try:
                convert(inner, TABLES[table])
            except InvalidConfiguration as wrong:
                problem = wrong.message.removeprefix(f"{wrong.field}: ")
                raise InvalidConfiguration(f"{table}.{name}.{wrong.field}", problem) from None
        raise


def _check(field: str, key: Key) -> None:
    if not _HASH.fullmatch(key.hash):
        problem = 'must be "sha256:" and 64 hexadecimal digits: create one with `kvforge keys api`'
        raise InvalidConfiguration(f"{field}.hash", problem)
    if not key.tenant or OWNER_END in key.tenant:
        raise InvalidConfiguration(f"{field}.tenant", "must be a name without line breaks")
    if wrong := sorted({*key.rights} - {*RIGHTS}):
        raise InvalidConfiguration(f"{field}.rights", f"holds {wrong[0]!r} (expected {', '.join(RIGHTS)})")
    if not -PRIORITY_MAX <= key.priority_max <= PRIORITY_MAX:
        raise InvalidConfiguration(f"{field}.priority_max", f"must be -{PRIORITY_MAX} to {PRIORITY_MAX}")
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(key, name) < 0:
            raise InvalidConfiguration(f"{field}.{name}", "must be 0 (no limit) or more")
    if key.expires is not None and key.expires.tzinfo is None:
        problem = f"has no time zone; write {key.expires.replace(tzinfo=UTC).isoformat()}"
        raise InvalidConfiguration(f"{field}.expires", problem)
