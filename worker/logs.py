"""How a rank process writes its log: lines for people, or one JSON object per line. Torch-free.

The JSON fields have the names that Ray's own JSON logs have, so that one parser reads a whole cluster.
"""

from __future__ import annotations

import json
import logging
from typing import Literal

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
        }
        if record.exc_info:
            told["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(told)


def set_up_logging(level: str, form: LogFormat) -> None:
    """For the whole process, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def message_of(line: str) -> str:
    """What a line of either form says; a line of neither is its own message."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line
