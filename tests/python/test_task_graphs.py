"""The task graphs: data, the network compared with torch_geometric's, metrics and runs."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_cli import Interrupted, config_of, refused, step_of, succeed
from test_distributed_training import assert_same, run_one, run_two
from torch.nn.functional import cross_entropy, elu

pytestmark = pytest.mark.cpu("runs the program, which has --device")

CORA = pathlib.Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "cora"
FILE = "checkpoint.safetensors"
NODES, WORDS, CLASSES = 30, 12, 3
TRAIN = ["train", "--task", "graphs", "--data", "graph.safetensors"]


def sample() -> dict[str, np.ndarray]:
    """Words and neighbours determine the class. Node 4 has no words; node 29 has no label or
    edge."""
    random = np.random.default_rng(0)
    labels = np.arange(NODES) % CLASSES
    edges = [
        (i, j)
        for i in range(NODES - 1)
        for j in range(i, NODES - 1)
        if random.random() < (0.3 if labels[i] == labels[j] else 0.05)
    ]
    words = [
        np.sort(random.choice(WORDS // CLASSES, 2, replace=False)) * CLASSES + label
        for label in labels
    ]
    words[3] = np.array([WORDS - 1, 0, 5, 0])
    words[4] = np.zeros(0, np.int64)
    labels[NODES - 1] = -1
    return {
        "graph.edges": np.array([*edges, edges[0], edges[1][::-1]], np.int32),
        "graph.words": np.concatenate(words),
        "graph.words_lengths": np.array([len(row) for row in words]),
        "graph.labels": labels.astype(np.int8),
        "train.nodes": np.arange(0, 9),
        "valid.nodes": np.arange(9, 17),
        "test.nodes": np.arange(17, 29),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("graphs")
    save_file(sample(), path / "graph.safetensors")
    return path


def weights_of(file: pathlib.Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): torch.from_numpy(tensor)
        for name, tensor in load_file(file).items()
        if name.startswith(prefix)
    }


def features_of(data: dict[str, np.ndarray]) -> torch.Tensor:
    x = torch.zeros(len(data["graph.labels"]), WORDS)
    at = 0
    for node, count in enumerate(data["graph.words_lengths"]):
        for word in data["graph.words"][at : at + count]:
            x[node, word] += 1 / count
        at += count
    return x


def edges_of(data: dict[str, np.ndarray], directed: bool = False) -> torch.Tensor:
    """The edges for torch_geometric: each edge once, without self-loops, which it adds itself."""
    pairs = {(int(i), int(j)) for i, j in data["graph.edges"]}
    if not directed:
        pairs |= {(j, i) for i, j in pairs}
    return torch.tensor(sorted((i, j) for i, j in pairs if i != j)).t()


def published(weights: dict[str, torch.Tensor], data, directed: bool = False) -> torch.Tensor:
    """Logits of torch_geometric's layers with these weights."""
    from torch_geometric.nn import GATConv  # slow to import

    x, edges = features_of(data), edges_of(data, directed)
    depth = sum(name.endswith(".bias") for name in weights)
    for n in range(depth):
        of = {name.split(".")[2]: w for name, w in weights.items() if f"layers.{n}." in name}
        inputs, heads, columns = of["weight"].shape
        layer = GATConv(inputs, columns, heads, concat=n + 1 < depth)
        bias = of["bias"].flatten() if n + 1 < depth else of["bias"].mean(0)
        replaced = {
            "lin.weight": of["weight"].flatten(1).t(),
            "att_dst": of["query_weight"].mT,
            "att_src": of["key_weight"].mT,
            "bias": bias,
        }
        assert {name: p.numel() for name, p in layer.named_parameters()} == {
            name: w.numel() for name, w in replaced.items()
        }
        replaced["att_dst"] = replaced["att_dst"].reshape(1, heads, columns)
        replaced["att_src"] = replaced["att_src"].reshape(1, heads, columns)
        x = torch.func.functional_call(layer, replaced, (x, edges))
        if n + 1 < depth:
            x = elu(x)
    return x


def dot_network(weights: dict[str, torch.Tensor], data) -> torch.Tensor:
    """Logits with the dot product, by dense attention."""
    x = features_of(data)
    i, j = edges_of(data)
    sees = torch.eye(NODES, dtype=torch.bool)
    sees[j, i] = True
    for n in range(2):
        of = {name.split(".")[2]: w for name, w in weights.items() if f"layers.{n}." in name}
        h = torch.einsum("ni,ihc->hnc", x, of["weight"])
        scores = (h @ of["query_weight"]) @ (h @ of["key_weight"]).mT / h.shape[2] ** 0.5
        o = scores.masked_fill(~sees, -torch.inf).softmax(2) @ h + of["bias"][:, None]
        x = elu(o.transpose(0, 1).flatten(1)) if n == 0 else o.mean(0)
    return x


def check_measured(result, logits: torch.Tensor, data) -> None:
    for at in result["losses"]:
        nodes = torch.from_numpy(data[f"{at['split']}.nodes"])
        labels = torch.from_numpy(data["graph.labels"]).long()[nodes]
        assert at["nodes"] == len(nodes)
        right = (logits[nodes].argmax(1) == labels).double().mean()
        assert at["accuracy"] == pytest.approx(right.item(), abs=1e-12)
        assert at["loss"] == pytest.approx(cross_entropy(logits[nodes], labels).item(), abs=1e-5)


def test_the_network_and_its_metrics_against_torch_geometric(folder, tmp_path):
    data = load_file(folder / "graph.safetensors")
    printed = succeed(*TRAIN, "--out", tmp_path / "run", "--steps", 40, "--similarity", "additive",
                      "--out-heads", 2, "--depth", 3, "--heads", 3, "--hidden", 5, "--dropout", 0.1,
                      "--splits", "valid,test", "--learning-rate", 0.03, cwd=folder)  # fmt: skip
    assert "validation at split valid" in printed
    arguments = ["eval", "--model", tmp_path / "run", "--json"]
    result = json.loads(succeed(*arguments, cwd=folder))
    logits = published(weights_of(tmp_path / "run" / FILE), data)
    assert [at["split"] for at in result["losses"]] == ["valid", "test"]
    check_measured(result, logits, data)
    assert result["losses"][1]["accuracy"] > 0.6
    # Only the requested split must exist.
    del data["test.nodes"], data["valid.nodes"]
    save_file(data, tmp_path / "less.safetensors")
    arguments += ["--data", tmp_path / "less.safetensors", "--splits", "train"]
    check_measured(json.loads(succeed(*arguments, cwd=folder)), logits, data)

    succeed(*TRAIN, "--out", tmp_path / "dot", "--steps", 40, cwd=folder)
    result = json.loads(succeed("eval", "--model", tmp_path / "dot", "--json", cwd=folder))
    data = load_file(folder / "graph.safetensors")
    check_measured(result, dot_network(weights_of(tmp_path / "dot" / FILE), data), data)


@pytest.mark.parametrize("dense", [False, True], ids=["words", "features"])
def test_the_gradient_against_torch_geometric(folder, tmp_path, dense):
    """The gradient of the loss and its penalty, computed by the code for dropout."""
    data = load_file(folder / "graph.safetensors")
    stored = dict(data)
    if dense:
        del stored["graph.words"], stored["graph.words_lengths"]
        stored["graph.features"] = features_of(data).numpy()
    save_file(stored, tmp_path / "graph.safetensors")
    # These dropout rates are so small that nothing is dropped.
    never = ["--dropout", 1e-12, "--attention-dropout", 1e-12]
    succeed(*TRAIN, "--out", "run", "--steps", 1, "--similarity", "additive", "--l2", 0.1,
            "--selection", "last", "--directed", "--clip", 1e9, *never, cwd=tmp_path)  # fmt: skip
    after = weights_of(tmp_path / "run" / FILE)
    moments = weights_of(tmp_path / "run" / FILE, "optimizer.exp_avg.")
    gradients = {name: moment / 0.1 for name, moment in moments.items()}
    # The first Adam step follows the sign of the gradient, so it can be undone.
    before = {
        name: (after[name] + 5e-3 * g / (g.abs() + 1e-8)).requires_grad_()
        for name, g in gradients.items()
    }
    nodes = torch.from_numpy(data["train.nodes"])
    labels = torch.from_numpy(data["graph.labels"]).long()
    loss = cross_entropy(published(before, data, directed=True)[nodes], labels[nodes])
    penalty = sum(w.square().sum() for name, w in before.items() if name.endswith("weight")) / 2
    (loss + 0.1 * penalty).backward()
    for name, weight in before.items():
        torch.testing.assert_close(weight.grad, gradients[name], atol=2e-6, rtol=1e-3, msg=name)


@pytest.mark.long
def test_interrupted_training_resumes_to_the_same_weights(folder, tmp_path):
    """A checkpoint contains the best weights so far, in addition to the latest ones."""
    arguments = [*TRAIN, "--steps", 500, "--similarity", "penumbral"]
    with Interrupted(arguments, folder, tmp_path, every=20) as run:
        best, last = weights_of(run.file, "best."), weights_of(run.file)
        assert best.keys() == last.keys() - {f"layers.{n}.similarity.gamma_start" for n in (0, 1)}
        assert 1 <= config_of(run.file)["selection"]["step"] <= step_of(run.file)
    assert not any(name.startswith("best.") for name in load_file(run.file))
    assert config_of(run.file)["selection"] is None


@pytest.mark.parametrize("selection", ["accuracy", "loss"])
def test_training_ends_with_the_best_weights(folder, tmp_path, selection):
    """The run gets worse, because its learning rate is far too high."""
    arguments = [*TRAIN, "--steps", 60, "--learning-rate", 0.3, "--similarity", "additive"]
    succeed(*arguments, "--out", tmp_path / "last", "--selection", "last", cwd=folder)
    succeed(*arguments, "--out", tmp_path / "best", "--selection", selection, cwd=folder)
    results = [
        json.loads(succeed("eval", "--model", tmp_path / name, "--json", "--splits", "valid",
                           cwd=folder))["losses"][0]
        for name in ("last", "best")
    ]  # fmt: skip
    last, best = results
    if selection == "accuracy":
        assert (-best["accuracy"], best["loss"]) < (-last["accuracy"], last["loss"])
    else:
        assert best["loss"] < last["loss"]


@pytest.mark.long
def test_two_processes_match_one(folder):
    arguments = [*TRAIN, "--steps", 5, "--similarity", "umbral", "--batch", 7]
    run_one([*arguments, "--out", "one"], folder)
    run_two([*arguments, "--out", "two"], folder)
    assert_same(folder / "two", folder / "one")


def test_compare_of_every_similarity(folder, tmp_path):
    names = [e["name"] for e in json.loads(succeed("list", "--json", cwd=folder))["similarities"]]
    similarities = ",".join([*names, "penumbral:gamma=fixed", "umbral:gamma=learned:score=log"])
    table = succeed("compare", *TRAIN[1:], "--steps", 2, "--seeds", 1, "--similarity",
                    similarities, "--out", tmp_path / "run", cwd=folder)  # fmt: skip
    assert "| accuracy at test | accuracy at valid |" in table
    assert "2 steps of 9 nodes, evaluated with the weights of the best validation accuracy" in table
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(record["runs"]) == len(names) + 2
    assert all(0 <= run["losses"][0]["accuracy"] <= 1 for run in record["runs"])
    assert record["data"]["edges"] == edges_of(sample()).shape[1] + NODES
    # Resuming a finished run does nothing.
    assert succeed("compare", "--resume", tmp_path / "run", cwd=folder).startswith(table[:60])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"graph.edges": [[0, NODES]]}, "'graph.edges' contains 30 at [0, 1]; expected 0 to 29"),
        ({"graph.edges": [[0, 1, 2]]}, "'graph.edges' has shape [1, 3]; expected (edges, 2)"),
        ({"graph.labels": [0] * NODES}, "has 1 class; expected two or more"),
        ({"graph.words": None}, "'graph.words' is missing; the file contains graph.edges"),
        ({"graph.words_lengths": [2]}, "'graph.words_lengths' sums to 2"),
        ({"graph.labels": [0, 1, 2, 1]}, "'graph.words_lengths' has 30 rows, but 'graph.labels'"),
        ({"train.nodes": [0, NODES - 1]}, "contains node 29 at [1], which has no label"),
        ({"valid.nodes": [10, 8]}, "contains node 8 at [1], which 'train.nodes' also contains"),
        ({"train.nodes": None}, "'train.nodes' is missing, but training needs it"),
        ({"valid.nodes": None}, "'valid.nodes' is missing, but --selection accuracy needs it"),
        (
            {"test.nodes": None},
            "'test.nodes' is missing, but --splits test,valid needs it; use --splits valid",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_data_are_one_line(tmp_path, change, part):
    data = sample()
    # If there are fewer labels, edges to the missing nodes would cause a different error.
    if len(change.get("graph.labels", range(NODES))) < NODES:
        data["graph.edges"] = data["graph.edges"] % 4
    for name, value in change.items():
        del data[name]
        if value is not None:
            data[name] = np.array(value)
    save_file(data, tmp_path / "graph.safetensors")
    line = refused(*TRAIN, "--out", "run", cwd=tmp_path)
    assert "graph.safetensors: " in line
    assert part in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--position", "alibi"], "position 'alibi': the nodes of a graph have no order"),
        (["--dropout", "1"], "--dropout is 1"),
        (["--splits", "train,train"], "--splits: train is given twice"),
        (["--splits", "best"], "--splits is 'best'; expected one of train, valid, test"),
        (["--selection", "first"], "--selection is 'first'; expected one of accuracy, loss, last"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_words_are_one_line(folder, words, part):
    assert part in refused(*TRAIN, "--out", "none", *words, cwd=folder)


def test_a_model_accepts_only_data_like_its_own(folder, tmp_path):
    succeed(*TRAIN, "--out", tmp_path / "run", "--steps", 1, cwd=folder)
    data = sample()
    data["graph.words"][0] = WORDS
    save_file(data, tmp_path / "graph.safetensors")
    words = ["eval", "--model", tmp_path / "run", "--data", tmp_path / "graph.safetensors"]
    assert "'graph.words' contains 12 at [0]; expected 0 to 11" in refused(*words, cwd=folder)


@pytest.mark.skipif(not CORA.exists(), reason="needs ../shared/data/cora")
def test_cora(tmp_path):
    names = {"train": "train", "valid": "val", "test": "test"}
    nodes = [f"{part}.nodes={CORA / file}.index" for part, file in names.items()]
    succeed("data", "cora.safetensors", f"graph.edges={CORA / 'edges.txt'}",
            f"graph.words={CORA / 'features.txt'}", f"graph.labels={CORA / 'labels.txt'}", *nodes,
            cwd=tmp_path)  # fmt: skip
    succeed("train", "--task", "graphs", "--data", "cora.safetensors", "--steps", 2, "--similarity",
            "additive", "--out", "run", cwd=tmp_path)  # fmt: skip
    result = json.loads(succeed("eval", "--model", "run", "--json", cwd=tmp_path))
    told = result["data"]
    assert (told["nodes"], told["features"], told["classes"]) == (2708, 1433, 7)
    assert told["edges"] == 2 * 5278 + 2708
    assert [at["nodes"] for at in result["losses"]] == [1000, 500]
    assert result["losses"][0]["accuracy"] > 1 / 7
