"""The task `translation`: from sentence files to translations, and their metrics."""

from __future__ import annotations

import gzip
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import sacrebleu
import torch
from formulas import mostly_long
from safetensors.numpy import load_file
from test_cli import PROGRAM, Interrupted, config_of, losses, refused, step_of
from test_cli import gnomon as run_gnomon
from test_cli import succeed as run
from test_distributed_training import assert_same, run_two

import gnomon

pytestmark = pytest.mark.cpu("runs the program, which has --device")

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
FILE = "checkpoint.safetensors"

TINY = ["--dim", 32, "--depth", 2, "--heads", 2, "--mlp", 48, "--threads", 1]
TRAIN = ["train", "--task", "translation", "--tokens", "words", *TINY]
COMPARE = ["compare", "--task", "translation", "--tokens", "words", *TINY]


def succeed(*arguments: object, cwd: pathlib.Path, draws: bool = False) -> str:
    """The program's output. Comparisons write a report only if the test uses it."""
    environment = {} if draws else {"GNOMON_PYTHON": "/nowhere"}
    return run(*arguments, cwd=cwd, OMP_NUM_THREADS="1", **environment)


def sentences(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Sources contain names of digits; targets contain digits, some as "no1", and punctuation."""
    generator = random.Random(seed)
    names = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    source, target = [], []
    for _ in range(count):
        digits = [generator.randrange(10) for _ in range(generator.randint(1, 6))]
        source.append(" ".join(names[digit] for digit in digits))
        told = [f"{digit}" if generator.random() < 0.7 else f"no{digit}" for digit in digits]
        target.append(" ".join(told) + generator.choice([" .", " !", ""]))
    return source, target


def write(folder: pathlib.Path, name: str, lines: list[str]) -> None:
    content = ("\n".join(lines) + "\n").encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def write_pairs(data: pathlib.Path) -> None:
    data.mkdir()
    for part, count, seed in [("train", 300, 0), ("val", 20, 1), ("test_2016", 16, 2)]:
        source, target = sentences(count, seed)
        write(data, f"{part}.de.gz", source)
        write(data, f"{part}.en", target)
    (data / "README.md").write_text("about the data\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("translation")
    write_pairs(path / "data")
    return path


@pytest.fixture(scope="module")
def model(folder) -> pathlib.Path:
    """A model with the positions of transformers' Pegasus."""
    out = folder / "model"
    succeed(
        *TRAIN, "--data", "data", "--source-language", "de", "--out", out, "--steps", 80,
        "--batch", 32, "--learning-rate", 0.01, "--position", "sinusoidal:layout=split_xl",
        cwd=folder,
    )  # fmt: skip
    return out


def evaluate(model: pathlib.Path, *arguments: object) -> dict:
    text = succeed("eval", "--model", model, "--json", "--threads", 1, *arguments, cwd=model)
    return json.loads(text)


def lines_of(file: pathlib.Path) -> list[str]:
    return file.read_text().removesuffix("\n").split("\n")


def pairs_of(folder: pathlib.Path, part: str) -> tuple[list[str], list[str]]:
    source = gzip.decompress((folder / "data" / f"{part}.de.gz").read_bytes()).decode()
    return source.splitlines(), lines_of(folder / "data" / f"{part}.en")


class Words:
    """The vocabulary of a checkpoint."""

    def __init__(self, file: pathlib.Path) -> None:
        self.words = load_file(file)["tokens.vocabulary"].tobytes().decode().splitlines()
        self.end = self.words.index("<eos>")

    def encode(self, line: str) -> list[int]:
        ids = {word: n for n, word in enumerate(self.words)}
        return [ids.get(word, 0) for word in line.split()] + [self.end]

    def decode(self, ids: list[int]) -> str:
        kept = ids[: ids.index(self.end)] if self.end in ids else ids
        return " ".join(self.words[n] for n in kept)


# ---- BLEU


ATOMS = [
    "a", "the", "cat", "Straße", "1", "23", "1,000", "3.14", ".", ",", "-", "--", "&amp;", "&quot;",
    "&lt;", "&amp;lt;", "&", "<skipped>", "'", '"', "(", ")", "/", "$", "%", "…", "。", "、",
    "你好", "🙂", "\u00a0", "\u2028", "\u3000", "\x85", "\x1c", "\t", " ", "é", "e\u0301", "ﬁ", "٣",
    "x-", "9-", "-9", "1-2", ".5", "5.", "a.b", "..", ".,", "U.S.", "\ufeff", "\u200b", "[", "]",
    "{", "}", "~", "`", "^", "_", "|", "\\", "@", ":", ";", "=", "?", "!", "#", "*", "+", "<", ">",
]  # fmt: skip


def bleu_cases() -> list[dict]:
    """Small corpora of adversarial lines, and sacrebleu's scores for them."""
    generator = random.Random(0)

    def line(most: int) -> str:
        count = generator.randint(0, most)
        return "".join(
            generator.choice(ATOMS) + generator.choice(["", " ", " "]) for _ in range(count)
        )

    cases = []
    for _ in range(300):
        references = [line(generator.choice([0, 3, 12])) for _ in range(generator.randint(1, 3))]
        hypotheses = [
            # A hypothesis is either unrelated to the reference or contains most of it.
            line(8)
            if generator.random() < 0.3
            else "".join(c for c in reference if generator.random() > 0.07)
            for reference in references
        ]
        score = sacrebleu.corpus_bleu(hypotheses, [references])
        cases.append(
            {
                "hypotheses": hypotheses,
                "references": references,
                "score": score.score,
                "brevity_penalty": score.bp,
                "precisions": score.precisions,
            }
        )
    return cases


def test_bleu_is_that_of_sacrebleu():
    program = ROOT / "build" / "bin" / "gnomon_bleu_program"
    if not program.exists():
        pytest.skip(f"{program.name} is not built")
    cases = bleu_cases()
    run = subprocess.run([program], input=json.dumps(cases), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    scores = json.loads(run.stdout)
    assert sum(score["score"] > 0 for score in scores) >= 100
    for key in ("score", "brevity_penalty", "precisions"):
        np.testing.assert_allclose(
            [score[key] for score in scores], [case[key] for case in cases], rtol=1e-9, atol=1e-12
        )


def test_metrics_are_those_of_a_second_implementation(folder, model):
    out = folder / "translations"
    result = evaluate(model, "--translations", out)
    assert [at["split"] for at in result["losses"]] == ["valid", "test_2016"]
    metric = sacrebleu.BLEU()
    for at, part in zip(result["losses"], ["val", "test_2016"], strict=True):
        _, references = pairs_of(folder, part)
        translations = lines_of(out / f"{at['split']}.en")
        assert at["sentences"] == len(translations) == len(references)
        expected = metric.corpus_score(translations, [references])
        assert 0 < expected.score < 100
        assert f"{metric.get_signature()}".split("|version")[0] == result["bleu"]
        assert at["bleu"] == pytest.approx(expected.score, abs=1e-9)
        assert at["brevity_penalty"] == pytest.approx(expected.bp, abs=1e-12)
        precisions = [at[f"precision_{order}"] for order in (1, 2, 3, 4)]
        assert precisions == pytest.approx(expected.precisions, abs=1e-9)
        matches = sum(a.split() == b.split() for a, b in zip(translations, references, strict=True))
        assert at["exact_match"] == matches / len(references)
    # Some are exact matches, but not all.
    assert 0 < sum(at["exact_match"] for at in result["losses"]) < 2


# ---- The model


def pegasus(file: pathlib.Path):
    """transformers' Pegasus with the weights of a checkpoint."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    tensors = {
        name.removeprefix("model."): torch.from_numpy(tensor)
        for name, tensor in load_file(file).items()
        if name.startswith("model.")
    }
    options = config_of(file)["model"]
    end = Words(file).end
    config = PegasusConfig(
        vocab_size=options["vocabulary"],
        d_model=options["dim"],
        encoder_layers=options["depth"],
        decoder_layers=options["depth"],
        encoder_attention_heads=options["heads"],
        decoder_attention_heads=options["heads"],
        encoder_ffn_dim=options["mlp"],
        decoder_ffn_dim=options["mlp"],
        activation_function="gelu",
        scale_embedding=True,
        dropout=0.0,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=end,
        forced_eos_token_id=None,
        decoder_start_token_id=end,
    )
    reference = PegasusForConditionalGeneration(config).eval()
    parts = {
        "attention_norm": "self_attn_layer_norm",
        "attention": "self_attn",
        "cross_norm": "encoder_attn_layer_norm",
        "cross_attention": "encoder_attn",
        "mlp_norm": "final_layer_norm",
        "mlp_in": "fc1",
        "mlp_out": "fc2",
    }
    state = {}
    for name, tensor in tensors.items():
        if name == "embedding.weight":
            for place in (
                "model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens",
                "lm_head",
            ):  # fmt: skip
                state[f"{place}.weight"] = tensor
            continue
        name = name.replace("encoder.blocks.", "model.encoder.layers.")
        name = name.replace("decoder_blocks.", "model.decoder.layers.")
        name = name.replace("encoder.norm.", "model.encoder.layer_norm.")
        name = name.replace("decoder_norm.", "model.decoder.layer_norm.")
        words = [parts.get(word, word) for word in name.split(".")]
        state[".".join(words)] = tensor
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("embed_positions" in name or "final_logits_bias" in name for name in missing)
    return reference


def length_penalty(tokens: int, alpha: float) -> float:
    """The length penalty of Wu et al. 2016, equation 14."""
    return (5 + tokens) ** alpha / (5 + 1) ** alpha


def test_loss_is_that_of_pegasus_with_the_same_weights(folder, model):
    words = Words(model / FILE)
    reference = pegasus(model / FILE)
    for at, part in zip(evaluate(model)["losses"], ["val", "test_2016"], strict=True):
        total, tokens = 0.0, 0
        for source, target in zip(*pairs_of(folder, part), strict=True):
            labels = torch.tensor([words.encode(target)])
            read = torch.tensor([[words.end, *words.encode(target)[:-1]]])
            with torch.no_grad():
                logits = reference(
                    input_ids=torch.tensor([words.encode(source)]), decoder_input_ids=read
                ).logits
            losses_of_it = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
            total += losses_of_it.item()
            tokens += labels.numel()
        assert at["loss"] == pytest.approx(total / tokens, abs=1e-5)


@pytest.mark.parametrize(
    ("beam", "alpha"), mostly_long([(1, 0.6), (4, 0.6), (4, 0), (3, 2)], ordinary=2)
)
def test_translations_are_those_of_pegasus_with_the_same_weights(folder, model, beam, alpha):
    """The results of transformers' beam search, rescored because its length penalty differs."""
    words = Words(model / FILE)
    reference = pegasus(model / FILE)
    out = folder / f"beam-{beam}-{alpha}"
    evaluate(model, "--beam", beam, "--length-penalty", alpha, "--translations", out)
    sources, _ = pairs_of(folder, "val")
    expected = []
    for source in sources:
        ids = words.encode(source)
        found = reference.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            num_beams=beam,
            num_return_sequences=beam,
            early_stopping=beam > 1,
            length_penalty=0.0,
            max_new_tokens=len(ids) + 50,
            output_scores=True,
            return_dict_in_generate=True,
        )
        hypotheses = []
        for n, sequence in enumerate(found.sequences.tolist()):
            told = sequence[1:]
            count = told.index(words.end) + 1 if words.end in told else len(told)
            likelihood = found.sequences_scores[n].item() if beam > 1 else 0.0
            hypotheses.append((likelihood / length_penalty(count, alpha), words.decode(told)))
        expected.append(max(hypotheses, key=lambda hypothesis: hypothesis[0])[1])
    assert lines_of(out / "valid.en") == expected
    # The compared lines are not all equal.
    assert len(set(expected)) > 10


@pytest.mark.parametrize("beam", [1, 3])
def test_sentences_of_ones_own(folder, model, beam, tmp_path):
    """`generate` translates each line of a file or of standard input as in an evaluation."""
    evaluate(model, "--beam", beam, "--translations", tmp_path)
    source, _ = pairs_of(folder, "val")
    expected = lines_of(tmp_path / "valid.en")
    # The lines form more than one batch, with blank lines in between.
    lines = [*(4 * source), "", *source, " \t"]
    write(tmp_path, "lines.gz", lines)
    generate = ["generate", "--model", model, "--beam", beam, "--threads", 1]
    printed = succeed(*generate, "--source", tmp_path / "lines.gz", cwd=folder)
    assert printed.splitlines() == [*(4 * expected), "", *expected, ""]
    piped = subprocess.run(
        [PROGRAM, *map(str, generate)],
        input="\ufeff" + "\r\n".join(source),
        capture_output=True,
        encoding="utf-8",
        cwd=folder,
    )
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.splitlines() == expected
    (tmp_path / "empty").write_bytes(b"")
    assert succeed(*generate, "--source", tmp_path / "empty", cwd=folder) == ""


def test_the_first_interrupt_ends_a_wait_for_sentences(folder, model):
    process = subprocess.Popen(
        [PROGRAM, "generate", "--model", model],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
        # A background job of a shell ignores this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait = pathlib.Path(f"/proc/{process.pid}/wchan")
        deadline = time.monotonic() + 60
        # Wait until the command has read the model and is waiting for standard input.
        while "pipe" not in (told := wait.read_text()):
            if told == "0" and process.poll() is None and os.geteuid() != 0:
                pytest.skip("the kernel does not report why a process is waiting")
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) in (130, -signal.SIGINT)
        assert process.stdout.read() == b""
        assert process.stderr.read() == b""
    finally:
        process.kill()


def test_wrong_sentences_are_one_line(folder, model, tmp_path):
    generate = ["generate", "--model", model, "--source"]
    (tmp_path / "wrong").write_bytes(b"eins\nzw\xffei\n")
    message = refused(*generate, tmp_path / "wrong", cwd=folder)
    assert message == f"gnomon: {tmp_path / 'wrong'}: line 2 is not UTF-8"
    assert "cannot read the data file nowhere" in refused(*generate, "nowhere", cwd=folder)
    short = tmp_path / "short"
    succeed(
        *TRAIN, "--data", "data", "--source-language", "de", "--out", short, "--steps", 1,
        "--batch", 32, "--position", "learned", "--max-length", 8, cwd=folder,
    )  # fmt: skip
    (tmp_path / "long").write_text("eins\n" + "eins " * 8 + "\n")
    message = refused("generate", "--model", short, "--source", tmp_path / "long", cwd=folder)
    assert (
        "--source: line 2 has 9 tokens including its end token, but the position is defined only "
        "up to length 8" in message
    )


def test_a_beam_finds_other_translations_than_a_greedy_search(folder, model):
    found = []
    for beam in (1, 4):
        out = folder / f"other-{beam}"
        evaluate(model, "--beam", beam, "--translations", out)
        found.append(lines_of(out / "valid.en"))
    assert found[0] != found[1]


class Reference(torch.nn.Module):
    """The model built from gnomon's Python modules, without a cache."""

    def __init__(self, options: dict, cross_position: str) -> None:
        super().__init__()
        dim = options["dim"]
        self.dim = dim

        def attention(position: str) -> gnomon.nn.MultiheadAttention:
            return gnomon.nn.MultiheadAttention(
                dim,
                options["heads"],
                similarity=options["similarity"],
                position=position,
                max_length=options["max_length"],
            )

        def block(**more: torch.nn.Module) -> torch.nn.ModuleDict:
            return torch.nn.ModuleDict(
                {
                    "attention_norm": torch.nn.LayerNorm(dim),
                    "attention": attention(acting(options["position"])),
                    "mlp_norm": torch.nn.LayerNorm(dim),
                    "mlp_in": torch.nn.Linear(dim, options["mlp"]),
                    "mlp_out": torch.nn.Linear(options["mlp"], dim),
                    **more,
                }
            )

        def place(causal: bool) -> gnomon.nn.TokenPosition:
            return gnomon.nn.TokenPosition(
                options["position"], dim, options["max_length"], causal=causal
            )

        layers = range(options["depth"])
        self.embedding = torch.nn.Embedding(options["vocabulary"], dim)
        self.encoder = torch.nn.ModuleDict(
            {
                "blocks": torch.nn.ModuleList(block() for _ in layers),
                "norm": torch.nn.LayerNorm(dim),
                "token_position": place(False),
            }
        )
        self.decoder_blocks = torch.nn.ModuleList(
            block(cross_norm=torch.nn.LayerNorm(dim), cross_attention=attention(cross_position))
            for _ in layers
        )
        self.decoder_norm = torch.nn.LayerNorm(dim)
        self.decoder_position = place(True)

    def forward(self, source: list[int], target: list[int]) -> torch.Tensor:
        x = self.embedding(torch.tensor([source])) * math.sqrt(self.dim)
        x = self.encoder["token_position"](x)
        for layer in self.encoder["blocks"]:
            x = x + layer["attention"](layer["attention_norm"](x))
            x = x + self.mlp(layer, x)
        encoded = self.encoder["norm"](x)
        y = self.embedding(torch.tensor([target])) * math.sqrt(self.dim)
        y = self.decoder_position(y)
        for layer in self.decoder_blocks:
            y = y + layer["attention"](layer["attention_norm"](y), causal=True)
            y = y + layer["cross_attention"](layer["cross_norm"](y), encoded, query_offset=0)
            y = y + self.mlp(layer, y)
        return (self.decoder_norm(y) @ self.embedding.weight.T)[0]

    def mlp(self, layer: torch.nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        return layer["mlp_out"](torch.nn.functional.gelu(layer["mlp_in"](layer["mlp_norm"](x))))


def acting(position: str) -> str:
    """The components of a position that act inside attention."""
    added = ("sinusoidal", "learned", "conv", "cape")
    parts = [part for part in position.split("+") if part.split(":")[0] not in added]
    return "+".join(parts) or "none"


@pytest.mark.parametrize(
    ("similarity", "position", "cross"),
    mostly_long(
        [
            ("penumbral", "learned+t5", "alibi:slopes=learned"),
            ("dot", "rope+hype:tau=learned+conv:kernel=3:groups=2", "same"),
            ("dot", "relative:max_offset=4", "rope"),
        ]
    ),
)
def test_terms_act_in_all_attentions(folder, tmp_path, similarity, position, cross):
    """With and without a cache, loss and greedy translations equal those of the Python modules."""
    succeed(
        *TRAIN, "--data", folder / "data", "--source-language", "de", "--steps", 40, "--batch", 32,
        "--out", "run", "--similarity", similarity, "--position", position, "--cross-position",
        cross, "--learning-rate", 0.01, "--splits", "valid", cwd=tmp_path,
    )  # fmt: skip
    file = tmp_path / "run" / FILE
    at = evaluate(tmp_path / "run", "--beam", 1, "--splits", "valid", "--translations",
                  tmp_path / "out")["losses"][0]  # fmt: skip
    words = Words(file)
    reference = Reference(
        config_of(file)["model"], acting(position) if cross == "same" else cross
    ).eval()
    reference.load_state_dict(
        {
            name.removeprefix("model."): torch.from_numpy(tensor)
            for name, tensor in load_file(file).items()
            if name.startswith("model.")
        }
    )
    total, tokens, expected = 0.0, 0, []
    with torch.no_grad():
        for line, translation in zip(*pairs_of(folder, "val"), strict=True):
            source, target = words.encode(line), words.encode(translation)
            logits = reference(source, [words.end, *target[:-1]])
            total += torch.nn.functional.cross_entropy(
                logits, torch.tensor(target), reduction="sum"
            ).item()
            tokens += len(target)
            told = [words.end]
            while len(told) <= len(source) + 50:
                told.append(int(reference(source, told)[-1].argmax()))
                if told[-1] == words.end:
                    break
            expected.append(words.decode(told[1:]))
    assert at["loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert lines_of(tmp_path / "out" / "valid.en") == expected


def test_label_smoothing_affects_only_the_training_loss(folder, tmp_path):
    """Without label smoothing, the loss of a step is the mean over the tokens of its batch."""
    arguments = [*COMPARE, "--data", folder / "data", "--source-language", "de", "--steps", 1,
                 "--batch", 300, "--position", "rope", "--splits", "train",
                 "--learning-rate", 0]  # fmt: skip
    made = {}
    for smoothing in (0, 0.25):
        out = tmp_path / f"{smoothing}"
        succeed(*arguments, "--dropout", 0, "--label-smoothing", smoothing, "--out", out,
                cwd=tmp_path)  # fmt: skip
        run_of_it = json.loads((out / "results.json").read_text())["runs"][0]
        made[smoothing] = (run_of_it["curve"]["loss"][0], run_of_it["losses"][0]["loss"])
    # With a learning rate of 0, the weights do not change. The batch contains all pairs.
    assert made[0][0] == pytest.approx(made[0][1], abs=1e-5)
    assert made[0.25][1] == made[0][1]
    assert abs(made[0.25][0] - made[0][0]) > 0.01


# ---- Runs


def test_interrupted_training_resumes_to_the_same_weights(folder, tmp_path):
    arguments = [*TRAIN, "--data", folder / "data", "--source-language", "de", "--steps", 120,
                 "--batch", 16, "--position", "rope+cape", "--dropout", 0.3]  # fmt: skip
    more = ["--threads", 1, "--beam", 1]
    with Interrupted(arguments, folder, tmp_path, every=10, resume=more) as run:
        assert step_of(run.file) < 120


def test_two_processes_match_one(folder, tmp_path):
    """Of five pairs, one process has two and the other has three. Random draws match those of a
    single process.

    All attention rotates keys: otherwise, the key-projection bias would not affect the weights, and
    its gradient would be noise.
    """
    arguments = [*TRAIN, "--data", folder / "data", "--source-language", "de", "--steps", 5,
                 "--batch", 5, "--position", "rope+cape+conv:kernel=3:groups=2", "--dropout", 0.3,
                 "--cross-position", "same", "--evaluation-sentences", 2]  # fmt: skip
    succeed(*arguments, "--out", "one", cwd=tmp_path)
    run_two([*arguments, "--out", "two"], tmp_path)
    assert_same(tmp_path / "two", tmp_path / "one")


def test_compare_resumes_with_the_parts_that_it_began_with(folder, tmp_path):
    out = tmp_path / "run"
    table = succeed(
        *COMPARE, "--data", folder / "data", "--source-language", "de", "--steps", 3, "--batch", 8,
        "--position", "rope,learned", "--run", "umbral/none", "--out", out, cwd=tmp_path,
        draws=True,
    )  # fmt: skip
    for part in ("| BLEU at valid | BLEU at test_2016 |", "exact match at valid", "greedily"):
        assert part in table
    record = json.loads((out / "results.json").read_text())
    assert record["settings"]["splits"] == ["valid", "test_2016"]
    assert record["settings"]["source_language"] == "de"
    assert record["settings"]["target_language"] == "en"
    assert record["settings"]["beam"] == 1
    assert record["data"]["train_pairs"] == 300
    assert "exact match" in (out / "report.html").read_text().lower()
    before = losses(out)
    record["runs"].pop()
    (out / "results.json").write_text(json.dumps(record))
    succeed("compare", "--resume", out, cwd=tmp_path)
    assert losses(out) == before


def test_the_catalogue_goes_in_by_name(folder, tmp_path):
    """Positions that require causal attention or a grid are rejected by name."""
    catalogue = json.loads(succeed("list", "--json", cwd=folder))
    refused_ones = {"transformer_xl", "grid_bias", "relative2d"}
    arguments = [*COMPARE, "--data", folder / "data", "--source-language", "de", "--steps", 1,
                 "--batch", 4, "--cross-position", "same", "--evaluation-sentences", 2,
                 "--splits", "valid"]  # fmt: skip
    runs = [f"{entry['name']}/none" for entry in catalogue["similarities"]]
    for entry in catalogue["positions"]:
        if entry["use"] != "attention()" and entry["name"] not in refused_ones:
            runs.append(f"dot/{entry['name']}")
    runs = list(dict.fromkeys(runs))
    flags = [flag for one in runs for flag in ("--run", one)]
    succeed(*arguments, *flags, "--out", "all", cwd=tmp_path)
    record = json.loads((tmp_path / "all" / "results.json").read_text())
    assert len(record["runs"]) == len(runs)
    assert all(one["losses"][0]["loss"] < 50 for one in record["runs"])
    for name in ("transformer_xl", "grid_bias:shape=4x4", "alibi:shape=2x4"):
        line = refused(*arguments, "--position", name, "--out", "no", cwd=tmp_path)
        assert f"position '{name}'" in line


def test_positions_that_end_are_measured_as_far_as_they_go(folder, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for part, count in [("train", 5), ("valid", 5), ("test", 40)]:
        write(data, f"{part}.src", ["a b", "b a", " ".join("ab" * count)])
        write(data, f"{part}.tgt", ["a", "b", "a b a"])
    arguments = [*COMPARE, "--data", data, "--steps", 1, "--batch", 2, "--max-length", 12]
    succeed(*arguments, "--position", "learned,rope", "--out", "run", cwd=tmp_path)
    rows = (tmp_path / "run" / "table.md").read_text().splitlines()
    dashes = {row.split("|")[1].strip(): row.count(" – ") for row in rows if "dot/" in row}
    assert dashes == {"dot/learned": 3, "dot/rope": 0}
    line = refused(*arguments, "--position", "learned:length=8", "--out", "no", cwd=tmp_path)
    assert "defined only up to length 8, but --max-length is 12" in line
    assert "choose a position without a maximum length, or a smaller --max-length" in line


def test_subwords_and_bytes(folder, tmp_path):
    arguments = ["train", "--task", "translation", "--data", folder / "data", "--source-language",
                 "de", "--steps", 2, "--batch", 8, "--evaluation-sentences", 3, *TINY]  # fmt: skip
    succeed(*arguments, "--tokens", "bytes", "--out", "bytes", cwd=tmp_path)
    result = evaluate(tmp_path / "bytes", "--evaluation-sentences", 3, "--translations",
                      tmp_path / "out")  # fmt: skip
    assert result["tokens"]["size"] == 256
    # After two steps, the output is not meaningful, but it consists of valid UTF-8 lines.
    assert len(lines_of(tmp_path / "out" / "valid.en")) == 3
    done = run_gnomon(*arguments, "--vocabulary", 300, "--out", "subwords", cwd=tmp_path)
    if "libsentencepiece-dev" in done.stderr:
        assert done.returncode == 2
        pytest.skip("built without SentencePiece")
    assert done.returncode == 0, done.stderr
    result = evaluate(tmp_path / "subwords", "--evaluation-sentences", 3)
    assert result["tokens"]["kind"] == "subwords"
    # Both languages share one vocabulary.
    assert result["tokens"]["size"] == 300


def test_other_data_are_evaluated_with_the_languages_of_the_model(folder, model, tmp_path):
    source, target = sentences(7, seed=5)
    write(tmp_path, "test.de", source)
    write(tmp_path, "test.en", target)
    (at,) = evaluate(model, "--data", tmp_path)["losses"]
    assert at["split"] == "test"
    assert at["sentences"] == 7
    (tmp_path / "test.de").rename(tmp_path / "test.src")
    (tmp_path / "test.en").rename(tmp_path / "test.tgt")
    languages = ["--source-language", "src", "--target-language", "tgt"]
    assert evaluate(model, "--data", tmp_path, *languages)["losses"] == [at]


# ---- Wrong data


def good(folder: pathlib.Path) -> pathlib.Path:
    for part in ("train", "valid"):
        write(folder, f"{part}.src", ["a b c", "b a", "c"])
        write(folder, f"{part}.tgt", ["A B C", "B A", "C"])
    return folder


def cut_gzip(path: pathlib.Path) -> None:
    (path / "train.src").unlink()
    content = gzip.compress(b"a\nb\nc\n" * 50)
    (path / "train.src.gz").write_bytes(content[:-12])


def name_gzip(path: pathlib.Path) -> None:
    (path / "train.src").rename(path / "train.src.gz")


def damage_gzip(path: pathlib.Path) -> None:
    (path / "train.src").unlink()
    content = bytearray(gzip.compress(random.Random(0).randbytes(500)))
    content[60] ^= 0xFF
    (path / "train.src.gz").write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda p: write(p, "train.tgt", ["A", "B"]), "train.tgt has 2 lines, but "),
        (lambda p: write(p, "valid.tgt", ["A", " \t", "C"]), "valid.tgt: line 2 is empty"),
        (lambda p: (p / "train.src").write_bytes(b"a\nb\nc\xff\n"), "train.src: line 3 is not UTF"),
        (lambda p: (p / "train.src").write_bytes(b""), "train.src is empty"),
        (lambda p: (p / "valid.src").unlink(), "the split 'valid' has valid.tgt but no file for"),
        (
            lambda p: [f.unlink() for f in p.glob("train.*")],
            "contains no training data: train.src and",
        ),
        (
            lambda p: [f.unlink() for f in p.glob("valid.*")],
            "contains no evaluation data: valid.src",
        ),
        (
            lambda p: [f.unlink() for f in p.iterdir()],
            "contains no splits; expected files train.LANG",
        ),
        (lambda p: write(p, "train.src.gz", ["a"]), "contains both train.src and train.src.gz"),
        (lambda p: write(p, "dev.src", ["a"]), "contains both "),
        (lambda p: [f.rename(f.with_suffix(".de")) for f in p.glob("*.src")], "--source-language"),
        (cut_gzip, "train.src.gz is truncated"),
        (damage_gzip, "train.src.gz is damaged"),
        (name_gzip, "train.src.gz is not gzipped, although its name ends in .gz"),
    ],
)
def test_wrong_data_are_one_line(tmp_path, spoil, part):
    data = tmp_path / "data"
    data.mkdir()
    spoil(good(data))
    line = refused(*TRAIN, "--data", data, "--batch", 2, "--steps", 1, cwd=tmp_path)
    assert part in line
    assert str(data) in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--data", "nowhere"], "no such data folder: nowhere"),
        (["--data", "data/train.src"], "is not a folder"),
        (["--splits", "test"], "--splits: 'test' is not a split of data, which has train, valid"),
        (["--splits", "valid,valid"], "--splits: valid is given twice"),
        (["--source-language", "de"], "choose two with --source-language and --target-language"),
        (["--source-language", "tgt", "--target-language", "tgt"], "are both 'tgt'"),
        (
            ["--source-language", "fr", "--target-language", "it"],
            "contains no split for the languages 'fr' and 'it'",
        ),
        (["--beam", 0], "--beam is 0"),
        (["--label-smoothing", 1], "--label-smoothing is 1"),
        (["--max-length", 2, "--batch", 3], "2 tokens (--max-length), but --batch is 3"),
        (["--cross-position", "sinusoidal"], "the position 'sinusoidal' of cross-attention"),
        (["--cross-position", "bogus"], "bogus"),
        (["--heads", 5], "dim is 32; expected a multiple of heads, 5"),
        (["--dim", 10**7], "not enough memory for --dim 10000000"),
        (["--vocabulary", 2], "--vocabulary is 2"),
    ],
)
def test_wrong_words_are_one_line(tmp_path, arguments, part):
    (tmp_path / "data").mkdir()
    good(tmp_path / "data")
    words = [*TRAIN, "--data", "data", "--batch", 2, "--steps", 1]
    for flag in arguments[::2]:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    assert part in refused(*words, *arguments, cwd=tmp_path)


# ---- Real data


@pytest.mark.long
def test_multi30k(tmp_path):
    if not (DATA / "multi30k").exists():
        pytest.skip("no ../shared/data/multi30k")
    done = run_gnomon(
        "train", "--task", "translation", "--data", DATA / "multi30k", "--source-language", "de",
        "--steps", 2, "--batch", 16, "--vocabulary", 1000, "--evaluation-sentences", 2, "--out",
        "run", *TINY, cwd=tmp_path,
    )  # fmt: skip
    if "libsentencepiece-dev" in done.stderr:
        pytest.skip("built without SentencePiece")
    assert done.returncode == 0, done.stderr
    assert "29000 pairs of sentences" in done.stderr
    assert "validation at split test_2016_flickr" in done.stdout


def test_scan(tmp_path):
    """Runs the commands from docs/tasks.md."""
    if not (DATA / "scan").exists():
        pytest.skip("no ../shared/data/scan")
    for part, name in [("train", "tasks_train_length.txt"), ("test", "tasks_test_length.txt")]:
        lines = (DATA / "scan" / name).read_text().splitlines()
        pairs = [line.removeprefix("IN: ").split(" OUT: ") for line in lines]
        write(tmp_path, f"{part}.src", [source for source, _ in pairs])
        write(tmp_path, f"{part}.tgt", [target for _, target in pairs])
    succeed(
        *TRAIN, "--data", tmp_path, "--steps", 2, "--batch", 8, "--evaluation-sentences", 2,
        "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    (at,) = evaluate(tmp_path / "run", "--evaluation-sentences", 2)["losses"]
    assert at["split"] == "test"
    assert 0 <= at["exact_match"] <= 1
