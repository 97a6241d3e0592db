"""Files of datasets on the Hugging Face hub: listed at a commit, whose files never change, and read by HTTP.

`huggingface_hub` comes with `datasets`; it is imported when a file is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectMissing, StoreError
from pipeline.common.objects.retries import retrying
from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.stores import hub_address
from pipeline.common.objects.urls import ObjectUrl, dataset_of

_STATUS_REFUSED = (401, 403)
_STATUS_MISSING = (404, 410)


def list_hub(folder: ObjectUrl, access: RemoteAccess) -> list[StoredObject]:
    """The files below a folder of a dataset, at the commit that its revision is now.

    Raises:
        ObjectMissing: there is no such dataset, revision or folder.
        StoreError: the hub does not answer, or refuses this user.
    """
    name, revision = dataset_of(folder)
    commit = _commit(name, revision, access)
    at = ObjectUrl("hf", f"datasets/{name}@{commit}", folder.key)

    def request() -> list[Any]:
        api = _api(access)
        found = api.list_repo_tree(name, folder.key or None, recursive=True, revision=commit, repo_type="dataset")
        return [entry for entry in _refused(at, lambda: list(found)) if hasattr(entry, "blob_id")]

    files = retrying(request, folder, "list", access)
    return [
        StoredObject(at.with_key(file.path), file.size, file.lfs.sha256 if file.lfs else file.blob_id, access)
        for file in files
    ]


# A command lists some folders of a dataset: all of them at one commit.
@lru_cache(maxsize=64)
def _commit(name: str, revision: str, access: RemoteAccess) -> str:
    url = ObjectUrl("hf", f"datasets/{name}@{revision}", "")

    def request() -> str:
        return str(_refused(url, lambda: _api(access).dataset_info(name, revision=revision)).sha)

    return retrying(request, url, "list", access)


def _api(access: RemoteAccess) -> Any:
    import huggingface_hub

    return huggingface_hub.HfApi(endpoint=hub_address(), token=False if access.anonymous else None)


def _refused(url: ObjectUrl, request: Any) -> Any:
    """The answer to a request, or the error of one that another attempt would not change."""
    try:
        return request()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        # The hub hides private datasets behind 401 and 404.
        if status in (*_STATUS_REFUSED, *_STATUS_MISSING):
            advice = "check name and revision; if it is private or has terms to accept, log in with `hf auth login`"
            kind = ObjectMissing if status in _STATUS_MISSING else StoreError
            raise kind(f"{url} cannot be listed ({status}): {advice}") from None
        raise
