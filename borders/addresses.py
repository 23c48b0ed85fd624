"""Tell addresses that only this machine reaches from those that others reach."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    """Return whether a host is an address, and no name that its reader resolves."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's loopback, whoever resolves it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # it is a name
        return host == "localhost"
