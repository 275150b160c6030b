"""Chat templates: a conversation as one text, by the Jinja template that a model was trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from llmstack.errors import UserError
from llmstack.tokenizer.base import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"

BUILT_IN = {
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Llama 3 (its model card's prompt format, without tools and date) and ChatML, by name."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the tokenizer that its special tokens belong to."""

    source: str
    """Jinja, as in a tokenizer's folder."""
    tokenizer: Tokenizer
    variables: Mapping[str, str]
    """What the template may use beside the messages: the names of BOS and EOS."""

    @classmethod
    def find(cls, wanted: str | None, folder: Path | None, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template that is ``wanted``: built in, or a file; none wanted: the folder's, if it has one.

        Raises:
            UserError: neither built in nor a file; or not to be read.
        """
        source: str | None
        if wanted is not None:
            source = BUILT_IN.get(wanted) or _read(wanted)
        else:
            source = _in_folder(folder) if folder is not None and folder.is_dir() else None
        if source is None:
            return None
        names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
        marks = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        return cls(
            source, tokenizer, {mark: names.get(token, "") for mark, token in marks.items() if token is not None}
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the template, hexadecimal."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """``messages`` (role, content) as text, and the beginning of an answer.

        Without the latter the last message is to be continued: the text ends where its content does.

        Raises:
            UserError: the template refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            text = self._compiled().render(
                messages=messages, add_generation_prompt=add_generation_prompt, **{"bos_token": "", **self.variables}
            )
        except TemplateError as error:
            raise UserError(f"chat template: {error}") from error
        if add_generation_prompt:
            return text
        content = str(messages[-1]["content"]).strip()
        end = text.rindex(content) + len(content)
        return text[:end]

    def encode(self, text: str) -> list[int]:
        """Ids of a text that :meth:`render` wrote."""
        return self.tokenizer.encode_marked(text)

    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)


def _read(path: str) -> str:
    if not Path(path).is_file():
        raise UserError(f"chat template {path}: neither a file nor one of {', '.join(BUILT_IN)}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _in_folder(folder: Path) -> str | None:
    if (folder / TEMPLATE_FILE).is_file():
        return _read(str(folder / TEMPLATE_FILE))
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object ({error})") from error
    if isinstance(found, list):  # several, by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found
