"""What the report of a comparison says of its numbers."""

import math

import pytest

from gnomon import report

# Two-sided 5% points of Student's t, by the number of pairs (any table has them).
POINTS = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 11: 2.228}


def with_t(t, n):
    """n differences whose mean is t of its own standard errors."""
    signs = [(-1.0) ** i for i in range(n)]
    mean = sum(signs) / n
    spread = math.sqrt(sum((s - mean) ** 2 for s in signs) / (n - 1))
    return [(s - mean) / spread + t / math.sqrt(n) for s in signs]


@pytest.mark.parametrize("n", POINTS)
def test_p_value(n):
    assert report.p_value(with_t(POINTS[n], n)) == pytest.approx(0.05, abs=1e-4)
    assert report.p_value(with_t(-POINTS[n], n)) == pytest.approx(0.05, abs=1e-4)
    assert report.p_value(with_t(0, n)) == pytest.approx(1)


def test_p_value_at_the_edges():
    assert report.p_value([]) == 1
    assert report.p_value([1.0]) == 1
    assert report.p_value([0.0, 0.0]) == 1
    assert report.p_value([0.5, 0.5, 0.5]) == 0
    assert 0 <= report.p_value([1.0, 1.0 + 1e-15, 1.0]) < 1e-6


def results_of(losses, combinations=None):
    """losses[c][s]: of combination c with seed s, at one length."""
    rows = [
        {"combination": c, "seed": s, "losses": [{"loss": loss, "last": None}]}
        for c, seeds in enumerate(losses)
        for s, loss in enumerate(seeds)
    ]
    return {"runs": rows, "settings": {"combinations": combinations or []}}


def test_the_best_is_marked_where_seeds_can_tell():
    # Seeds differ by more than combinations do, but the pairs agree.
    assert report.best(results_of([[3.0, 2.0, 1.0], [2.9, 1.9, 0.9]]), "loss", 0) == 1
    # The means differ as much, the pairs do not agree.
    assert report.best(results_of([[3.0, 2.0, 1.0], [2.6, 2.2, 0.9]]), "loss", 0) is None
    # One that cannot be told from the best is enough.
    losses = [[3.0, 2.0, 1.0], [2.9, 1.9, 0.9], [2.91, 1.88, 0.92]]
    assert report.best(results_of(losses), "loss", 0) is None
    # One or two seeds tell nothing, and neither does one combination.
    assert report.best(results_of([[3.0], [2.0]]), "loss", 0) is None
    assert report.best(results_of([[3.0, 2.0], [2.0, 1.0]]), "loss", 0) is None
    assert report.best(results_of([[3.0, 2.0, 1.0]]), "loss", 0) is None
    assert report.best(results_of([[3.0, 2.0, 1.0], [2.0, 1.0, 0.0]]), "last", 0) is None


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
    assert report.labels(results_of([], [rope, cone])) == [
        "dot product · RoPE",
        "umbral cones · RoPE",
    ]
    # What titles do not tell apart has its specification.
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


def test_a_busy_machine_is_told():
    def run(others):
        return {"others": others}

    assert report.busy({"runs": [run(0.01), run(None), {}]}) == ""
    text = report.busy({"runs": [run(0.01), run(0.43), run(0.2)]})
    assert "in 2 of 3 runs" in text
    assert "up to 43%" in text
