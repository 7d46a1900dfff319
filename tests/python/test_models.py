"""Tests checkpoints shared by the command line and the Python package, and the Python model."""

import copy
import json
import math
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_cli import copy_with_steps, refused, succeed

from gnomon.lab import _safetensors
from gnomon.lab._program import options as program_options
from gnomon.lab.inspect.__main__ import main as inspect
from gnomon.lab.models import (
    LanguageModel,
    LanguageModelCache,
    LanguageModelMemory,
    Tokenizer,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from gnomon.nn import KVCache

FILE = "checkpoint.safetensors"
LENGTH = 24
TINY = ["--dim", 16, "--depth", 2, "--heads", 2, "--mlp", 32, "--batch", 4, "--length", LENGTH]
SENTENCE = "the quick brown fox jumps over a lazy dog and runs\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    (path / "text").mkdir()
    (path / "text" / "train.txt").write_text(SENTENCE * 40)
    # The validation text is one window long, in bytes here and in words below.
    (path / "text" / "valid.txt").write_text((SENTENCE * 4)[: LENGTH + 1])
    (path / "words").mkdir()
    (path / "words" / "train.txt").write_text(SENTENCE * 40)
    (path / "words" / "valid.txt").write_text(" ".join((SENTENCE.split() * 4)[: LENGTH + 1]))
    return path


def train(folder, name, *arguments, data="text"):
    out = folder / f"run {name}"
    succeed(
        *("train", "--data", data, "--out", out, "--steps", 3, "--warmup", 1, *TINY, *arguments),
        cwd=folder,
    )
    return out


def evaluated(folder, model, data):
    """The loss reported by the program."""
    printed = succeed(
        *("eval", "--model", model, "--data", data, "--lengths", LENGTH, "--memory", 0, "--json"),
        cwd=folder,
    )
    (at,) = json.loads(printed)["losses"]
    assert at["windows"] == 1
    return at["loss"]


def window(folder, data, tokenizer):
    """The validation text as tokens (1, LENGTH + 1)."""
    text = (folder / data / "valid.txt").read_bytes()
    if tokenizer.kind == "words":
        words = tokenizer.vocabulary.split(b"\n")
        return torch.tensor([[words.index(word) for word in text.split()]])
    return torch.tensor([list(text)])


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    assert logits.shape == (1, LENGTH, model.options["vocabulary"])
    return torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])


MODELS = {
    "cone + HyPE": ["--similarity", "penumbral", "--position", "rope+hype:tau=learned"],
    "transformer_xl": ["--position", "transformer_xl", "--memory", LENGTH],
    "learned": ["--similarity", "umbral:score=log", "--position", "learned+t5", "--dropout", 0.2],
    "words": ["--position", "absolute_keys+conv:kernel=3:groups=2", "--tokens", "words"],
}


@pytest.mark.cpu("models are loaded on the CPU")
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, folder, tmp_path):
    data = "words" if name == "words" else "text"
    trained = train(folder, name, *MODELS[name], data=data)
    state = torch.get_rng_state()
    checkpoint = load_checkpoint(trained)
    assert torch.equal(torch.get_rng_state(), state)
    assert checkpoint.tokenizer.kind == ("words" if name == "words" else "bytes")
    model, training = checkpoint.model, checkpoint.training
    assert training.step == 3
    assert not model.training
    tokens = window(folder, data, checkpoint.tokenizer)
    expected = evaluated(folder, trained, data)
    assert loss_of(model, tokens).item() == pytest.approx(expected, rel=2e-6)

    # Train one step in Python; the command then reads the result.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    with torch.no_grad():
        after = loss_of(model, tokens).item()
    assert after < expected - 0.1
    path = tmp_path / "alone"
    save_checkpoint(path, model, checkpoint.tokenizer)
    assert evaluated(folder, path, data) == pytest.approx(after, rel=2e-6)

    again = load_checkpoint(path)
    assert again.training is None
    assert again.tokenizer == checkpoint.tokenizer
    assert again.model.options == model.options
    for (name, ours), theirs in zip(
        model.state_dict().items(), again.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.cpu("the program")
def test_a_model_without_training_state_at_the_command_line(tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(dim=16, depth=1, heads=2, mlp=32, position="alibi", max_length=LENGTH)
    save_checkpoint(tmp_path / FILE, model)
    (tmp_path / "text.txt").write_text(SENTENCE * 40)
    assert "contains only a model; --resume also needs" in refused(
        "train", "--resume", tmp_path, cwd=tmp_path
    )
    assert "contains only a model, with no data path; pass --data" in refused(
        "eval", "--model", tmp_path, cwd=tmp_path
    )
    printed = json.loads(
        succeed("eval", "--model", tmp_path, "--data", "text.txt", "--json", cwd=tmp_path)
    )
    assert printed["step"] is None
    assert [at["length"] for at in printed["losses"]] == [LENGTH, 2 * LENGTH, 4 * LENGTH]
    arguments = ["--model", tmp_path, "--prompt", "the", "--temperature", 0, "--tokens", 5]
    text = succeed("generate", *arguments, cwd=tmp_path)
    cache = LanguageModelCache(depth=1)
    new, fresh = b"", torch.tensor([list(b"the")])
    with torch.no_grad():
        for _ in range(5):
            fresh = model(fresh, cache)[:, -1:].argmax(-1)
            new += bytes(fresh[0].tolist())
    assert text.rstrip("\n") == "the" + new.decode(errors="backslashreplace").rstrip("\n")
    picture = tmp_path / "decay.png"
    assert inspect(["decay", "--model", str(tmp_path), "--out", str(picture)]) == 0
    assert picture.exists()


def test_resuming_a_checkpoint_written_by_python(folder):
    """The training state passes through Python bitwise unchanged, including the memory."""
    original = train(folder, "state", "--position", "rope+conv:kernel=3:groups=2", "--memory", 40)
    copy = folder / "state copy"
    copy.mkdir()
    checkpoint = load_checkpoint(original)
    assert checkpoint.training.memory.keys() == {"layers.0", "layers.1", "embeddings"}
    checkpoint.training.options["steps"] = 5
    save_checkpoint(
        copy / FILE, checkpoint.model, checkpoint.tokenizer, training=checkpoint.training
    )
    copy_with_steps(original / FILE, original / FILE, steps=5)
    files = []
    for run in (original, copy):
        succeed("train", "--resume", run, cwd=folder)
        files.append(load_file(run / FILE))
        assert load_checkpoint(run).training.step == 5
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


@pytest.mark.cpu("the program")
def test_it_begins_as_the_programs_model_does(folder):
    arguments = ["--similarity", "hyperbolic", "--position", "learned+relative+kerple"]
    out = train(folder, "beginning", *arguments, "--learning-rate", 0, "--weight-decay", 0)
    theirs = load_checkpoint(out).model
    torch.manual_seed(0)
    ours = LanguageModel(**theirs.options).state_dict()
    drawn = 0
    for name, tensor in theirs.state_dict().items():
        if tensor.numel() == 1 or tensor.std() == 0:
            torch.testing.assert_close(ours[name], tensor)
        elif name.endswith(("_theta", "_start")):
            torch.testing.assert_close(ours[name], tensor)
        else:
            drawn += 1
            # The tolerance is five standard errors of the ratio of two standard deviations.
            bound = 1 + 5 * math.sqrt(1 / tensor.numel())
            assert 1 / bound < (ours[name].std() / tensor.std()).item() < bound, name
    assert drawn >= 1 + 2 * 7 + 1


@pytest.mark.parametrize("position", ["transformer_xl", "rope+conv:kernel=3:groups=2"])
def test_caches_and_memories(position):
    torch.manual_seed(0)
    model = LanguageModel(11, 16, 2, 2, 32, position=position, dropout=0.5).double().eval()
    tokens = torch.randint(11, (3, 20))
    expected = model(tokens)
    for known in ({"cache": LanguageModelCache(2)}, {"memory": LanguageModelMemory(20)}):
        parts = [model(part, **known) for part in tokens.split([5, 1, 7, 7], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected)
    memory = LanguageModelMemory(4)
    for part in tokens.split(10, 1):
        last = model(part, memory=memory)
    assert memory.length() == 4
    assert memory.tokens.length() == 20
    assert not torch.allclose(last, expected[:, 10:])
    assert all(not layer.requires_grad for layer in memory.layers)
    memory.reset()
    torch.testing.assert_close(model(tokens, memory=memory), expected)
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def state_of(known):
    """The complete contents of a cache or a memory."""
    layers = [
        # assert_close does not accept strings.
        vars(layer) | {"_rotation": None} if isinstance(layer, KVCache) else layer
        for layer in known.layers
    ]
    return copy.deepcopy((layers, vars(known.tokens)))


REFUSED = {
    "another batch": (
        ValueError,
        "batch size 2 and the tokens have batch size 1",
        {"tokens": (1, 2)},
    ),
    "another depth": (ValueError, "2 layers and the model has 3", {"depth": 3}),
    "beyond the vocabulary": (ValueError, "tokens are outside", {"vocabulary": 2}),
    "by a layer": (RuntimeError, "no layer", {"break": "blocks.1"}),
    "by the last norm": (RuntimeError, "no layer", {"break": "norm"}),
}


@pytest.mark.real_device
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["cache", "memory"])
@torch.no_grad()
def test_a_refused_call_changes_nothing(kind, name, device):
    if device.type == "cuda" and name == "beyond the vocabulary":
        pytest.skip("values of GPU tensors are not checked")
    error, message, other = REFUSED[name]
    torch.manual_seed(0)
    position = "conv:kernel=3:groups=2+rope"
    tokens = torch.arange(8).view(2, 4)

    def model(vocabulary=11, depth=2):
        return LanguageModel(vocabulary, 8, depth, 2, 16, position=position).eval()

    first = model()
    known = LanguageModelCache(2) if kind == "cache" else LanguageModelMemory(3)
    holders = [known.tokens, *(known.layers if kind == "cache" else [])]
    first(tokens, **{kind: known})
    before = state_of(known)
    second = model(other.get("vocabulary", 11), other.get("depth", 2))
    if "break" in other:

        def refuse(*_):
            raise RuntimeError("no layer")

        second.get_submodule(other["break"]).register_forward_pre_hook(refuse)
    given = torch.arange(4).view(2, 2) if "tokens" not in other else torch.zeros(*other["tokens"])
    with pytest.raises(error, match=message):
        second(given.long(), **{kind: known})
    torch.testing.assert_close(state_of(known), before, rtol=0, atol=0)
    # The rejected cache or memory can still be extended.
    first(tokens, **{kind: known})
    assert holders == [known.tokens, *(known.layers if kind == "cache" else [])]
    assert known.tokens.length() == 8


@pytest.mark.cpu("models are loaded on the CPU")
def test_beyond_the_longest_text_or_another_dtype():
    model = LanguageModel(11, 8, 2, 2, 16, position="learned+absolute_keys", max_length=6)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    cache, memory = LanguageModelCache(2), LanguageModelMemory(6)
    for known in ({"cache": cache}, {"memory": memory}):
        model(tokens, **known)
        with pytest.raises(ValueError, match=r"length of 8; expected at most|the table has 6 rows"):
            model(tokens, **known)
        model(tokens[:, :2], **known)
    with pytest.raises(
        TypeError, match=r"memory has dtype torch\.float32 and the model has dtype torch"
    ):
        model.double()(tokens[:, :1], memory=memory)
    with pytest.raises(TypeError, match="the memory is on cpu and the model is on meta"):
        model.float().to("meta")(tokens.to("meta"), memory=memory)
    assert memory.tokens.length() == cache.tokens.length() == 6


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: LanguageModel(dim=10, heads=3), ValueError, "dim is 10; expected a multiple of"),
        (lambda m: LanguageModel(depth=0), ValueError, "depth is 0; expected at least 1"),
        (lambda m: LanguageModel(depth=1.0), TypeError, "depth is a float; expected an integer"),
        (lambda m: LanguageModel(dropout=1), ValueError, r"dropout is 1; expected \[0, 1\)"),
        (lambda m: LanguageModel(position=3), TypeError, "position is an int; expected"),
        (lambda m: LanguageModel(similarity="dott"), ValueError, 'unknown similarity "dott"'),
        (lambda m: m([[1]]), TypeError, "tokens is a list; expected a Tensor"),
        (lambda m: m(torch.tensor([[256]])), ValueError, "tokens are outside .*from 0 to 255"),
        (lambda m: m(torch.tensor([[-1]])), ValueError, "tokens are outside .*from 0 to 255"),
        (lambda m: m(torch.zeros(1, 1, device="meta").long()), TypeError, "tokens are on meta and"),
        (lambda m: m(torch.ones(1, 1).long(), 1), TypeError, "cache is an int; expected a Lang"),
        (
            lambda m: m(torch.ones(1, 1).long(), None, 1),
            TypeError,
            "memory is an int; expected a L",
        ),
        (lambda m: LanguageModelCache("a"), TypeError, "depth is a str; expected an integer"),
        (lambda m: LanguageModelCache(0), ValueError, "depth is 0; expected at least 1"),
        (lambda m: m(torch.zeros(1, 2)), TypeError, "tokens have dtype torch.float32; expected"),
        (lambda m: m(torch.zeros(2).long()), ValueError, r"shape \(2,\); expected \(B, L\)"),
        (
            lambda m: m(torch.ones(1, 1).long(), LanguageModelCache(1), LanguageModelMemory(1)),
            ValueError,
            "a cache and a memory are both given",
        ),
        (lambda m: LanguageModelMemory(-1), ValueError, "max_length is -1; expected at least 0"),
        (lambda m: Tokenizer("letters"), ValueError, "kind is 'letters'; expected one of bytes"),
        (lambda m: Tokenizer("words"), ValueError, "vocabulary of words has 0 bytes; expected a"),
        (lambda m: Tokenizer("bytes", b"a"), ValueError, "bytes has 1 bytes; expected none"),
        *[
            (lambda m, words=words: Tokenizer("words", words), ValueError, message)
            for words, message in {
                b"<unk>\n<eos>\na\nb\na\n": "line 5 of the word vocabulary appears twice",
                b"<unk>\n<eos>\n\na\n": "line 3 .* is not a single word",
                b"<unk>\n<eos>\na b\n": "line 3 .* is not a single word",
                b"<unk>\n<eos>\na\r\n": "line 3 .* is not a single word",
                b"<unk>\n<eos>\na": "line 3 .* has no end",
                b"<eos>\n<unk>\na\n": "begins with .*expected <unk>, <eos> and a word",
                b"<unk>\n<eos>\n": "begins with .*expected <unk>, <eos> and a word",
            }.items()
        ],
        (lambda m: Tokenizer("words", "a\n"), TypeError, "vocabulary is a str; expected bytes"),
        (
            lambda m: load_checkpoint(3),
            TypeError,
            "load_checkpoint: path is an int; expected a str",
        ),
        (
            lambda m: save_checkpoint(3, m),
            TypeError,
            "save_checkpoint: path is an int; expected a ",
        ),
        (lambda m: save_checkpoint("x", m.norm), TypeError, "model is a LayerNorm; expected a"),
        (lambda m: save_checkpoint("x", m, "bytes"), TypeError, "tokenizer is a str; expected a"),
        (lambda m: save_checkpoint("x", m, None, {}), TypeError, "training is a dict; expected a"),
        (
            lambda m: save_checkpoint("x", m, Tokenizer("words", b"<unk>\n<eos>\ncat\n")),
            ValueError,
            "vocabulary of words has 3 tokens, but the model has 256",
        ),
    ],
)
def test_wrong_arguments(call, kind, message, tmp_path, monkeypatch, device):
    if device.type == "cuda" and message.startswith("tokens are outside"):
        pytest.skip("values of GPU tensors are not checked")
    monkeypatch.chdir(tmp_path)
    model = LanguageModel(dim=4, depth=1, heads=1, mlp=4)
    with pytest.raises(kind, match=f"gnomon.*{message}"):
        call(model)
    assert list(tmp_path.iterdir()) == []


def without_norm(model):
    model.norm = torch.nn.Identity()


def weight_normalised(model):
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp_in)


def widened(model):
    model.blocks[0].mlp_in = torch.nn.Linear(4, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_norm, r"model lacks the tensor 'norm\.bias'"),
        (weight_normalised, r"model has the tensor 'blocks\.0\.mlp_in\.parametrizations"),
        (widened, r"'blocks\.0\.mlp_in\.bias' of shape \[5\]; expected \[4\]"),
    ],
)
def test_a_model_of_other_tensors_is_not_saved(change, message, tmp_path):
    model = LanguageModel(dim=4, depth=1, heads=1, mlp=4, position="relative")
    state = torch.get_rng_state()
    save_checkpoint(tmp_path / "whole", model)
    assert torch.equal(torch.get_rng_state(), state)
    change(model)
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "file", model)
    assert not (tmp_path / "file").exists()


@pytest.mark.cpu("models are loaded on the CPU")
def test_options_are_read_only():
    model = LanguageModel(dim=4, depth=1, heads=1, mlp=4)
    with pytest.raises(TypeError):
        model.options["dim"] = 8
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert twin.options == model.options
    assert repr(twin) == repr(model)


def training(**fields):
    """A valid training state, except for the given fields."""
    sound = {
        "options": {
            name: {"integer": 1, "text": option.default}.get(option.kind, 0.5)
            for name, option in program_options("training").items()
        },
        "step": 3,
        "optimizer": {"exp_avg.x": torch.ones(1)},
        "memory": {},
        "memory_tokens": 0,
        "data": {"path": "text", "sha256": "0"},
    }
    return sound | fields


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"step": "3"}, TypeError, "step is a str; expected an integer"),
        ({"step": True}, TypeError, "step is a bool; expected an integer"),
        ({"step": -1}, ValueError, "step is -1; expected at least 0"),
        ({"memory_tokens": 1.5}, TypeError, "memory_tokens is a float; expected an integer"),
        ({"memory_tokens": -1}, ValueError, "memory_tokens is -1; expected at least 0"),
        ({"options": []}, TypeError, "options is a list; expected a dict"),
        ({"options": {}}, ValueError, "options lacks 'length'"),
        ({"options": {"length": "x"}}, TypeError, "length of options is a str; expected an int"),
        ({"options": {"clip": None}}, TypeError, "clip of options is a NoneType; expected a num"),
        ({"options": {"clip": math.inf}}, ValueError, "clip of options is inf; expected at most"),
        ({"data": {}}, ValueError, "data lacks 'path'"),
        ({"data": {"path": 1, "sha256": ""}}, TypeError, "path of data is an int; expected a str"),
        ({"data": None}, TypeError, "data is a NoneType; expected a dict"),
        ({"optimizer": {"x": 1}}, TypeError, "x is an int; expected a Tensor"),
        ({"memory": 1}, TypeError, "memory is an int; expected a dict"),
        ({"run": {"bytes": 1}}, ValueError, "run has 'bytes'; expected checkpoint_every and"),
        ({"run": {"evaluation_bytes": 0}}, ValueError, "evaluation_bytes of run is 0; expected at"),
        ({"run": {"checkpoint_every": 1.5}}, TypeError, "checkpoint_every of run is a float; exp"),
    ],
)
def test_wrong_training_states(fields, kind, message, tmp_path):
    if fields.get("options"):
        fields = {"options": training()["options"] | fields["options"]}
    with pytest.raises(kind, match=rf"gnomon\.models\.TrainingState: {message}"):
        TrainingState(**training(**fields))
    # A training state that has become invalid can be neither saved nor loaded.
    state = TrainingState(**training())
    model = LanguageModel(dim=4, depth=1, heads=1, mlp=4)
    path = tmp_path / "file"
    save_checkpoint(path, model, training=state)
    assert load_checkpoint(path).training.data == state.data
    tensors, metadata = _safetensors.read(path)
    for field, value in fields.items():
        setattr(state, field, value)
    with pytest.raises(kind, match=message):
        save_checkpoint(tmp_path / "other", model, training=state)
    assert not (tmp_path / "other").exists()
    if not fields.keys() & {"optimizer", "memory"}:
        config = json.loads(metadata["gnomon"])
        config |= {"training" if name == "options" else name: v for name, v in fields.items()}
        _safetensors.write(path, tensors, {"gnomon": json.dumps(config)})
        with pytest.raises(ValueError, match=f"is not a checkpoint.*{message}"):
            load_checkpoint(path)


def test_run_options_besides_training_are_kept(tmp_path):
    model = LanguageModel(dim=4, depth=1, heads=1, mlp=4)
    path = tmp_path / "file"
    save_checkpoint(path, model, training=TrainingState(**training(run={"evaluation_bytes": 9})))
    loaded = load_checkpoint(path).training
    assert loaded.run == {"evaluation_bytes": 9, "checkpoint_every": 500}
    save_checkpoint(path, model, training=loaded)
    assert load_checkpoint(path).training.run == loaded.run


def test_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    path = tmp_path / "file"
    model = LanguageModel(dim=4, depth=1, heads=1, mlp=4)
    opened = []

    def fsync(number: int) -> None:
        # At the second call, both writers have written their complete files.
        opened.append(sorted(p.name for p in tmp_path.iterdir()))
        if len(opened) == 1:
            save_checkpoint(path, model)

    monkeypatch.setattr("os.fsync", fsync)
    save_checkpoint(path, model)
    assert len(opened[1]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    load_checkpoint(path)


@pytest.mark.cpu("models are loaded on the CPU")
def test_loaded_under_other_modes(tmp_path):
    """The loaded parameters are trainable and on the CPU."""
    path = tmp_path / "file"
    original = LanguageModel(dim=4, depth=1, heads=1, mlp=4, position="relative+hype:tau=learned")
    save_checkpoint(path, original, training=TrainingState(**training()))
    for mode in (torch.inference_mode(), torch.device("meta"), torch.no_grad()):
        with mode:
            checkpoint = load_checkpoint(path)
        held = [*checkpoint.model.state_dict().values(), *checkpoint.training.optimizer.values()]
        assert not any(tensor.is_inference() for tensor in held)
        assert {tensor.device.type for tensor in held} == {"cpu"}
        checkpoint.model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        assert all(parameter.grad is not None for parameter in checkpoint.model.parameters())
        assert torch.equal(checkpoint.model.norm.weight, original.norm.weight)


def test_wrong_files(tmp_path):
    path = tmp_path / "file"
    save_checkpoint(path, LanguageModel(dim=4, depth=1, heads=1, mlp=4))
    tensors, metadata = _safetensors.read(path)
    whole = path.read_bytes()

    def refuses(message, path=path):
        with pytest.raises(ValueError, match=message) as caught:
            load_checkpoint(path)
        assert str(path) in str(caught.value)

    def config(**fields):
        return {"gnomon": json.dumps(json.loads(metadata["gnomon"]) | fields)}

    def model(**options):
        return config(model=json.loads(metadata["gnomon"])["model"] | options)

    refuses("no such checkpoint file or run folder", tmp_path / "absent")
    refuses("contains no checkpoint.safetensors", tmp_path)
    for content in (b"", whole[:-1], whole[:60], whole + b"x", b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        refuses("is not a valid safetensors file")
    weight = tensors["model.norm.weight"]
    without = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    for changed, meta, message in (
        (tensors, {}, "'gnomon' is missing"),
        (tensors, {"gnomon": "{"}, "is not a checkpoint"),
        (tensors, {"gnomon": "[]"}, "is not a checkpoint"),
        (tensors, config(format=2), "its format is 2; expected 1"),
        (tensors, config(format=1.0), "its format is 1.0; expected 1"),
        (tensors, config(format=True), "its format is True; expected 1"),
        (tensors, config(model=3), "the field 'model' is an int; expected an object"),
        (tensors, config(tokens=[]), "the field 'tokens' is a list; expected an object"),
        (tensors, model(depth="2"), "depth is a str; expected an integer"),
        (tensors, model(mlp=None), "mlp is a NoneType; expected an integer"),
        (
            tensors | {"tokens.vocabulary": torch.zeros(2, 2, dtype=torch.uint8)},
            metadata,
            "has 2 axes; expected uint8 and one",
        ),
        (tensors, config(tokens={"kind": "words"}), "vocabulary of words has 0 bytes"),
        (tensors, config(step=3), "'training' is missing"),
        (tensors, model(dim=2**40), "dim is 1099511627776; expected at most 1e"),
        (tensors, model(dim=2**30), "'model.embedding.weight' does not have the shape"),
        (tensors, model(depth=2**30), "fewer tensors than"),
        (tensors, model(position="bogus"), "bogus"),
        (tensors, model(dropout="no"), "dropout is a str"),
        (without, metadata, "norm.weight"),
        (tensors | {"model.norm.weight": weight.double()}, metadata, "expected float32"),
        (tensors | {"model.norm.weight": weight[:3]}, metadata, "norm.weight"),
        (tensors | {"more": weight}, metadata, "but its model has"),
    ):
        save_file({name: t.clone() for name, t in changed.items()}, path, meta)
        refuses(message)


@pytest.mark.cpu("models are loaded on the CPU")
def test_safetensors_of_ours_and_of_the_package(tmp_path):
    torch.manual_seed(0)
    tensors = {
        str(dtype): (10 * torch.randn(3, 5)).to(dtype) for dtype in _safetensors._DTYPES.values()
    }
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "é": torch.ones(1)}
    tensors["turned"] = torch.randn(4, 6).T
    _safetensors.write(tmp_path / "ours", tensors, {"key": "wört"})
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", {"key": "wört"})
    with safe_open(tmp_path / "ours", "pt") as content:
        assert content.metadata() == {"key": "wört"}
    theirs, metadata = _safetensors.read(tmp_path / "theirs")
    assert metadata == {"key": "wört"}
    for read in (load_file(tmp_path / "ours"), theirs, _safetensors.read(tmp_path / "ours")[0]):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name
    with pytest.raises(TypeError, match=r"x has dtype torch\.complex64; expected one of"):
        _safetensors.write(tmp_path / "complex", {"x": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(OSError, match="absent"):
        _safetensors.write(tmp_path / "absent" / "file", tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "theirs"}


HEADERS = {
    "a dtype": '{"x": {"dtype": "F8", "shape": [2], "data_offsets": [0, 8]}}',
    "a size": '{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
    "a negative size": '{"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    "an end": '{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}',
    "an order": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
    "more bytes than elements": '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "shared bytes": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
    ' "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    "a name twice": '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
    ' "x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    "64 bits": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
    ' "y": {"dtype": "F32", "shape": [0, 4611686018427387904], "data_offsets": [8, 8]}}',
    "no shape": '{"x": {"dtype": "F32", "data_offsets": [0, 8]}}',
    "metadata": '{"__metadata__": {"a": 1}, '
    '"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    "depth": "[" * 100000,
    "a minus": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-0, 8]}}',
    "half a pair": b'{"x\xed\xa0\x80": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    "UTF-16": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'.encode("utf-16-le"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_headers(name, tmp_path):
    header = HEADERS[name]
    header = header if isinstance(header, bytes) else header.encode()
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="is not a valid safetensors file") as caught:
        _safetensors.read(path)
    assert str(path) in str(caught.value)
