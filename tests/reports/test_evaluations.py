"""The downstream tables, from evaluations whose numbers are computed by hand."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmstack.accounting import count_parameters
from llmstack.errors import UserError
from llmstack.model import ModelConfig
from llmstack.reports import read_runs
from llmstack.reports.evaluation_table import CHANCE, Cell, Row, Table, evaluation_tables
from llmstack.reports.evaluation_text import comma_separated, latex, layout, markdown
from llmstack.reports.evaluations import read_evaluations
from llmstack.reports.published import PUBLISHED, SIZES, published_size
from llmstack.reports.runs import group_by_setting
from llmstack.reports.writing import write_report

TINY = 600_000
Metrics = Mapping[str, Sequence[float]]


def evaluated(
    run: Path,
    tasks: Mapping[str, Metrics],
    *,
    groups: Mapping[str, Metrics] | None = None,
    error: float | None = 0.01,
    step: int = 40,
    num_fewshot: int | None = 3,
    limit: int | None = None,
    parameters: int = TINY,
    model: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write what ``llmstack evaluate`` would into the folder of a run; values are fractions, ``error`` their stderr."""

    def metrics(scores: Metrics) -> dict[str, Any]:
        return {
            name: {"mean": sum(values) / len(values), "stderr": error, "over_seeds": None, "values": list(values)}
            for name, values in scores.items()
        }

    identity = {"version": 1.0, "hash": "same", "num_fewshot": num_fewshot, "documents": 500, "notes": []}
    how = {"dtype": "fp32", "weights": None, "folded": True, "max_length": 2048, "bos": True, "tokenizer": "t"}
    record = {
        "format": "llmstack-evaluation",
        "format_version": 1,
        "date": "2026-12-01T05:00:00+00:00",
        "checkpoint": {"ckpt": str(run), "step": step, "parameters": parameters, "norm": "rmsnorm"},
        "model": {**how, "chat_template": None, **(model or {})},
        "versions": {"llmstack": "0.1.0", "lm_eval": "0.4.13"},
        "num_fewshot": num_fewshot,
        "limit": limit,
        "fewshot_seeds": [1234],
        "tasks": {name: {**identity, "metrics": metrics(scores)} for name, scores in tasks.items()},
        "groups": {name: {"documents": 14042, "metrics": metrics(scores)} for name, scores in (groups or {}).items()},
        **more,
    }
    folder = run / "evaluation"
    folder.mkdir(exist_ok=True)
    path = folder / f"tasks-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(record))
    return path


def tables_of(*paths: Path) -> list[Table]:
    runs = read_runs(paths)
    return evaluation_tables(group_by_setting(runs), {run.name: read_evaluations(run.path) for run in runs})


def acc(*values: float) -> dict[str, Metrics]:
    """One task with these results."""
    return {"piqa": {"acc": values}}


@pytest.fixture
def two_runs(make_run: Callable[..., Path]) -> tuple[Path, Path]:
    return make_run("base", {40: 2.0}), make_run("other", {40: 1.5}, norm="dyt")


def test_columns_stand_in_the_order_of_the_paper_and_groups_hide_their_members(make_run):
    run = make_run("a", {40: 2.0})
    names = ("zeta", "boolq", "arc_easy", "alpha", "arc_challenge", "mmlu_anatomy", "winogrande")
    evaluated(
        run,
        {name: {"acc": [0.5]} for name in names},
        groups={"mmlu": {"acc": [0.26]}, "mmlu_stem": {"acc": [0.24]}},
    )
    (table,) = tables_of(run)
    order = ["arc_challenge", "arc_easy", "winogrande", "mmlu", "boolq", "alpha", "zeta"]
    assert table.columns == ["train_loss", "eval_loss", "ppl", *order, "avg"]
    assert table.rows[0].cells["mmlu"].mean == 26.0
    assert table.documents["mmlu"] == 14042
    assert table.rows[0].cells["avg"].mean == pytest.approx((50 * 4 + 26) / 5), "alpha and zeta are not of the eight"


def test_a_single_result_has_the_standard_error_of_its_sample(make_run):
    run = make_run("a", {40: 2.0})
    evaluated(run, {"arc_easy": {"acc": [0.4]}, "piqa": {"acc": [0.6]}}, error=0.03)
    cells = tables_of(run)[0].rows[0].cells
    assert cells["arc_easy"] == Cell(40.0, 3.0, "sample", 1, 3.0, 3.0)
    average = cells["avg"]
    assert average.mean == 50.0
    assert average.spread == pytest.approx(math.sqrt(3**2 + 3**2) / 2)
    assert (cells["train_loss"].mean, cells["eval_loss"].mean, cells["eval_loss"].spread) == (3.0, 2.0, None)
    assert cells["ppl"].mean == pytest.approx(7.389056)


def test_runs_of_one_setting_are_a_row_over_training_and_fewshot_seeds(make_run):
    first, second = make_run("bhyt-s0", {40: 2.0}, seed=0), make_run("bhyt-s1", {40: 2.2}, seed=1)
    evaluated(first, {"arc_easy": {"acc": [0.30, 0.32]}, "piqa": {"acc": [0.60, 0.60]}})
    evaluated(second, {"arc_easy": {"acc": [0.34, 0.36]}, "piqa": {"acc": [0.70, 0.60]}})
    (table,) = tables_of(first, second)
    (row,) = table.rows
    assert (row.label, row.runs) == ("bhyt-s*", ["bhyt-s0", "bhyt-s1"])
    deviation = math.sqrt((3**2 + 1 + 1 + 3**2) / 3)
    easy = row.cells["arc_easy"]
    assert (easy.mean, easy.spread_of, easy.results) == (pytest.approx(33.0), "results", 4)
    assert [easy.spread, easy.error] == pytest.approx([deviation, deviation / 2])
    # 45, 46, 52 and 48: their mean is 47.75, their deviations from it -2.75, -1.75, 4.25 and 0.25.
    average = row.cells["avg"]
    assert average.mean == pytest.approx(47.75)
    assert average.spread == pytest.approx(math.sqrt((2.75**2 + 1.75**2 + 4.25**2 + 0.25**2) / 3))
    assert row.cells["eval_loss"].mean == pytest.approx(2.1)
    assert row.cells["eval_loss"].spread == pytest.approx(0.2 / math.sqrt(2))
    assert "Results per row: bhyt-s* 4 of 2 runs." in layout(table).caption


def test_results_that_seeds_cannot_change_are_one(make_run):
    zero_shot, alike = make_run("a", {40: 2.0}), make_run("b", {40: 2.0}, norm="dyt")
    evaluated(zero_shot, acc(0.4, 0.4, 0.4), num_fewshot=0)
    assert tables_of(zero_shot)[0].rows[0].cells["piqa"] == Cell(40.0, 1.0, "sample", 1, 1.0, 1.0)
    evaluated(alike, acc(0.4, 0.4))
    cell = tables_of(alike)[0].rows[0].cells["piqa"]
    assert (cell.spread, cell.spread_of, cell.error) == (1.0, "sample", 1.0), "no spread of 0 from few documents"


def bold(table: Table, column: str) -> list[str]:
    return [row.label for row in table.rows if column in row.cells and row.cells[column].best]


@pytest.mark.parametrize(("lead", "expected"), [(0.0282, []), (0.0284, ["other"])])
def test_the_best_is_bold_only_beyond_the_noise_of_samples(two_runs, lead: float, expected: list[str]):
    # Two standard errors of 1 make 2 · √2 = 2.828 points.
    evaluated(two_runs[0], acc(0.5))
    evaluated(two_runs[1], acc(0.5 + lead))
    (table,) = tables_of(*two_runs)
    assert bold(table, "piqa") == expected
    assert ("**" in markdown([table])) == bool(expected)
    assert (r"\textbf{" in latex([table])) == bool(expected)


@pytest.mark.parametrize(("lead", "expected"), [(0.0131, []), (0.0133, ["other"])])
def test_noise_over_seeds_is_that_of_the_mean(two_runs, lead: float, expected: list[str]):
    # Variances 2/4 over five results and 4/3 over four: 2 · √(0.5/5 + 1.333/4) = 1.317 points.
    evaluated(two_runs[0], acc(0.69, 0.71, 0.70, 0.70, 0.70), error=0.02)
    evaluated(two_runs[1], acc(0.69 + lead, 0.71 + lead, 0.69 + lead, 0.71 + lead), error=0.02)
    (table,) = tables_of(*two_runs)
    assert bold(table, "piqa") == expected


def test_one_row_in_the_noise_of_the_best_keeps_it_from_bold(make_run):
    runs = [make_run(name, {40: 2.0}, norm=name) for name in ("rmsnorm", "dyt", "lns")]
    evaluated(runs[0], acc(0.60), error=0.01)
    evaluated(runs[1], acc(0.50), error=0.01)
    assert bold(tables_of(*runs[:2])[0], "piqa") == ["rmsnorm"]
    evaluated(runs[2], acc(0.49), error=0.10)
    assert bold(tables_of(*runs)[0], "piqa") == []


def test_one_row_alone_and_rows_without_an_error_are_never_bold(two_runs):
    evaluated(two_runs[0], acc(0.2))
    assert bold(tables_of(two_runs[0])[0], "piqa") == []
    evaluated(two_runs[1], acc(0.9), error=None)
    table = tables_of(*two_runs)[0]
    assert bold(table, "piqa") == []
    assert layout(table).rows[1][-1] == "90.00"


def test_of_losses_the_lowest_is_bold_where_seeds_tell_it(make_run):
    paths = []
    for norm, losses in (("rmsnorm", (2.00, 2.02)), ("dyt", (1.90, 1.92))):
        for seed, loss in enumerate(losses):
            paths.append(make_run(f"{norm}-{seed}", {40: loss}, norm=norm, seed=seed))
            evaluated(paths[-1], acc(0.5))
    assert bold(tables_of(*paths)[0], "eval_loss") == ["dyt-*"], "0.1 apart, with errors of 0.01"
    assert bold(tables_of(paths[0], paths[2])[0], "eval_loss") == [], "one seed each: no noise is known"


@pytest.mark.parametrize(("second", "named"), [(0.5199, True), (0.5201, False)])
def test_a_task_is_at_chance_only_where_every_row_is(two_runs, second: float, named: bool):
    evaluated(two_runs[0], acc(0.49))
    evaluated(two_runs[1], acc(second))
    (table,) = tables_of(*two_runs)
    assert any(note.startswith("At chance") and "piqa (50 %)" in note for note in table.notes) == named


def test_chance_is_judged_by_the_documents_not_by_the_seeds(two_runs):
    evaluated(two_runs[0], {"arc_easy": {"acc": [0.2601, 0.2600, 0.2599]}})
    cell = tables_of(two_runs[0])[0].rows[0].cells["arc_easy"]
    assert cell.error is not None
    assert cell.mean - 25 > 2 * cell.error
    assert any("arc_easy (25 %)" in note for note in tables_of(two_runs[0])[0].notes)


def test_of_those_who_guess_none_is_bold(two_runs):
    """Few-shot seeds agree to 0.01 points and the rows are 1 point apart, but documents do not tell 25 from 26 %."""

    def evaluate(run: Path, score: float, step: int) -> None:
        values = [score + 0.0001, score, score - 0.0001]
        evaluated(run, {"arc_easy": {"acc": values}, "mmlu": {"acc": values}}, step=step)

    evaluate(two_runs[0], 0.25, 20)
    for score, step, expected in ((0.26, 20, []), (0.28, 40, ["other"])):
        evaluate(two_runs[1], score, step)
        table = tables_of(*two_runs)[0]
        assert [bold(table, column) for column in ("arc_easy", "avg")] == [expected, expected]


def test_only_what_is_comparable_shares_a_table(two_runs):
    first, second = two_runs
    evaluated(first, acc(0.5))
    evaluated(second, acc(0.5), parameters=int(1.01 * TINY))
    assert [len(table.rows) for table in tables_of(first, second)] == [2]
    evaluated(second, acc(0.5), num_fewshot=0)
    evaluated(second, acc(0.5), limit=10)
    evaluated(second, acc(0.5), model={"weights": "int8"})
    evaluated(first, acc(0.5), model={"chat_template": "abc"})
    evaluated(first, acc(0.5), parameters=2 * TINY, step=50, num_fewshot=5)
    tables = tables_of(first, second)
    settings = [table.setting for table in tables]
    assert len(set(settings)) == len(settings) == 6
    assert sorted(len(table.rows) for table in tables) == [1, 1, 1, 1, 1, 2]
    captions = {table.setting: layout(table).caption for table in tables}
    for setting, caption in captions.items():
        demonstration = "first 10 documents of each task: a demonstration, not a benchmark"
        assert (demonstration in caption) == (setting.limit == 10)
        assert f"{setting.num_fewshot}-shot" in caption
        assert "Documents: piqa 500" in caption
    assert {setting.size for setting in settings} == {"600k", "1.2M"}


def test_a_template_that_was_not_used_is_no_setting(two_runs):
    evaluated(two_runs[0], acc(0.5), model={"chat_template": "abc"}, chat=False)
    evaluated(two_runs[1], acc(0.5))
    assert len(tables_of(*two_runs)) == 1


def test_the_latest_step_of_a_setting_counts(make_run):
    run = make_run("a", {20: 2.5, 40: 2.0})
    evaluated(run, acc(0.6), step=40)
    evaluated(run, acc(0.5), step=20)
    evaluated(run, acc(0.7), step=20, num_fewshot=0)
    three, zero = sorted(tables_of(run), key=lambda table: -(table.setting.num_fewshot or 0))
    assert (three.rows[0].cells["piqa"].mean, three.rows[0].steps) == (60.0, [40])
    assert (zero.rows[0].cells["piqa"].mean, zero.rows[0].steps) == (70.0, [20])
    assert three.rows[0].cells["eval_loss"].mean == 2.0
    assert zero.rows[0].cells["eval_loss"].mean == 2.5, "that of the checkpoint, not the run's last"
    assert zero.rows[0].cells["train_loss"].mean == 4.0


def test_checkpoints_of_different_steps_are_said(two_runs):
    evaluated(two_runs[0], acc(0.6), step=40)
    evaluated(two_runs[1], acc(0.6), step=30)
    assert "Checkpoints of different steps: base 40, other 30." in tables_of(*two_runs)[0].notes


def test_what_else_differs_is_said(two_runs):
    evaluated(two_runs[0], {"piqa": {"acc": [0.6]}, "gsm8k": {"exact_match": [0.1]}})
    other = evaluated(two_runs[1], acc(0.6), model={"dtype": "bf16"})
    record = json.loads(other.read_text())
    record["tasks"]["piqa"]["documents"] = 499
    other.write_text(json.dumps(record))
    notes = "\n".join(tables_of(*two_runs)[0].notes)
    assert "do not compare: piqa" in notes
    assert "the same dtype" in notes
    assert "gsm8k" in notes
    assert "max_length" not in notes


def test_acc_norm_is_taken_where_every_row_has_it_and_acc_stands_in_a_second_table(two_runs):
    both = {"arc_easy": {"acc": [0.4], "acc_norm": [0.38]}, "boolq": {"acc": [0.5]}}
    evaluated(two_runs[0], {**both, "piqa": {"acc": [0.6], "acc_norm": [0.61]}})
    evaluated(two_runs[1], {**both, "piqa": {"acc": [0.6]}})
    main, plain = tables_of(*two_runs)
    assert main.metrics == {"arc_easy": "acc_norm", "piqa": "acc", "boolq": "acc"}
    assert [row.cells["arc_easy"].mean for row in main.rows] == [38.0, 38.0]
    assert plain.metrics == {"arc_easy": "acc", "piqa": "acc", "boolq": "acc"}
    assert [row.cells["arc_easy"].mean for row in plain.rows] == [40.0, 40.0]
    assert "acc_norm of arc_easy; acc of piqa, boolq." in layout(main).caption
    assert "acc of arc_easy, piqa, boolq." in layout(plain).caption


def test_the_average_is_over_the_tasks_that_all_rows_have(two_runs):
    evaluated(two_runs[0], {name: {"acc": [0.5]} for name in ("arc_easy", "piqa", "boolq", "other")})
    evaluated(two_runs[1], {"piqa": {"acc": [0.6]}, "boolq": {"acc": [0.4]}, "other": {"acc": [0.9]}})
    (table,) = tables_of(*two_runs)
    assert table.averaged == ["piqa", "boolq"]
    assert [row.cells["avg"].mean for row in table.rows] == pytest.approx([50, 50])
    assert "avg: mean over piqa, boolq." in layout(table).caption
    assert layout(table).rows[1][layout(table).head.index("arc_easy")] == "–"


def published_rows(table: Table) -> list[Row]:
    return [row for row in table.rows if row.label == "published"]


def test_published_rows_stand_beside_their_size_alone(two_runs):
    everything = {name: {"acc": [0.4]} for name in CHANCE}
    evaluated(two_runs[0], everything, parameters=int(1.019 * SIZES["374M"]))
    evaluated(two_runs[1], everything, parameters=int(1.021 * SIZES["374M"]))
    close, far = tables_of(*two_runs)
    assert (close.setting.size, far.setting.size) == ("374M", "383M")
    assert not published_rows(far)
    assert [row.norm for row in published_rows(close)] == ["RMSNorm", "Peri-LN", "LNS", "DyT", "BHyT"]
    cells = published_rows(close)[-1].cells
    assert [cells[name].mean for name in ("eval_loss", "ppl", "arc_challenge", "avg")] == [3.207, 24.714, 24.4, 40.31]
    assert (cells["avg"].spread, cells["avg"].best, cells["avg"].error) == (0.11, False, None)
    assert "Table 1 of the BHyT paper (arXiv 2601.09719)" in layout(close).caption


def test_published_rows_are_of_the_same_setting(two_runs):
    evaluated(two_runs[0], acc(0.4), parameters=SIZES["1B"], num_fewshot=0)
    evaluated(two_runs[0], acc(0.4), parameters=SIZES["1B"], limit=10)
    evaluated(two_runs[0], acc(0.4), parameters=SIZES["3B"])
    tuned = {"piqa": {"acc": [0.4]}, "boolq": {"acc": [0.4]}}
    evaluated(two_runs[0], tuned, parameters=SIZES["1B"], model={"chat_template": "abc"})
    tables = {
        (one.setting.size, one.setting.num_fewshot, one.setting.chat_template): one for one in tables_of(two_runs[0])
    }
    assert not published_rows(tables["1B", 0, None])
    assert any("rows of this size are not shown" in note for note in tables["1B", 0, None].notes)
    assert not published_rows(tables["1B", 3, None]), "the first ten documents"
    assert [row.norm for row in published_rows(tables["3B", 3, None])] == ["Peri-LN", "BHyT"]
    after = published_rows(tables["1B", 3, "abc"])[-1]
    assert after.cells["piqa"].mean == 72.29
    assert after.cells["avg"].mean == pytest.approx((72.29 + 57.05) / 2), "over what our rows have, so without its ±"
    assert after.cells["avg"].spread is None


def test_published_numbers_agree_with_themselves():
    assert [count_parameters(ModelConfig.preset(name.lower())).total for name in SIZES] == [*SIZES.values()]
    assert published_size(SIZES["1B"]) == "1B"
    assert published_size(TINY) is None
    # The paper's Table 2 prints averages that its own rows do not have.
    off = {("374M", method, 2) for method in ("RMSNorm", "Peri-LN", "LNS")}
    for row in PUBLISHED:
        mean = sum(row.numbers[task].mean for task in CHANCE) / len(CHANCE)
        difference = abs(mean - row.numbers["avg"].mean)
        assert (difference > 0.0101) == ((row.size, row.method, row.table) in off), row
        if "ppl" in row.numbers:
            assert math.exp(row.numbers["eval_loss"].mean) == pytest.approx(row.numbers["ppl"].mean, rel=1e-3)
    assert len(PUBLISHED) == 24


def test_names_are_escaped_in_latex_and_markdown(make_run):
    run = make_run("a_b & 50% of $x^2 #1 {~}", {40: 2.0})
    evaluated(run, {"arc_easy": {"acc": [0.4]}, "a|b_": {"acc": [0.3]}})
    tables = tables_of(run)
    text = latex(tables)
    assert r"a\_b \& 50\% of \$x\textasciicircum{}2 \#1 \{\textasciitilde{}\} & rmsnorm & " in text
    assert r"& arc\_easy & a|b\_ \\" in text
    assert r"40.00 $\pm$ 1.00 & 30.00 $\pm$ 1.00 \\" in text
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert r"| arc_easy | a\|b\_ |" in markdown(tables)
    rows = [line for line in markdown(tables).splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in rows}) == 1


def test_a_broken_file_is_named(make_run):
    run = make_run("a", {40: 2.0})
    path = evaluated(run, acc(0.4))
    whole = path.read_text()
    for text, said in (
        (whole[:-20], "is no evaluation"),
        ('{"perplexity": 3}', "is no evaluation"),
        ("[]", "is no evaluation"),
        (whole.replace("llmstack-evaluation", "other"), "is no evaluation"),
        (whole.replace('"format_version": 1', '"format_version": 2'), "has format version 2"),
        (whole.replace('"step"', '"steps"'), "is not a whole evaluation"),
        (whole.replace('"values": [0.4]', '"values": []'), "is not a whole evaluation"),
        (whole.replace('"values": [0.4]', '"values": [NaN]'), "is not a whole evaluation"),
    ):
        assert text != whole
        path.write_text(text)
        with pytest.raises(UserError, match=f"{path.name} {said}"):
            read_evaluations(run)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is no evaluation"):
        read_evaluations(run)


def test_the_report_has_the_tables_in_every_form(two_runs, tmp_path):
    evaluated(two_runs[0], acc(0.5))
    evaluated(two_runs[1], acc(0.6))
    runs, out = read_runs(two_runs), tmp_path / "out"
    write_report(runs, runs[0], out)
    (table,) = json.loads((out / "report.json").read_text())["downstream"]
    assert [row["cells"]["piqa"]["mean"] for row in table["rows"]] == [50.0, 60.0]
    lines = [*csv.DictReader(io.StringIO((out / "evaluations.csv").read_text()))]
    found = {line["run"]: (line["mean"], line["spread"], line["best"]) for line in lines if line["column"] == "piqa"}
    assert found == {"base": ("50", "1", "0"), "other": ("60", "1", "1")}
    assert "| other | dyt | 3.000 | 1.500 | 4.482 | **60.00 ± 1.00** |" in (out / "evaluations.md").read_text()
    assert r"\textbf{60.00 $\pm$ 1.00} \\" in (out / "evaluations.tex").read_text()
    page = (out / "report.html").read_text()
    assert "<td><b>60.00 ± 1.00</b>" in page
    assert "<td>50.00 ± 1.00" in page
    for run in two_runs:
        (run / "evaluation" / "tasks-0.json").unlink()
    write_report(runs, runs[0], out)
    assert not [path.name for path in out.iterdir() if path.name.startswith("evaluations")]
    assert "Downstream" not in (out / "report.html").read_text()


def test_a_broken_evaluation_leaves_the_old_report(two_runs, tmp_path):
    runs, out = read_runs(two_runs), tmp_path / "out"
    write_report(runs, runs[0], out)
    before = (out / "report.json").read_bytes()
    evaluated(two_runs[1], acc(0.6)).write_text("{")
    with pytest.raises(UserError, match=r"tasks-0\.json"):
        write_report(runs, runs[0], out)
    assert (out / "report.json").read_bytes() == before


def test_the_csv_has_a_line_for_every_number(two_runs):
    evaluated(two_runs[0], acc(0.4, 0.5), parameters=SIZES["3B"])
    lines = [*csv.DictReader(io.StringIO(comma_separated(tables_of(two_runs[0]))))]
    ours = next(line for line in lines if line["run"] == "base" and line["column"] == "piqa")
    assert (ours["mean"], ours["results"], ours["spread_of"], ours["metric"]) == ("45", "2", "results", "acc")
    assert float(ours["spread"]) == pytest.approx(math.sqrt(50))
    assert float(ours["standard_error"]) == pytest.approx(5)
    paper = next(line for line in lines if line["norm"] == "BHyT" and line["column"] == "piqa")
    assert (paper["mean"], paper["spread"], paper["spread_of"], paper["documents"]) == (
        "70.18",
        "0.08",
        "published",
        "",
    )
