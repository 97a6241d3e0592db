"""Public IP addresses. The ranges are ours: those of Python's `ipaddress` change between its releases.

Source: the IANA registries of special-purpose addresses, RFC 6890.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_right

_SPECIAL = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/3",
)  # fmt: skip
_GIVEN_OUT = (
    "2001:200::/23", "2001:400::/22", "2001:800::/21", "2001:1000::/20", "2001:2000::/19", "2001:4000::/18",
    "2001:8000::/17", "2002::/16", "2003::/16", "2400::/7", "2600::/7", "2800::/7", "2a00::/7", "2c00::/7",
)  # fmt: skip
_DOCUMENTATION = ipaddress.IPv6Network("2001:db8::/32")
_NETWORKS = [ipaddress.IPv4Network(each) for each in _SPECIAL]
_STARTS = [int(each.network_address) for each in _NETWORKS]
_ENDS = [int(each.broadcast_address) for each in _NETWORKS]
_V6 = [ipaddress.IPv6Network(each) for each in _GIVEN_OUT]


def public_v4(text: str) -> str | None:
    """The address as it is usually written, if it is one and public; documentation's addresses are not."""
    octets = text.split(".")
    if len(octets) != 4 or any(len(each) > 3 or each != str(int(each)) or int(each) > 255 for each in octets):
        return None
    a, b, c, d = map(int, octets)
    number = a << 24 | b << 16 | c << 8 | d
    place = bisect_right(_STARTS, number) - 1
    return None if number <= _ENDS[place] else text


def public_v6(text: str) -> str | None:
    """The address in its shortest form, if it is one and in a range that is given out."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    if address in _DOCUMENTATION or not any(address in network for network in _V6):
        return None
    return str(address)
