"""A thousand random requests in one process."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from llmstack.inference import Completion, Generator, Request, Sampling
from llmstack.model import Llama
from llmstack.tokenizer import load_tokenizer

LENGTH = 192


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_request(draw: random.Random) -> Request:
    prompt = [1, *(draw.randrange(3, 512) for _ in range(draw.choice([0, 1, 7, 15, 16, 17, 63, 100])))]
    sampling = Sampling(
        draw.choice([0.0, 0.0, 0.7, 1.3]),
        draw.choice([None, 1, 20]),
        draw.choice([None, 0.5, 0.95]),
        draw.randrange(2**31),
        min_p=draw.choice([None, 0.1]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
        logit_bias=draw.choice([{}, {}, {draw.randrange(512): -float("inf"), draw.randrange(512): 2.0}]),
    )
    return Request(
        prompt,
        draw.randint(1, min(60, LENGTH - len(prompt))),
        sampling,
        stop_ids=draw.choice([(), (2,), (2, draw.randrange(3, 512))]),
        stop_strings=draw.choice([(), ("She",), ("e d", "nowhere")]),
        logprobs=draw.choice([None, None, 0, 3]),
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_no_crash_no_growth_and_rows_as_alone(stories: Llama, shared: Path) -> None:
    draw = random.Random(0)
    tokenizer = load_tokenizer(shared / "checkpoints/stories260K/tok512.model")
    generator = Generator(stories, LENGTH, batch_size=4, compile=True, tokenizer=tokenizer, chunk=16)
    alone = Generator(stories, LENGTH, tokenizer=tokenizer)
    generator.warm_up()
    requests = [random_request(draw) for _ in range(1000)]
    answers: list[Completion] = []
    graphs, memory = counters["stats"]["unique_graphs"], 0
    while len(answers) < len(requests):
        answers += generator.generate(requests[len(answers) : len(answers) + draw.choice([1, 2, 5, 30])])
        if memory == 0 and len(answers) >= 300:
            memory = resident()
    assert counters["stats"]["unique_graphs"] == graphs >= 1
    assert resident() - memory < 2**24
    for request, answer in zip(requests, answers, strict=True):
        assert 1 <= len(answer.ids) <= request.max_new_tokens
        assert answer.finish == "length" or answer.ids[-1] in request.stop_ids or request.stop_strings
        if request.sampling.temperature == 0:
            expected = alone.generate([replace(request, logprobs=None)])[0]
            assert (answer.ids, answer.text, answer.finish) == (expected.ids, expected.text, expected.finish)
