"""Sockets that servers listen on: a port of an address, or a unix socket that only this user can open; and TLS."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.trust import writers
from pipeline.eval.server.keys import KEY_VARIABLE, read_private

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


@contextmanager
def bound(host: str, port: int, key: str, *, has_keys: bool) -> Generator[socket.socket, None, None]:
    """A socket that listens on a port, until the end of the block.

    Args:
        host: name or address.
        port: 0 for a free one.
        key: config key or option of the port, for messages.
        has_keys: whether requests need a key; without, only this machine may connect.

    Raises:
        UserError: the address or the port cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UserError(f"serve.host is {host!r}, which is not an address of this machine ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    if not has_keys and not ipaddress.ip_address(address[0]).is_loopback:
        raise UserError(
            f"serve.host is {host!r}, which other machines can reach, but there is no API key: leave out --no-key "
            f"(give --api-key-file or set {KEY_VARIABLE} for a key of yours), or use {LOOPBACK} and `ssh -L`"
        )
    with socket.socket(family, kind, protocol) as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError as error:
            raise UserError(_why_not(error, host, port, key)) from None
        yield listening


def _why_not(error: OSError, host: str, port: int, key: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{key} {port} of {host} is taken by another program; choose another one with --port, or 0 for any free one"
        )
    if error.errno == errno.EACCES:
        return f"you may not use {key} {port}; choose one above 1023 with --port"
    return f"{key} {port} of {host} (serve.host) cannot be used: {error.strerror}"


@contextmanager
def bound_unix(path: Path) -> Generator[socket.socket, None, None]:
    """A unix socket of mode 600 that listens, until the end of the block, which removes it.

    Raises:
        UserError: another server listens there, something else is there, or others could put a socket in its place.
    """
    path = path.absolute()
    for where in writers(path.parent).values():
        raise UserError(
            f"--socket {path}: {where}, and who writes there can put a socket of theirs in its place; name a path in a "
            "folder of yours"
        )
    _remove_left_over(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        before = os.umask(0o177)  # from its first moment on: a chmod afterwards would be too late
        try:
            listening.bind(str(path))
        except OSError as error:
            raise UserError(f"--socket {path} cannot be used: {error.strerror or error}") from None
        finally:
            os.umask(before)
        listening.listen(_BACKLOG)
        try:
            yield listening
        finally:
            with suppress(OSError):
                path.unlink()


def _remove_left_over(path: Path) -> None:
    """Remove the socket of a server that was killed."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"--socket {path} exists and is not a socket; name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise UserError(f"--socket {path} cannot be used: {error.strerror or error}") from None
        else:
            raise UserError(f"--socket {path} is used by another server; end that one, or name another path")


def is_of_this_machine(listening: socket.socket) -> bool:
    """True if no other machine can connect."""
    return listening.family == socket.AF_UNIX or ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Settings of TLS 1.2 and newer with a certificate; None without one.

    Args:
        certificate: PEM file with the certificate, and those of its issuers.
        key: PEM file with its private key, which nobody else may read.

    Raises:
        UserError: one is missing or cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UserError("TLS needs both --ssl-certificate and --ssl-key")
    read_private(key, f"--ssl-key {key}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A password: without one, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise UserError(
            f"--ssl-certificate {certificate} and --ssl-key {key} cannot be used: {error}; both are PEM files, the key "
            "without a password and that of the certificate"
        ) from None
    return context
