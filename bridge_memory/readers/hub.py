"""Fetching a config.json from the Hugging Face Hub. huggingface_hub is imported here and only when called."""

from __future__ import annotations

import os

from bridge_memory.spec import SpecError

#: One line of why, for the errors huggingface_hub raises, most specific first.
_REASONS = (
    ("GatedRepoError", "it is gated: accept its terms on the Hub and log in (hf auth login, or HF_TOKEN)"),
    ("DisabledRepoError", "its repository is disabled"),
    ("RepositoryNotFoundError", "the Hub has no such repository, or it is private and the token does not reach it"),
    ("LocalEntryNotFoundError", None),
    ("OfflineModeIsEnabled", None),
    ("EntryNotFoundError", "its repository has no config.json"),
    ("RevisionNotFoundError", "its repository has no such revision"),
    ("HFValidationError", "it is not a valid Hub id"),
)


def fetch_config(repo: str, suggestions: str = "") -> str:
    """The local path of ``repo``'s config.json, from the cache or the Hub. Raises SpecError of one line."""
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError:
        raise SpecError(
            f"{repo} is no preset, and fetching it needs huggingface_hub: pip install huggingface_hub{suggestions}"
        ) from None
    try:
        path: str = hf_hub_download(repo, "config.json")
    except Exception as error:  # every failure ends as one line: network stacks raise far too many kinds
        offline = bool(constants.HF_HUB_OFFLINE) or os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "TRUE")
        raise SpecError(
            f"{repo} is no preset and could not be fetched: {_reason(error, offline, constants.ENDPOINT)}{suggestions}"
        ) from None
    return path


def _reason(error: BaseException, offline: bool, endpoint: str) -> str:
    names = {cls.__name__ for cls in type(error).__mro__}
    for name, reason in _REASONS:
        if name in names:
            if reason is not None:
                return reason
            break
    if offline:
        return "HF_HUB_OFFLINE is set and its config.json is not in the cache"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"{endpoint} answered {status}"
    return f"{endpoint} cannot be reached; give a config.json instead"
