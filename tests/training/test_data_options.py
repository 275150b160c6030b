"""Data options that contradict one another are refused before anything is read."""

from typing import Any

import pytest

from llmstack.errors import UserError
from llmstack.training.datamodule import LanguageData

BEST_FIT = {"packing": "best_fit", "document_masks": True}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"packing": "best_fit"}, "set data.document_masks to true"),
        ({**BEST_FIT, "source": "prepared", "mixture": {"a": 1, "b": 1}}, "no stream, task or mixture"),
        (
            {**BEST_FIT, "source": "stream", "files": "f", "heldout_files": "h", "tokenizer": "t"},
            "no stream, task or mixture",
        ),
        ({"source": "copy", "document_masks": True}, "a sample of data.source copy is one document"),
        ({"num_workers": -1}, "data.num_workers is -1; it must be 0 to"),
        ({"num_workers": 99_999}, "data.num_workers is 99999; it must be 0 to"),
        ({"source": "prepared"}, "source prepared needs one of the two"),
        ({"folder": "a"}, "source prepared needs one of the two"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        LanguageData(**options)


def test_best_fit_packing_is_another_set_of_samples(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run was trained on names the packing, so that a resumed run cannot change it; the waste is said."""
    monkeypatch.setenv("LLMSTACK_CACHE", str(tmp_path))
    packed = LanguageData(**BEST_FIT, block_size=64, embedded_vocab_size=512)  # type: ignore[arg-type]
    plain = LanguageData(document_masks=True, block_size=64, embedded_vocab_size=512)
    for data in (packed, plain):
        data.setup("fit")
    assert packed.fingerprint == f"{plain.fingerprint}-best_fit"
    assert plain.describe_packing() is None
    assert "% filling" in (packed.describe_packing() or "")
