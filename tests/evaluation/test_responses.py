"""Answers that were kept are found by whoever asks the same of the same model, and by nobody else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmstack.bench.decode import huggingface_folder
from llmstack.errors import UserError
from llmstack.evaluation.harness import HarnessModel
from llmstack.evaluation.responses import Responses
from llmstack.model import Llama, ModelConfig
from llmstack.tokenizer import BosEosPolicy, train_tokenizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ANSWERS: dict[str, Any] = {
    "a": [-1.2345678901234567, True],
    "b": "text\r\n\u2028\x85 é 漢 😀\n",
    "c": "",
    "d": [-1e-300, False],
}


def keep(folder: Path, answers: dict[str, Any], identity: str = "model", rank: int = 0) -> Path:
    """The file that holds them."""
    responses = Responses(folder, identity, rank)
    for key, answer in answers.items():
        responses.keep(key, answer)
    return folder / f"{identity}.{rank}.jsonl"


def test_what_was_kept_is_found_as_it_was(tmp_path: Path) -> None:
    keep(tmp_path / "new" / "folder", ANSWERS)
    responses = Responses(tmp_path / "new" / "folder", "model")
    assert responses.find(ANSWERS) == ANSWERS
    assert responses.find(["a", "unknown"]) == {"a": ANSWERS["a"]}
    assert responses.find([]) == {}
    # What is kept now is there at once, for this process and another.
    responses.keep("e", 5)
    assert responses.find(["e"]) == Responses(tmp_path / "new" / "folder", "model", 3).find(["e"]) == {"e": 5}


def test_answers_of_all_ranks_are_known_and_those_of_other_models_are_not(tmp_path: Path) -> None:
    keep(tmp_path, {"a": 1}, rank=0)
    keep(tmp_path, {"b": 2}, rank=1)
    keep(tmp_path, {"a": 3, "c": 4}, "model2")
    assert Responses(tmp_path, "model", 5).find("abc") == {"a": 1, "b": 2}
    assert Responses(tmp_path, "model2").find("abc") == {"a": 3, "c": 4}
    assert Responses(tmp_path, "mode").find("abc") == {}


def test_a_line_that_was_cut_anywhere_is_no_answer_and_harms_no_other(tmp_path: Path) -> None:
    path = keep(tmp_path / "whole", ANSWERS)
    content = path.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(last, len(content)):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / path.name).write_bytes(content[:end])
        known = Responses(folder, "model").find(ANSWERS)
        # Without the line break it is whole.
        assert known == (ANSWERS if end == len(content) - 1 else {key: ANSWERS[key] for key in "abc"})
        # The next answer does not become a part of it.
        keep(folder, {"d": ANSWERS["d"], "e": 7})
        assert Responses(folder, "model").find("abcde") == {**ANSWERS, "e": 7}


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b"null", b"3", b'["a"]', b'[["a"], 1]', b'{"a": 1, "b": 2}', b"\xff\x00"]
)
def test_lines_that_are_no_answers_are_passed_over(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "model.0.jsonl").write_bytes(line + b"\n")
    keep(tmp_path, ANSWERS)
    assert Responses(tmp_path, "model").find(ANSWERS) == ANSWERS


def test_two_processes_may_write_at_once_into_one_file(tmp_path: Path) -> None:
    """Short lines and such as are longer than any buffer."""
    number = 150

    def answer(process: int, place: int) -> str:
        return f"{process}" * (40_000 if place % 3 == 0 else 3)

    started = []
    for process in range(2):
        child = os.fork()
        if child == 0:
            try:
                responses = Responses(tmp_path, "model")
                for place in range(number):
                    responses.keep(f"{process} {place}", answer(process, place))
                os._exit(0)
            finally:
                os._exit(1)
        started.append(child)
    assert [os.waitpid(child, 0)[1] for child in started] == [0, 0]
    expected = {f"{process} {place}": answer(process, place) for process in range(2) for place in range(number)}
    assert Responses(tmp_path, "model").find(expected) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["model.0.jsonl"]


def test_a_folder_that_cannot_be_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/folder"):
        Responses(tmp_path / "file" / "folder", "model")


# Of a model


TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the warm sun until the evening comes."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint") / "hf", seed=0)


def written(folder: Path, seed: int) -> Path:
    tokenizer = train_tokenizer([TEXT * 3], 300)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    torch.manual_seed(seed)
    config = ModelConfig(vocab_size=300, max_position_embeddings=40, initializer_range=0.3, **sizes)
    with huggingface_folder(Llama(config).eval()) as made:
        shutil.copytree(made, folder)
    tokenizer.save(folder, BosEosPolicy(bos=True, eos=False))
    return folder


PASSES = 6 + 2 + 1 + 3
"""Of six scores and two documents, of what these begin with, and of three texts."""


class Counted:
    """A harness model, and what it computes."""

    def __init__(self, checkpoint: Path, responses: Path | None, stop_after: int = 10**9, **options: Any) -> None:
        self.model = HarnessModel(checkpoint, device="cpu", responses=responses, batch_size=1, **options)
        self.forwards, self._stop_after = 0, stop_after
        hidden_states, generated = self.model.model.hidden_states, self.model._generated_once

        def counted(*arguments: Any, **context: Any) -> Tensor:
            if self.forwards == self._stop_after:
                raise KeyboardInterrupt
            self.forwards += 1
            return hidden_states(*arguments, **context)

        def counted_generation(asked: Any, waiting: list[int]) -> Any:
            self.forwards += len(waiting)
            return generated(asked, waiting)

        self.model.model.hidden_states = counted  # type: ignore[method-assign]
        self.model._generated_once = counted_generation  # type: ignore[method-assign]

    def ask(self) -> dict[str, list[Any]]:
        """Different beginnings, so that each is a row and a pass of its own: :data:`PASSES` in all."""
        from lm_eval.api.instance import Instance

        asked: dict[str, list[Any]] = {
            "loglikelihood": [(TEXT[place : place + 45], " yes") for place in range(0, 60, 10)],
            "loglikelihood_rolling": [(TEXT[place : place + 60],) for place in (20, 35)],
            "generate_until": [(TEXT[place:40], {"until": [], "max_gen_toks": 4}) for place in (0, 7, 9)],
        }
        found = {}
        for kind, requests in asked.items():
            instances = [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in requests]  # type: ignore[arg-type]
            found[kind] = getattr(self.model, kind)(instances, disable_tqdm=True)
        return found


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[Any]]:
    """Without a folder."""
    return Counted(checkpoint, None).ask()


def test_a_second_run_computes_nothing(checkpoint: Path, expected: dict[str, list[Any]], tmp_path: Path) -> None:
    first, second = (Counted(checkpoint, tmp_path) for _ in range(2))
    assert first.ask() == expected
    assert first.forwards == PASSES
    assert second.ask() == expected
    assert second.forwards == 0
    # In one process, too.
    assert first.ask() == expected
    assert first.forwards == PASSES


def test_a_cut_last_line_is_computed_again_alone(
    checkpoint: Path, expected: dict[str, list[Any]], tmp_path: Path
) -> None:
    Counted(checkpoint, tmp_path).ask()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    again = Counted(checkpoint, tmp_path)
    assert again.ask() == expected
    assert again.forwards == 1


def test_an_evaluation_that_was_stopped_goes_on_where_it_was(
    checkpoint: Path, expected: dict[str, list[Any]], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Counted(checkpoint, tmp_path, stop_after=4).ask()
    again = Counted(checkpoint, tmp_path)
    assert again.ask() == expected
    assert again.forwards == PASSES - 4


def test_whatever_changes_an_answer_sees_none_of_them(checkpoint: Path, tmp_path: Path) -> None:
    responses = tmp_path / "responses"
    Counted(checkpoint, responses).ask()
    other_weights = written(tmp_path / "other", seed=1)
    other_tokenizer = tmp_path / "tokenizer"
    train_tokenizer([TEXT], 290).save(other_tokenizer)
    for where, options in (
        (other_weights, {}),
        (checkpoint, {"dtype": "bf16"}),
        (checkpoint, {"max_length": 39}),
        (checkpoint, {"fold": False}),
        (checkpoint, {"tokenizer": other_tokenizer}),
    ):
        changed = Counted(where, responses, **options)
        changed.ask()
        assert changed.forwards == PASSES, options
    # The same weights elsewhere are the same model.
    copied = Counted(shutil.copytree(checkpoint, tmp_path / "copy"), responses)
    copied.ask()
    assert copied.forwards == 0


def test_answers_are_plain_json(checkpoint: Path, expected: dict[str, list[Any]], tmp_path: Path) -> None:
    Counted(checkpoint, tmp_path).ask()
    (path,) = tmp_path.iterdir()
    kept = dict(json.loads(line) for line in path.read_text().splitlines() if line)
    scores = [tuple(answer) for answer in kept.values() if isinstance(answer, list)]
    assert set(expected["loglikelihood"]) <= set(scores)
    assert set(expected["generate_until"]) == {answer for answer in kept.values() if isinstance(answer, str)}
