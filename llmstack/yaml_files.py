"""Reading YAML that a user has written: what is no YAML is one line with the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from llmstack.errors import UserError


def parse_yaml(content: bytes, where: str | Path) -> Any:
    """The value in the ``content`` of ``where``; a :class:`UserError` if it is no YAML in UTF-8."""
    try:
        return yaml.safe_load(content.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not readable as YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> Any:
    """The value in a file; a :class:`UserError` if it cannot be read or is no YAML in UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} is not readable as YAML: {error.strerror}") from error
    return parse_yaml(content, path)
