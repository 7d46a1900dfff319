"""Adaptive embeddings and the tied adaptive softmax."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_cli import copy_with_steps, refused, succeed

from gnomon.lab.models import LanguageModel, load_checkpoint, save_checkpoint
from gnomon.lab.models._adaptive import AdaptiveEmbedding

pytestmark = pytest.mark.cpu("runs the program, which has --device")

VOCABULARY, DIM, CUTOFFS = 57, 64, [7, 20]
TINY = ["--dim", 32, "--depth", 2, "--heads", 2, "--mlp", 24, "--batch", 4, "--length", 12]


def torch_softmax(embedding, cutoffs):
    """PyTorch's adaptive softmax with the same weights; its tail weights are not tied."""
    vocabulary, dim = embedding.bounds[-1], embedding.weight.shape[1]
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(dim, vocabulary, cutoffs, div_value=4.0)
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat([embedding.weight, embedding.clusters]))
        for band, (down, up) in enumerate(theirs.tail, 1):
            down.weight.copy_(embedding.get_parameter(f"projection_{band}").T)
            up.weight.copy_(embedding.get_parameter(f"table_{band}"))
    return theirs.to(embedding.weight.dtype)


def rows_of(embedding, tokens):
    """Each token's embedding, computed directly from the definition."""
    rows = []
    for token in tokens.flatten().tolist():
        band = sum(token >= end for end in embedding.bounds[1:-1])
        row = embedding.get_parameter(f"table_{band}")[token - embedding.bounds[band]]
        if band > 0:
            row = embedding.get_parameter(f"projection_{band}") @ row
        rows.append(row)
    return torch.stack(rows).view(*tokens.shape, -1)


@pytest.mark.parametrize("cutoffs", [[1], [7, 20], [3, 5, 56], [10, 20, 30]])
def test_it_is_the_published_softmax_and_its_transpose(cutoffs):
    torch.manual_seed(len(cutoffs))
    embedding = AdaptiveEmbedding(VOCABULARY, DIM, cutoffs).double()
    theirs = torch_softmax(embedding, cutoffs)
    x = torch.randn(5, 8, DIM, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (5, 8))
    targets[0] = 0  # a band may be absent from a row
    flat = x.flatten(0, 1)
    expected = theirs.log_prob(flat).view(5, 8, VOCABULARY)
    found = embedding.log_probabilities(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(5, 8, dtype=torch.float64))
    losses = embedding.losses(x, targets)
    torch.testing.assert_close(losses.flatten(), -theirs(flat, targets.flatten()).output)
    torch.testing.assert_close(embedding(targets), rows_of(embedding, targets))

    parameters = dict(embedding.named_parameters())
    weights = torch.randn(5, 8, dtype=torch.float64)
    by_losses = torch.autograd.grad((losses * weights).sum(), [x, *parameters.values()])
    by_all = torch.autograd.grad(
        -(found.gather(2, targets[..., None])[..., 0] * weights).sum(), [x, *parameters.values()]
    )
    torch.testing.assert_close(by_losses, by_all)


def test_bands_that_no_token_is_of_have_gradients_of_zero():
    embedding = AdaptiveEmbedding(VOCABULARY, DIM, CUTOFFS)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    (embedding(tokens).sum() + embedding.losses(torch.randn(2, 3, DIM), tokens).sum()).backward()
    for name, parameter in embedding.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith(("_1", "_2")):
            assert not parameter.grad.any(), name


@pytest.mark.parametrize("adaptive", [(), CUTOFFS])
def test_losses_are_those_of_the_logits(adaptive):
    torch.manual_seed(3)
    model = LanguageModel(VOCABULARY, DIM, 2, 2, 24, position="rope", adaptive=adaptive).eval()
    tokens, targets = torch.randint(VOCABULARY, (2, 3, 9))
    with torch.no_grad():
        logits = model(tokens)
        expected = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        torch.testing.assert_close(model.losses(tokens, targets), expected)
        # A row with two documents; tokens of different documents do not attend to each other.
        places = {"positions": [0, 1, 2, 3, 0, 1, 2, 3, 4], "segments": [0] * 4 + [1] * 5}
        apart = torch.cat(
            [
                model.losses(tokens[:, :4], targets[:, :4]),
                model.losses(tokens[:, 4:], targets[:, 4:]),
            ],
            1,
        )
        torch.testing.assert_close(model.losses(tokens, targets, **places), apart)


def test_words_from_training_to_text(tmp_path):
    words = " ".join(f"w{n % (3 + n % 40)}" for n in range(4000))
    (tmp_path / "text.txt").write_text("\n".join(words[n : n + 90] for n in range(0, 16000, 90)))
    arguments = ["--data", "text.txt", "--tokens", "words", *TINY, "--position", "rope"]
    short = ["train", *arguments, "--adaptive", "5,20", "--warmup", 1]
    succeed(*short, "--steps", 4, "--out", "run", cwd=tmp_path)
    tensors = load_file(tmp_path / "run/checkpoint.safetensors")
    shapes = {
        name.removeprefix("model.embedding."): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith("model.embedding.")
    }
    vocabulary = 5 + 15 + shapes["table_2"][0]
    assert shapes == {
        "table_0": (5, 32),
        "table_1": (15, 8),
        "table_2": (vocabulary - 20, 2),
        "projection_1": (32, 8),
        "projection_2": (32, 2),
        "clusters": (2, 32),
    }
    evaluate = ["eval", "--model", "run", "--lengths", 12, "--json"]
    at = json.loads(succeed(*evaluate, cwd=tmp_path))["losses"][0]
    model = load_checkpoint(tmp_path / "run").model
    assert model.options["adaptive"] == [5, 20]
    # The Python model must predict the words that the program generates.
    said = succeed("generate", "--model", "run", "--prompt", "w1 w2", "--tokens", 8,
                   "--temperature", 0, cwd=tmp_path).split()  # fmt: skip
    listed = tensors["tokens.vocabulary"].numpy().tobytes().decode().split()
    tokens = torch.tensor([[listed.index(word) for word in said if word in listed]])
    with torch.no_grad():
        assert model(tokens[:, :2])[0, -1].argmax() == tokens[0, 2]
    assert at["loss"] < 7
    # Training continues from a checkpoint file.
    (tmp_path / "more").mkdir()
    file = tmp_path / "more/checkpoint.safetensors"
    copy_with_steps(tmp_path / "run/checkpoint.safetensors", file, 6)
    succeed("train", "--resume", "more", cwd=tmp_path)
    assert not load_file(file)["model.embedding.table_2"].equal(tensors["model.embedding.table_2"])
    checkpoint = load_checkpoint(tmp_path / "run")
    save_checkpoint(tmp_path / "copy.safetensors", model, checkpoint.tokenizer)
    printed = succeed("eval", "--model", "copy.safetensors", "--data", "text.txt", *evaluate[3:],
                      cwd=tmp_path)  # fmt: skip
    assert json.loads(printed)["losses"][0]["loss"] == at["loss"]


def test_cutoffs_may_exceed_the_number_of_bytes(tmp_path):
    words = [f"w{n}" for n in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(" ".join(words) for _ in range(12)))
    arguments = ["train", "--data", "text.txt", "--tokens", "words", *TINY, "--steps", 1]
    succeed(*arguments, "--adaptive", "20,300", "--out", "run", cwd=tmp_path)
    table = load_file(tmp_path / "run/checkpoint.safetensors")["model.embedding.table_1"]
    assert table.shape == (280, 32 // 4)
    printed = refused(*arguments, "--adaptive", "20,3000", "--out", "none", cwd=tmp_path)
    assert "expected increasing numbers from 1 to " in printed
    assert not (tmp_path / "none").exists()


def test_what_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 90)
    arguments = ["train", "--data", "text.txt", "--out", "run", *TINY, "--steps", 1]
    for cutoffs in ("9,4", "4,4", "256", "0"):
        printed = refused(*arguments, "--adaptive", cutoffs, cwd=tmp_path)
        assert "--adaptive" in printed, cutoffs
    for cutoffs in ([9, 4], [4, 4], [VOCABULARY], [0]):
        with pytest.raises(ValueError, match="adaptive"):
            LanguageModel(VOCABULARY, DIM, 2, 2, 24, adaptive=cutoffs)
    with pytest.raises(TypeError, match="adaptive"):
        LanguageModel(VOCABULARY, DIM, 2, 2, 24, adaptive=5)
    with pytest.raises(TypeError, match=r"adaptive\[1\]"):
        LanguageModel(VOCABULARY, DIM, 2, 2, 24, adaptive=[5, "9"])
    model = LanguageModel(VOCABULARY, DIM, 2, 2, 24, adaptive=CUTOFFS)
    with pytest.raises(ValueError, match="tokens are outside the vocabulary"):
        model(torch.tensor([[VOCABULARY]]))
    with pytest.raises(ValueError, match="targets are outside the vocabulary"):
        model.losses(torch.tensor([[1]]), torch.tensor([[-1]]))
    with pytest.raises(ValueError, match="targets have shape"):
        model.losses(torch.tensor([[1]]), torch.tensor([1]))
