"""The tokenizer of the embedded corpus, trained on the spot and kept in the cache."""

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.data.prepared import growing_folder
from llmstack.data.sources import EMBEDDED, describe_source, iterate_documents
from llmstack.store import cache_root
from llmstack.tokenizer import BosEosPolicy, Tokenizer, load_tokenizer, train_tokenizer


def embedded_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of ``vocab_size`` ids over the embedded corpus.

    It sees the whole text, held-out sections included: it defines what the tokens are, not which follow which, and
    every model compared on this corpus, the baselines too, uses the same tokens.
    """
    content = describe_source(EMBEDDED)[0]["embedded"]
    path = cache_root() / f"embedded-tokenizer-{vocab_size}-{content[:16]}"
    if not path.exists():
        with failing_in_one_line(path.parent), growing_folder(path, path.name) as folder:
            if folder is not None:
                tokenizer = train_tokenizer((document.text for document in iterate_documents(EMBEDDED)), vocab_size)
                tokenizer.save(folder, BosEosPolicy.default(tokenizer))
    return load_tokenizer(path)
