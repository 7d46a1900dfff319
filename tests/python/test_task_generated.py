"""The task `generated`: answers, metrics compared with NumPy, the model compared with GPT-2."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_cli import copy_with_steps
from test_distributed_training import FILE, assert_same, run_one, run_two

pytestmark = pytest.mark.cpu("runs the program, which has --device")

TINY = ["--dim", 16, "--depth", 2, "--heads", 2, "--mlp", 32]
TRAIN = ["train", "--task", "generated", *TINY, "--evaluation-examples", 4]
TWO_STEPS = [*TRAIN, "--batch", 4, "--steps", 2]

Run = Callable[..., str]


def evaluate(gnomon: Run, *words: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of `gnomon eval`, and the evaluated examples."""
    output = gnomon("eval", "--model", "run", "--json", "--examples", "examples", *words)
    lines = pathlib.Path("examples").read_text().splitlines()
    return json.loads(output), [json.loads(line) for line in lines]


def answer_of(problem: str, symbols: int, words: list[str]) -> list[str]:
    """The answer to an input, by the definition of the problem."""
    if problem == "copy":
        return words
    if problem == "reverse":
        return words[::-1]
    if problem in ("sort", "bucket-sort"):
        return sorted(words, key=int)
    if problem == "parity":
        return ["1" if words.count("1") % 2 else "0"]
    if problem == "modular-addition":
        return [str(sum(map(int, words)) % symbols)]
    stack: list[str] = []
    for word in words:
        if word.startswith("push"):
            stack.append(word.removeprefix("push"))
        elif word != "pop":
            stack.append(word)
        elif stack:
            stack.pop()
    return [*stack[::-1], "end"]


PROBLEMS = {
    "bucket-sort": 5,
    "copy": 2,
    "modular-addition": 5,
    "parity": 2,
    "reverse": 2,
    "sort": 100,
    "stack": 2,
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_answers_are_those_of_the_definition(gnomon, problem):
    gnomon(*TWO_STEPS, "--out", "run", "--problem", problem, "--lengths", "3")
    result, examples = evaluate(gnomon, "--lengths", "1,7,20", "--evaluation-examples", 60)
    symbols = PROBLEMS[problem]
    assert result["data"] == {"problem": problem, "symbols": symbols}
    assert [e["length"] for e in examples] == [1] * 60 + [7] * 60 + [20] * 60
    seen = set()
    for example in examples:
        tokens = example["tokens"]
        mark = tokens.index("=")
        words = tokens[:mark]
        assert mark == example["length"]
        answer = answer_of(problem, symbols, words)
        first = mark + 1
        assert tokens[first : first + len(answer)] == answer
        assert example["answer"] == [*range(first, first + len(answer))]
        assert set(tokens[first + len(answer) :]) <= {"="}
        seen.update(words)
    digits = {str(n) for n in range(symbols)}
    assert seen == digits | ({"push0", "push1", "pop"} if problem == "stack" else set())
    # All inputs are equally likely.
    firsts = [e["tokens"][0] for e in examples]
    assert len(set(firsts)) > min(symbols, 50) / 2
    long = {" ".join(e["tokens"]) for e in examples if e["length"] == 20}
    assert len(long) == 60


def test_recall_asks_for_each_key_once_in_random_order(gnomon):
    gnomon(*TWO_STEPS, "--out", "run", "--problem", "recall", "--symbols", 9, "--lengths", "3")
    _, examples = evaluate(gnomon, "--lengths", "1,6,17", "--evaluation-examples", 30)
    in_order = 0
    for example in examples:
        tokens, pairs = example["tokens"], (example["length"] + 1) // 2
        assert tokens[2 * pairs] == "="
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs
        assert all(re.fullmatch("k[0-8]", key) for key in keys)
        assert all(re.fullmatch("v[0-8]", value) for value in values)
        asked, told = tokens[2 * pairs + 1 :: 2], tokens[2 * pairs + 2 :: 2]
        assert sorted(asked) == sorted(keys)
        assert told == [dict(zip(keys, values, strict=True))[key] for key in asked]
        assert example["answer"] == [*range(2 * pairs + 2, 4 * pairs + 1, 2)]
        in_order += example["length"] == 17 and asked == keys
    assert in_order < 3


def words_of(problem: str, symbols: int) -> list[str]:
    digits = [str(n) for n in range(symbols)]
    if problem != "stack":
        return [*digits, "="]
    return [*digits, *(f"push{n}" for n in digits), "pop", "end", "="]


@pytest.mark.parametrize("problem", ["bucket-sort", "stack"])
def test_metrics_by_numpy_and_the_model_against_gpt2(gnomon, problem):
    """Accuracies follow from predictions; GPT-2 with the same weights has the same predictions and
    loss."""
    transformers = pytest.importorskip("transformers")
    gnomon(
        *TRAIN, "--out", "run", "--problem", problem, "--lengths", "9", "--position", "learned",
        "--steps", 150, "--learning-rate", 0.01,
    )  # fmt: skip
    result, examples = evaluate(gnomon, "--lengths", "9,2,4,10", "--evaluation-examples", 40)
    weights = load_file("run/" + FILE)
    ours = {
        name.removeprefix("model."): torch.from_numpy(tensor)
        for name, tensor in weights.items()
        if name.startswith("model.")
    }
    rows = ours["token_position.learned0.table"].shape[0]
    vocabulary = words_of(problem, PROBLEMS[problem])
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=rows, n_embd=16, n_layer=2, n_head=2, n_inner=32,
        activation_function="gelu", tie_word_embeddings=False, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    model.load_state_dict(as_gpt2(ours), strict=True)
    for at in result["losses"]:
        length = at["length"]
        batch = [e for e in examples if e["length"] == length]
        if length == 10:  # longer than the position table
            assert (batch, at["examples"]) == ([], 0)
            assert [at[key] for key in ("accuracy", "exact", "loss")] == [None] * 3
            continue
        tokens = torch.tensor([[vocabulary.index(w) for w in e["tokens"]] for e in batch])
        with torch.no_grad():
            log_p = model(tokens[:, :-1]).logits.log_softmax(2)
        right, losses = [], []
        for row, example in enumerate(batch):
            places = np.array(example["answer"])
            answer = tokens[row, places]
            told = [vocabulary.index(word) for word in example["told"]]
            assert log_p[row, places - 1].argmax(1).tolist() == told
            losses += (-log_p[row, places - 1, answer]).tolist()
            right.append(np.array(told) == answer.numpy())
        assert at["examples"] == len(batch) == 40
        np.testing.assert_allclose(at["loss"], np.mean(losses), rtol=1e-5)
        np.testing.assert_allclose(at["accuracy"], np.mean(np.concatenate(right)), rtol=1e-12)
        np.testing.assert_allclose(at["exact"], np.mean([r.all() for r in right]), rtol=1e-12)
    # The model has learned something but not everything, so the metrics differ.
    measured = [at for at in result["losses"] if at["loss"] is not None]
    assert any(at["exact"] > 0 for at in measured)
    assert any(at["exact"] < at["accuracy"] < 1 for at in measured)


def as_gpt2(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under GPT-2's names, with transposed linear maps."""
    embedding = ours["embedding.weight"]
    theirs = {
        "transformer.wte.weight": embedding * embedding.shape[1] ** 0.5,
        "transformer.wpe.weight": ours["token_position.learned0.table"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
        "lm_head.weight": embedding,
    }
    for layer in range(2):
        for part, read in (("weight", lambda x: x.T), ("bias", lambda x: x)):
            mine, other = f"blocks.{layer}.", f"transformer.h.{layer}."
            qkv = [ours[f"{mine}attention.{name}_proj.{part}"] for name in "qkv"]
            theirs |= {
                f"{other}attn.c_attn.{part}": read(torch.cat(qkv)).contiguous(),
                f"{other}attn.c_proj.{part}": read(ours[f"{mine}attention.out_proj.{part}"]),
                f"{other}mlp.c_fc.{part}": read(ours[f"{mine}mlp_in.{part}"]),
                f"{other}mlp.c_proj.{part}": read(ours[f"{mine}mlp_out.{part}"]),
                f"{other}ln_1.{part}": ours[f"{mine}attention_norm.{part}"],
                f"{other}ln_2.{part}": ours[f"{mine}mlp_norm.{part}"],
            }
    return theirs


def test_it_is_learned(gnomon):
    """Trains on short inputs, with and without random positions."""
    for extra in (["rope"], ["sinusoidal", "--random-positions", 12]):
        out = "run-" + extra[0]
        gnomon(
            "train", "--task", "generated", "--problem", "reverse", "--lengths", "3,4", "--out",
            out, "--dim", 32, "--depth", 2, "--heads", 2, "--mlp", 64, "--batch", 32, "--steps",
            400, "--learning-rate", 0.005, "--position", *extra,
        )  # fmt: skip
        losses = json.loads(gnomon("eval", "--model", out, "--json"))["losses"]
        # The chance levels of these metrics are 0.5 and 0.125.
        assert losses[0]["accuracy"] > 0.85, extra
        assert losses[0]["exact"] > 0.6, extra


def test_random_positions_end_where_they_are_drawn_from(gnomon):
    gnomon(
        *TWO_STEPS, "--out", "run", "--lengths", "3,5,6", "--position", "sinusoidal",
        "--random-positions", 10,
    )  # fmt: skip
    _, examples = evaluate(gnomon, "--lengths", "5")
    at = json.loads(gnomon("eval", "--model", "run", "--json"))["losses"]
    assert [row["accuracy"] is None for row in at] == [False, False, True]
    # Random positions do not change the examples.
    gnomon(*TWO_STEPS, "--out", "plain", "--lengths", "3")
    gnomon("eval", "--model", "plain", "--lengths", "5", "--examples", "others")
    others = [json.loads(line) for line in pathlib.Path("others").read_text().splitlines()]
    assert [e["tokens"] for e in others] == [e["tokens"] for e in examples]


@pytest.mark.parametrize(
    "extra",
    [
        ["rope"],
        ["learned", "--random-positions", 30],
        ["rope+alibi:slopes=learned+relative:max_offset=4", "--random-positions", 30],
    ],
)
def test_resumes_bitwise(gnomon, extra):
    # During warm-up, the learning rate does not depend on the number of steps.
    arguments = [*TRAIN, "--problem", "stack", "--lengths", "5", "--dropout", 0.1]
    arguments += ["--warmup", 3, "--position", *extra]
    gnomon(*arguments, "--steps", 6, "--out", "whole")
    gnomon(*arguments, "--steps", 3, "--out", "half")
    pathlib.Path("resumed").mkdir()
    copy_with_steps(pathlib.Path("half") / FILE, pathlib.Path("resumed") / FILE, 6)
    gnomon("train", "--resume", "resumed")
    resumed, whole = load_file("resumed/" + FILE), load_file("whole/" + FILE)
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(resumed[name], tensor, err_msg=name)


def test_two_processes_match_one(tmp_path):
    # With the dot product, a key-projection bias has no effect, so its gradient is only rounding.
    arguments = [
        *TRAIN, "--problem", "stack", "--lengths", "9", "--batch", 5, "--dropout", 0.2,
        "--position", "learned", "--random-positions", 30, "--similarity", "penumbral",
        "--steps", 4,
    ]  # fmt: skip
    run_one([*arguments, "--out", "one"], tmp_path)
    run_two([*arguments, "--out", "two"], tmp_path)
    assert_same(tmp_path / "two", tmp_path / "one")


def test_compare(gnomon):
    gnomon(
        "compare", "--task", "generated", *TINY, "--steps", 2, "--batch", 4, "--problem",
        "recall", "--symbols", 12, "--lengths", "4,8", "--evaluation-examples", 6, "--position",
        "none,learned,rope+hype:tau=learned", "--similarity", "dot,penumbral", "--out", "runs",
    )  # fmt: skip
    record = json.loads(pathlib.Path("runs/results.json").read_text())
    assert record["status"] == "finished"
    assert record["settings"]["problem"] == {"problem": "recall", "symbols": 12}
    assert record["task"]["conditions"] == {
        "key": "length", "title": "input length in symbols", "values": [4, 8], "trained": 0,
    }  # fmt: skip
    assert len(record["runs"]) == 6
    for run in record["runs"]:
        is_learned = record["settings"]["combinations"][run["combination"]]["position"] == "learned"
        assert (run["losses"][1]["accuracy"] is None) == is_learned
    table = pathlib.Path("runs/table.md").read_text()
    assert "trained on recall with 1 to 4 symbols for 2 steps of 4 examples" in table
    gnomon("compare", "--resume", "runs")


GENERATED = ["train", "--task", "generated"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--problem", "cope"], "--problem is 'cope'; expected one of bucket-sort, copy, "),
        (["--symbols", 1], "--symbols is 1: copy allows 2 to 65536"),
        (["--symbols", 3, "--problem", "parity"], "--symbols is 3: parity allows 2"),
        (["--lengths", "40,40"], "--lengths: 40 is given twice"),
        (["--lengths", "0"], "--lengths"),
        (["--lengths", "4,600", "--problem", "recall"], "600 is too long for recall with 256 "
                                                        "symbols"),
        (["--lengths", "40,1000000000000"], "not enough memory for --lengths 1000000000000"),
        (["--batch", 10**11], "not enough memory for --batch 100000000000 and --lengths 40"),
        (["--dim", 30], "dim is 30; expected a multiple of heads, 4"),
        (["--data", "x"], "--data"),
        (["--random-positions", 79, "--position", "sinusoidal"],
         "--random-positions is 79; expected at least the longest row length in training, 80 "
         "tokens"),
        (["--position", "learned:length=79"],
         "defined only up to length 79, but the longest rows have 80 tokens"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(refused, words, part):
    assert part in refused(*GENERATED, *words)


def test_random_positions_reject_unsupported_terms_by_name(refused):
    for position in ("conv", "rope+conv"):
        line = refused(*GENERATED, "--random-positions", 100, "--position", position)
        assert "'conv' reads neighbouring tokens and does not support random positions" in line
    line = refused(*GENERATED, "--random-positions", 100, "--position", "sinusoidal:shape=8x10")
    assert "defined only up to length 80, but the longest rows have 100 tokens" in line


@pytest.mark.parametrize(
    "position", ["none", "rope", "alibi", "t5+cape", "transformer_xl", "absolute_keys", "forget"]
)
def test_random_positions_are_those_of_all_that_reads_positions(gnomon, position):
    gnomon(
        *TWO_STEPS, "--out", "run", "--lengths", "3,5", "--position", position,
        "--random-positions", 20,
    )  # fmt: skip
    at = json.loads(gnomon("eval", "--model", "run", "--json"))["losses"]
    assert all(row["accuracy"] is not None for row in at)
