"""`data.remote`: object storage that sources and datasets are read from."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from pipeline.common.objects.access import PATIENCE_S, READ_TIMEOUT_S, REQUEST_BYTES, REQUESTS, RemoteAccess
from pipeline.common.objects.urls import check_endpoint
from pipeline.config.base import CREDENTIALS, MAX_BYTES, Bytes, Section


class RemoteConfig(Section):
    """Object storage of sources and datasets. Credentials come from the environment, never from a run file."""

    concurrency: int = Field(default=REQUESTS, ge=1, le=256)
    """Requests in flight at a time, for each worker process; it may hold an answer of each in memory. Each process
    of a training has at least 16."""
    request_bytes: Bytes = Field(default=REQUEST_BYTES, ge=2**16, le=MAX_BYTES)
    """Largest range that a request asks for."""
    patience_seconds: float = Field(default=PATIENCE_S, ge=0, lt=10**9)
    """Seconds for which a request that fails is sent again, with growing pauses, while nothing comes. After that the
    command ends; the same command resumes."""
    read_timeout_seconds: float = Field(default=READ_TIMEOUT_S, gt=0, lt=10**6)
    """Seconds without a byte after which a request is sent again, from the byte that came last."""
    endpoint: Annotated[str, AfterValidator(check_endpoint), CREDENTIALS] | None = None
    """URL of a server that speaks the protocol of S3; by default `AWS_ENDPOINT_URL`, else Amazon's. It gets your
    requests, so it is refused in a file that another user may have written."""
    anonymous: bool = False
    """Read without credentials, for public buckets."""

    @property
    def access(self) -> RemoteAccess:
        """The settings, for readers."""
        return RemoteAccess(
            self.concurrency,
            self.request_bytes,
            self.patience_seconds,
            self.read_timeout_seconds,
            self.endpoint,
            self.anonymous,
        )
