"""Checks of settings that need this machine: the files that they name must be readable and valid."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from kvforge.gateway.config import Settings
from kvforge.gateway.parse import choose
from kvforge.protocol import network
from kvforge.protocol.configuration import expand
from kvforge.protocol.errors import InvalidConfiguration

# transformers' own tags, which mark the training part of a template and are unknown to Jinja.
_TRAINING = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def check_settings(settings: Settings) -> None:
    """Check the settings that refer to files, keys and other hosts.

    Raises:
        InvalidConfiguration: Names the setting: `chat_template`, `tool_format`, `endpoint` or a key.
    """
    choose("", settings.tool_format)
    if settings.endpoint and not settings.endpoint.startswith("ipc://"):
        network.host_and_port(settings.endpoint, "endpoint")
    for name, replica in settings.replicas.items():
        if replica.endpoint and not replica.endpoint.startswith("ipc://"):
            network.host_and_port(replica.endpoint, f"replicas.{name}.endpoint")
        network.credentials_for(replica.coordinator, replica.server_key or None, replica.key_file or None)
    network.credentials_for(settings.coordinator, settings.server_key or None, settings.key_file or None)
    if not settings.chat_template:
        return
    try:
        template = expand(settings.chat_template).read_text(encoding="utf-8")
        Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINING.sub("", template))
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read {settings.chat_template}: {getattr(error, 'strerror', None) or error}"
        raise InvalidConfiguration("chat_template", problem) from None
    except TemplateSyntaxError as error:
        problem = f"{settings.chat_template}, line {error.lineno}: {error.message}"
        raise InvalidConfiguration("chat_template", problem) from None


def effective_settings(settings: Settings) -> dict[str, Any]:
    """Return the effective settings, for `--check` and `kvforge deploy check`."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    replicas = {name: replica.coordinator for name, replica in settings.replicas.items()}
    return {
        "runtime_dir": "" if settings.endpoint or settings.replicas else str(settings.folder),
        "coordinator": settings.coordinator if not settings.replicas else "",
        **({"replicas": replicas} if replicas else {}),
        "address": f"http://{host}:{settings.port}",
        "processes": settings.processes,
        "keys": len(settings.keys),
    }
