"""Sockets that processes of this machine listen on, as the kernel lists them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def beyond_loopback(pids: Iterable[int]) -> list[str]:
    """Addresses that others than this machine can reach, of sockets that these processes listen on."""
    return [str(address) for address in listeners(pids) if not ipaddress.ip_address(address[0]).is_loopback]


def listeners(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Address and port of each socket that one of these processes listens on."""
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            table = _table(pid)
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    target = os.readlink(descriptor)
                    if target in table:
                        found.add(table[target])
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """A process, those that it has started, and theirs."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def _table(pid: int) -> dict[str, tuple[str, int]]:
    """By the name of a socket, where it listens."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN:
                address, port = words[1].split(":")
                found[f"socket:[{words[9]}]"] = (str(_address(address)), int(port, 16))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """From the kernel's form: words of 32 bits, each in the order of this machine."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(data)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
