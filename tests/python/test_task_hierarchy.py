"""The task hierarchy: data, splits, metrics compared with their definitions, and runs."""

from __future__ import annotations

import json
import math
import pathlib

import geoopt
import numpy as np
import pytest
import torch
from formulas import ball_exp, entailment
from safetensors.numpy import load_file, save_file
from test_cli import Interrupted, refused, succeed
from test_distributed_training import assert_same, run_one, run_two

pytestmark = pytest.mark.cpu("runs the program, which has --device")

WORDNET = pathlib.Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "wordnet"
FILE = "checkpoint.safetensors"
TRAIN = ["train", "--task", "hierarchy", "--data", "tree.safetensors"]
FEW = ["--negatives", 6, "--batch", 32]
# A binary tree of 31 nodes, and a second parent of node 30.
PARENTS = [(n, (n - 1) // 2) for n in range(1, 31)] + [(30, 13)]


def closure(parents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = set(parents)
    while True:
        more = {(c, a) for c, b in pairs for p, a in parents if p == b} - pairs
        if not more:
            return sorted(pairs)
        pairs |= more


ALL = closure(PARENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("hierarchy")
    save_file({"train.pairs": np.array(ALL, np.int32)}, path / "tree.safetensors")
    test = [pair for pair in ALL if pair not in PARENTS][::5]
    valid = [pair for pair in ALL if pair not in PARENTS][1::7]
    train = [pair for pair in ALL if pair not in {*test, *valid}]
    parts = {"train": train, "valid": [p for p in valid if p not in test], "test": test}
    save_file({f"{k}.pairs": np.array(v) for k, v in parts.items()}, path / "parts.safetensors")
    return path


def average_precision(right: list[float], wrong: list[float]) -> float:
    """The sum over all thresholds of precision times the increase in recall."""
    area, recall = 0.0, 0.0
    for level in sorted({*right, *wrong}, reverse=True):
        hits = sum(score >= level for score in right)
        alarms = sum(score >= level for score in wrong)
        area += hits / (hits + alarms) * (hits / len(right) - recall)
        recall = hits / len(right)
    return area


def ranks(scores: torch.Tensor, pairs: list[tuple[int, int]]) -> list[float]:
    """The rank of each pair's ancestor among the nodes that are not ancestors of its descendant."""
    result = []
    for child, parent in pairs:
        others = [n for n in range(31) if n != child and (child, n) not in ALL]
        own = scores[parent, child]
        before = sum((scores[n, child] > own).item() for n in others)
        equal = sum((scores[n, child] == own).item() for n in others)
        result.append(1 + before + equal / 2)
    return result


def scores_of(similarity: str, weights: dict[str, np.ndarray]) -> torch.Tensor:
    """One row per ancestor, one column per descendant."""
    points = torch.from_numpy(weights["model.points"]).double()
    if similarity == "dot":
        return points @ points.T / math.sqrt(points.shape[1])
    name = "beta" if similarity.startswith("hyperbolic") else "gamma"
    theta = weights[f"model.similarity.{name}_theta"].astype(float)
    factor = float(weights[f"model.similarity.{name}_start"]) * math.exp(5 * theta[0])
    if name == "beta":
        ball = geoopt.PoincareBall()
        x = ball.expmap0(points / 2)  # geoopt's metric at 0 is 4, not 1
        return -factor * ball.dist(x[:, None], x[None])
    x = ball_exp(points)[None, None]
    return -factor * entailment(x, x, 0.1)[0, 0]


@pytest.mark.parametrize("similarity", ["dot", "entailment", "hyperbolic:model=ball"])
def test_metrics_by_definition(folder, tmp_path, similarity):
    """Compares with geoopt's distance, and with the formula of entailment cones."""
    arguments = ["train", "--task", "hierarchy", "--data", "parts.safetensors", *FEW]
    succeed(*arguments, "--steps", 61, "--dim", 3, "--similarity", similarity, "--out",
            tmp_path / "run", cwd=folder)  # fmt: skip
    result = json.loads(succeed("eval", "--model", tmp_path / "run", "--json", cwd=folder))
    scores = scores_of(similarity, load_file(tmp_path / "run" / FILE))
    parts = load_file(folder / "parts.safetensors")
    known = {tuple(pair) for array in parts.values() for pair in array.tolist()}
    assert known == set(ALL)
    assert [at["split"] for at in result["losses"]] == ["test", "valid"]
    for at in result["losses"]:
        pairs = [tuple(pair) for pair in parts[f"{at['split']}.pairs"].tolist()]
        assert at["pairs"] == len(pairs)
        expected = ranks(scores, pairs)
        assert at["mrr"] == pytest.approx(np.mean([1 / rank for rank in expected]), abs=1e-6)
        assert at["hits"] == pytest.approx(np.mean([rank <= 10 for rank in expected]))
        # Five wrong ancestors and five wrong descendants per pair, as the task draws them.
        drawn = torch.randint(
            0, 31, (2, len(pairs), 5), generator=torch.Generator().manual_seed(20171207)
        )
        wrong = [(c, n) for (c, _), row in zip(pairs, drawn[0].tolist(), strict=True) for n in row]
        wrong += [(n, a) for (_, a), row in zip(pairs, drawn[1].tolist(), strict=True) for n in row]
        # A distance equals that of the reversed pair, which may be among the wrong pairs. Their
        # order then depends on rounding.
        least, most = (
            average_precision(
                [scores[a, c].item() + shift for c, a in pairs],
                [scores[a, c].item() for c, a in wrong if c != a and (c, a) not in known],
            )
            for shift in (-1e-5, 1e-5)
        )
        assert most - least < 0.01
        assert least - 1e-6 <= at["average_precision"] <= most + 1e-6


def test_held_out_pairs_follow_from_the_others(folder, tmp_path):
    told = {}
    for seed in (0, 0, 1):
        succeed(*TRAIN, *FEW, "--steps", 1, "--held-out", 0.2, "--split-seed", seed, "--out",
                tmp_path / f"run{len(told)}", cwd=folder)  # fmt: skip
        words = ["eval", "--model", tmp_path / f"run{len(told)}", "--json", "--splits",
                 "test,valid,train"]  # fmt: skip
        result = json.loads(succeed(*words, cwd=folder))
        told[len(told)] = [at["mrr"] for at in result["losses"]]
        implied = len(ALL) - len(PARENTS)
        held_out = int(0.2 * implied)
        assert [at["pairs"] for at in result["losses"]] == [
            held_out,
            held_out,
            len(ALL) - 2 * held_out,
        ]
    assert told[0] == told[1]
    assert told[0] != told[2]
    parents = {"train.pairs": np.array(PARENTS)}
    save_file(parents, tmp_path / "tree.safetensors")
    line = refused(*TRAIN, "--out", "none", cwd=tmp_path)
    assert "too few pairs are implied by others" in line


def test_cones_learn_a_tree_in_two_dimensions(folder, tmp_path):
    succeed(*TRAIN, "--steps", 500, "--negatives", 20, "--batch", 64, "--dim", 2, "--similarity",
            "entailment", "--held-out", 0.1, "--out", tmp_path / "run", cwd=folder)  # fmt: skip
    words = ["eval", "--model", tmp_path / "run", "--json", "--splits", "train"]
    (at,) = json.loads(succeed(*words, cwd=folder))["losses"]
    assert at["mrr"] > 0.6
    assert at["hits"] > 0.75
    assert at["average_precision"] > 0.65


@pytest.mark.parametrize("corrupt", ["ancestor", "descendant", "both"])
def test_the_loss_by_definition(tmp_path, corrupt):
    """For one pair among three nodes, the wrong nodes do not depend on random draws."""
    names = {"train.pairs_names": np.frombuffer(b"abc", np.uint8),
             "train.pairs_names_lengths": np.ones(3, np.int64)}  # fmt: skip
    save_file({"train.pairs": np.array([[0, 1]])} | names, tmp_path / "tree.safetensors")
    words = ["--steps", 1, "--batch", 1, "--negatives", 4000, "--corrupt", corrupt, "--clip", 1e9]
    words += ["--splits", "train"]
    succeed(*TRAIN, *words, "--dim", 2, "--out", "run", cwd=tmp_path)
    tensors = load_file(tmp_path / "run" / FILE)
    gradient = torch.from_numpy(tensors["optimizer.exp_avg.points"]) / 0.1
    after = torch.from_numpy(tensors["model.points"])
    points = (after + 0.05 * gradient / (gradient.abs() + 1e-8)).requires_grad_()
    scores = points @ points.T / math.sqrt(2)
    # About 4000 / 3 of the draws are the only wrong node; the other draws are excluded.
    share = torch.tensor(4000 / 3)
    ancestor = torch.logaddexp(scores[1, 0], scores[2, 0] + share.log()) - scores[1, 0]
    descendant = torch.logaddexp(scores[1, 0], scores[1, 2] + share.log()) - scores[1, 0]
    loss = {
        "ancestor": ancestor,
        "descendant": descendant,
        "both": (ancestor + descendant) / 2,
    }[corrupt]
    loss.backward()
    torch.testing.assert_close(points.grad, gradient, atol=2e-3, rtol=2e-2)


@pytest.mark.long
def test_interrupted_training_resumes_to_the_same_weights(folder, tmp_path):
    arguments = [*TRAIN, *FEW, "--steps", 500, "--similarity", "umbral"]
    with Interrupted(arguments, folder, tmp_path, every=20):
        pass


@pytest.mark.long
def test_two_processes_match_one(folder):
    arguments = [*TRAIN, "--steps", 5, "--similarity", "penumbral", "--batch", 7]
    run_one([*arguments, "--out", "one"], folder)
    run_two([*arguments, "--out", "two"], folder)
    assert_same(folder / "two", folder / "one")


def test_compare_of_every_similarity(folder, tmp_path):
    names = [e["name"] for e in json.loads(succeed("list", "--json", cwd=folder))["similarities"]]
    # `additive` needs one column, but the nodes of this comparison have five.
    names.remove("additive")
    flags = ["--similarity", ",".join(names), *FEW, "--steps", 2]
    table = succeed("compare", *TRAIN[1:], *flags, "--out", tmp_path / "run", cwd=folder)
    assert "| MRR at test | MRR at valid | hits@10 at test |" in table
    assert "| AP at test |" in table
    assert "in 5 dimensions, trained for 2 steps of 32 pairs against 6 negative samples" in table
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(record["runs"]) == len(names)
    assert all(0 < run["losses"][0]["mrr"] <= 1 for run in record["runs"])
    words = ["--similarity", "additive", "--dim", 1, "--steps", 2, *FEW]
    succeed(*TRAIN, *words, "--out", tmp_path / "additive", cwd=folder)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"train.pairs": None}, "the array 'train.pairs' is missing"),
        ({"train.pairs": [[0, 1, 2]]}, "'train.pairs' has shape [1, 3]; expected (pairs, 2)"),
        (
            {"train.pairs": [[1, 0], [2, 2]]},
            "'train.pairs' contains a pair of a node with itself at [1]",
        ),
        ({"train.pairs": [[1, 0], [0, 1]]}, "nodes 0 and 1 are ancestors of each other"),
        ({"valid.pairs": [[1, 31]]}, "'valid.pairs' contains 31 at [0, 1]; expected 0 to 30"),
        ({"test.pairs": [[30, 0]]}, "'valid.pairs' is missing"),
        ({"valid.pairs": [[30, 0]]}, "no test pairs, which --splits test,valid needs: the array"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_data_are_one_line(tmp_path, change, part):
    data = {"train.pairs": np.array(ALL), "other.array": np.zeros(1)}
    for name, value in change.items():
        data.pop(name, None)
        if value is not None:
            data[name] = np.array(value)
    save_file(data, tmp_path / "tree.safetensors")
    line = refused(*TRAIN, "--out", "run", cwd=tmp_path)
    assert "tree.safetensors: " in line
    assert part in line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--position", "rope"], "position 'rope': the nodes of a hierarchy have no order"),
        (["--similarity", "additive"], "additive"),
        (["--splits", "test,test"], "--splits: test is given twice"),
        (["--corrupt", "none"], "--corrupt is 'none'; expected one of ancestor, descendant, both"),
        (["--held-out", "0.6"], "--held-out is 0.6"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_words_are_one_line(folder, words, part):
    assert part in refused(*TRAIN, "--out", "none", *words, cwd=folder)


def test_names_of_nodes(tmp_path):
    """Pairs from a table; each split identifies nodes by name."""
    lines = {
        "train": ["dog,animal,1", "cat,animal,1", "poodle,dog,1", "poodle,animal,1"],
        "valid": ["poodle,animal,1"],
        "test": ["cat,animal,1"],
    }
    for part, rows in lines.items():
        (tmp_path / f"{part}.csv").write_text("\n".join(["below,above,weight", *rows]) + "\n")
    sources = [f"{part}.pairs={part}.csv:below,above" for part in lines]
    printed = succeed("data", "tree.safetensors", *sources, cwd=tmp_path)
    assert "train.pairs: int64, 4 x 2" in printed
    arrays = load_file(tmp_path / "tree.safetensors")
    assert arrays["train.pairs_names"].tobytes() == b"animalcatdogpoodle"
    assert arrays["train.pairs"].tolist() == [[2, 0], [1, 0], [3, 2], [3, 0]]
    succeed(*TRAIN, "--steps", 1, "--out", "run", cwd=tmp_path)
    result = json.loads(succeed("eval", "--model", "run", "--json", cwd=tmp_path))
    assert result["data"]["nodes"] == 4
    # Of three nodes, one is not an ancestor of poodles, and two are not ancestors of cats.
    assert [at["pairs"] for at in result["losses"]] == [1, 1]
    (tmp_path / "valid.csv").write_text("below,above\nhorse,animal\n")
    succeed("data", "tree.safetensors", *sources, cwd=tmp_path)
    line = refused(*TRAIN, "--out", "none", cwd=tmp_path)
    assert "'valid.pairs_names' contains 'horse', which is not a node of the training pairs" in line


@pytest.mark.skipif(not WORDNET.exists(), reason="needs ../shared/data/wordnet")
def test_mammals(tmp_path):
    source = f"train.pairs={WORDNET / 'mammal_closure.csv'}:id1,id2"
    succeed("data", "mammals.safetensors", source, cwd=tmp_path)
    succeed("train", "--task", "hierarchy", "--data", "mammals.safetensors", "--steps", 2, "--out",
            "run", cwd=tmp_path)  # fmt: skip
    result = json.loads(succeed("eval", "--model", "run", "--json", cwd=tmp_path))
    told = result["data"]
    assert (told["nodes"], told["train_pairs"]) == (1180, 6540 - 2 * 268)
    assert [at["pairs"] for at in result["losses"]] == [268, 268]
