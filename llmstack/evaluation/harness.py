"""Our models as lm-eval sees a model: ``lm_eval.simple_evaluate(model="llmstack", model_args={"pretrained": CKPT})``.

Importing this module registers the name. What lm-eval asks in texts is asked of :mod:`~llmstack.evaluation.scoring` and
of a :class:`~llmstack.inference.Generator` in token ids. Where several processes evaluate together, each of them has
all requests and computes its share; all know all answers, so lm-eval itself sees one process.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from llmstack import __version__
from llmstack.checkpoint import Source, load_model, resolve
from llmstack.checkpoint.ranks import on_every_rank
from llmstack.errors import Stopped, UserError
from llmstack.evaluation.responses import Responses
from llmstack.evaluation.scoring import Request, Score, score, shares
from llmstack.inference import Generator, Sampling
from llmstack.inference import Request as GenerationRequest
from llmstack.inference.generate import inference_form
from llmstack.inference.linear import Weights
from llmstack.model import Llama
from llmstack.ranks import Ranks
from llmstack.tokenizer import BosEosPolicy, Tokenizer, load_policy, load_tokenizer
from llmstack.tokenizer.chat import ChatTemplate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Of a batch, where its size is found automatically; halved where the memory does not suffice."""
_GENERATED_ROWS = {"cpu": 8, "cuda": 64}
_MAX_NEW_TOKENS = 256
"""lm-eval's, where a task does not say."""


@register_model("llmstack")
class HarnessModel(TemplateLM):
    """A checkpoint, or a model in memory, that answers lm-eval's requests.

    Args:
        pretrained: what a CKPT argument may be, or a model (then with ``tokenizer``).
        dtype: of weights and products: fp32 or bf16.
        weights: int8 or int4: store the matrices so.
        fold: fold the norms.
        max_length: most tokens that the model sees at once; none: its positions.
        batch_size: rows of a batch; auto: as many as make a batch of a fixed number of tokens.
        max_batch_size: most rows, where the size is found automatically.
        device: none: the GPU if there is one.
        tokenizer: file or folder, or a tokenizer; none: the checkpoint's.
        policy: whether texts begin with BOS; none: the checkpoint's.
        compile: compile blocks and decoding step; none: on a GPU.
        responses: folder where answers are kept for the next time; none: they are not.
        chat_template: file or name of a template; none: the tokenizer's, where it has one.
        ranks: the processes that evaluate together.
        beat: called as answers are found.

    Raises:
        UserError: no checkpoint, no tokenizer, or an option that is impossible.
    """

    def __init__(
        self,
        pretrained: str | Path | Source | Llama,
        *,
        dtype: str = "fp32",
        weights: Weights | None = None,
        fold: bool = True,
        max_length: int | None = None,
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = None,
        device: str | torch.device | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        policy: BosEosPolicy | None = None,
        compile: bool | None = None,
        responses: str | Path | None = None,
        chat_template: str | None = None,
        ranks: Ranks | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise UserError(f"evaluation: dtype is {dtype}; it must be one of {', '.join(DTYPES)}")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.ranks, self._beat = ranks or Ranks(), beat
        source = pretrained if isinstance(pretrained, Source | Llama) else resolve(pretrained)
        folder: Path | None = None
        if isinstance(source, Source):
            folder = source.tokenizer
            model = load_model(source, device=self._device, dtype=DTYPES[dtype])
        else:
            model = source
        if not isinstance(tokenizer, Tokenizer):
            folder = Path(tokenizer) if tokenizer is not None else folder
            if folder is None:
                raise UserError(f"{pretrained} has no tokenizer: give one")
            tokenizer = load_tokenizer(folder)
        if policy is None:
            stored = load_policy(folder) if folder is not None and folder.is_dir() else None
            policy = stored or BosEosPolicy.default(tokenizer)
        self.tokenizer, self.policy = tokenizer, policy
        self.template = ChatTemplate.find(chat_template, folder, tokenizer)
        self._how = {"dtype": dtype, "weights": weights, "fold": fold}
        self._decodes = _decodes(model)
        self.model = inference_form(model, fold, weights)
        self._compiles = compile if compile is not None else self._device.type == "cuda"
        if self._compiles:
            for block in self.model.blocks:
                # One graph for all blocks and lengths, others for batches of one row and for those with a prefix.
                block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
        self._max_length = self._checked_length(max_length)
        self._rows = _rows(batch_size, max_batch_size)
        self._tokens = _BATCH_TOKENS[self._device.type] if batch_size in ("auto", None) else 2**62
        self._generated_rows = self._rows or _GENERATED_ROWS[self._device.type]
        self._generator: Generator | None = None
        self._responses, self._responses_folder = None, Path(responses or ".")
        if responses is not None:
            if not isinstance(source, Source):
                raise UserError("evaluation: answers are kept for checkpoints on disk alone")
            identity = self._identity(source)
            self._responses = Responses(self._responses_folder, identity, self.ranks.rank)
        self._known: dict[str, list[int]] = {}

    def _identity(self, source: Source) -> str:
        """Of everything that an answer depends on but the request."""
        parts = [__version__, source.content_hash, self.described()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _checked_length(self, length: int | None) -> int:
        limit = self.model.config.max_position_embeddings
        if length is not None and not 1 <= length <= limit:
            raise UserError(f"evaluation: the window is {length} tokens; this model allows 1 to {limit}")
        return length or limit

    @property
    def max_length(self) -> int:
        """Most tokens that the model sees at once."""
        return self._max_length

    @property
    def eot_token_id(self) -> int:
        """EOS."""
        if self.tokenizer.eos_id is None:
            raise UserError("evaluation: this tokenizer has no EOS")
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: BOS, or EOS where texts have no BOS."""
        if self.policy.bos and self.tokenizer.bos_id is not None:
            return self.tokenizer.bos_id
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Its fingerprint, and that of the chat template."""
        return f"{self.tokenizer.fingerprint[:16]}-{self.template.fingerprint[:16] if self.template else 'no-template'}"

    def described(self) -> dict[str, Any]:
        """What answers depend on beside the weights, for a record."""
        return {
            "dtype": self._how["dtype"],
            "weights": self._how["weights"],
            "folded": self._how["fold"],
            "max_length": self.max_length,
            "bos": self.policy.bos,
            "tokenizer": self.tokenizer.fingerprint,
            "chat_template": self.template.fingerprint if self.template is not None else None,
        }

    def encoded_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a question and a choice, as they are scored."""
        if not context:
            return [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
        return self._encode_pair(context, continuation)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Ids of ``string``, with BOS by the checkpoint's policy unless ``add_special_tokens`` says otherwise.

        BOS is never doubled: a chat template may have written it already.
        """
        bos = self.policy.bos if add_special_tokens is None else add_special_tokens
        ids = self._known.get(string)
        if ids is None:
            ids = self.template.encode(string) if self.template is not None else self.tokenizer.encode(string)
        return BosEosPolicy(bos=bos and self.tokenizer.bos_id is not None, eos=False).wrap(ids, self.tokenizer)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See ``lm_eval.api.model.LM``."""
        if self.template is None:
            # All texts that will be asked for, on all cores: the context alone, and with each choice.
            pairs = [request.args for request in requests if request.args[0]]
            texts = list(dict.fromkeys(text for one, other in pairs for text in (one.rstrip(), one + other)))
            self._known = dict(zip(texts, self.tokenizer.encode_batch(texts), strict=True))
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._known = {}

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text."""
        return self._needed_template().source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """``chat_history`` as one text; its special tokens are read as such."""
        return self._needed_template().render(chat_history, add_generation_prompt)

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            raise UserError("evaluation: this tokenizer has no chat template; give one with --chat-template")
        return self.template

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        asked = [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        return [(found.logprob, found.greedy) for found in self.scores(asked, disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See ``lm_eval.api.model.LM``: every token once, in windows that are as long as the model's."""
        asked: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            ):
                context, continuation = make_disjoint_window(window)
                asked.append(Request(tuple(context), tuple(continuation)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, found in zip(owners, self.scores(asked, disable_tqdm), strict=True):
            sums[owner] += found.logprob
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See ``lm_eval.api.model.LM``; a context that leaves no room for the answer loses its beginning."""
        asked = [self._generation(number, *request.args) for number, request in enumerate(requests)]
        keys = [_key("generate", asdict(one)) for one in asked]
        return self._answers(keys, lambda places: self._generated(asked, places), disable_tqdm)

    def scores(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[Score]:
        """The scores of ``requests``, in their order."""
        keys = [_key("loglikelihood", request) for request in requests]
        found = self._answers(
            keys, lambda places: self._scored([requests[place] for place in places], places), disable_tqdm
        )
        return [Score(*one) for one in found]

    def _answers(
        self, keys: list[str], compute: Callable[[list[int]], Iterator[tuple[int, Any]]], disable_tqdm: bool
    ) -> list[Any]:
        """The answer to each request, in their order; each distinct one is computed once, by one rank.

        Args:
            keys: of the requests; equal ones have equal answers.
            compute: the requests at these places -> places and answers (plain JSON), as they are found.
            disable_tqdm: show no progress.
        """
        places: dict[str, int] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, place)
        known = self.ranks.from_first(self._responses.find(places) if self._responses is not None else {})
        missing = [place for key, place in places.items() if key not in known]

        def work() -> dict[str, Any]:
            found = {}
            with tqdm(total=len(missing), disable=disable_tqdm or not self.ranks.is_first, unit="request") as bar:
                for place, answer in compute(missing):
                    found[keys[place]] = answer
                    self._beat()
                    bar.update(self.ranks.world_size)
                    if self._responses is not None:
                        self._responses.keep(keys[place], answer)
            return found

        try:
            for found in on_every_rank(self.ranks, self._responses_folder, work):
                known.update(found)
        except UserError as error:
            # All ranks have the same error, and one of them says it.
            raise error if self.ranks.world_size == 1 else Stopped(str(error), 2) from error
        return [known[key] for key in keys]

    def _scored(self, requests: list[Request], places: list[int]) -> Iterator[tuple[int, Any]]:
        mine = shares(requests, self.ranks.world_size)[self.ranks.rank]
        found = score(
            self.model,
            [requests[number] for number in mine],
            window=self.max_length,
            batch_tokens=self._tokens,
            batch_rows=self._rows,
            in_parts=self._decodes,
            forget_memory=_forget_memory,
        )
        return ((places[mine[number]], list(one)) for number, one in found)

    def _generation(self, number: int, context: str, options: dict[str, Any]) -> GenerationRequest:
        wanted = dict(normalize_gen_kwargs(options, _MAX_NEW_TOKENS))
        new, until = int(wanted.pop("max_gen_toks")), list(wanted.pop("until", None) or [])
        sampled, temperature = wanted.pop("do_sample", False), float(wanted.pop("temperature", 0.0))
        if new >= self.max_length:
            raise UserError(f"evaluation: {new} new tokens asked for, and the window is {self.max_length}")
        known = {name: wanted.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in wanted}
        if wanted:
            raise UserError(f"evaluation: unknown generation option {', '.join(sorted(wanted))}")
        sampling = Sampling(temperature=temperature if sampled else 0.0, seed=number if sampled else 0, **known)
        ids = self.tok_encode(context)[-(self.max_length - new) :] or [self.prefix_token_id]
        stops = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        return GenerationRequest(ids, new, sampling, stops, [text for text in until if text])

    def _generated(self, asked: list[GenerationRequest], places: list[int]) -> Iterator[tuple[int, str]]:
        # The longest first: what does not fit into the memory is known at once; neighbours have alike prompts.
        mine = sorted(places, key=lambda place: (-len(asked[place].prompt_ids), list(asked[place].prompt_ids)))
        waiting = mine[self.ranks.rank :: self.ranks.world_size]
        while waiting:
            try:
                yield from self._generated_once(asked, waiting)
                return
            except torch.OutOfMemoryError:
                if self._generated_rows == 1:
                    raise
            # Out of the handler: the error holds the frames of the model, and so their tensors.
            self._generated_rows //= 2
            self._generator = None
            _forget_memory()

    def _generated_once(self, asked: list[GenerationRequest], waiting: list[int]) -> Iterator[tuple[int, str]]:
        """Answers as they are found; what was answered leaves ``waiting``."""
        generator = self._generator_for([asked[place] for place in waiting])
        order, texts = list(waiting), dict.fromkeys(range(len(waiting)), "")
        for token in generator.run([asked[place] for place in order]):
            texts[token.request] += token.text
            if token.finish is not None:
                waiting.remove(order[token.request])
                yield order[token.request], texts.pop(token.request)

    def _generator_for(self, asked: list[GenerationRequest]) -> Generator:
        """One that is long enough; kept, so that it is compiled once."""
        needed = max(len(one.prompt_ids) + one.max_new_tokens for one in asked)
        if self._generator is None or self._generator.max_length < needed:
            length = min(max(256, 1 << (needed - 1).bit_length()), self.max_length)
            self._generator = Generator(
                self.model,
                length,
                batch_size=self._generated_rows,
                compile=self._compiles,
                fold=False,
                tokenizer=self.tokenizer,
                keep_prefixes=True,
            )
        return self._generator


def _rows(batch_size: int | str | None, most: int | None) -> int | None:
    """Most rows of a batch."""
    if batch_size in ("auto", None):
        return most
    try:
        rows = int(batch_size or 0)
    except ValueError:
        rows = 0
    if rows < 1:
        raise UserError(f"evaluation: batch_size is {batch_size}; it must be a number from 1 on, or auto")
    return rows


def _key(kind: str, request: Any) -> str:
    return hashlib.blake2b(f"{kind} {request}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _forget_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _decodes(model: Llama) -> bool:
    """Whether what is read in parts is what is read at once: a norm may treat the first token of a row apart."""
    try:
        model.config.norm_method.check_decoding(model)
    except UserError:
        return False
    return True
