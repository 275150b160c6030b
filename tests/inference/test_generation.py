"""Generation: published text, transformers' greedy, cache against full passes, graphs, reuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from llmstack.checkpoint import config_to_huggingface, to_huggingface_names
from llmstack.errors import UserError
from llmstack.inference import Generator, Sampling
from llmstack.model import Llama, RopeScaling, cache_bytes
from llmstack.tokenizer import load_tokenizer

BOS = 1
LONG, SHORT = list(range(3, 30)), [7, 5, 3]


@pytest.mark.parametrize("use_cache", [True, False])
def test_stories260k_gives_its_published_tokens(stories: Llama, published_ids: list[int], use_cache: bool):
    generator = Generator(stories, 257, use_cache=use_cache)
    assert list(generator.stream([BOS], 256)) == published_ids


def test_compiled_stories260k_gives_its_published_text_from_one_graph(
    stories: Llama, published_ids: list[int], shared: Path
):
    torch._dynamo.reset()
    counters.clear()
    generator = Generator(stories, 300, compile=True)
    generator.warm_up()
    assert counters["stats"]["unique_graphs"] == 1
    assert list(generator.stream([BOS], 256)) == published_ids
    assert list(generator.stream([BOS, *published_ids[:41]], 32)) == published_ids[41:73]
    assert counters["stats"]["unique_graphs"] == 1
    folder = shared / "checkpoints/stories260K"
    text = load_tokenizer(folder / "hf").decode(published_ids)
    assert text + "\n" == (folder / "greedy-256.txt").read_text()


def test_compiled_bhyt_deeper_than_the_recompile_limit_is_one_graph_and_equals_eager(
    random_model: Callable[..., Llama],
):
    torch._dynamo.reset()
    counters.clear()
    model = random_model(num_layers=10, norm={"method": "bhyt"})
    expected = [list(Generator(model, 64).stream(prompt, 16)) for prompt in (LONG, SHORT)]
    compiled = Generator(model, 64, compile=True)
    assert [list(compiled.stream(prompt, 16)) for prompt in (LONG, SHORT)] == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert all("forward" not in vars(block) for block in model.blocks), "the model is left as it was"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_kv_heads": 1, "tie_word_embeddings": False},
        {"num_kv_heads": 4, "head_dim": 16},
        {
            "max_position_embeddings": 256,
            "rope_theta": 500000.0,
            "rope_scaling": RopeScaling(32.0, 1.0, 4.0, original_max_position_embeddings=64),
        },
    ],
)
def test_greedy_equals_that_of_transformers(random_model: Callable[..., Llama], overrides: dict[str, object]):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = random_model(**overrides)
    reference = LlamaForCausalLM(LlamaConfig(**config_to_huggingface(model.config)))
    weights = to_huggingface_names(model.state_dict(), model.config)
    reference.load_state_dict(weights, strict=not model.config.tie_word_embeddings)
    reference.tie_weights()
    generator = Generator(model, 100)
    for prompt in (LONG, SHORT):
        theirs = reference.eval().generate(
            torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        ours = list(generator.stream(prompt, 60))
        assert ours == theirs[0, len(prompt) :].tolist()
        assert len(set(ours)) > 5


@pytest.mark.parametrize(
    "overrides",
    [
        {"norm": {"method": "bhyt"}},
        {"norm": {"method": "bhyt_star", "mu_term": True}},
        {"positions": "learned", "norm": {"method": "layernorm"}, "mlp": "gelu", "lm_head_bias": True},
        {"positions": "sinusoidal", "num_kv_heads": 1},
        {"positions": "none", "attention_bias": True},
    ],
)
def test_sampling_with_the_cache_equals_full_passes(random_model: Callable[..., Llama], overrides: dict[str, object]):
    model = random_model(**overrides)
    sampling = Sampling(0.9, top_k=40, top_p=0.95, seed=11)
    cached, full = (list(Generator(model, 80, use_cache=use).stream(LONG, 40, sampling)) for use in (True, False))
    assert cached == full


def test_a_generator_remembers_nothing_of_earlier_prompts(random_model: Callable[..., Llama]):
    model = random_model()
    generator = Generator(model, 64)
    sampling = Sampling(1.0, seed=3)
    first = list(generator.stream(LONG, 30, sampling))
    assert list(generator.stream(SHORT, 30, sampling)) == list(Generator(model, 64).stream(SHORT, 30, sampling))
    assert list(generator.stream(LONG, 30, sampling)) == first
    for buffer in generator.runner.cache.buffers():
        buffer.fill_(torch.nan)
    assert list(generator.stream(LONG, 30, sampling)) == first


def test_an_open_stream_ends_loudly_when_the_next_one_starts(random_model: Callable[..., Llama]):
    generator = Generator(random_model(), 64)
    expected = list(generator.stream(SHORT, 5))
    old = generator.stream(LONG, 5)
    next(old)
    new = generator.stream(SHORT, 5)
    with pytest.raises(RuntimeError, match="another prompt"):
        next(old)
    assert list(new) == expected
    started, unread = generator.stream(LONG, 5), generator.stream(SHORT, 5)
    with pytest.raises(RuntimeError, match="another prompt"):
        next(started)
    assert list(unread) == expected


def test_stops_after_the_first_stop_id(random_model: Callable[..., Llama]):
    generator = Generator(random_model(), 64)
    ids = list(generator.stream(SHORT, 30))
    stop = ids[9]
    assert list(generator.stream(SHORT, 30, stop_ids=[stop])) == ids[: ids.index(stop) + 1]


def test_padding_ids_of_the_embedding_are_never_drawn(random_model: Callable[..., Llama]):
    model = random_model(initializer_range=1e-4)
    ids = list(Generator(model, 128, vocab_size=10).stream(SHORT, 100, Sampling(1.0)))
    assert set(ids) == set(range(10))


def test_the_cache_takes_the_computed_bytes(random_model: Callable[..., Llama]):
    model = random_model()
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.int8, 1)):
        generator = Generator(model, 50, cache_dtype=dtype)
        found = sum(buffer.numel() * buffer.element_size() for buffer in generator.runner.cache.buffers())
        assert found == cache_bytes(model.config, 1, 50, size)
        assert len(list(generator.stream(SHORT, 3))) == 3


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([1] * 100, 29, "100 prompt tokens \\+ 29 new ones are 129, but the model has 128 positions"),
        ([3, 97], 5, "id 97 is outside the model's vocabulary, 0 to 96"),
        ([-1], 5, "id -1 is outside"),
        ([1], 0, "0 new tokens"),
    ],
)
def test_impossible_requests_are_refused_at_once(
    random_model: Callable[..., Llama], prompt: list[int], new: int, message: str
):
    with pytest.raises(UserError, match=message):
        Generator(random_model(), 128).stream(prompt, new)


def test_all_positions_can_be_used_and_no_more_than_the_generator_was_made_for(random_model: Callable[..., Llama]):
    model = random_model()
    assert len(list(Generator(model, 128).stream([1] * 100, 28))) == 28
    with pytest.raises(UserError, match="made for 64 \\(the model has 128\\)"):
        Generator(model, 64).stream([1] * 60, 5)
    with pytest.raises(UserError, match="129 positions asked for; the model has 1 to 128"):
        Generator(model, 129)
    with pytest.raises(UserError, match="needs the cache"):
        Generator(model, 64, compile=True, use_cache=False)
