"""Stores of objects, opened by obstore (the extra `cloud`), which is imported when the first one is opened."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import quote

from pipeline.common.errors import MachineError, UserError, install_extra
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.urls import ObjectUrl, dataset_of

_WHOLE_REQUEST = timedelta(hours=1)
"""Bound of a request with its body; what holds is the time without a byte."""
_CONNECT = timedelta(seconds=5)
_PIECE_RETRIES = 8
"""Times that the library sends a piece of an upload again: an upload that fails as a whole begins anew."""


class _Stores:
    """Stores that are open in this process."""

    owner: int | None = None
    """Process that uses the library. A fork does not copy its threads, and the copy would wait for them for ever."""
    opened: ClassVar[dict[tuple[str, str, RemoteAccess, bool], Any]] = {}
    lock = threading.Lock()


def load_obstore() -> ModuleType:
    """The library.

    Raises:
        UserError: it is not installed.
        MachineError: this process was forked from one that has used it.
    """
    if _Stores.owner not in (None, os.getpid()):
        raise MachineError(
            f"object storage cannot be used in process {os.getpid()}, which was forked from process {_Stores.owner} "
            "after that had used it; start the process anew (`spawn`) instead"
        )
    try:
        import obstore
    except ImportError:
        raise UserError(f"objects are read with obstore, which is not installed: {install_extra('cloud')}") from None
    _Stores.owner = os.getpid()
    return obstore


def was_used() -> bool:
    """Tell whether a store was opened in this process or one that it was forked from: it must not be forked."""
    return _Stores.owner is not None


def open_store(url: ObjectUrl, access: RemoteAccess, *, writes: bool = False) -> Any:
    """The store that an object is in. Each is opened once.

    A store for writing sends checksums along, and pieces of an upload again.

    Credentials come from the environment, or the role of the machine: nothing of them is in the settings.

    Raises:
        UserError: the library is missing, or there are credentials that it cannot read.
    """
    load_obstore()
    key = (url.scheme, url.place, access, writes)
    with _Stores.lock:
        if key not in _Stores.opened:
            _Stores.opened[key] = _open(url, access, writes)
        return _Stores.opened[key]


def forget_store(url: ObjectUrl, access: RemoteAccess) -> None:
    """Open the store of an object anew when it is asked for next, with the credentials that there are then."""
    with _Stores.lock:
        for writes in (False, True):
            _Stores.opened.pop((url.scheme, url.place, access, writes), None)


def use_store(url: ObjectUrl, access: RemoteAccess, store: Any) -> None:
    """Let a store that is open already be that of an object, such as one in memory."""
    load_obstore()
    with _Stores.lock:
        for writes in (False, True):
            _Stores.opened[url.scheme, url.place, access, writes] = store


def _open(url: ObjectUrl, access: RemoteAccess, writes: bool) -> Any:
    from obstore import store

    options: dict[str, Any] = {
        "client_options": {
            "timeout": _WHOLE_REQUEST,
            "connect_timeout": _CONNECT,
            "read_timeout": timedelta(seconds=access.read_timeout_s),
        },
        # Our own attempts are counted, and continue at the byte that came.
        "retry_config": {"max_retries": _PIECE_RETRIES if writes else 0, "retry_timeout": _WHOLE_REQUEST},
    }
    if url.scheme == "s3":
        if writes:
            options["checksum_algorithm"] = "SHA256"
        return _open_s3(url, access, options)
    if url.is_pinned:
        return _open_hub(url, access, options)
    if url.scheme in ("https", "http"):
        options["client_options"]["allow_http"] = url.scheme == "http"
        return store.HTTPStore(f"{url.scheme}://{url.place}", **options)
    kind: Callable[..., Any] = store.GCSStore if url.scheme == "gs" else store.AzureStore
    return kind(url.place, skip_signature=access.anonymous, **options)


def hub_address() -> str:
    """URL of the Hugging Face hub: `HF_ENDPOINT`, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _open_hub(url: ObjectUrl, access: RemoteAccess, options: dict[str, Any]) -> Any:
    import huggingface_hub
    from obstore.store import HTTPStore

    name, revision = dataset_of(url)
    address = hub_address()
    options["client_options"]["allow_http"] = address.startswith("http:")
    token = None if access.anonymous else huggingface_hub.get_token()
    if token is not None:
        options["client_options"]["default_headers"] = {"authorization": f"Bearer {token}"}
    return HTTPStore(f"{address}/datasets/{name}/resolve/{quote(revision, safe='')}", **options)


def _open_s3(url: ObjectUrl, access: RemoteAccess, options: dict[str, Any]) -> Any:
    from obstore.store import S3Store

    endpoint = access.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint is not None:
        options["endpoint"] = endpoint
        options["client_options"]["allow_http"] = endpoint.startswith("http:")
    if access.anonymous:
        return S3Store(url.place, skip_signature=True, **options)
    if has_profile():
        if find_spec("boto3") is None:
            raise UserError(
                f"{url}: the credentials of AWS are in a profile (~/.aws, AWS_PROFILE), and profiles are read with "
                "boto3: `pip install boto3`. Or put the credentials into the environment: "
                '`eval "$(aws configure export-credentials --format env)"`'
            )
        from obstore.auth.boto3 import Boto3CredentialProvider

        provider = Boto3CredentialProvider()
        region = os.environ.get("AWS_REGION") or provider.config.get("region")
        if region:
            options["region"] = region
        return S3Store(url.place, credential_provider=provider, **options)
    return S3Store(url.place, **options)


def has_profile() -> bool:
    """Tell whether the credentials of AWS are in a file: the environment names no others, and there is a profile."""
    given = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in (*given, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return False
    if os.environ.get("AWS_PROFILE"):
        return True
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE")
    return (Path(file) if file else Path.home() / ".aws" / "credentials").is_file()
