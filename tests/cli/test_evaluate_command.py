"""``llmstack evaluate``, and evaluations in the middle of a training."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from llmstack.checkpoint.run_folder import FINISHED_FILE
from llmstack.cli import evaluate as command
from llmstack.cli.main import main
from tests.training.conftest import TINY

Fit = Callable[..., int]


def fit(folder: Path, *arguments: str) -> None:
    assert main(["fit", *TINY, "--model.compile", "false", "--run.dir", str(folder), *arguments]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    fit(folder, "--trainer.max_steps", "2")
    return folder


@pytest.fixture
def stories(shared: Path) -> str:
    return str(shared / "checkpoints/stories260K/hf")


def test_a_run_without_any_data_set(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSTACK_DATA", str(tmp_path / "nothing"))
    output, samples = tmp_path / "o.json", tmp_path / "samples"
    arguments = ["evaluate", str(run), "--tasks", "python_reference", "--limit", "6", "--show"]
    assert main([*arguments, "--output", str(output), "--log-samples", str(samples)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(output.read_text())
    (in_run,) = (run / "evaluation").iterdir()
    assert json.loads(in_run.read_text()) == found
    assert in_run.name.startswith("tasks-step-00000002-")
    assert found["format"] == "llmstack-evaluation"
    assert found["checkpoint"]["step"] == 2
    assert found["checkpoint"]["norm"] == "bhyt"
    assert len(found["checkpoint"]["sha256"]) == 64
    assert (found["limit"], found["fewshot_seeds"]) == (6, [1234])
    assert found["command"][:2] == ["llmstack", *found["command"][1:2]]
    (task,) = found["tasks"].values()
    assert task["documents"] == 6
    assert set(task["metrics"]) == {"acc", "acc_norm"}
    assert len(task["hash"]) == 64
    lines = [json.loads(line) for line in (samples / "python_reference.jsonl").read_text().splitlines()]
    assert sum(line["acc"] for line in lines) / 6 == pytest.approx(task["metrics"]["acc"]["mean"])
    # What the model saw: the ids of a question begin with BOS.
    assert "== python_reference, first document, request 4" in out
    assert "context [0, " in out
    assert "BOS (0) before each text" in err


def test_offline_sets_in_the_hubs_layout(stories: str, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HellaSwag has no training split here: examples come from those it is evaluated on, never the question itself."""
    root = str(shared / "eval")
    arguments = ["evaluate", stories, "--tasks", "hellaswag,arc_easy", "--data-root", root, "--limit", "4"]
    assert main([*arguments, "--num-fewshot", "2", "--show"]) == 0
    out, err = capsys.readouterr()
    assert "hellaswag: no train split here; examples are taken from the validation split" in err
    assert "arc_easy:" not in err
    shown = out.split("== hellaswag, first document, request 1\n")[1].split("⟦")[0]
    *examples, question = shown.split("\n\n")
    assert len(examples) == 2
    assert all(question not in example for example in examples)


def test_seeds_and_kept_answers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, answers = tmp_path / "o.json", tmp_path / "answers"
    arguments = ["evaluate", str(run), "--tasks", "python_reference", "--limit", "5", "--num-fewshot", "1"]
    arguments += ["--fewshot-seeds", "1,2,3", "--cache", str(answers), "--output", str(output)]
    assert main(arguments) == 0
    assert "seeds ±: standard deviation" in capsys.readouterr().out
    first = json.loads(output.read_text())["tasks"]["python_reference"]["metrics"]["acc"]
    assert len(first["values"]) == 3
    mean = sum(first["values"]) / 3
    assert first["mean"] == pytest.approx(mean)
    assert first["over_seeds"] == pytest.approx((sum((one - mean) ** 2 for one in first["values"]) / 2) ** 0.5)

    def computed(*_: object, **__: object) -> None:
        raise AssertionError("everything is known already")

    monkeypatch.setattr("llmstack.evaluation.scoring._Batches._compute", computed)
    assert main(arguments) == 0
    assert json.loads(output.read_text())["tasks"]["python_reference"]["metrics"]["acc"] == first


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "arc_eazy"], "no such task"),
        (["--tasks", "nothing_like_it,arc_easy"], "--tasks nothing_like_it: lm-eval has no such task"),
        (["--tasks", ","], "no tasks given"),
        (["--tasks", "python_reference", "--num-fewshot", "-1"], "--num-fewshot is -1"),
        (["--tasks", "python_reference", "--fewshot-seeds", "1,b"], "--fewshot-seeds 1,b: not whole numbers"),
        (["--tasks", "python_reference", "--batch-size", "many"], "batch_size is many"),
        (["--tasks", "python_reference", "--max-length", "999999"], "the window is 999999 tokens"),
        (["--tasks", "python_reference", "--limit", "0"], "--limit"),
        (["--tasks", "python_reference", "--chat"], "no chat template"),
        (["--tasks", "python_reference", "--chat-template", "chatml"], "it needs --chat"),
        (["--tasks", "python_reference", "--include", "/no/such/folder"], "there is no such folder"),
        (["--tasks", "arc_easy", "--data-root", "/no/such/folder"], "fetch --what arc"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], told: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert told in lines[-1]
    assert lines[-1].startswith("llmstack: ")


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has not begun to save, then trains: what it has at the end is evaluated, and the watch is over."""
    monkeypatch.setattr(command, "_LOOK_SECONDS", 0.1)
    folder = tmp_path / "run"
    folder.mkdir()
    assert main(["evaluate", str(folder), "--watch", "--tasks", "python_reference"]) == 2
    folder.rmdir()
    fit(folder, "--trainer.max_steps", "1")
    # As a run that still trains.
    record = folder / FINISHED_FILE
    finished = record.read_bytes()
    record.unlink()
    watch = ["evaluate", str(folder), "--watch", "--tasks", "python_reference", "--limit", "2"]
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(main(watch)), daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert thread.is_alive()
    record.write_bytes(finished)
    thread.join(timeout=60)
    assert statuses == [0]
    assert len(list((folder / "evaluation").iterdir())) == 1


def test_training_goes_on_as_if_nobody_had_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ("--trainer.max_steps", "4", "--model.config.residual_dropout", "0.1")
    fit(tmp_path / "alone", *steps)
    asked = ("--run.evaluate_every", "2", "--run.evaluate_limit", "3")
    fit(tmp_path / "asked", *steps, *asked)
    assert "step 2: python_reference acc" in capsys.readouterr().err
    columns = ("loss", "grad_norm", "learning_rate", "tokens_seen")
    rows = [_columns(tmp_path / name / "metrics.csv", columns) for name in ("alone", "asked")]
    assert rows[0] == rows[1]
    names = sorted(path.name[6:19] for path in (tmp_path / "asked/evaluation").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    # The checkpoint's own evaluation gives what the one in training gave.
    assert main(["evaluate", str(tmp_path / "asked"), "--tasks", "python_reference", "--limit", "3"]) == 0
    last = sorted((tmp_path / "asked/evaluation").glob("tasks-step-00000004-*"))
    values = [json.loads(path.read_text())["tasks"]["python_reference"]["metrics"] for path in last]
    assert len(values) == 2
    assert values[0] == values[1]


def _columns(path: Path, names: tuple[str, ...]) -> list[list[str]]:
    head, *rows = (line.split(",") for line in path.read_text().splitlines())
    return [[row[head.index(name)] for name in names] for row in rows]
