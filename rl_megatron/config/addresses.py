"""Addresses of this machine, for processes that have only the standard library, too."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. Other names than localhost may be those of any machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
