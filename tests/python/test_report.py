"""The statistics and the report of a comparison."""

import itertools
import math
import random
import re
from typing import Any

import numpy as np
import pytest
import scipy.stats

from gnomon.lab import _plots, report

pytestmark = pytest.mark.cpu("runs the program, which has --device")

# Two-sided 5% critical values of Student's t by number of pairs, from a published table.
POINTS = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 11: 2.228}


def with_t(t, n):
    """n differences whose mean is t times its standard error."""
    signs = [(-1.0) ** i for i in range(n)]
    mean = sum(signs) / n
    spread = math.sqrt(sum((s - mean) ** 2 for s in signs) / (n - 1))
    return [(s - mean) / spread + t / math.sqrt(n) for s in signs]


@pytest.mark.parametrize("n", POINTS)
def test_p_value(n):
    assert report.p_value(with_t(POINTS[n], n)) == pytest.approx(0.05, abs=1e-4)
    assert report.p_value(with_t(-POINTS[n], n)) == pytest.approx(0.05, abs=1e-4)
    assert report.p_value(with_t(0, n)) == pytest.approx(1)


def test_tests_and_intervals_are_those_of_scipy():
    generator = random.Random(0)
    for _ in range(50):
        n, margin = generator.choice([2, 3, 5, 20]), generator.choice([0.1, 1.0, 4.0])
        differences = [generator.gauss(generator.choice([0, 0.5, 3]), 1) for _ in range(n)]
        two_sided = scipy.stats.ttest_1samp(differences, 0)
        assert report.p_value(differences) == pytest.approx(two_sided.pvalue, rel=1e-6)
        low, high = two_sided.confidence_interval(0.95)
        assert report.confidence_interval(differences) == pytest.approx((high - low) / 2, rel=1e-6)
        below = scipy.stats.ttest_1samp(differences, margin, alternative="less").pvalue
        above = scipy.stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
        ours = report.equivalence_p_value(differences, margin)
        assert ours == pytest.approx(max(below, above), rel=1e-6)
    assert report.equivalence_p_value([0.0], 1.0) == 1


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected if Bonferroni rejects every set of hypotheses that contains it."""
    generator = random.Random(0)
    for _ in range(20):
        n = generator.randint(1, 6)
        p = [generator.choice([0.001, 0.01, generator.random()]) for _ in range(n)]
        sets = [s for k in range(n) for s in itertools.combinations(range(n), k + 1)]
        expected = [
            max(min(1.0, len(s) * min(p[i] for i in s)) for s in sets if index in s)
            for index in range(n)
        ]
        assert report.holm(p) == pytest.approx(expected)
    assert report.holm([]) == []


def test_false_verdicts_are_rare_over_all_tests_together():
    """Of 400 pages with ten true null hypotheses each, about 5% contain a false verdict."""
    generator = random.Random(0)
    wrong = 0
    for _ in range(400):
        pages = [[generator.gauss(0, 1) for _ in range(5)] for _ in range(10)]
        found = report.verdicts(pages, [0.0] * 10, [True] * 10)
        wrong += any(verdict in {"better", "worse"} for verdict, _ in found)
    assert wrong <= 0.05 * 400 + 3 * (400 * 0.05 * 0.95) ** 0.5


def compared(values: np.ndarray, seed_range: list[int], margin: float) -> dict[str, Any]:
    """A record of combinations (rows) with seeds (columns); NaN marks a missing run."""
    runs = [
        {"combination": c, "seed": seed, "losses": [{"length": 1, "loss": float(value)}]}
        for c, row in enumerate(values)
        for seed, value in enumerate(row)
        if not np.isnan(value)
    ]
    metric = {"key": "loss", "title": "loss", "higher_is_better": False, "is_compared": True}
    return {
        "runs": runs,
        "task": {"metrics": [metric], "conditions": {"key": "length", "values": [1]}},
        "summary": [{"losses": [{"loss": {"mean": 0.0}}]}],
        "settings": {"seed_range": seed_range, "margin": margin},
    }


@pytest.mark.parametrize("effects", [[0, 0, 0], [0, 0, 1], [0, 0.4, 2]])
def test_false_verdicts_are_rare_although_seeds_are_added_until_there_is_one(effects):
    draw = np.random.default_rng(3)
    fewest, most, margin, comparisons = 3, 8, 0.5, 700
    false, used = 0, []
    for _ in range(comparisons):
        every = np.array(effects)[:, None] + draw.normal(0, 0.3, (len(effects), most))
        every += draw.normal(0, 5, most)  # variance that pairing removes
        values = np.full_like(every, np.nan)
        values[:, :fewest] = every[:, :fewest]
        for seed in range(fewest, most):
            waiting = report.undecided(compared(values, [fewest, most], margin))
            if not waiting:
                break
            values[waiting, seed] = every[waiting, seed]
        used.append(np.count_nonzero(~np.isnan(values)))
        for pair in report.pairs(compared(values, [fewest, most], margin), 0):
            effect = effects[pair.left] - effects[pair.right]
            wrong = {
                "better": effect >= 0,
                "worse": effect <= 0,
                "equivalent": abs(effect) >= margin,
            }
            if wrong.get(pair.verdict, False):
                false += 1
                break
    # The limit is 0.05 plus three standard errors of the fraction of false verdicts.
    assert false / comparisons <= 0.05 + 3 * (0.05 * 0.95 / comparisons) ** 0.5
    # Some comparisons end early, and some need all seeds.
    assert min(used) < len(effects) * most
    assert max(used) > len(effects) * fewest


def test_seeds_are_added_only_for_undecided_pairs():
    draw = np.random.default_rng(0)
    near, far = draw.normal(0, 1, (2, 5)), draw.normal(0, 1e-3, 5) + 100
    values = np.stack([near[0], near[1], far])
    # The distant combination differs from the other two, which are not distinguishable.
    assert report.undecided(compared(values, [5, 9], 0.01)) == [0, 1]
    # A combination without results has no pair.
    values[1] = np.nan
    assert report.undecided(compared(values, [5, 9], 0.01)) == []


def test_p_value_at_the_edges():
    assert report.p_value([]) == 1
    assert report.p_value([1.0]) == 1
    assert report.p_value([0.0, 0.0]) == 1
    assert report.p_value([0.5, 0.5, 0.5]) == 0
    assert 0 <= report.p_value([1.0, 1.0 + 1e-15, 1.0]) < 1e-6


def results_of(losses, combinations=None):
    """A record with losses[c][s] of combination c and seed s, at one length."""
    rows = [
        {"combination": c, "seed": s, "losses": [{"loss": loss, "last": None}]}
        for c, seeds in enumerate(losses)
        for s, loss in enumerate(seeds)
    ]
    return {"runs": rows, "settings": {"combinations": combinations or []}}


def test_the_best_is_marked_where_seeds_can_tell():
    # Seeds differ more than combinations do, but the pairs agree.
    assert report.best(results_of([[3.0, 2.0, 1.0], [2.9, 1.9, 0.9]]), "loss", 0) == 1
    # The means differ by the same amount, but the pairs do not agree.
    assert report.best(results_of([[3.0, 2.0, 1.0], [2.6, 2.2, 0.9]]), "loss", 0) is None
    # If another combination is not distinguishable from the best, none is marked.
    losses = [[3.0, 2.0, 1.0], [2.9, 1.9, 0.9], [2.91, 1.88, 0.92]]
    assert report.best(results_of(losses), "loss", 0) is None
    # One or two seeds, or a single combination, are not enough for a test.
    assert report.best(results_of([[3.0], [2.0]]), "loss", 0) is None
    assert report.best(results_of([[3.0, 2.0], [2.0, 1.0]]), "loss", 0) is None
    assert report.best(results_of([[3.0, 2.0, 1.0]]), "loss", 0) is None
    assert report.best(results_of([[3.0, 2.0, 1.0], [2.0, 1.0, 0.0]]), "last", 0) is None


def record(task, count=2, **fields):
    """Up to three combinations with three seeds, each better than the previous one."""
    key, values = task["conditions"]["key"], task["conditions"]["values"]
    runs = [
        {
            "combination": c,
            "seed": s,
            "ms_per_step": 5.0,
            "curve": {"step": [1, 2], "loss": [2.0, 1.5]},
            "losses": [
                {key: value, "accuracy": 0.5 + 0.1 * c + 0.01 * s, "loss": 1 - 0.1 * c - 0.01 * s}
                for value in values
            ],
        }
        for c in range(count)
        for s in range(3)
    ]
    summary = [
        {
            "combination": c,
            "label": f"dot/{c}",
            "diverged": 0,
            "parameters": 1234,
            "ms_per_step": {"mean": 5.0, "spread": 0.1},
            "losses": [
                {
                    key: value,
                    "accuracy": {"mean": 0.5 + 0.1 * c, "spread": 0.01},
                    "loss": {"mean": 1 - 0.1 * c, "spread": 0.01},
                }
                for value in values
            ],
        }
        for c in range(count)
    ]
    machine = {"cpu": "c", "cores": 1, "threads": 1, "instruction_set": "i", "system": "s"}
    return {
        "task": task,
        "runs": runs,
        "summary": summary,
        "data": {"images": 60000},
        "sessions": [{"machine": machine, "command": ["gnomon"], "started": "now"}],
        "versions": {"gnomon": "1"},
        "settings": {
            "combinations": [
                combination("dot", "rope", "dot product", "RoPE"),
                combination("dot", "none", "dot product", "no position"),
                combination("dot", "alibi", "dot product", "ALiBi"),
            ][:count],
            "seeds": [0, 1, 2],
            "model": {"dim": 8, "kv_heads": None, "adaptive": [], "patch": 4},
            "training": {"steps": 3, "learning_rate": 0.002, "novel_option": 7},
            "sizes": [28, 36],
            "evaluation_examples": None,
            "problem": {"problem": "copy", "symbols": 2},
        },
    } | fields


@pytest.mark.parametrize("values", [["test"], [28, 36]])
def test_any_task_is_reported(values):
    task = {
        "name": "images",
        "loss_unit": "nats per image",
        "metrics": [
            {"key": "accuracy", "title": "accuracy", "higher_is_better": True, "is_compared": True},
            {"key": "loss", "title": "loss, nats", "higher_is_better": False, "is_compared": True},
        ],
        "conditions": {"key": "size", "title": "size, pixels", "values": values, "trained": 0},
        "examples": "images",
    }
    results = record(task)
    # The second combination is the best by both metrics. Higher is better for one metric, and lower
    # for the other.
    assert report.best(results, "accuracy", 0, higher_is_better=True) == 1
    assert report.best(results, "loss", 0) == 1
    assert report.best(results, "accuracy", 0) == 0
    page = report.render(results)
    # The first plot shows the verdicts.
    assert page.count("<svg") == 4
    assert page.index("<h2>Verdicts</h2>") < page.index("<svg")
    for part in (
        "1 of 1 pairs differ",
        "Accuracy by size (pixels)",
        "Loss (nats) by size (pixels)",
        f"trained at size {values[0]} on the same data",
        "patch 4",
        "images 60,000",
        "dim 8, patch 4",
        "sizes 28 36, problem copy, symbols 2<",
        # The report also lists options that it does not know.
        "learning rate 0.002, novel option 7",
    ):
        assert part in page, part
    assert page.count('<td class="best">') == 2 * len(values)
    hidden = task | {"metrics": [task["metrics"][0], task["metrics"][1] | {"is_compared": False}]}
    assert "Loss, nats, by" not in report.render(record(hidden))


def conditions_of(values, trained=0):
    return {
        "name": "images",
        "loss_unit": "nats per image",
        "metrics": [
            {"key": "loss", "title": "loss", "higher_is_better": False, "is_compared": True}
        ],
        "conditions": {"key": "size", "title": "size", "values": values, "trained": trained},
        "examples": "images",
    }


def test_every_pair_has_its_mean_difference():
    page = report.render(record(conditions_of([28]), count=3))
    table = page[page.index("Every pair at size 28") :]
    cells = re.findall(r"<br>([+-][0-9.]+)", table[: table.index("</table>")])
    # Rows are compared with columns; the losses differ by 0.1 per combination.
    assert cells == ["+0.100", "+0.200", "-0.100", "+0.100", "-0.200", "-0.100"]


@pytest.mark.parametrize("values", [["0-999", "0-499", "500-999"], [28, 44, "28x32"], [28]])
def test_conditions_without_a_scale_are_drawn_as_points(values):
    axes = report.draw_conditions(record(conditions_of(values))).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(map(str, values))
    both = [container.lines for container in axes.containers]
    assert all(points.get_linestyle() == "None" for points, _, _ in both)
    places = [points.get_xdata() for points, _, _ in both]
    assert len({x for xs in places for x in xs}) == 2 * len(values)
    assert all(round(x) == n for xs in places for n, x in enumerate(xs))
    # The bars show the spread over seeds at each length.
    for points, _, (bars,) in both:
        for y, bar in zip(points.get_ydata(), bars.get_segments(), strict=True):
            assert list(bar[:, 1]) == pytest.approx([y - 0.01, y + 0.01])


def test_numbers_are_joined_in_their_order():
    axes = report.draw_conditions(record(conditions_of([44, 28, 36]))).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in lines] == [[28, 36, 44]] * 2
    assert all(line.get_linestyle() != "None" for line in lines)
    # A line with a single point shows its spread as an error bar.
    results = record(conditions_of([28, 36]))
    results["summary"][1]["losses"][1]["loss"] = {"mean": None, "spread": None}
    axes = report.draw_conditions(results).axes[0]
    assert len(axes.containers) == 1


def test_no_two_series_look_alike():
    points = {(_plots.colour(n), _plots.marker(n)) for n in range(64)}
    assert len(points) == 64
    lines = {
        (style["color"], str(style["linestyle"])) for style in map(_plots.line_style, range(32))
    }
    assert len(lines) == 32


def test_records_from_before_there_were_tasks():
    settings = {"tokens": "words", "lengths": [16, 32]}
    task = report.text_task({"settings": settings})
    assert [metric["key"] for metric in task["metrics"]] == ["loss", "last", "bits_per_byte"]
    assert all(metric["is_compared"] for metric in task["metrics"])
    assert task["conditions"]["values"] == [16, 32]
    assert task["loss_unit"] == "nats per word"
    task = report.text_task({"settings": settings | {"tokens": "bytes"}})
    assert [metric["is_compared"] for metric in task["metrics"]] == [True, True, False]


def combination(similarity, position, similarity_title, position_title):
    return {
        "similarity": similarity,
        "position": position,
        "similarity_title": similarity_title,
        "position_title": position_title,
    }


def test_labels():
    rope = combination("dot", "rope", "dot product", "RoPE")
    hype = combination("dot", "hype:mu=learned", "dot product", "learned HyPE")
    other = combination("dot", "hype:tau=learned", "dot product", "learned HyPE")
    cone = combination("umbral", "rope", "umbral cones", "RoPE")
    assert report.labels(results_of([], [rope, hype])) == ["RoPE", "learned HyPE"]
    assert report.labels(results_of([], [rope, cone])) == ["dot product", "umbral cones"]
    assert report.labels(results_of([], [rope, hype, cone])) == [
        "dot product · RoPE",
        "dot product · learned HyPE",
        "umbral cones · RoPE",
    ]
    assert report.labels(results_of([], [rope])) == ["RoPE"]
    assert report.in_common(results_of([], [rope, cone])) == " The position of all runs is RoPE."
    assert report.in_common(results_of([], [rope, hype])) == (
        " The similarity of all runs is dot product."
    )
    assert report.in_common(results_of([], [rope, hype, cone])) == ""
    # For ambiguous titles, labels include the specification.
    assert report.labels(results_of([], [hype, other])) == ["hype:mu=learned", "hype:tau=learned"]
    old = {"similarity": "dot", "position": "rope"}
    assert report.labels(results_of([], [old, old | {"position": "t5"}])) == ["rope", "t5"]


def test_smoothing_ends_where_the_window_does():
    steps = list(range(10, 210, 10))
    line = [float(step) for step in steps]
    middle, means = report.smooth(steps, line)
    assert means == [float(step) for step in middle]
    assert middle == steps[2:-2]
    assert report.smooth(steps[:9], line[:9]) == (steps[:9], line[:9])


def test_a_busy_machine_is_reported():
    def run(others):
        return {"others": others}

    assert report.busy({"runs": [run(0.01), run(None), {}]}) == ""
    text = report.busy({"runs": [run(0.01), run(0.43), run(0.2)]})
    assert "in 2 of 3 runs" in text
    assert "up to 43%" in text
