"""Strict parsing of the Host header: `localhost:80:evil.example` and `localhost@evil.example` are invalid."""

from __future__ import annotations

import ipaddress
import re

PORT_MAX = (1 << 16) - 1
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{0,5}))?", re.ASCII)


def host_of(header: str) -> str:
    """Return the normalised host of a Host header.

    Args:
        header: `HOST`, `HOST:` or `HOST:PORT`, where HOST is a name, an IPv4 address, or an IPv6 address in brackets.

    Returns:
        The name in lower case without a trailing dot, or the address in its usual form without brackets; "" for a
        malformed header.
    """
    found = _HOST.fullmatch(header)
    if found is None or int(found["port"] or 0) > PORT_MAX:
        return ""
    if (address := found["address"]) is not None:
        try:
            return str(ipaddress.IPv6Address(address))
        except ValueError:
            return ""
    return plain(found["name"])


def plain(host: str) -> str:
    """Return a host of the settings in the spelling of `host_of`."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host.lower().removesuffix(".")
