"""Models of the Hugging Face hub, by `org/name`. Safetensors and text files only, never pickle.

huggingface_hub keeps its own cache (HF_HOME) and token; a cached copy serves when the hub cannot be reached.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .errors import ModelError
from .progress import ProgressSink

_WEIGHTS = ["*.safetensors"]
_FILES = ["*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
# other frameworks' copies of the same weights
_NOT = ["original/*", "onnx/*", "consolidated*.safetensors"]
# the hub's name for its bar of bytes received, which runs beside the one of bytes written
_RECEIVED = "Downloading bytes"


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form org/name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) is not None


def fetch_from_hub(repo: str, revision: str | None, progress: ProgressSink, *, weights: bool = True) -> Path:
    """Folder of the model in huggingface_hub's cache, downloaded if need be. Raises ModelError.

    weights: False fetches all but them, into the folder where they would be.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    progress.start(f"downloading {repo}", None)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_FILES + (_WEIGHTS if weights else []),
            ignore_patterns=_NOT,
            tqdm_class=_progress_bar(progress),
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated on the Hugging Face hub.",
            f"Accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The Hugging Face hub has no model {repo}, or not for you.",
            "Check the name; for a private one set HF_TOKEN.",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision}.", "Check --revision.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        # its other lines say at length what ours say
        reason = str(error).partition("\n")[0].removeprefix("Got: ")
        raise ModelError(
            f"{repo} is not in the local cache, and the Hugging Face hub cannot be reached: {reason}",
            "Go online, unset HF_HUB_OFFLINE, or copy the model here and `decodefleet serve FOLDER`. "
            "A local folder was meant? There is none of this name.",
        ) from error
    progress.done()
    return Path(folder)


def _progress_bar(progress: ProgressSink) -> type[Any]:
    """A tqdm class, as huggingface_hub wants it, that reports bytes to `progress` and draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B" and kwargs.get("desc") != _RECEIVED
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes and n:
                progress.advance(int(n))
            return None

    return Bar
