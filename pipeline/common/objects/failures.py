"""Failures of requests to object storage: what each means, and what a user can do about it.

A message never has the query of a URL, headers, or the text of the library's exception, which has both.
"""

from __future__ import annotations

import re
from typing import Literal

from pipeline.common.errors import MachineError, UserError
from pipeline.common.objects.urls import STORES, ObjectUrl

Kind = Literal[
    "changed",
    "missing",
    "denied",
    "expired",
    "clock",
    "unauthenticated",
    "no credentials",
    "no range",
    "refused",
    "passing",
]
"""`passing`: the same request may succeed later."""
Action = Literal["list", "read", "write", "delete"]
_DONE: dict[Action, str] = {"list": "listed", "read": "read", "write": "written", "delete": "removed"}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(
    r"\(code: ([A-Za-z0-9]{1,64})\)|<Code>\s*([A-Za-z0-9]{1,64})\s*</Code>"
    r"|\"(?:code|reason)\"\s*:\s*\"([A-Za-z0-9]{1,64})\""
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_SKEWED = frozenset({"RequestTimeTooSkewed"})
_WRONG = frozenset(
    {
        "SignatureDoesNotMatch",
        "InvalidAccessKeyId",
        "InvalidToken",
        "AuthorizationHeaderMalformed",
        "AuthenticationFailed",
    }
)
_EMPTY_FOLDER = "empty path segment"
"""Part of the library's message about a key like `a//b`."""
_METADATA = ("//169.254.169.254/", "//169.254.170.2/", "//metadata.google.internal/", "//metadata/")
"""Addresses at which machines of a cloud find their role: asked where the environment has no credentials."""
_PASSING = frozenset({"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ServerBusy", "Throttling"})
_PERMISSIONS: dict[str, dict[Action, str]] = {
    "s3": {
        "list": "s3:ListBucket",
        "read": "s3:GetObject",
        "write": "s3:PutObject",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "list": "storage.objects.list",
        "read": "storage.objects.get",
        "write": "storage.objects.create",
        "delete": "storage.objects.delete",
    },
    "az": {
        "list": "Storage Blob Data Reader",
        "read": "Storage Blob Data Reader",
        "write": "Storage Blob Data Contributor",
        "delete": "Storage Blob Data Contributor",
    },
}
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the service account of the machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or the managed identity",
}


class StoreError(MachineError):
    """An object store cannot be reached, or refuses this user. What was committed is kept."""


class ObjectChanged(UserError):
    """An object is not the one that was listed any more."""


class ObjectMissing(UserError):
    """An object or a bucket that does not exist."""


class Truncated(Exception):
    """A response ended before all of its bytes had come."""


def kind_of(error: BaseException) -> tuple[Kind, str]:
    """Kind of a failure, and the code that the server gives for it (a name or a status); empty without one."""
    # What follows is the library's dump of its own objects.
    text = str(error).partition("\n\nDebug source")[0]
    found, status = _CODE.search(text), _STATUS.search(text)
    code = next(filter(None, found.groups()), "") if found else ""
    number = int(status[1]) if status else 0
    shown = code or (str(number) if number else "")
    name = type(error).__name__
    kinds: tuple[tuple[Kind, bool], ...] = (
        ("no credentials", any(host in text for host in _METADATA)),
        ("refused", _EMPTY_FOLDER in text),
        ("expired", code in _EXPIRED),
        ("clock", code in _SKEWED),
        ("passing", code in _PASSING or is_taken(error) or isinstance(error, Truncated)),
        ("changed", number == 412 or name == "PreconditionError"),
        ("missing", number in (404, 410) or isinstance(error, FileNotFoundError)),
        ("unauthenticated", number == 401 or code in _WRONG or name == "UnauthenticatedError"),
        ("denied", number == 403 or code == "AccessDenied" or name == "PermissionDeniedError"),
        ("no range", number == 416 or name == "NotSupportedError" or (not number and "Invalid range" in text)),
        ("refused", 300 <= number < 500 and number not in (408, 425, 429)),
        ("refused", name in ("InvalidPathError", "UnknownConfigurationKeyError", "JoinError")),
    )
    return next((kind for kind, holds in kinds if holds), "passing"), shown


def is_taken(error: BaseException) -> bool:
    """Tell whether a store says that there is such an object already, or that another writer is at it."""
    return type(error).__name__ == "AlreadyExistsError"


def failure(error: BaseException, url: ObjectUrl, action: Action, attempts: int = 1) -> UserError:
    """The error of the project for a failed request.

    Args:
        error: of the library.
        url: of the object; of a listing, with the prefix as its key.
        action: what was asked for.
        attempts: requests that came to nothing.
    """
    kind, code = kind_of(error)
    what = f"{url} cannot be {_DONE[action]}"
    server = f" ({code})" if code else ""
    permission = _PERMISSIONS.get(url.scheme, {}).get(action)
    if kind == "missing":
        bucket = code in ("NoSuchBucket", "ContainerNotFound")
        return ObjectMissing(f"{url}: there is no such {'bucket' if bucket else 'object'}{server}")
    if kind == "changed":
        return ObjectChanged(f"{url} changed since it was listed; {RESTORE}")
    if kind == "denied":
        needs = f": it needs the permission {permission}" if permission else ""
        return StoreError(f"{what}: access is denied{server}{needs}{_credentials(url)}")
    if kind == "unauthenticated":
        return StoreError(f"{what}: the server does not accept the credentials{server}{_credentials(url)}")
    if kind == "no credentials":
        return StoreError(
            f"{what}: no credentials were found, neither in the environment nor from a role of this machine"
            f"{_credentials(url)}; for a public bucket set data.remote.anonymous: true"
        )
    if kind == "expired":
        return StoreError(f"{what}: the credentials have expired{server}; renew them, and run the same command again")
    if kind == "clock":
        return StoreError(
            f"{what}: the clock of this machine differs from the server's by more than 15 minutes{server}; set it (NTP)"
        )
    if kind == "no range":
        return StoreError(f"{what}: the server does not give parts of objects{server}; {COPY_FIRST}")
    if kind == "refused":
        hint = ", which may mean that the bucket is in another region: set AWS_REGION" if code.startswith("30") else ""
        if _EMPTY_FOLDER in str(error):
            return StoreError(f"{what}: a key in it has an empty folder name (//), which is not supported; rename it")
        return StoreError(f"{what}: the server refuses the request{server}{hint}")
    tries = f" in {attempts} attempts" if attempts > 1 else ""
    return StoreError(
        f"{what}: no answer{server}{tries}; check network, data.remote.endpoint and AWS_ENDPOINT_URL, and run the same "
        "command again to resume"
    )


COPY_FIRST = "copy it to a disk or a bucket first"
RESTORE = "restore it; documents of two versions of a file must not be mixed"


def _credentials(url: ObjectUrl) -> str:
    variables = _VARIABLES.get(url.scheme)
    return f"; {STORES[url.scheme]} takes credentials from {variables}" if variables else ""
