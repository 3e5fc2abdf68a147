"""What a gateway is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One gateway. endpoint: of the coordinator; "": where clients look by default."""

    endpoint: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    body_bytes_max: int = 32 << 20
    tokenizer: str = ""
    chat_template: str = ""
    names: tuple[str, ...] = ()
