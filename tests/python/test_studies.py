"""Studies: their files, their runs, and the pages generated from records."""

import dataclasses
import json
import pathlib
import random
import re
import shutil

import numpy as np
import pytest
import study as studies
from safetensors.numpy import save_file
from study import Claim, Comparison, Contrast, Study
from test_cli import refused

from gnomon.nn import MultiheadAttention, TokenPosition, attention_position

pytestmark = pytest.mark.cpu("runs the program, which has --device")

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ("--lengths", "16,32", "--steps", "2", "--dim", "16", "--depth", "1", "--heads", "2",
        "--mlp", "16", "--batch", "2", "--evaluation-bytes", "512")  # fmt: skip


def value_of(comparison, flag):
    return comparison.arguments[comparison.arguments.index(flag) + 1]


@pytest.mark.parametrize("name", studies.names())
def test_a_study_is_complete(name):
    study = studies.load_study(name)
    assert study.title
    assert study.question
    assert len(re.findall(r"[.?](?: |$)", study.answer)) <= 5
    assert study.limits
    labels = set()
    for comparison in study.comparisons:
        similarities = ["dot"]
        if "--similarity" in comparison.arguments:
            similarities = value_of(comparison, "--similarity").split(",")
        positions = ["none"]
        if "--position" in comparison.arguments:
            positions = value_of(comparison, "--position").split(",")
        labels |= {f"{s}/{p}" for s in similarities for p in positions}
        labels |= {
            word
            for flag, word in zip(comparison.arguments, comparison.arguments[1:], strict=False)
            if flag == "--run"
        }
        assert not {"--out", "--data", "--resume"} & set(comparison.arguments)
    names = {c.name for c in study.comparisons}
    assert len(names) == len(study.comparisons)
    for claim in study.claims:
        assert claim.contrasts
        assert claim.left_is in studies.AGREEING
        for contrast in claim.contrasts:
            assert {contrast.left, contrast.right} <= labels, claim.text
            assert {contrast.left_in, contrast.right_in} <= names | {""}, claim.text


@pytest.mark.parametrize("name", studies.names())
def test_pages_are_those_of_the_records(name, tmp_path, monkeypatch):
    page = ROOT / "docs/studies" / f"{name}.md"
    monkeypatch.setattr(studies, "PAGES", tmp_path)
    monkeypatch.setattr(studies, "save", lambda figure, path: path.touch())  # drawing takes seconds
    studies.write_page(name, studies.load_study(name))
    assert (tmp_path / f"{name}.md").read_text() == page.read_text(), (
        f"python lab/studies/study.py --page {name} rewrites it"
    )
    for figure in tmp_path.glob("*.svg"):
        assert (page.parent / figure.name).is_file()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(studies, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(studies, "PAGES", tmp_path / "pages")
    (tmp_path / "data").mkdir()
    generator = random.Random(0)
    text = "".join(generator.choice("abcdef gh\n") for _ in range(20000))
    (tmp_path / "data/text.txt").write_text(text)
    return tmp_path


def tiny(seeds):
    arguments = ("--position", "none,rope", *TINY, "--seeds", str(seeds))
    return Study(
        title="A study",
        question="Which?",
        answer="RoPE.",
        comparisons=(
            Comparison("one", "One text", "text.txt", arguments),
            Comparison("two", "Another text", "none.txt", arguments),
        ),
        claims=(
            Claim("RoPE is better.", (Contrast("dot/rope", 16, "dot/none", 16),)),
            Claim("Longer is better.", (Contrast("dot/rope", 32, "dot/rope", 16, "last"),)),
        ),
        limits="Much.",
    )


def test_it_runs_is_recorded_goes_on_elsewhere_and_has_a_page(folders):
    study = tiny(seeds=3)
    comparison = study.comparisons[0]
    data = folders / "data"
    assert studies.run("tiny", comparison, data, threads=1) == 0
    path = studies.record_path("tiny", comparison)
    text = path.read_text()
    record = json.loads(text)
    assert record["status"] == "finished"
    assert len(record["runs"]) == 6
    # The record must not contain paths on this machine.
    assert str(folders) not in text
    assert record["data"]["path"] == "text.txt"
    assert record["sessions"][0]["command"] == studies.command(comparison)
    # Completed comparisons are not repeated.
    before = path.stat().st_mtime_ns
    assert studies.run("tiny", comparison, data, threads=1) == 0
    assert path.stat().st_mtime_ns == before

    # Continue on another machine, with a record that stopped after four runs.
    for file in sorted((folders / "runs").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    stopped = {**record, "runs": record["runs"][:4], "status": "interrupted"}
    path.write_text(studies.dump(stopped))
    assert studies.run("tiny", comparison, data, threads=1) == 0
    resumed = json.loads(path.read_text())
    assert [run["losses"] for run in resumed["runs"]] == [run["losses"] for run in record["runs"]]

    studies.write_page("tiny", study)
    page = (folders / "pages/tiny.md").read_text()
    assert "All 6 runs are complete" in page
    assert "These comparisons have not started: Another text" in page
    assert "Only these comparisons have results so far: One text." in page
    assert "(tiny-effects.svg)" in page
    assert (folders / "pages/tiny-effects.svg").is_file()
    assert "Claim: RoPE is better.\n\nVerdict: **" in page
    assert "| One text (loss on the last 32 bytes): `dot/rope` at 32 bytes vs. 16 bytes |" in page
    assert (folders / "pages/tiny-one.svg").read_text().startswith("<?xml")
    losses = {
        (run["combination"], run["seed"]): [at["loss"] for at in run["losses"]]
        for run in record["runs"]
    }
    differences = [losses[1, seed][0] - losses[0, seed][0] for seed in range(3)]
    assert f"| {sum(differences) / 3:+.3f} |" in page


def test_records_of_another_command_and_missing_data_are_errors(folders):
    comparison = tiny(seeds=1).comparisons[0]
    assert studies.run("tiny", comparison, folders / "data", threads=1) == 0
    for file in (folders / "runs/tiny/one").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="recorded with a different command"):
        studies.run("tiny", tiny(seeds=2).comparisons[0], folders / "data", threads=1)
    with pytest.raises(ValueError, match=r"there is no none\.txt in"):
        studies.run("tiny", tiny(seeds=1).comparisons[1], folders / "data", threads=1)
    with pytest.raises(ValueError, match="there is no study 'nothing'"):
        studies.load_study("nothing")


def test_a_classifier_is_trained_once_and_named_without_its_place(folders):
    numbers = np.random.default_rng(0)
    parts = {"train": 24, "valid": 12}
    arrays = {
        f"{part}.{name}": values
        for part, count in parts.items()
        for name, values in (
            ("images", numbers.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)),
            ("labels", np.arange(count) % 3),
        )
    }
    save_file(arrays, folders / "data/dots.safetensors")
    sizes = ("--dim", "16", "--depth", "1", "--heads", "2", "--mlp", "16", "--patch", "4",
             "--batch", "2", "--steps", "2")  # fmt: skip
    words = ("--task", "diffusion", "--position", "none,learned", "--evaluation-images", "4",
             "--classifier", studies.CLASSIFIER, "--frechet-images", "6", *sizes)  # fmt: skip
    comparison = Comparison(
        "one", "Dots", "dots.safetensors", words, classifier=("--position", "none", *sizes)
    )
    study = dataclasses.replace(tiny(seeds=1), comparisons=(comparison,), claims=())
    for _ in range(2):
        assert studies.run("tiny", comparison, folders / "data", threads=1) == 0
    path = studies.record_path("tiny", comparison)
    assert str(folders) not in path.read_text()
    record = json.loads(path.read_text())
    assert record["settings"]["classifier"] == studies.CLASSIFIER
    assert all(run["losses"][0]["frechet"] > 0 for run in record["runs"])
    studies.write_page("tiny", study)
    page = (folders / "pages/tiny.md").read_text()
    assert "$ gnomon train --task images --data dots.safetensors --position none " in page
    # The distance is measured only over all timesteps, so it adds one column.
    assert "Fréchet distance by range of timesteps:\n\n|  | 0-999 | seeds |\n" in page
    made = folders / "runs/tiny/one"
    head = (made / "table.md").read_text().splitlines()[0]
    assert head.endswith("loss at 750-999 | Frechet distance at 0-999 |")
    report = (made / "report.html").read_text()
    of_distance = report[report.index("<h3>Frechet distance by timesteps</h3>") :]
    assert of_distance.split("</thead>")[0].count("<th>") == 2

    # On another machine, only the record exists.
    shutil.rmtree(folders / "runs")
    stopped = {**record, "runs": record["runs"][:1], "status": "interrupted"}
    path.write_text(studies.dump(stopped))
    assert studies.run("tiny", comparison, folders / "data", threads=1) == 0
    resumed = json.loads(path.read_text())
    assert [run["losses"] for run in resumed["runs"]] == [run["losses"] for run in record["runs"]]


def results_of(pairs, *, higher_is_better=False):
    """A record of two combinations under one condition."""
    return {
        "settings": {"combinations": [{"label": "a"}, {"label": "b"}]},
        "task": {
            "metrics": [{"key": "m", "higher_is_better": higher_is_better}],
            "conditions": {"key": "split", "title": "split", "values": ["test"]},
        },
        "runs": [
            {"combination": c, "seed": seed, "losses": [{"m": pair[c]}]}
            for seed, pair in enumerate(pairs)
            for c in (0, 1)
        ],
    }


ONE_TEXT = Comparison("one", "One text", "text.txt", ())
CLEAR, NONE = [(1, 2), (1, 2.1), (1, 1.9)], [(1, 2), (2, 1), (1, 1.1)]
SAME = [(1, 1.0001), (1, 0.9999), (1, 1.0002)]


def described(claims, found, **margins):
    study = dataclasses.replace(tiny(seeds=3), claims=tuple(claims), margins=margins)
    rows = studies.tested_rows(study, found)
    return [studies.describe_claim(*pair) for pair in zip(claims, rows, strict=True)]


@pytest.mark.parametrize(
    ("pairs", "higher_is_better", "left_is", "expected"),
    [
        (CLEAR, False, "better", "holds"),
        (CLEAR, True, "better", "does not hold"),
        (CLEAR, False, "worse", "does not hold"),
        (CLEAR, True, "worse", "holds"),
        (CLEAR, False, "not worse", "holds"),
        (CLEAR, True, "not worse", "does not hold"),
        (NONE, False, "better", "undecided"),
        (NONE, False, "worse", "undecided"),
        (NONE, False, "not worse", "undecided"),
        (SAME, False, "better", "does not hold"),
        (SAME, False, "not worse", "holds"),
        (CLEAR[:2], False, "better", "too few seeds"),
        ([], False, "not worse", "not run yet"),
    ],
)
def test_a_verdict_knows_which_way_is_better(pairs, higher_is_better, left_is, expected):
    results = results_of(pairs, higher_is_better=higher_is_better)
    claim = Claim("A is so.", (Contrast("a", "test", "b", "test"),), left_is, why="Who knows.")
    [[claimed, said, *rest]] = described([claim], [(ONE_TEXT, results)], m=0.1)
    assert claimed == "Claim: A is so."
    assert said == f"Verdict: **{expected}**."
    assert ("Who knows." in rest) == (expected != "not run yet")


def test_verdicts_of_several_rows():
    better, worse, equal, same, few, missing = (
        *("better", "worse", "equivalent", "not distinguishable", "too few seeds", "not run yet"),
    )
    for outcomes, left_is, expected in [
        ([], "better", "not run yet"),
        ([missing, missing], "not worse", "not run yet"),
        ([missing, few], "better", "too few seeds"),
        ([better, worse], "better", "holds in 1 of 2 rows"),
        ([better, same], "better", "holds in 1 of 2 rows"),
        ([worse, same], "better", "contradicted in 1 of 2 rows"),
        ([worse, equal], "better", "does not hold"),
        ([same, same], "better", "undecided"),
        ([better, same], "not worse", "holds in 1 of 2 rows"),
        ([better, equal], "not worse", "holds"),
        ([worse, same], "not worse", "contradicted in 1 of 2 rows"),
        ([worse, worse], "not worse", "does not hold"),
        ([worse, same], "worse", "holds in 1 of 2 rows"),
        ([better, same], "worse", "contradicted in 1 of 2 rows"),
        # Contrasts that have not been run do not count.
        ([better, few, missing], "better", "holds"),
        ([same, missing], "better", "undecided"),
    ]:
        assert studies.verdict(outcomes, left_is) == expected, (outcomes, left_is)


def test_tests_of_a_page_are_corrected_together():
    """A single clear difference is significant, but not among fifty unclear ones."""
    pairs = [(1, 2.0), (1, 2.2), (1, 1.8)]
    clear = Claim("A is better.", (Contrast("a", "test", "b", "test"),))
    [[_, said, *_]] = described([clear], [(ONE_TEXT, results_of(pairs))], m=0.1)
    assert said == "Verdict: **holds**."
    others = [(Comparison(f"other{n}", f"Other {n}", "", ()), results_of(NONE)) for n in range(50)]
    [[_, said, *_]] = described([clear], [(ONE_TEXT, results_of(pairs)), *others], m=0.1)
    assert said == "Verdict: **undecided**."


def test_a_baseline_is_a_row_of_its_metric():
    results = results_of(CLEAR)
    results["summary"] = []
    results["task"]["metrics"][0]["is_compared"] = True
    metric = results["task"]["metrics"][0]
    table = studies.summary_table(results, metric, ("chance", "m", {"test": 0.5}), shows_cost=False)
    assert table.splitlines()[-1] == "| chance | 0.500 | – |"
    assert "chance" not in studies.summary_table(
        results, metric, ("chance", "n", {"test": 0.5}), shows_cost=False
    )


def test_a_predictor_that_repeats_is_as_good_as_it_is_said_to_be():
    sort = next(c for c in studies.load_study("generalisation").comparisons if c.name == "sort")
    title, metric, scores = sort.baseline
    assert (title, metric) == ("repeating the previous symbol", "accuracy")
    numbers = np.random.default_rng(0)
    for n, score in scores.items():
        rows = np.sort(numbers.integers(0, 100, (4000, n)), axis=1)
        repeated = (rows[:, 1:] == rows[:, :-1]).sum(axis=1) / n
        assert score == pytest.approx(repeated.mean(), abs=3 * repeated.std() / 4000**0.5)


def test_rows_name_other_metrics_and_claims_without_rows_are_reported():
    results = results_of(CLEAR)
    results["task"]["metrics"] = [
        {"key": key, "title": f"the {key}", "higher_is_better": False} for key in ("m", "n")
    ]
    for run in results["runs"]:
        run["losses"][0]["n"] = -run["losses"][0]["m"]
    found = [(Comparison("one", "One text", "text.txt", ()), results)]
    contrasts = [Contrast("a", "test", "b", "test", metric) for metric in (None, "m", "n")]
    claim = Claim("A is better.", tuple(contrasts))
    [[_, said, table]] = described([claim], found, m=0.1, n=0.1)
    assert said == "Verdict: **holds in 2 of 3 rows** (2 better, 1 worse)."
    assert table.count("| One text (test split): `a` vs. `b` |") == 2
    assert table.count("| One text (the n, test split): `a` vs. `b` |") == 1
    other = Claim("C is better.", (Contrast("c", "test", "b", "test"),), why="Who knows.")
    told = ["Claim: C is better.", "Verdict: **not run yet**."]
    assert described([other], found, m=0.1) == [told]
    assert described([other], []) == [told]


def test_a_contrast_may_be_of_two_comparisons():
    plain, other = (Comparison(name, name.title(), "", ()) for name in ("plain", "other"))
    found = [(plain, results_of([(1, 5), (2, 6.1), (3, 7)])), (other, results_of(CLEAR))]

    def rows(**of):
        contrasts = (Contrast("a", "test", "b", "test", **of),)
        return studies.contrast_rows(Claim("", contrasts), found, {"m": 0.1})

    # The right-hand model is b of "plain", with the values 5, 6.1 and 7, instead of b of "other".
    left = [run["losses"][0]["m"] for run in found[1][1]["runs"] if run["combination"] == 0]
    mean = sum(left) / len(left) - (5 + 6.1 + 7) / 3
    [row] = rows(left_in="other", right_in="plain")
    assert row.title == "Other (test split): `a` vs. `b` (plain)"
    assert row.mean == pytest.approx(mean)
    [row] = rows(left_in="plain", right_in="plain")
    assert row.title == "Plain (test split): `a` vs. `b`"
    assert [row.title.split()[0] for row in rows()] == ["Plain", "Other"]
    # Contrasts that have not started have no row.
    assert rows(left_in="plain", right_in="third") == rows(left_in="third") == []


def test_differences_are_of_the_seeds_that_both_have():
    results = results_of([(1, 3), (2, 5), (3, 4)])
    contrast = Contrast("a", "test", "b", "test")
    assert studies.differences_of(results, contrast) == [-2, -3, -1]
    del results["runs"][2]
    assert studies.differences_of(results, contrast) == [-2, -1]
    with pytest.raises(ValueError, match="no margin for 'm'"):
        studies.contrast_rows(Claim("", (contrast,)), [(ONE_TEXT, results)], {})
    with pytest.raises(ValueError, match="no combination is named 'c'"):
        studies.differences_of(results_of([]), Contrast("c", "test", "b", "test"))


@pytest.mark.parametrize("name", studies.names())
def test_the_command_lines_of_studies_are_valid(name, tmp_path):
    """Runs each command with missing data or, if it needs no data, an invalid position."""
    for comparison in studies.load_study(name).comparisons:
        words = list(comparison.arguments)
        if comparison.data:
            words = ["--data", tmp_path / "nothing", *words]
        else:
            words[words.index("--position") + 1] = "nothing"
        assert "nothing" in refused("compare", "--out", tmp_path / "run", *words, cwd=tmp_path)
        similarities, positions = (
            value_of(comparison, flag).split(",") if flag in comparison.arguments else [default]
            for flag, default in (("--similarity", "dot"), ("--position", "none"))
        )
        for similarity in similarities:
            qk_dim = 1 if similarity == "additive" else 4
            for position in positions:
                if "=grid" not in position:
                    TokenPosition(position, 16, 64)
                    acts = attention_position(position)
                    MultiheadAttention(16, 4, qk_dim=qk_dim, similarity=similarity, position=acts)
