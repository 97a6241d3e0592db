"""Access to object storage: how it is read. It holds no credentials, and may be sent and kept."""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS = 4
"""Requests of a process that are in flight at a time, by default."""
REQUEST_BYTES = 2**23
PATIENCE_S = 600.0
READ_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RemoteAccess:
    """Settings of access to object storage.

    Attributes:
        concurrency: requests of a process that are in flight at a time.
        request_bytes: most bytes of a request.
        patience_s: seconds after which a request that comes to nothing is given up.
        read_timeout_s: seconds without a byte after which a request is sent again.
        endpoint: URL of a server that speaks the protocol of S3, in place of Amazon's; by default that of the
            environment.
        anonymous: without credentials, for public buckets.
    """

    concurrency: int = REQUESTS
    request_bytes: int = REQUEST_BYTES
    patience_s: float = PATIENCE_S
    read_timeout_s: float = READ_TIMEOUT_S
    endpoint: str | None = None
    anonymous: bool = False
