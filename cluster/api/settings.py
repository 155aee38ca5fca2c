"""What the HTTP surface can be told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from decodefleet.worker.config import Frozen


class ApiSettings(Frozen):
    """Limits and keys of the public endpoint."""

    api_keys: tuple[str, ...] = Field((), repr=False, description="accepted keys; none leaves the API open")
    api_key_file: Path | None = Field(None, description="file of more keys, read again when it changes")
    allowed_origins: tuple[str, ...] = Field((), description="other sites whose pages may call the API")
    max_body_bytes: int = Field(16 << 20, ge=1, description="largest request body that is read")
    body_s: float = Field(120.0, gt=0, description="seconds within which a request's body must have come")
    max_prompts: int = Field(128, ge=1, description="most prompts in one completion request")
    ping_s: float = Field(15.0, gt=0, description="seconds of silence after which a stream gets a comment")
    stall_s: float = Field(
        60.0, gt=0, description="seconds after which a client that does not read its stream is cut"
    )
    echo_request_id: bool = Field(
        True, description="whether answers are given their x-request-id here; not where Serve does so"
    )
    access_log: bool = Field(True, description="whether one line is logged per request")
    log_fields: bool = Field(False, description="whether log handlers write fields: no need for words")
