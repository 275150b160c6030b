"""Ids to text as they come: never half a character, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmstack.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """The text of one continuation.

    What :meth:`push` and :meth:`flush` return joins to the decoded ids, up to the first stop string.

    Args:
        tokenizer: of the model.
        stop_strings: the text ends before the first of them.
        stop_ids: ids that end the text and are no part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop_strings, self._stop_ids = stop_strings, stop_ids
        self._held = ""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, token_id: int) -> str:
        """The text that became final with this id."""
        return "" if token_id in self._stop_ids else self._released(self._decoder.push(token_id))

    def flush(self) -> str:
        """What is left when no id follows."""
        text = self._released(self._decoder.flush()) + self._held
        self._held = ""
        return text

    def _released(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stop_strings if (place := self._held.find(stop)) >= 0]
        if found:
            # The first to be complete, as if the text had come by single characters.
            _, place = min(found)
            self.stopped = True
            released, self._held = self._held[:place], ""
            return released
        keep = max((_begun(self._held, stop) for stop in self._stop_strings), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
