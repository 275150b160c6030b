"""Conversations are written and read as transformers writes and reads them, with the same template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from llmstack.errors import UserError
from llmstack.evaluation.harness import HarnessModel
from llmstack.model import Llama, ModelConfig
from llmstack.tokenizer import BosEosPolicy, Tokenizer, load_tokenizer, train_tokenizer
from llmstack.tokenizer.chat import BUILT_IN, ChatTemplate

transformers = pytest.importorskip("transformers")

Messages = list[dict[str, Any]]

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL = (BOS, EOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<tool>")

SAID = (
    "Hello there",
    "  spaces on both sides \n",
    "two\n\nlines",
    "",
    "é 漢字 😀",
    "the user said: assistant\n",
    "a <b> & 'c'",
)
CONVERSATIONS: list[Messages] = [
    [{"role": "user", "content": "Hello there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    *([{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": said}] for said in SAID),
    [{"role": role, "content": said} for role, said in zip(("user", "assistant") * 4, SAID, strict=False)],
    # Special tokens in what somebody said are read as such, by both.
    [
        {"role": "user", "content": "an <|eot_id|> and <|im_end|> inside"},
        {"role": "assistant", "content": "x<|eot_id|>"},
    ],
]

CUSTOM = """\
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
{{- bos_token }}
{%- set state = namespace(turns=0) %}
{% for message in messages %}
    {% if message['role'] == 'tool' %}
        {% continue %}
    {% endif %}
    {% if message['role'] == 'system' and not loop.first %}
        {{ raise_exception('The system speaks first.') }}
    {% endif %}
[{{ message['role'] | upper }} {{ state.turns }}] {{ message['content'] }}{{ eos_token }}
    {% set state.turns = state.turns + 1 %}
{% endfor %}
{{ {'turns': state.turns, 'é': [1, 2]} | tojson }} {{ [1] | tojson(indent=2) }} {{ 'é' | tojson(ensure_ascii=True) }}
{% if add_generation_prompt %}
[ASSISTANT]{% endif %}
"""
TEMPLATES = {**BUILT_IN, "custom": CUSTOM}


@pytest.fixture(autouse=True, scope="module")
def _offline() -> Iterator[None]:
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with special tokens for all templates; transformers puts no BOS before what a template wrote."""
    folder = tmp_path_factory.mktemp("tokenizer")
    spec = json.loads(train_tokenizer(["Hello there, the user and the assistant. " * 9], 300)._files["tokenizer.json"])
    first = max(spec["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] += [{"id": first + place, "content": name, **flags} for place, name in enumerate(SPECIAL)]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def made(name: str, tokenizer: Tokenizer, tmp_path: Path) -> ChatTemplate:
    wanted = name
    if name not in BUILT_IN:
        wanted = str(tmp_path / "own.jinja")
        Path(wanted).write_text(TEMPLATES[name], encoding="utf-8")
    found = ChatTemplate.find(wanted, None, tokenizer)
    assert found is not None
    assert found.source == TEMPLATES[name]
    return found


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(
    name: str, messages: Messages, tokenizer: Tokenizer, theirs: Any, tmp_path: Path
) -> None:
    template = made(name, tokenizer, tmp_path)
    before = json.dumps(messages)
    text = template.render(messages)
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": True}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert template.encode(text) == theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_is_continued_where_transformers_continues_it(
    name: str, messages: Messages, tokenizer: Tokenizer, theirs: Any, tmp_path: Path
) -> None:
    template = made(name, tokenizer, tmp_path)
    text = template.render(messages, add_generation_prompt=False)
    options = {"chat_template": TEMPLATES[name], "continue_final_message": True}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert template.encode(text) == theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    last = messages[-1]["content"]
    assert text.rstrip().endswith(last.strip() or {"llama3": "<|end_header_id|>", "chatml": "assistant"}.get(name, "]"))


def test_special_tokens_are_single_ids_and_their_names_are_text_in_a_plain_text(tokenizer: Tokenizer) -> None:
    assert set(SPECIAL) <= set(tokenizer.special_tokens)
    for name in SPECIAL:
        assert tokenizer.encode_marked(f"a{name}b").count(tokenizer.special_tokens[name]) == 1
        assert not set(tokenizer.encode(f"a{name}b")) & tokenizer.special_ids
        # One call leaves the other as it was.
        assert tokenizer.encode(name) == tokenizer.encode_batch([name])[0] != [tokenizer.special_tokens[name]]
    assert tokenizer.encode_marked("") == []
    assert tokenizer.encode_marked("plain text") == tokenizer.encode("plain text")
    assert tokenizer.encode_marked("\ud800 <|eot_id|>")[-1] == tokenizer.special_tokens["<|eot_id|>"]


@pytest.mark.parametrize("kind", ["llama-2", "tok512", "mistral-v3", "llama-3", "gpt2", "gpt-neox"])
def test_what_stands_between_special_tokens_is_encoded_by_itself(kind: str, loaded: dict[str, Tokenizer]) -> None:
    """As the makers of the models did: each turn is a text of its own, and its marks are added to it."""
    tokenizer = loaded[kind]
    names = sorted(tokenizer.special_tokens)[:3]
    assert all(tokenizer.special_tokens[name] in tokenizer.special_ids for name in names)
    texts = ["Hello there", "user\nwhy?", "x", "two  spaces", "é漢"]
    for name in names:
        for text in texts:
            mark = tokenizer.special_tokens[name]
            expected = [mark, *tokenizer.encode(text), mark, *tokenizer.encode(text)]
            assert tokenizer.encode_marked(f"{name}{text}{name}{text}") == expected


# Llama 3's own tokenizer file

LLAMA3_IDS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
}
"""Of llama_models, ``models/llama3/tokenizer.py``."""


def dialog_prompt(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """``ChatFormat.encode_dialog_prompt`` of the same: headers and contents are encoded one by one."""

    def header(role: str) -> list[int]:
        return [128006, *tokenizer.encode(role), 128007, *tokenizer.encode("\n\n")]

    ids = [128000]
    for message in messages:
        ids += [*header(message["role"]), *tokenizer.encode(message["content"].strip()), 128009]
    return ids + header("assistant")


@pytest.mark.parametrize("messages", CONVERSATIONS[:-1])
def test_llama_3_reads_a_conversation_as_the_reference_code_writes_it(
    messages: Messages, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded["llama-3"]
    assert {name: tokenizer.special_tokens[name] for name in LLAMA3_IDS} == LLAMA3_IDS
    template = ChatTemplate.find("llama3", None, tokenizer)
    assert template is not None
    assert template.encode(template.render(messages)) == dialog_prompt(tokenizer, messages)


# Where a template comes from


def with_config(folder: Path, source: Path, **more: Any) -> Path:
    """A copy of the tokenizer in ``source`` with more in its configuration."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **more}))
    return folder


def test_a_tokenizers_folder_has_its_template_where_transformers_finds_it(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    by_name = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CUSTOM}]
    folders = [
        with_config(tmp_path / "text", folder, chat_template=CUSTOM),
        with_config(tmp_path / "list", folder, chat_template=by_name),
        with_config(tmp_path / "file", folder),
        with_config(tmp_path / "both", folder, chat_template="not this one"),
    ]
    for one in folders[2:]:
        (one / "chat_template.jinja").write_text(CUSTOM, encoding="utf-8")
    for one in folders:
        template = ChatTemplate.find(None, one, tokenizer)
        assert template is not None
        expected = transformers.PreTrainedTokenizerFast.from_pretrained(one).apply_chat_template(
            CONVERSATIONS[1], tokenize=False, add_generation_prompt=True
        )
        assert template.render(CONVERSATIONS[1]) == expected
        assert "[USER 1] Why?" in expected
        # What is asked for by name goes before it.
        asked = ChatTemplate.find("chatml", one, tokenizer)
        assert asked is not None
        assert asked.source == BUILT_IN["chatml"]
        assert asked.fingerprint != template.fingerprint


def test_a_folder_without_a_template_has_none(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert ChatTemplate.find(None, folder, tokenizer) is None
    assert ChatTemplate.find(None, None, tokenizer) is None
    assert ChatTemplate.find(None, folder / "tokenizer.json", tokenizer) is None
    assert ChatTemplate.find(None, tmp_path, tokenizer) is None


@pytest.mark.parametrize("content", ["[]", "{", '{"chat_template": 3}', '{"chat_template": [{"name": "default"}]}'])
def test_a_broken_configuration_is_an_error_of_the_user(content: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        ChatTemplate.find(None, tmp_path, tokenizer)


def test_a_name_that_is_no_template_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a file nor one of llama3, chatml"):
        ChatTemplate.find("llama4", None, tokenizer)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        ChatTemplate.find(str(tmp_path / "binary"), None, tokenizer)


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (CUSTOM, [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "The system speaks first"),
        ("{% for message in messages %}", CONVERSATIONS[0], "chat template: "),
        ("{{ messages[0]['nothing']['deeper'] }}", CONVERSATIONS[0], "chat template: "),
        ("{{ messages[0]['content'] + 3 }}", CONVERSATIONS[0], "chat template: "),
        ("{{ ''.__class__.__mro__ }}", CONVERSATIONS[0], "chat template: "),
    ],
)
def test_a_template_that_fails_says_why(
    source: str, messages: Messages, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text(source)
    template = ChatTemplate.find(str(tmp_path / "own.jinja"), None, tokenizer)
    assert template is not None
    with pytest.raises(UserError, match=message):
        template.render(messages)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages | length }}", CONVERSATIONS[0]),
        ("{{ messages[0]['content'] | upper }}", CONVERSATIONS[0]),
        (BUILT_IN["llama3"], []),
        (BUILT_IN["llama3"], [{"role": "assistant"}]),
        (BUILT_IN["llama3"], [{"role": "assistant", "content": None}]),
    ],
)
def test_what_cannot_be_continued_is_refused(
    source: str, messages: Messages, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """By transformers, too."""
    (tmp_path / "own.jinja").write_text(source)
    template = ChatTemplate.find(str(tmp_path / "own.jinja"), None, tokenizer)
    assert template is not None
    with pytest.raises(UserError, match="last message"):
        template.render(messages, add_generation_prompt=False)


def test_a_date_is_todays(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}")
    template = ChatTemplate.find(str(tmp_path / "own.jinja"), None, tokenizer)
    assert template is not None
    before = datetime.now().strftime("%Y-%m-%d")
    assert template.render(CONVERSATIONS[0]) in (before, datetime.now().strftime("%Y-%m-%d"))


# As lm-eval's requests are read


def harness(tokenizer: Tokenizer, **options: Any) -> HarnessModel:
    sizes = {"hidden_size": 4, "num_layers": 1, "num_heads": 1, "intermediate_size": 4, "max_position_embeddings": 8}
    model = Llama(ModelConfig(vocab_size=tokenizer.vocab_size, **sizes)).eval()
    return HarnessModel(model, tokenizer=tokenizer, device="cpu", fold=False, **options)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_that_begins_with_bos_gets_no_second_one(
    name: str, bos: bool, tokenizer: Tokenizer, theirs: Any, tmp_path: Path
) -> None:
    template = made(name, tokenizer, tmp_path)
    wanted = name if name in BUILT_IN else str(tmp_path / "own.jinja")
    model = harness(tokenizer, chat_template=wanted, policy=BosEosPolicy(bos=bos, eos=False))
    text = model.apply_chat_template(CONVERSATIONS[1])
    ids = theirs.apply_chat_template(
        CONVERSATIONS[1], return_dict=False, chat_template=TEMPLATES[name], add_generation_prompt=True
    )
    if name == "chatml":  # which writes none
        assert model.tok_encode(text) == ([tokenizer.bos_id] if bos else []) + ids
    else:
        assert model.tok_encode(text) == ids
        assert ids.count(tokenizer.bos_id) == 1
        assert ids[0] == tokenizer.bos_id
    # A choice follows: question and choice are the ids of the whole text.
    context, continuation = model.encoded_pair(text, " yes")
    assert context + continuation == model.tok_encode(text + " yes")
    assert context == model.tok_encode(text.rstrip()), "lm-eval counts white space before a choice to the choice"
    assert model.chat_template(True) == template.source
    assert model.tokenizer_name.endswith(template.fingerprint[:16])


def test_llama_3_gets_one_bos(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["llama-3"]
    model = harness(tokenizer, chat_template="llama3", policy=BosEosPolicy(bos=True, eos=True))
    ids = model.tok_encode(model.apply_chat_template(CONVERSATIONS[1]))
    assert ids == dialog_prompt(tokenizer, CONVERSATIONS[1])
    assert ids.count(128000) == 1
    assert 128001 not in ids


def test_without_a_template_the_names_of_special_tokens_are_text(tokenizer: Tokenizer) -> None:
    model = harness(tokenizer, policy=BosEosPolicy(bos=False, eos=False))
    assert not set(model.tok_encode(f"{BOS}a<|eot_id|>")) & tokenizer.special_ids
    with pytest.raises(UserError, match="no chat template"):
        model.apply_chat_template(CONVERSATIONS[0])
