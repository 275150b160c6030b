"""Encoding in the parent, then in workers."""

import os
import subprocess
import sys

import pytest

FORKED = """
import multiprocessing, sys
from llmstack.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
texts = ["Hello world %d" % i for i in range(200)]
ids = tokenizer.encode_batch(texts)
with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
    for again in pool.map(tokenizer.encode_batch, [texts] * 2):
        assert again == ids
print("done")
"""


@pytest.mark.parametrize(
    ("name", "parallelism"), [("gpt2", None), ("gpt2", "true"), ("tok512", None), ("llama-3", None)]
)
def test_workers_forked_after_encoding_do_not_wait_for_ever(name, parallelism, paths):
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    if parallelism is not None:
        environment["TOKENIZERS_PARALLELISM"] = parallelism
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(paths[name]), "fork"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_spawned_workers(paths, tmp_path):
    script = tmp_path / "spawned.py"
    body = "\n".join("    " + line for line in FORKED.strip().splitlines())
    script.write_text(f'if __name__ == "__main__":\n{body}\n')
    done = subprocess.run(
        [sys.executable, str(script), str(paths["gpt2"]), "spawn"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
