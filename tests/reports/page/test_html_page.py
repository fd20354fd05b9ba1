"""A page of hostile runs: its table has the numbers of the facts, its charts have all marks, and no name becomes
markup."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, replace
from typing import Any
from xml.etree.ElementTree import Element

import pytest

from mgpu_slurm.core.formatting import duration
from mgpu_slurm.reports.facts.gather import ReportOptions, gather
from mgpu_slurm.reports.facts.report_facts import Facts
from mgpu_slurm.reports.page import parameter_charts, sweep_charts
from mgpu_slurm.reports.page.html_page import POLICY, page
from mgpu_slurm.reports.page.markup import escaped, number
from mgpu_slurm.reports.page.page_tables import MOST_COLUMNS
from mgpu_slurm.reports.page.shown import names_of
from mgpu_slurm.reports.usage.ledger import Ledger
from tests.reports.page.hostile_runs import EVIL, STATES, hostile_runs
from tests.reports.page.trees import by_class, by_id, text_of, tree_of


@dataclass(frozen=True)
class Made:
    facts: Facts
    text: str
    root: Element


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    runs = hostile_runs(tmp_path_factory.mktemp("runs"))
    facts = gather([str(run) for run in runs], ReportOptions(title=EVIL, metric="loss"))
    text = page(facts)
    return Made(facts, text, tree_of(text.encode().decode()))


def rows(root: Element) -> tuple[list[str], list[list[Element]]]:
    table = by_id(root, "runs")
    head, body = table.find("thead/tr"), table.find("tbody")
    assert head is not None
    assert body is not None
    return [text_of(each) for each in head], [list(row) for row in body]


def test_table_has_the_numbers_of_the_facts(made: Made) -> None:
    heads, body = rows(made.root)
    shown = made.facts.to_json()["runs"]
    names = names_of(made.facts)
    assert len(body) == len(shown) == 14
    for cells, run in zip(body, shown, strict=True):
        assert len(cells) == len(heads)
        expected: dict[str, Any] = {"Attempts": len(run["attempts"]), **run["config"]}
        for name, metric in run["metrics"].items():
            shown_name = html.unescape(escaped(name))
            expected |= {f"Best {shown_name}": metric["best"], f"Last {shown_name}": metric["last"]}
        named = dict(zip(heads, cells, strict=True))
        assert text_of(named["Run"]) == names.of(run["run"])
        assert text_of(named["State"]).rpartition(" ")[2] == run["state"].lower()
        assert text_of(named["Time"]) == duration(run["seconds"])
        assert text_of(named["Progress"]) == named["Progress"].get("data-v") == str(run["progress"])
        for head in set(heads) - {"Run", "State", "Time", "Progress", "Curve"}:
            value = expected.get(head)
            assert text_of(named[head]) == number(value), (run["run"], head)
            if isinstance(value, float | int) and not isinstance(value, bool):
                assert named[head].get("data-v") == repr(value)


def test_only_config_values_that_differ_are_columns_and_most_are_hidden(made: Made) -> None:
    heads, _ = rows(made.root)
    keys = heads[heads.index("Time") + 1 :]
    assert set(keys) == {key for run in made.facts.runs for key in run.config}
    more = by_class(by_id(made.root, "runs"), "more", "th")
    assert len(keys) - len(more) == MOST_COLUMNS
    assert text_of(by_id(made.root, "more-columns")) == f"Show {len(more)} more config values"


def test_each_curve_is_drawn(made: Made) -> None:
    for place, metric in enumerate(made.facts.metric_names):
        chart = by_id(made.root, f"curve-{place}")
        having = {index: run.series[metric] for index, run in enumerate(made.facts.runs) if metric in run.series}
        lines = [int(each.get("data-r", "")) for each in by_class(chart, "run", "path")]
        dots = [int(each.get("data-r", "")) for each in by_class(chart, "dot", "circle")]
        assert lines == [index for index, series in having.items() if len(series.value) > 1]
        assert set(dots) <= {index for index, series in having.items() if len(series.value) == 1}
        assert len(by_class(chart, "tick", "path")) >= 1
        assert len(by_class(chart, "grid", "path")) >= 1


def test_each_trial_has_its_marks(made: Made) -> None:
    (sweep,) = made.facts.sweeps
    states = sorted(f"s-{each.name}" for each in STATES)
    trials = {index for index, run in enumerate(made.facts.runs) if run.kind == "trial"}
    charts = ["sweep-0-history", *(f"sweep-0-slice-{place}" for place in range(len(sweep.study.parameters)))]
    for ident in charts:
        marks = by_class(by_id(made.root, ident), "point")
        assert sorted(each.get("class", "").split()[1] for each in marks) == states
        assert {int(each.get("data-r", "")) for each in marks} == trials
        assert {each.tag for each in marks if "s-COMPLETE" in each.get("class", "")} == {"circle"}
        assert {each.tag for each in marks if "s-COMPLETE" not in each.get("class", "")} == {"path"}
    parallel = by_id(made.root, "sweep-0-parallel")
    assert {int(each.get("data-r", "")) for each in by_class(parallel, "line", "path")} == trials
    axes = by_class(parallel, "upright", "g")
    assert [each.findtext("text[@class='label']") for each in axes] == [EVIL, "x (log)", "loss"]


def test_chart_alone_says_which_values_are_beyond_its_axis(made: Made) -> None:
    study = made.facts.sweeps[0].study
    trial = next(each for each in study.trials if each.row.state == "COMPLETE")
    values = [*(("COMPLETE", 0.9 + number / 1000) for number in range(30)), ("PRUNED", 50.0)]
    trials = [
        replace(trial, row=replace(trial.row, number=number, state=state, value=value))
        for number, (state, value) in enumerate(values)
    ]
    cut, whole = (replace(study, trials=part) for part in (trials, trials[:-1]))
    for draw in (sweep_charts.history, parameter_charts.slices, parameter_charts.parallel):
        found = [each.text for each in by_class(tree_of(f"<div>{draw(cut, 'c', {})}</div>"), "alone")]
        assert {*found} == {"1 value beyond the axis is drawn at its end."}
        assert not by_class(tree_of(f"<div>{draw(whole, 'c', {})}</div>"), "alone")


def test_no_name_becomes_markup(made: Made) -> None:
    assert "img" not in {each.tag for each in made.root.iter()}
    assert not [name for each in made.root.iter() for name in each.attrib if name.startswith("on")]
    scripts = [each for each in made.root.iter("script") if each.get("type") != "application/json"]
    assert len(scripts) == made.text.count("<script>")
    assert all(EVIL not in text_of(each) for each in scripts)
    assert made.root.findtext("head/title") == EVIL
    assert EVIL in [text_of(each) for each in by_class(made.root, "quiet", "div")]
    assert {run["name"] for run in json.loads(text_of(by_id(made.root, "data")))["runs"]} == {
        names_of(made.facts).of(run.run) for run in made.facts.runs
    }


def test_page_is_closed_and_its_parts_have_names(made: Made) -> None:
    idents = [ident for each in made.root.iter() if (ident := each.get("id")) is not None]
    assert len(set(idents)) == len(idents)
    named = " ".join(each.get("aria-labelledby", "") for each in made.root.iter()).split()
    assert {*named, *(each.get("href", "")[1:] for each in made.root.iter("a"))} <= set(idents)
    charts = by_class(made.root, "chart", "svg")
    assert len(charts) >= len(made.facts.metric_names) + 5
    assert all(each.get("role") == "img" and each.findtext("title") and each.findtext("desc") for each in charts)
    assert [each.get("content") for each in made.root.iter("meta") if each.get("http-equiv")] == [POLICY]
    assert not {"src", "srcset", "action"} & {name for each in made.root.iter() for name in each.attrib}
    assert not re.search(r"url\((?!data:)|@import", made.text)
    for part in charts:
        assert not re.search(r"\b(nan|inf)\b", " ".join(" ".join(each.attrib.values()) for each in part.iter("path")))


def test_page_says_what_it_left_out(made: Made) -> None:
    said = [text_of(each) for each in by_class(made.root, "left-out", "li")]
    assert [each.removeprefix("!") for each in said] == made.facts.warnings == ["1 run without metrics: silent"]
    failed = [text_of(each) for each in by_class(made.root, "failed", "li")]
    assert failed == [f"✕failed: failed{EVIL}", "✕digits: 1 failed trial"]


def test_page_without_points_has_all_charts_and_no_script(made: Made) -> None:
    root = tree_of(page(made.facts, with_points=False))
    assert [each.get("type") for each in root.iter("script")] == ["application/json"]
    assert [each.get("id") for each in by_class(root, "chart", "svg")] == [
        each.get("id") for each in by_class(made.root, "chart", "svg")
    ]


def test_page_without_runs() -> None:
    nothing = Facts("2026-01-01T00:00:00", "1", "empty", None, [], [], Ledger(), "core", [], [])
    root = tree_of(page(nothing, refresh=7))
    assert [each.get("content") for each in root.iter("meta") if each.get("http-equiv") == "refresh"] == ["7"]
    assert [each.get("id") for each in root.iter("section")] == ["overview"]
