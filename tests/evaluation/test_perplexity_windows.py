"""Each token is scored once, with the context that the windows give it, whatever the batches and the shares."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llmstack.errors import UserError
from llmstack.evaluation.perplexity import (
    Perplexity,
    TokenSequence,
    rolling_windows,
    score,
    token_sequences,
    wikitext_file,
)
from llmstack.model import Llama, ModelConfig
from llmstack.model.head import IGNORE_INDEX
from llmstack.tokenizer import BosEosPolicy, Tokenizer, train_tokenizer

WINDOW = 10
LENGTHS = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 25]
STRIDES = [1, 3, WINDOW]
BOS = 0


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=61, hidden_size=32, num_layers=2, intermediate_size=48, max_position_embeddings=40)
    return Llama(ModelConfig(**{**config.to_dict(), "initializer_range": 0.3})).eval()


def sequence(text: str, tokenizer: Tokenizer, policy: BosEosPolicy, max_tokens: int | None = None) -> TokenSequence:
    (found,) = token_sequences([text], tokenizer, policy, max_tokens)
    return found


def text_ids(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, 61, (length,), generator=generator).tolist()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("length", LENGTHS)
def test_windows_equal_those_of_lm_eval(length: int, stride: int):
    utils = pytest.importorskip("lm_eval.utils")
    ids = text_ids(length)
    theirs = utils.get_rolling_token_windows(ids, BOS, max_seq_len=WINDOW, context_len=WINDOW - stride + 1)
    ours = [
        (inputs, [label for label in labels if label != IGNORE_INDEX])
        for inputs, labels in rolling_windows([BOS, *ids], WINDOW, stride)
    ]
    assert ours == [(inputs, targets) for inputs, targets in theirs]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("length", LENGTHS)
def test_sum_equals_that_of_one_forward_pass_per_token(model: Llama, length: int, stride: int):
    ids = [BOS, *text_ids(length)]
    expected, end = 0.0, 0
    for position in range(1, len(ids)):
        if position > end:
            end = min(end + (stride if end else WINDOW), length)
        context = torch.tensor([ids[max(end - WINDOW, 0) : position]])
        with torch.no_grad():
            log_probabilities = F.log_softmax(model(context)[0, -1].double(), -1)
        expected -= log_probabilities[ids[position]].item()
    result = score(model, [TokenSequence(ids, 7)], window=WINDOW, stride=stride)
    assert result.tokens == length
    assert result.nats == pytest.approx(expected, rel=1e-6)


def test_batches_of_mixed_lengths_equal_one_by_one(model: Llama):
    sequences = [TokenSequence([BOS, *text_ids(length)], length) for length in (13, 0, 40, 3, 3, 77, 1, 26)]
    alone = [score(model, [sequence], window=40, batch_tokens=1) for sequence in sequences]
    together = score(model, sequences, window=40, batch_tokens=4096)
    assert together.nats == pytest.approx(sum(result.nats for result in alone), rel=1e-6)
    assert (together.tokens, together.documents, together.num_bytes) == (163, 8, 163)


@pytest.mark.parametrize("stride", STRIDES)
def test_neither_the_batch_nor_the_number_of_processes_changes_the_sum(model: Llama, stride: int):
    """Batches of 1, 3 and 8 windows on 1 to 3 processes; of so few windows that a process has none, too."""
    for lengths in ((25, 0, 40, 3, 11, 77, 1, 26), (4,)):
        sequences = [TokenSequence([BOS, *text_ids(length)], length, length) for length in lengths]
        whole = score(model, sequences, window=WINDOW, stride=stride)
        for rows in (1, 3, 8):
            for processes in (1, 2, 3):
                shares = [
                    score(
                        model,
                        sequences,
                        window=WINDOW,
                        stride=stride,
                        batch_tokens=rows * WINDOW,
                        share=(number, processes),
                    )
                    for number in range(processes)
                ]
                nats = math.fsum(share.nats for share in shares)
                assert nats / whole.tokens == pytest.approx(whole.nats_per_token, rel=1e-5)
                for share in shares:
                    assert (share.tokens, share.documents, share.num_bytes, share.words) == (
                        sum(lengths),
                        len(lengths),
                        sum(lengths),
                        sum(lengths),
                    )


def test_an_empty_text_scores_nothing(model: Llama):
    for ids in ([], [BOS]):
        assert score(model, [TokenSequence(ids, 0, 0)], window=WINDOW) == Perplexity(0.0, 0, 0, 1, 0)


def test_units():
    result = Perplexity(nats=40 * math.log(2), tokens=20, num_bytes=80, documents=1, words=10)
    assert result.nats_per_token == pytest.approx(2 * math.log(2))
    assert result.perplexity == pytest.approx(4)
    assert result.bits_per_byte == pytest.approx(0.5)
    assert result.word_perplexity == pytest.approx(16)


def test_a_text_that_is_one_endless_word_has_no_perplexity_by_word():
    assert Perplexity(nats=1e6, tokens=10**6, num_bytes=10**6, documents=1, words=1).word_perplexity is None
    assert Perplexity(nats=1.0, tokens=1, num_bytes=1, documents=1, words=0).word_perplexity is None


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(model: Llama):
    uniform = Llama(model.config).eval()
    with torch.no_grad():
        uniform.embed_tokens.weight.zero_()
    result = score(uniform, [TokenSequence([BOS, *text_ids(30)], None)], window=40)
    assert result.perplexity == pytest.approx(61, rel=1e-6)
    assert result.bits_per_byte is None


def test_ids_of_a_text_start_with_bos_have_no_eos_and_are_cut_with_bos_counted():
    tokenizer = train_tokenizer(["ein Satz, noch ein Satz"] * 3, 270)
    policy = BosEosPolicy(bos=True, eos=True)
    ids = tokenizer.encode("ein Satz: é")
    whole = sequence("ein Satz: é", tokenizer, policy)
    assert whole == TokenSequence([tokenizer.bos_id, *ids], 12, 3)
    cut = sequence("ein Satz: é", tokenizer, policy, max_tokens=4)
    assert cut == TokenSequence([tokenizer.bos_id, *ids[:3]], None, None)
    assert sequence("ein Satz: é", tokenizer, policy, max_tokens=len(ids) + 1) == whole


def test_without_bos_the_first_token_is_given_and_what_it_stands_for_does_not_count():
    tokenizer = train_tokenizer(["ein Satz, noch ein Satz"] * 3, 270)
    ids = tokenizer.encode("ein Satz")
    found = sequence("ein Satz", tokenizer, BosEosPolicy(bos=False, eos=True))
    rest = "ein Satz".removeprefix(tokenizer.decode(ids[:1]))
    assert found == TokenSequence(ids, len(rest), len(rest.split()))


def test_texts_in_any_number_keep_their_order():
    tokenizer = train_tokenizer(["ein Satz, noch ein Satz"] * 3, 270)
    texts = ["ein Satz", "", *(f"Satz {number}" for number in range(600))]
    policy = BosEosPolicy(bos=True, eos=False)
    found = [one.ids for one in token_sequences(texts, tokenizer, policy)]
    assert found == [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]


def test_wikitext_is_its_raw_file(shared: Path):
    """Of 1,290,590 bytes; the 62 pages of another set of the hub are the same text cut at the titles."""
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = shared / "eval"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    file = "wikitext-2-raw-v1/test-00000-of-00001.parquet"
    rows = parquet.read_table(folder / "Salesforce/wikitext" / file).column("text").to_pylist()
    pages = parquet.read_table(folder / "EleutherAI/wikitext_document_level" / file).column("page").to_pylist()
    text = wikitext_file(rows)
    assert len(text.encode()) == 1_290_590
    assert text == " \n" + "\n".join(pages)


@pytest.mark.parametrize(
    ("ids", "window", "stride", "message"),
    [
        ([0, 1], 41, None, "window is 41 tokens; this model allows 1 to 40"),
        ([0, 1], 0, None, "window is 0"),
        ([0, 1], 10, 11, "stride is 11 tokens; it must be from 1 to the window, 10"),
        ([0, 61, 1], 10, None, "id 61 is outside the model's vocabulary, 0 to 60"),
        ([0, 61], 10, None, "id 61 is outside the model's vocabulary, 0 to 60"),
    ],
)
def test_impossible_requests_are_refused(model: Llama, ids: list[int], window: int, stride: int | None, message: str):
    with pytest.raises(UserError, match=message):
        score(model, [TokenSequence(ids)], window=window, stride=stride)


def test_a_model_of_nan_is_an_error_not_a_result(model: Llama):
    broken = Llama(model.config).eval()
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        score(broken, [TokenSequence([0, 1])], window=10)
