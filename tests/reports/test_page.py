"""The report's folder: a page that needs nothing else, pictures of what the runs have, and nothing half-written."""

import base64
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from llmstack.checkpoint import DiagnosticsRow
from llmstack.errors import UserError
from llmstack.reports import read_runs
from llmstack.reports.writing import write_report

ODD = '$a_b$ <b>&"x"'
"""A name that would be a formula to matplotlib and markup to a browser."""


def inside(layers: int = 3) -> list[DiagnosticsRow]:
    """A little of everything that has a picture."""
    rows = []
    for step in (10, 20):
        for name in ("stream_mean_abs", "stream_variance", "stream_rms", "stream_first_token_rms"):
            rows += [DiagnosticsRow(step, layer, "", name, step * 3.0**layer) for layer in range(layers + 1)]
        for name in ("gate", "scale_ratio", "lambda", "tanh_saturation", "variance_approximated", "variance_exact"):
            rows += [DiagnosticsRow(step, layer, "mlp", name, 0.5 + layer) for layer in range(layers)]
        rows += [DiagnosticsRow(step, layer, "mlp", "variance_pearson", 0.9) for layer in range(layers)]
        rows.append(DiagnosticsRow(step, None, "final", "scale_mean", 2.0))
        rows.append(DiagnosticsRow(step, None, "final", "radial_gradient", -0.1))
    return rows


class Tags(HTMLParser):
    """Collects tags with their attributes, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.fixture(scope="module")
def finished_report(runs_in, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_run = runs_in(folder / "runs")
    runs = read_runs(
        [
            make_run("base-s1", {20: 3.0, 40: 2.5}, seed=1),
            make_run("base-s2", {20: 3.0, 40: math.nan}, seed=2),
            make_run(ODD, {20: 2.8, 40: 2.4}, norm="bhyt", diagnostics=inside(), val_tokens=6000),
            make_run("_never", {}, norm="dyt", steps=30),
            make_run("blown", {20: 3.0, 40: 1e300}, norm="lns"),
        ]
    )
    write_report(runs, runs[0], folder / "out")
    return folder / "out"


@pytest.fixture
def report(finished_report: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(finished_report, tmp_path / "out")


def test_the_page_needs_nothing_else_and_names_every_run(report: Path):
    text = (report / "report.html").read_text()
    page = Tags()
    page.feed(text)
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert not {"script", "link", "iframe", "object", "b>&"} & {tag for tag, _ in page.tags}
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    files = sorted(path.name for path in report.glob("*.png"))
    assert len(pictures) == len(files) > 10
    assert all("src" not in attributes for tag, attributes in page.tags if tag != "img")
    embedded = {base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in pictures if source}
    assert embedded == {(report / name).read_bytes() for name in files}
    anchors = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert anchors == {f"#{name.removesuffix('.png')}" for name in files}
    for name in ("base-s1", "base-s2", ODD, "_never", "blown", "base-s*"):
        assert name in page.text


def test_what_a_reader_must_know_before_comparing_is_said(report: Path):
    notes = json.loads((report / "report.json").read_text())["notes"]
    for said in (
        "base-s1 has no diagnostics",
        "base-s2 has diverged",
        f"{ODD} was validated on 6,000 tokens, the baseline on 5,000",
        "_never was never validated",
        "_never was trained on 3,000 tokens, the baseline on 4,000",
        "blown has diverged",
    ):
        assert any(note.startswith(said) for note in notes), said
    assert not any(note.startswith(f"{ODD} has no diagnostics") for note in notes)


def test_the_numbers_are_json_without_nan(report: Path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    numbers = json.loads((report / "report.json").read_text(), parse_constant=refuse)
    rows = {row["name"]: row for row in numbers["runs"]}
    assert numbers["baseline"] == "base-s1"
    assert rows[ODD]["final_gap"]["nats"] == pytest.approx(-0.1)
    assert rows[ODD]["final_gap"]["percent"] == pytest.approx(-4)
    assert rows["base-s2"]["final_val_loss"] is None
    assert numbers["groups"][0]["final_val_loss"]["n"] == 1
    assert numbers["groups"][0]["best_val_loss"]["n"] == 2
    assert [group["label"] for group in numbers["groups"]] == ["base-s*", ODD, "_never", "blown"]
    assert numbers["pictures"] == [name for name in numbers["pictures"] if (report / name).is_file()]


def test_every_picture_is_legible_in_size_and_not_blank(report: Path):
    for path in report.glob("*.png"):
        with Image.open(path) as image:
            assert 800 <= image.width <= 1800
            assert image.height >= 400
            colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert colours is not None
        assert len(colours) > 50, path


def test_runs_without_diagnostics_have_curves_alone(make_run, tmp_path: Path):
    runs = read_runs([make_run("a", {40: 2.0})])
    write_report(runs, runs[0], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "loss.png",
        "optimisation.png",
        "report.html",
        "report.json",
    ]


def test_an_older_report_is_replaced_whole(report: Path, make_run):
    runs = read_runs([make_run("a", {40: 2.0})])
    write_report(runs, runs[0], report)
    assert not (report / "magnitude.png").exists()
    assert json.loads((report / "report.json").read_text())["baseline"] == "a"
    assert [path.name for path in report.parent.iterdir() if path.name.startswith(".")] == []


def test_a_folder_with_other_things_is_left_alone(make_run, tmp_path: Path):
    runs = read_runs([make_run("a", {40: 2.0})])
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        write_report(runs, runs[0], other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_an_error_while_drawing_leaves_the_old_report_and_nothing_else(report: Path, make_run, monkeypatch):
    before = {path.name: path.read_bytes() for path in report.iterdir()}
    runs = read_runs([make_run("a", {40: 2.0})])

    def stop(name: str) -> None:
        if name == "optimisation.png":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report(runs, runs[0], report, report=stop)
    assert {path.name: path.read_bytes() for path in report.iterdir()} == before
    assert sorted(path.name for path in report.parent.iterdir()) == ["out", "runs"]
