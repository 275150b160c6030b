"""What lm-eval gets from our model is what it gets from its own Hugging Face model, or from plain passes of ours."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmstack.bench.decode import huggingface_folder
from llmstack.errors import Stopped, UserError
from llmstack.evaluation.harness import HarnessModel
from llmstack.model import Llama, ModelConfig
from llmstack.ranks import Ranks
from llmstack.tokenizer import BosEosPolicy, Tokenizer, train_tokenizer

transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

WINDOW = 64
SECONDS = 60
"""Longest time that two processes may take."""
LIKELIHOOD, ROLLING, UNTIL = "loglikelihood", "loglikelihood_rolling", "generate_until"
BATCH_SIZES: list[int | str] = [1, 4, 10, "auto"]


@pytest.fixture(autouse=True, scope="module")
def _offline_and_one_thread() -> Iterator[None]:
    import huggingface_hub.constants

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield
    torch.set_num_threads(threads)


@dataclass(eq=False)
class Pair:
    """One checkpoint in both libraries, with one tokenizer."""

    folder: Path
    tokenizer_folder: Path
    policy: BosEosPolicy | None
    theirs: Any
    text: str
    """Of the kind that the tokenizer was made for."""

    def ours(self, **options: Any) -> HarnessModel:
        values = {"tokenizer": self.tokenizer_folder, "policy": self.policy, "max_length": WINDOW, "device": "cpu"}
        return HarnessModel(self.folder, **{**values, **options})

    @cached_property
    def answers(self) -> dict[str, tuple[list[Any], list[Any]]]:
        """Kind of request -> requests and what lm-eval's own model answers."""
        ours = self.ours()
        asked = {LIKELIHOOD: pairs(ours, self.text), ROLLING: documents(ours, self.text), UNTIL: prompts(self)}
        return {kind: (requests, ask(self.theirs, kind, requests)) for kind, requests in asked.items()}


def instance(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def ask(model: Any, kind: str, requests: Sequence[Any]) -> list[Any]:
    return getattr(model, kind)([instance(kind, *arguments) for arguments in requests], disable_tqdm=True)


def their_model(folder: Path, tokenizer: Any, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    # Its cache of logits is off: requests of the same ids that are cut differently get each other's (0.4.13).
    where = {"device": "cpu", "dtype": "float32", "logits_cache": False}
    return HFLM(str(folder), tokenizer=tokenizer, batch_size=4, max_length=WINDOW, **where, **options)


def stories(shared: Path, tmp_path: Path) -> Pair:
    """The real stories260K, both sides with the fast tokenizer that transformers makes of its SentencePiece file."""
    folder = shared / "checkpoints/stories260K/hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    with (shared / "tinystories/tinystories.jsonl").open(encoding="utf-8") as lines:
        text = " ".join(json.loads(next(lines))["text"] for _ in range(3))
    return Pair(folder, tmp_path, None, their_model(folder, tokenizer), text)


def english() -> str:
    from pydoc_data.topics import topics

    return " ".join("\n".join(topics[name] for name in sorted(topics)[:12]).split())


def byte_level(tmp_path: Path, bos: bool) -> Tokenizer:
    """Saved there; with ``bos`` the library puts it before each text, as ours does by its policy."""
    tokenizer = train_tokenizer([english()], 400)
    tokenizer.save(tmp_path, BosEosPolicy(bos=bos, eos=False))
    if bos:
        spec = json.loads((tmp_path / "tokenizer.json").read_text())
        mark, text = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [mark, text],
            "pair": [mark, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [0], "tokens": ["<|bos|>"]}},
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    return tokenizer


def random_model(vocab_size: int, **options: Any) -> Llama:
    """Weights large enough that its greedy choices are no near-ties."""
    values = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    return Llama(ModelConfig(**{**values, "vocab_size": vocab_size, "initializer_range": 0.3, **options})).eval()


def fast(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>"
    )


@pytest.fixture(scope="module", params=["stories260K", "random GQA", "random GQA without BOS"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    tmp_path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "stories260K":
        yield stories(request.getfixturevalue("shared"), tmp_path)
        return
    bos = request.param == "random GQA"
    tokenizer = byte_level(tmp_path, bos)
    model = random_model(tokenizer.vocab_size, max_position_embeddings=128, tie_word_embeddings=False)
    with huggingface_folder(model) as folder:
        # Without BOS lm-eval is told that EOS stands before a text, and takes no BOS from the tokenizer's names.
        theirs = their_model(folder, fast(tmp_path), prefix_token_id=tokenizer.bos_id if bos else tokenizer.eos_id)
        yield Pair(folder, tmp_path, None, theirs, english())


def cut_to(model: HarnessModel, text: str, tokens: int) -> str:
    """A beginning of ``text`` that is so many ids long, BOS counted."""
    return next(text[:end] for end in range(len(text)) if len(model.tok_encode(text[:end])) == tokens)


@torch.no_grad()
def greedy(model: HarnessModel, text: str, number: int) -> str:
    ids = model.tok_encode(text)
    for _ in range(number):
        ids.append(int(model.model(torch.tensor([ids]))[0, -1].argmax()))
    return model.tokenizer.decode(ids[-number:])


def pairs(model: HarnessModel, text: str) -> list[tuple[str, str]]:
    """Contexts and continuations, in a random order and some twice."""
    found = [(text[:cut], text[cut : cut + more]) for cut in range(1, 40, 3) for more in (1, 2, 7)]
    # Spaces on either side, and none where the tokens would like one.
    found += [("The answer is ", "yes"), ("The answer is", " yes"), ("The answer is  ", "no"), ("The answer is", "no")]
    found += [("a\n", "b"), ("a \n ", " b"), ("Once upon a ", "time"), ("Once upo", "n a time"), ("é", "è ü")]
    found += [("", "Once"), ("", " Once upon"), ("", text[:90])]
    question = text[:60]
    found += [(question, choice) for choice in (" A", " B", " a longer choice", " the longest choice of them all")]
    # Over one context that is longer than the window, each choice loses another beginning.
    long = cut_to(model, text, WINDOW + 20)
    found += [(long, choice) for choice in (" A", " and B", " a longer choice", text[:70])]
    for tokens in range(WINDOW - 4, WINDOW + 4):
        found += [(cut_to(model, text, tokens), choice) for choice in (" x", " a dog")]
    # What it says itself.
    for cut in range(4, 60, 3):
        said = greedy(model, text[:cut], 6)
        found += [(text[:cut], said[:1]), (text[:cut], said[:4]), (text[:cut], said)]
    found = [one for one in found if len(model.encoded_pair(*one)[1]) > 0]
    found += found[::4]
    random.Random(0).shuffle(found)
    return found


def documents(model: HarnessModel, text: str) -> list[tuple[str]]:
    """Texts without a token, with few, and of the window's length and around it."""
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, int(2.5 * WINDOW))
    found = ["", "a", " ", "a  b \n", *(cut_to(model, text, length) for length in lengths)]
    found = [(one,) for one in [*found, *found[::3]]]
    random.Random(1).shuffle(found)
    return found


def prompts(pair: Pair) -> list[tuple[str, dict[str, Any]]]:
    """With stop strings that the model does write, wherever its tokens cut them."""
    beginnings = [pair.text[:length] for length in (1, 4, 11, 30, 60)] + ["The cat ", pair.text[:400]]
    if pair.ours().policy.bos:
        beginnings.append("")  # lm-eval's own model has nothing to begin with otherwise
    free = ask(pair.theirs, UNTIL, [(one, {"until": [], "max_gen_toks": 20}) for one in beginnings])
    found: list[tuple[str, dict[str, Any]]] = []
    for number, (beginning, said) in enumerate(zip(beginnings, free, strict=True)):
        stops = [said[place : place + width] for place in (1, 5, 9) for width in (1, 3, 6) if said[place:]]
        found += [(beginning, {"until": [stop], "max_gen_toks": 20}) for stop in stops]
        found.append((beginning, {"until": [*stops[-2:], "never written"], "max_gen_toks": 20}))
        found.append((beginning, {"until": "\n\n", "max_gen_toks": 5 + number, "do_sample": False}))
        found.append((beginning, {"until": [], "max_gen_toks": 1, "temperature": 0.0}))
    found += found[::5]
    random.Random(2).shuffle(found)
    return found


def agree(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Scores to 1e-4 (of sums of hundreds: to their rounding), and all else exactly."""
    assert len(found) == len(expected)
    if isinstance(expected[0], tuple):
        assert [one[1] for one in found] == [one[1] for one in expected]
        found, expected = [one[0] for one in found], [one[0] for one in expected]
    if isinstance(expected[0], str):
        assert found == expected
    else:
        assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("kind", [LIKELIHOOD, ROLLING, UNTIL])
def test_answers_are_those_of_lm_evals_own_model(pair: Pair, kind: str, batch_size: int | str) -> None:
    requests, expected = pair.answers[kind]
    agree(ask(pair.ours(batch_size=batch_size), kind, requests), expected)


@pytest.mark.parametrize("fold", [True, False])
def test_the_same_unfolded_and_for_one_request_at_a_time(pair: Pair, fold: bool) -> None:
    ours = pair.ours(fold=fold)
    for kind, (requests, expected) in pair.answers.items():
        agree([ask(ours, kind, [one])[0] for one in requests[:12]], expected[:12])


def test_an_empty_stop_string_is_none(pair: Pair) -> None:
    """lm-eval's own model would end after one token."""
    options = {"max_gen_toks": 5}
    ours = pair.ours()
    without = ask(ours, UNTIL, [("The cat ", {"until": [], **options})])
    assert ask(ours, UNTIL, [("The cat ", {"until": [""], **options})]) == without


def test_the_requests_can_tell(pair: Pair) -> None:
    """They hold greedy answers and others, stop strings that are met, and answers that are cut by their length."""
    _, scores = pair.answers[LIKELIHOOD]
    assert 2 <= sum(greedy for _, greedy in scores) < len(scores)
    asked, texts = pair.answers[UNTIL]
    assert len(set(texts)) > 10
    cut = [text for (_, options), text in zip(asked, texts, strict=True) if options["max_gen_toks"] == 20]
    assert len({len(text) for text in cut}) > 5


def test_texts_begin_as_they_do_for_lm_evals_own_model(pair: Pair) -> None:
    ours = pair.ours()
    assert ours.prefix_token_id == pair.theirs.prefix_token_id
    assert ours.max_length == pair.theirs.max_length
    for text in ("", "a", " a", pair.text[:200]):
        for special in (None, True, False):
            if special is True and ours.policy.bos is False:
                continue  # theirs adds none, since its tokenizer has no template
            assert ours.tok_encode(text, special) == pair.theirs.tok_encode(text, special)


def test_a_text_without_a_token_has_the_probability_of_nothing(pair: Pair) -> None:
    """With BOS before texts, lm-eval asks for that of a BOS after BOS, of every text and so of this one, too."""
    ours = pair.ours()
    (found,) = ask(ours, ROLLING, [("",)])
    if not ours.policy.bos:
        assert found == 0.0
    agree([found], ask(pair.theirs, ROLLING, [("",)]) if ours.policy.bos else [0.0])
    assert ask(ours, ROLLING, []) == ask(ours, LIKELIHOOD, []) == ask(ours, UNTIL, []) == []


# Our own norms, which no other library has


@torch.no_grad()
def one_pass_per_token(model: Llama, context: list[int], continuation: list[int], window: int) -> tuple[float, bool]:
    seen, logprob, greedy = [*context, *continuation][-(window + 1) : -1], 0.0, True
    for place, token in zip(range(len(seen) - len(continuation) + 1, len(seen) + 1), continuation, strict=True):
        logits = model(torch.tensor([seen[:place]]))[0, -1].double()
        logprob += float(logits.log_softmax(-1)[token])
        greedy &= int(logits.argmax()) == token
    return logprob, greedy


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("own"), bos=False)


@pytest.mark.parametrize("fold", [True, False])
def test_a_bhyt_model_answers_as_plain_passes_do(tokenizer: Tokenizer, fold: bool) -> None:
    model = random_model(tokenizer.vocab_size, norm={"method": "bhyt"}, max_position_embeddings=WINDOW)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = HarnessModel(model, tokenizer=tokenizer, device="cpu", fold=fold)
    requests = pairs(ours, english())[:40]
    encoded = [ours.encoded_pair(*one) for one in requests]
    assert all(context[0] == tokenizer.bos_id for context, _ in encoded)
    agree(ask(ours, LIKELIHOOD, requests), [one_pass_per_token(model, *one, WINDOW) for one in encoded])
    # Greedy text, token by token.
    prompt, new = tokenizer.encode("The value of")[: WINDOW - 12], []
    for _ in range(12):
        with torch.no_grad():
            new.append(int(model(torch.tensor([[0, *prompt, *new]]))[0, -1, : tokenizer.vocab_size].argmax()))
        if new[-1] == tokenizer.eos_id:
            break
    asked = [(tokenizer.decode(prompt), {"until": [], "max_gen_toks": 12})]
    assert ask(ours, UNTIL, asked) == [tokenizer.decode(new)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype is fp8"),
        ({"max_length": WINDOW + 1}, "the window is 65 tokens; this model allows 1 to 64"),
        ({"max_length": 0}, "the window is 0 tokens"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "many"}, "batch_size is many"),
        ({"chat_template": "nowhere"}, "neither a file nor one of llama3, chatml"),
        ({"responses": "somewhere"}, "checkpoints on disk alone"),
    ],
)
def test_impossible_options_are_refused(tokenizer: Tokenizer, options: dict[str, Any], message: str) -> None:
    model = random_model(tokenizer.vocab_size, max_position_embeddings=WINDOW)
    with pytest.raises(UserError, match=message):
        HarnessModel(model, **{"tokenizer": tokenizer, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gen_toks": WINDOW}, "64 new tokens asked for, and the window is 64"),
        ({"max_gen_toks": 2, "num_beams": 4}, "unknown generation option num_beams"),
    ],
)
def test_impossible_generations_are_refused(tokenizer: Tokenizer, options: dict[str, Any], message: str) -> None:
    model = random_model(tokenizer.vocab_size, max_position_embeddings=WINDOW)
    with pytest.raises(UserError, match=message):
        ask(HarnessModel(model, tokenizer=tokenizer, device="cpu"), UNTIL, [("a", options)])


def test_sampled_answers_differ_from_each_other_and_are_repeatable(tokenizer: Tokenizer) -> None:
    """A task that asks one question several times wants several answers."""
    model = random_model(tokenizer.vocab_size, max_position_embeddings=WINDOW)
    options = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    found = [ask(HarnessModel(model, tokenizer=tokenizer), UNTIL, [("a", options)] * 4) for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_generation_that_does_not_fit_the_memory_goes_on_with_fewer_rows(tokenizer: Tokenizer) -> None:
    """What was answered by then is not computed again; a row that does not fit by itself is an error."""
    model = random_model(tokenizer.vocab_size, max_position_embeddings=WINDOW)
    requests = [(english()[: 10 + number], {"until": [], "max_gen_toks": 3 + number}) for number in range(9)]
    expected = ask(HarnessModel(model, tokenizer=tokenizer), UNTIL, requests)
    ours = HarnessModel(model, tokenizer=tokenizer, batch_size=8)
    make = ours._generator_for
    asked = []

    def too_large(asked_now: list[Any]) -> Any:
        asked.append((ours._generated_rows, len(asked_now)))
        if ours._generated_rows > fits:
            raise torch.OutOfMemoryError("no memory")
        return make(asked_now)

    ours._generator_for = too_large  # type: ignore[method-assign]
    fits = 2
    assert ask(ours, UNTIL, requests) == expected
    assert asked == [(8, 9), (4, 9), (2, 9)]
    fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        ask(ours, UNTIL, requests)


# Two processes


Together = Callable[[Callable[[Ranks], None]], list[int]]


@pytest.fixture
def together(tmp_path: Path) -> Iterator[Together]:
    """Run a function on two ranks over gloo; their exit statuses, in time. What still runs at the end is killed."""
    started: list[int] = []

    def rank_process(work: Callable[[Ranks], None], rank: int) -> None:
        meeting = f"file://{tmp_path}/meeting"
        limit = datetime.timedelta(seconds=SECONDS / 2)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
        ranks = Ranks()
        ranks.connect()
        work(ranks)

    def run(work: Callable[[Ranks], None]) -> list[int]:
        for rank in range(2):
            process = os.fork()
            if process == 0:
                try:
                    rank_process(work, rank)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            started.append(process)
        deadline, statuses = time.monotonic() + SECONDS, dict[int, int]()
        while len(statuses) < 2:
            assert time.monotonic() < deadline, "a rank hangs"
            for process in set(started) - set(statuses):
                ended, status = os.waitpid(process, os.WNOHANG)
                statuses |= {process: status} if ended else {}
            time.sleep(0.01)
        found, started[:] = [statuses[process] for process in started], []
        return found

    yield run
    for process in started:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize("number", [1, 3])
def test_two_ranks_give_the_answers_of_one_however_few_the_requests(
    tokenizer: Tokenizer, tmp_path: Path, together: Together, number: int
) -> None:
    model = random_model(tokenizer.vocab_size, max_position_embeddings=WINDOW)
    text = english()
    asked: dict[str, list[Any]] = {
        LIKELIHOOD: [(text[: 30 + 9 * place], " yes") for place in range(number)],
        ROLLING: [(text[: 10 + 200 * place],) for place in range(number)],
        UNTIL: [(text[: 5 + 9 * place], {"until": [], "max_gen_toks": 5}) for place in range(number)],
    }
    alone = HarnessModel(model, tokenizer=tokenizer, device="cpu")

    def evaluate(ranks: Ranks) -> None:
        ours = HarnessModel(model, tokenizer=tokenizer, device="cpu", ranks=ranks)
        computed = 0
        hidden_states = ours.model.hidden_states

        def counted(*arguments: Any, **context: Any) -> Tensor:
            nonlocal computed
            computed += 1
            return hidden_states(*arguments, **context)

        ours.model.hidden_states = counted  # type: ignore[method-assign]
        found = {kind: ask(ours, kind, requests) for kind, requests in asked.items()}
        (tmp_path / f"{ranks.rank}.json").write_text(json.dumps([found, computed]))

    assert together(evaluate) == [0, 0]
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for kind, requests in asked.items():
        for found, _ in outcomes:
            agree([tuple(one) if isinstance(one, list) else one for one in found[kind]], ask(alone, kind, requests))
    if number == 3:
        assert all(computed for _, computed in outcomes), "each has its share"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_ends_both(tokenizer: Tokenizer, tmp_path: Path, together: Together, failing: int) -> None:
    model = random_model(tokenizer.vocab_size, max_position_embeddings=WINDOW)

    def evaluate(ranks: Ranks) -> None:
        ours = HarnessModel(model, tokenizer=tokenizer, device="cpu", ranks=ranks)
        if ranks.rank == failing:

            def broken(*arguments: Any, **context: Any) -> Tensor:
                raise RuntimeError("a fault of this rank")

            ours.model.hidden_states = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError if ranks.rank == failing else Stopped, match="a fault of this rank"):
            ask(ours, LIKELIHOOD, [("a", " b"), ("c d", " e"), ("f", " g h")])
        (tmp_path / str(ranks.rank)).touch()

    assert together(evaluate) == [0, 0]
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


# lm-eval itself


TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "doc_to_text": "",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def local_tasks(folder: Path, text: str) -> list[str]:
    """Their YAML files and their data; few-shot examples for the first two."""
    words = text.split()
    rows = [
        {
            "question": " ".join(words[place : place + 6]),
            "choices": [" ".join(words[place + 6 : place + 6 + more]) for more in (1, 2, 4)],
            "answer": place % 3,
        }
        for place in range(0, 55, 5)
    ]
    for name, part in (("validation", rows[:4]), ("test", rows[4:])):
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, part)))
    for name, task in TASKS.items():
        files = {part: str(folder / f"{part}.json") for part in ("validation", "test")}
        common = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "metadata": {"version": 1},
        }
        shots = {} if name == "read" else {"fewshot_split": "validation", "num_fewshot": 2}
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **shots, **task}))  # JSON is YAML
    return [f"local_{name}" for name in TASKS]


def evaluated(folder: Path, tasks: list[str], **options: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(tasks=tasks, task_manager=manager, bootstrap_iters=0, verbosity="ERROR", **options)


def same_results(found: dict[str, Any], expected: dict[str, Any], task: str) -> None:
    ours, theirs = found["results"][task], expected["results"][task]
    assert set(ours) == set(theirs)
    for metric, value in theirs.items():
        assert ours[metric] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), metric


@pytest.mark.parametrize("pair", ["stories260K"], indirect=True)
def test_simple_evaluate_knows_our_model_by_name_and_finds_what_it_finds_with_its_own(
    pair: Pair, tmp_path: Path
) -> None:
    tasks = local_tasks(tmp_path, pair.text)
    arguments = {"pretrained": str(pair.folder), "tokenizer": str(pair.tokenizer_folder), "max_length": WINDOW}
    found = evaluated(tmp_path, tasks, model="llmstack", model_args=arguments, batch_size="auto", device="cpu")
    expected = evaluated(tmp_path, tasks, model=pair.theirs)
    assert set(found["results"]) == set(tasks)
    for task in tasks:
        same_results(found, expected, task)
        for ours, theirs in zip(found["samples"][task], expected["samples"][task], strict=True):
            assert ours["arguments"] == theirs["arguments"]
            assert (ours["doc_hash"], ours["prompt_hash"]) == (theirs["doc_hash"], theirs["prompt_hash"])
    text = ",".join(f"{name}={value}" for name, value in arguments.items())
    by_text = evaluated(tmp_path, tasks[:1], model="llmstack", model_args=text, batch_size=3, device="cpu")
    same_results(by_text, found, tasks[0])


@pytest.mark.parametrize("pair", ["stories260K", "random GQA"], indirect=True)
def test_a_conversation_reaches_the_model_as_its_template_writes_it(pair: Pair, tmp_path: Path) -> None:
    """Few-shot examples as turns: one BOS, no space that the template does not write, and the ids of transformers."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    (tmp_path / "own.jinja").write_text(template)
    (task, *_) = local_tasks(tmp_path, pair.text)
    ours = pair.ours(chat_template=str(tmp_path / "own.jinja"), batch_size=4)
    seen: list[tuple[list[int], list[int]]] = []
    tokens = ours._loglikelihood_tokens

    def watched(requests: Any, **options: Any) -> Any:
        seen.extend((context, continuation) for _, context, continuation in requests)
        return tokens(requests, **options)

    ours._loglikelihood_tokens = watched  # type: ignore[method-assign]
    options: dict[str, Any] = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    found = evaluated(tmp_path, [task], model=ours, **options)
    their_tokenizer = pair.theirs.tokenizer
    before = getattr(their_tokenizer, "chat_template", None)
    their_tokenizer.chat_template = template
    try:
        expected = evaluated(tmp_path, [task], model=pair.theirs, **options)
        same_results(found, expected, task)
        assert ours.chat_template(True) == template
        place = 0
        for one, other in zip(found["samples"][task], expected["samples"][task], strict=True):
            assert one["arguments"] == other["arguments"]
            agree(one["filtered_resps"], other["filtered_resps"])
            for context, continuation in one["arguments"]:
                assert context.endswith("[assistant] ")
                assert not continuation.startswith(" ")
                ids = their_tokenizer.encode(context + continuation, add_special_tokens=False)
                assert [*seen[place][0], *seen[place][1]] == ids
                assert ids.count(their_tokenizer.bos_token_id) == 1
                assert ids.count(their_tokenizer.eos_token_id) == 5
                place += 1
        assert place == len(seen)
    finally:
        their_tokenizer.chat_template = before


@pytest.mark.parametrize("pair", ["random GQA"], indirect=True)
def test_without_a_template_a_conversation_is_refused(pair: Pair, tmp_path: Path) -> None:
    (task, *_) = local_tasks(tmp_path, pair.text)
    with pytest.raises(UserError, match="no chat template"):
        evaluated(tmp_path, [task], model=pair.ours(), apply_chat_template=True)
