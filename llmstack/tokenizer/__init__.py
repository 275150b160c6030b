"""Loading and training tokenizers, the BOS/EOS policy, incremental decoding.

Importing this loads no tokenizer library; loading a tokenizer loads the one that its kind needs.
"""

from llmstack.tokenizer.base import BosEosPolicy, StreamDecoder, Tokenizer, load_policy
from llmstack.tokenizer.loading import load_tokenizer
from llmstack.tokenizer.training import train_tokenizer

__all__ = ["BosEosPolicy", "StreamDecoder", "Tokenizer", "load_policy", "load_tokenizer", "train_tokenizer"]
