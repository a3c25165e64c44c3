"""Logs on stderr, as plain lines or as one JSON object a line; results never come this way."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

LogFormat = Literal["console", "json"]
CHATTY = ("hivemind", "transformers", "asyncio", "urllib3", "filelock")


class JsonFormatter(logging.Formatter):
    """{"time", "level", "site", "logger", "message", ...fields of `extra={"fields": {...}}`, "exception" if any}."""

    def __init__(self, site: str):
        super().__init__()
        self.site = site

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "site": self.site,
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """12:01:33 site  message; warnings and errors say so."""

    def __init__(self, site: str):
        super().__init__()
        self.site = site

    def format(self, record: logging.LogRecord) -> str:
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {self.site + '  ' if self.site else ''}{mark}{record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def setup(log_format: LogFormat, site: str = "", file: Path | None = None, stream: TextIO | None = None) -> None:
    """Routes every logger to stderr (or `stream`), and to `file` too. Call it after the libraries are imported: some of them
    bring handlers of their own, which are taken off; their chatter below a warning is dropped."""
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(JsonFormatter(site) if log_format == "json" else ConsoleFormatter(site))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind calls it WARN, for the whole process
    for name in CHATTY:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
