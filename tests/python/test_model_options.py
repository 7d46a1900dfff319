"""Options of recent language models: norms, gated MLPs, per-layer positions, sinks."""

import itertools
import json

import pytest
import torch
from safetensors.numpy import load_file
from test_cli import refused, succeed
from test_devices import FILE, TASKS
from transformers import LlamaConfig, LlamaForCausalLM

from gnomon.lab.models import LanguageModel, LanguageModelCache, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.cpu("runs the program, which has --device")

LENGTH = 24
TINY = ["--dim", 16, "--depth", 3, "--heads", 2, "--mlp", 24, "--batch", 4, "--length", LENGTH]
SENTENCE = b"the quick brown fox jumps over a lazy dog and runs\n"

POSITIONS = [
    "rope;rope;none",
    "learned+alibi;none",
    "rope+qk_norm",
    "alibi+sink",
    "rope+gate",
    "forget",
    "rope+forget+sink+qk_norm+gate",
    "content_bias:extent=7:columns=4:past=true",
    "alibi+scalable_softmax",
    "rope+log_temperature:length=4:scale=0.5",
    "rope+log_temperature:length=4:kind=smooth",
    "rope:scaling=yarn:factor=4:original_max_position_embeddings=8",
]
MODELS = [
    ["--norm", "rms"],
    ["--activation", "swiglu"],
    ["--activation", "geglu", "--no-bias"],
    ["--activation", "relu", "--norm", "rms", "--no-bias"],
    ["--kv-heads", 1, "--position", "rope+alibi:slopes=learned"],
    ["--qk-dim", 2, "--similarity", "penumbral", "--position", "relative"],
    ["--qk-dim", 14, "--kv-heads", 1, "--position", "transformer_xl"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("options")
    (path / "text").mkdir()
    (path / "text" / "train.txt").write_bytes(SENTENCE * 40)
    (path / "text" / "valid.txt").write_bytes((SENTENCE * 4)[: LENGTH + 1])
    return path


def loss_of(model):
    window = torch.tensor(list((SENTENCE * 4)[: LENGTH + 1]))[None]
    with torch.no_grad():
        logits = model(window[:, :-1])
    return float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=marks, id=" ".join(map(str, options)))
        for options, marks in (
            *((options, []) for options in MODELS),
            # `make test` takes every third position.
            *(
                (["--position", position], [pytest.mark.long] * (n % 3 > 0))
                for n, position in enumerate(POSITIONS)
            ),
        )
    ],
)
def test_the_program_and_python_have_the_same_model(folder, tmp_path, options):
    run = tmp_path / "run"
    train = ["train", "--data", folder / "text", *TINY, "--warmup", 1, "--steps", 4]
    succeed(*train, "--out", run, *options, cwd=folder)
    printed = succeed(
        *("eval", "--model", run, "--data", folder / "text", "--lengths", LENGTH, "--json"),
        cwd=folder,
    )
    checkpoint = load_checkpoint(run)
    assert loss_of(checkpoint.model) == pytest.approx(
        json.loads(printed)["losses"][0]["loss"], 1e-5
    )
    # A file written by Python can be read again.
    save_checkpoint(tmp_path / "copy.safetensors", checkpoint.model)
    again = load_checkpoint(tmp_path / "copy.safetensors").model
    assert again.options == checkpoint.model.options
    assert loss_of(again) == loss_of(checkpoint.model)
    # A cache does not change results.
    with_cache, without = (
        (
            succeed(
                *(
                    "generate",
                    "--model",
                    run,
                    "--prompt",
                    "the q",
                    "--tokens",
                    40,
                    "--seed",
                    1,
                    *no,
                ),
                cwd=folder,
            )
            for no in ([], ["--no-cache"])
        )
        if "learned+" not in " ".join(map(str, options))
        else ("", "")
    )
    assert with_cache == without


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 1, "qk_dim": 10}], ids=["even", "grouped"])
@pytest.mark.parametrize("position", POSITIONS)
def test_no_token_sees_a_later_one(position, sizes):
    torch.manual_seed(0)
    model = LanguageModel(40, 16, 3, 2, 24, position=position, max_length=LENGTH, **sizes).eval()
    tokens = torch.randint(40, (2, LENGTH))
    with torch.no_grad():
        expected = model(tokens)
        changed = tokens.clone()
        changed[:, 9:] = (changed[:, 9:] + 7) % 40
        found = model(changed)
        assert torch.equal(found[:, :9], expected[:, :9])
        assert not torch.equal(found[:, 9:], expected[:, 9:])
        cache = LanguageModelCache(3)
        parts = [model(part, cache) for part in tokens.split([5, 1, LENGTH - 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-5)


def test_a_pattern_repeats_over_the_layers():
    model = LanguageModel(depth=5, position="learned+rope;alibi;none", max_length=8)
    assert [block.attention.position for block in model.blocks] == [
        "rope",
        "alibi",
        "none",
        "rope",
        "alibi",
    ]
    assert model.max_length == 8
    assert model.options["position"] == "learned+rope;alibi;none"


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("bias", ["", "+sink"])
def test_with_rms_norm_and_a_gated_mlp_it_is_llama(bias, kv_heads):
    """Compared with transformers' Llama, whose embeddings are unscaled and whose output is
    untied."""
    torch.manual_seed(1)
    dim, depth, heads, mlp = 32, 3, 4, 40
    ours = LanguageModel(
        50, dim, depth, heads, mlp,
        position="rope:layout=half", norm="rms", activation="swiglu", no_bias=True,
        kv_heads=kv_heads,
    ).eval()  # fmt: skip
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=dim,
            intermediate_size=mlp,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads or heads,
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        theirs.model.embed_tokens.weight.copy_(ours.embedding.weight * dim**0.5)
        theirs.lm_head.weight.copy_(ours.embedding.weight)
        theirs.model.norm.weight.copy_(ours.norm.weight)
        for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
            layer.input_layernorm.weight.copy_(block.attention_norm.weight)
            layer.post_attention_layernorm.weight.copy_(block.mlp_norm.weight)
            for mine, name in (
                ("q_proj", "q_proj"), ("k_proj", "k_proj"),
                ("v_proj", "v_proj"), ("out_proj", "o_proj"),
            ):  # fmt: skip
                weight = getattr(block.attention, mine).weight
                getattr(layer.self_attn, name).weight.copy_(weight)
            gate, up = block.mlp_in.weight.chunk(2)
            layer.mlp.gate_proj.weight.copy_(gate)
            layer.mlp.up_proj.weight.copy_(up)
            layer.mlp.down_proj.weight.copy_(block.mlp_out.weight)
        tokens = torch.randint(50, (2, 33))
        expected = theirs(tokens).logits
        if bias:
            # A sink of -1e4 gets no weight, so the results are the same.
            sunk = LanguageModel(**{**ours.options, "position": "rope:layout=half+sink"}).eval()
            sunk.load_state_dict(ours.state_dict(), strict=False)
            for block in sunk.blocks:
                block.attention.sink_score.fill_(-1e4)
            ours = sunk
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--norm", "batch"], "'batch'; expected one of layer, rms"),
        (["--activation", "tanh"], "'tanh'; expected one of gelu, relu, swiglu, geglu"),
        (
            ["--position", "rope;sinusoidal"],
            "'sinusoidal' is added to the embeddings before all layers",
        ),
        (["--position", "rope;;none"], "position"),
        (["--kv-heads", "3"], "kv_heads is 3; expected a divisor of num_heads = 4"),
        (["--kv-heads", "0"], "--kv-heads is 0; expected an integer from 1"),
        (["--qk-dim", "3", "--position", "rope"], "3"),
        (["--qk-dim", "2", "--similarity", "additive"], "qk_dim is 2; additive needs 1"),
        (["--qk-dim", "100000000000"], "--qk-dim 100000000000"),
        (["--position", "rope;nope"], "nope"),
        (
            ["--task", "graphs", "--kv-heads", "1"],
            "arguments were not expected: --kv-heads 1; did you mean --out-heads? "
            "(see train --task graphs --help)",
        ),
        (["stray"], "argument was not expected: stray (see train --task text --help)"),
    ],
)
def test_wrong_options_are_one_line(folder, options, message):
    error = refused("train", "--data", folder / "text", "--out", "bad", *options, cwd=folder)
    assert message in error
    assert error.count("\n") <= 1
    assert not (folder / "bad").exists()


TRANSFORMERS = [task for task in TASKS if task not in ("graphs", "hierarchy")]


@pytest.mark.parametrize("task", TRANSFORMERS)
def test_every_transformer_groups_heads_and_sizes_them(task, tmp_path):
    sample = TASKS[task]
    sample.make(tmp_path)
    words = ["--task", task, *sample.words, *sample.training]
    sizes = ["--kv-heads", 1, "--qk-dim", 6]
    succeed("train", *words, *sizes, "--steps", 2, "--out", "run", cwd=tmp_path)
    weights = load_file(tmp_path / "run" / FILE)
    shapes = {
        (name.split(".")[-2], array.shape)
        for name, array in weights.items()
        if name.endswith("proj.weight")
    }
    assert shapes == {
        ("q_proj", (12, 16)),
        ("k_proj", (6, 16)),
        ("v_proj", (8, 16)),
        ("out_proj", (16, 16)),
    }
    succeed("eval", "--model", "run", cwd=tmp_path)
    # The defaults of --kv-heads and --qk-dim are heads and dim / heads.
    for given, out in (([], "even"), (["--kv-heads", 2, "--qk-dim", 8], "said")):
        succeed("train", *words, *given, "--steps", 2, "--out", out, cwd=tmp_path)
    even, said = (load_file(tmp_path / out / FILE) for out in ("even", "said"))
    assert even.keys() == said.keys()
    assert all((even[name] == said[name]).all() for name in even)


def test_wrong_options_in_python():
    for options, message in (
        ({"norm": "batch"}, "norm is 'batch'; expected one of layer, rms"),
        ({"activation": 3}, "activation"),
        ({"no_bias": "yes"}, "no_bias"),
        ({"kv_heads": 0}, "kv_heads is 0; expected at least 1"),
        ({"kv_heads": 3}, "kv_heads is 3; expected a divisor"),
        ({"qk_dim": "4"}, "qk_dim"),
        ({"position": "rope;learned"}, "'learned' is added to embeddings"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            LanguageModel(dim=16, depth=1, heads=2, mlp=8, **options)


def test_all_of_it_in_one_comparison(folder, tmp_path):
    positions = [p for p in POSITIONS if "," not in p]
    out = tmp_path / "all"
    succeed(
        *("compare", "--data", folder / "text", "--out", out, "--lengths", LENGTH, "--steps", 2),
        *("--dim", 16, "--depth", 2, "--heads", 2, "--mlp", 16, "--batch", 2),
        *("--position", ",".join(positions), "--norm", "rms", "--activation", "swiglu"),
        cwd=folder,
    )
    record = json.loads((out / "results.json").read_text())
    assert record["status"] == "finished"
    titles = [c["position_title"] for c in record["settings"]["combinations"]]
    assert len(set(titles)) == len(titles)
    assert titles[0] == "RoPE | RoPE | no position"
    assert all(run["status"] == "done" for run in record["runs"])
    report = (out / "report.html").read_text()
    for title in itertools.islice(titles, 3):
        assert title in report
