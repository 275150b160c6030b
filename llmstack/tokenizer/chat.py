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

_END = "<<END_OF_THE_LAST_MESSAGE>> "
"""Shows where a template writes the end of a message, and whether it keeps spaces there."""


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
        if add_generation_prompt:
            return self._rendered(messages, add_generation_prompt=True)
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise UserError("chat template: there is no last message with a text to continue")
        text = self._rendered([*messages[:-1], {**messages[-1], "content": content + _END}])
        end = text.rfind(_END.strip())
        if end < 0 or content.strip() not in text:
            raise UserError("chat template: the last message cannot be continued, the template does not write it whole")
        # Spaces at its end stay where the template leaves them.
        return text[:end] if text.startswith(_END, end) else text[:end].rstrip()

    def _rendered(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        known = {"bos_token": "", "tools": None, "documents": None, **self.variables}
        try:
            text: str = self._compiled().render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except Exception as error:  # whatever the template's own operations raise
            raise UserError(f"chat template: {error}") from error
        return text

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
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


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
        if isinstance(found, list):  # several, by name
            found = {one["name"]: one["template"] for one in found}.get("default")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a JSON object with chat templates ({error})") from error
    if not isinstance(found, str | None):
        raise UserError(f"{path}: chat_template is not a text")
    return found
