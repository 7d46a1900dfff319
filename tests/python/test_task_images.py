"""The tasks `images` and `volumes`: data, training and metrics compared with transformers' ViT and
PyTorch's own layers."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_cli import (
    ROOT,
    Interrupted,
    config_of,
    gnomon,
    refused,
    runs_of_the_catalogue,
    succeed,
)
from test_distributed_training import assert_same, run_two
from torch.nn import functional

from gnomon.lab.data.__main__ import main as make_data
from gnomon.lab.report import __main__ as report_program

pytestmark = pytest.mark.cpu("runs the program, which has --device")

FILE = "checkpoint.safetensors"
SHARED = ROOT.parent / "shared" / "data"
TINY = {"dim": 16, "depth": 2, "heads": 2, "mlp": 32, "batch": 5, "threads": 1}
SIZE = (12, 8)  # of the colour images; with patches of 4 pixels the grid is 3 x 2


def draw(count: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images as bytes, with the labels 0, 1 and 2 for brightness."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(count) % 3)
    pixels = generator.integers(0, 120, (count, *shape))
    pixels += 60 * labels.reshape(-1, *[1] * len(shape))
    return pixels.astype(np.uint8), labels


def sample(shape: tuple[int, ...], name: str = "images", **changed: np.ndarray) -> dict:
    arrays = {}
    for part, count, seed in (("train", 23, 0), ("valid", 11, 1)):
        arrays[f"{part}.{name}"], arrays[f"{part}.labels"] = draw(count, shape, seed)
    return arrays | {key.replace("_", ".", 1): value for key, value in changed.items()}


def tiny(**changed: int) -> list[object]:
    return [word for name, value in (TINY | changed).items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("images")
    save_file(sample((*SIZE, 3)), path / "colour")
    save_file(sample((8, 8)), path / "grey")
    save_file(sample((4, 6, 4), "volumes"), path / "volumes")
    return path


def train(
    folder: pathlib.Path, out: object, *words: object, task: str = "images", **changed: int
) -> None:
    succeed("train", "--task", task, "--out", out, *tiny(**changed), *words, cwd=folder)


def compare(
    folder: pathlib.Path, out: str, *words: object, task: str = "images", **changed: int
) -> dict:
    """The record of a comparison, without its report, which takes seconds and is tested
    elsewhere."""
    succeed(
        "compare", "--task", task, "--out", out, *tiny(**changed), *words, cwd=folder,
        GNOMON_PYTHON="/no/such/python",
    )  # fmt: skip
    return record_of(folder / out)


def evaluate(folder: pathlib.Path, model: object, *arguments: object) -> list[dict]:
    words = ["eval", "--model", model, "--threads", 1, "--json", *arguments]
    return json.loads(succeed(*words, cwd=folder))["losses"]


def record_of(folder: pathlib.Path) -> dict:
    return json.loads((folder / "results.json").read_text())


class Checkpoint:
    """A trained model as tensors, and the inputs from its validation images."""

    def __init__(self, folder: pathlib.Path, run: str, data: str):
        tensors = load_file(folder / run / FILE)
        self.options = config_of(folder / run / FILE)["model"]
        self.tensors = {
            name.removeprefix("model."): torch.from_numpy(tensor)
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        arrays = load_file(folder / data)
        self.labels = torch.from_numpy(arrays["valid.labels"])
        # Images are normalised by statistics of the training split, not by those in the checkpoint.
        train, valid = (
            torch.from_numpy(arrays[f"{part}.{self.name(arrays)}"]).double() / 255
            for part in ("train", "valid")
        )
        channels = self.options["channels"]
        if channels == 1:
            train, valid = train.unsqueeze(-1), valid.unsqueeze(-1)
        pixels = train.reshape(-1, channels)
        valid = (valid - pixels.mean(0)) / pixels.std(0, correction=0)
        self.images = valid.movedim(-1, 1).float()

    @staticmethod
    def name(arrays: dict) -> str:
        return "images" if "train.images" in arrays else "volumes"

    def layer(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Pre-norm layers built from PyTorch's own functions."""
        heads = self.options["heads"]

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return functional.layer_norm(x, x.shape[-1:], *self.layer(f"encoder.{name}"))

        for n in range(self.options["depth"]):
            block = f"blocks.{n}"
            normed = norm(f"{block}.attention_norm", x)
            q, k, v = (
                functional.linear(normed, *self.layer(f"encoder.{block}.attention.{part}_proj"))
                .unflatten(2, (heads, -1))
                .transpose(1, 2)
                for part in "qkv"
            )
            read = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + functional.linear(read, *self.layer(f"encoder.{block}.attention.out_proj"))
            hidden = functional.linear(
                norm(f"{block}.mlp_norm", x), *self.layer(f"encoder.{block}.mlp_in")
            )
            x = x + functional.linear(
                functional.gelu(hidden), *self.layer(f"encoder.{block}.mlp_out")
            )
        return norm("norm", x)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return functional.linear(features, *self.layer("head"))

    def check(self, measured: dict, logits: torch.Tensor) -> None:
        assert measured["loss"] == pytest.approx(
            functional.cross_entropy(logits, self.labels).item(), rel=1e-5, abs=1e-5
        )
        correct = (logits.argmax(1) == self.labels).double().mean().item()
        assert measured["accuracy"] == pytest.approx(correct, abs=1e-12)


def test_the_model_is_the_vit_of_transformers(folder):
    transformers = pytest.importorskip("transformers", minversion="5")
    train(folder, "vit", "--data", "colour", "--position", "learned", "--steps", 4,
          "--learning-rate", 0.01)  # fmt: skip
    ours = Checkpoint(folder, "vit", "colour")
    config = transformers.ViTConfig(
        image_size=SIZE, patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, layer_norm_eps=1e-5, num_labels=3,
    )  # fmt: skip
    theirs = transformers.ViTForImageClassification(config).eval()
    names = {
        "vit.embeddings.patch_embeddings.projection": "patches.projection",
        "vit.layernorm": "encoder.norm",
        "classifier": "head",
    }
    parts = {
        "layernorm_before": "attention_norm",
        "attention.q_proj": "attention.q_proj",
        "attention.k_proj": "attention.k_proj",
        "attention.v_proj": "attention.v_proj",
        "attention.o_proj": "attention.out_proj",
        "layernorm_after": "mlp_norm",
        "mlp.fc1": "mlp_in",
        "mlp.fc2": "mlp_out",
    }
    for n in range(2):
        for part, name in parts.items():
            names[f"vit.layers.{n}.{part}"] = f"encoder.blocks.{n}.{name}"
    state = {
        "vit.embeddings.cls_token": ours.tensors["class_token"],
        "vit.embeddings.position_embeddings": ours.tensors["encoder.token_position.learned0.table"],
    }
    for name, our_name in names.items():
        state[f"{name}.weight"], state[f"{name}.bias"] = ours.layer(our_name)
    expected = theirs.state_dict()
    assert state.keys() == expected.keys()
    theirs.load_state_dict({name: state[name].reshape(expected[name].shape) for name in expected})
    with torch.no_grad():
        logits = theirs(ours.images).logits
        (measured,) = evaluate(folder, "vit")
        ours.check(measured, logits)
        assert measured["size"] == "12x8"
        assert measured["images"] == 11
        # The loss is computed from the logits, for each image separately.
        arrays = load_file(folder / "colour")
        for n in range(3):
            one = {
                f"valid.{key}": arrays[f"valid.{key}"][n : n + 1] for key in ("images", "labels")
            }
            save_file(one, folder / "one")
            (measured,) = evaluate(folder, "vit", "--data", "one")
            loss = functional.cross_entropy(logits[n : n + 1], ours.labels[n : n + 1]).item()
            assert measured["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)


@torch.no_grad()
def test_convolutions_and_the_mean_of_the_tokens(folder):
    train(folder, "conv", "--data", "grey", "--stem", "conv", "--pool", "mean", "--steps", 3,
          "--learning-rate", 0.01)  # fmt: skip
    ours = Checkpoint(folder, "conv", "grey")
    x = ours.images
    for n in (0, 3):
        x = functional.conv2d(x, *ours.layer(f"stem.layers.{n}"), stride=2, padding=1)
        x = functional.gelu(functional.group_norm(x, 1, *ours.layer(f"stem.layers.{n + 1}")))
    assert x.shape[1:] == (16, 2, 2)
    x = functional.conv2d(x, *ours.layer("stem.layers.6")).flatten(2).transpose(1, 2)
    ours.check(evaluate(folder, "conv")[0], ours.head(ours.encode(x).mean(1)))


@torch.no_grad()
def test_volumes_of_other_sizes_use_other_grids(folder):
    words = ["--position", "sinusoidal:shape=grid", "--steps", 3]
    train(folder, "solid", "--data", "volumes", "--patch", 2, *words, task="volumes", dim=24)
    ours = Checkpoint(folder, "solid", "volumes")
    assert ours.options["position"] == "sinusoidal:shape=2x3x2:prefix=1"
    measured = evaluate(folder, "solid", "--sizes", "8,2x4x10")
    assert [at["size"] for at in measured] == ["4x6x4", 8, "2x4x10"]
    for at, size in zip(measured, [(4, 6, 4), (8, 8, 8), (2, 4, 10)], strict=True):
        images = functional.interpolate(ours.images, size, mode="trilinear")
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).movedim(1, 4)
        x = functional.linear(patches.flatten(4).flatten(1, 3), *ours.layer("patches.projection"))
        # As in He et al. 2022, each coordinate has a third of the columns, with alternating sines
        # and cosines.
        places = torch.cartesian_prod(*[torch.arange(length // 2) for length in size])
        rates = 10000 ** (-torch.arange(0, 8, 2).double() / 8)
        angles = places.unsqueeze(2) * rates
        waves = torch.stack((angles.sin(), angles.cos()), 3).flatten(1).float()
        x = torch.cat((ours.tensors["class_token"].expand(len(x), 1, 24), x + waves), 1)
        ours.check(at, ours.head(ours.encode(x)[:, 0]))


def test_learned_positions_end_with_their_grid(folder):
    on_grid = ["rope", "alibi", "hype:tau=learned", "t5", "cape", "sinusoidal", "kerple"]
    tables = [
        "grid_bias",
        "relative2d",
        "learned",
        "absolute_keys",
        "offset_bias:shape=grid:axis=1",
    ]
    raster = ["none", "rope", "alibi", "relative", "conv:kernel=3:groups=2"]
    positions = [*[f"{name}:shape=grid" for name in on_grid], *tables, *raster]
    record = compare(
        folder, "places", "--data", "colour", "--position", ",".join(positions), "--sizes", "16x12",
        "--steps", 2, "--evaluation-examples", 7,
    )  # fmt: skip
    labels = [c["position"] for c in record["settings"]["combinations"]]
    assert labels[:3] == [
        "rope:shape=3x2:prefix=1", "alibi:shape=3x2:prefix=1",
        "hype:tau=learned:shape=3x2:prefix=1",
    ]  # fmt: skip
    assert "grid_bias:shape=3x2:prefix=1" in labels
    assert "offset_bias:shape=3x2:axis=1:prefix=1" in labels
    assert len(labels) == len(positions)
    assert record["task"]["conditions"]["values"] == ["12x8", "16x12"]
    for combination, run in zip(record["settings"]["combinations"], record["runs"], strict=True):
        first, second = run["losses"]
        assert first["images"] == 7
        assert first["loss"] < 10
        assert 0 <= first["accuracy"] <= 1
        is_table = combination["position"].split(":")[0] in [t.split(":")[0] for t in tables]
        assert (second["accuracy"] is None) == is_table, combination["position"]
        assert (second["loss"] is None) == is_table


def test_every_similarity_and_position_that_there_is(folder):
    runs, positions = runs_of_the_catalogue(folder)
    for entry in positions:
        name = entry["name"]
        if entry["needs_causal"]:
            message = refused("train", "--task", "images", "--data", "grey", "--position", name,
                              *tiny(), cwd=folder)  # fmt: skip
            assert f"position '{name}'" in message
            assert "causal" in message
            continue
        runs += [f"penumbral/{name}"]
        if "grid" in entry["tokens"]:
            runs += [f"umbral/{name}:shape=grid"]
    runs = list(dict.fromkeys(runs))  # penumbral/none occurs twice
    flags = [flag for run in runs for flag in ("--run", run)]
    record = compare(folder, "all", "--data", "grey", *flags, "--steps", 1, dim=32)
    assert len(record["runs"]) == len(runs)
    assert all(run["losses"][0]["loss"] < 10 for run in record["runs"])


def test_positions_of_volumes(folder):
    words = ["--data", "volumes", "--patch", 2, "--steps", 1]
    on_grid = ["rope", "hype:tau=learned", "alibi", "grid_bias", "sinusoidal", "t5"]
    positions = ",".join(f"{name}:shape=grid" for name in on_grid) + ",learned,hype"
    record = compare(folder, "three", *words, "--position", positions, task="volumes", dim=24)
    table = (folder / "three" / "table.md").read_text()
    assert "dot/hype:tau=learned:shape=2x3x2:prefix=1" in table
    assert "Nats per volume" in table
    assert all(run["losses"][0]["loss"] < 10 for run in record["runs"])
    for name in ("relative2d", "cape:shape=grid"):
        message = refused("train", "--task", "volumes", *words, *tiny(dim=24), "--position", name,
                          cwd=folder)  # fmt: skip
        assert f"position '{name.split(':')[0]}:shape=2x3x2:prefix=1'" in message


def test_the_grid_is_filled_in_once_and_kept(folder):
    positions = "rope:shape=grid+alibi,rope:shape=grid:prefix=0,grid_bias"
    words = ["--pool", "mean", "--sizes", "12", "--steps", 1]
    # Two combinations are equal once defaults are filled in.
    message = refused(
        "compare", "--task", "images", "--data", "grey", *words, *tiny(), "--out", "never",
        "--position", f"{positions},rope:shape=2x2+alibi", cwd=folder,
    )  # fmt: skip
    assert "dot/rope:shape=2x2+alibi is given twice" in message
    assert "dot/rope:shape=grid+alibi is the same on this data" in message
    assert not (folder / "never").exists()
    record = compare(folder, "once", "--data", "grey", *words, "--position", positions)
    assert [c["position"] for c in record["settings"]["combinations"]] == [
        "rope:shape=2x2+alibi", "rope:shape=2x2:prefix=0", "grid_bias:shape=2x2",
    ]  # fmt: skip
    assert record["settings"]["model"]["size"] == [8, 8]
    # An interrupted run continues with the same random numbers.
    cut = record | {"runs": record["runs"][:1]}
    (folder / "once" / "results.json").write_text(json.dumps(cut))
    succeed("compare", "--resume", "once", "--threads", 1, cwd=folder)
    for again, before in zip(record_of(folder / "once")["runs"], record["runs"], strict=True):
        assert again["losses"] == before["losses"]
        assert again["curve"] == before["curve"]


# With this similarity, unlike with the dot product, the bias of the key projection has a gradient.
RANDOM = ["--similarity", "penumbral", "--position", "cape:shape=grid+learned", "--shift", 2,
          "--dropout", 0.2]  # fmt: skip


@pytest.mark.long
def test_interrupted_training_resumes_to_the_same_weights(folder, tmp_path):
    words = ["train", "--task", "images", "--data", "colour", "--steps", 150, *tiny(), *RANDOM]
    with Interrupted(words, folder, tmp_path, every=10, resume=["--threads", 1]) as run:
        pass
    # The classes differ in brightness, which is easy to learn.
    assert evaluate(folder, run.whole)[0]["accuracy"] > 0.9


def test_two_processes_match_one(folder):
    words = ["train", "--task", "images", "--data", "colour", "--steps", 5, *tiny(), *RANDOM]
    succeed(*words, "--out", "alone", cwd=folder)
    run_two([*words, "--out", "both"], folder)
    assert_same(folder / "both", folder / "alone")


def test_each_epoch_has_every_image_once(folder):
    """If a batch is an entire epoch, gradients do not depend on the order of the images."""
    arrays = load_file(folder / "grey")
    turned = {
        name: np.ascontiguousarray(array[::-1]) if name.startswith("train.") else array
        for name, array in arrays.items()
    }
    save_file(turned, folder / "turned")
    for data in ("grey", "turned"):
        train(folder, f"epoch-{data}", "--data", data, "--steps", 2, batch=23)
    got, expected = (
        evaluate(folder, f"epoch-{data}", "--data", "grey")[0] for data in ("grey", "turned")
    )
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_shifts_repeat_the_edges(folder):
    """Shifting does not change constant images, but changes all others."""
    plain = sample((8, 8))
    for part in ("train", "valid"):
        plain[f"{part}.images"] = np.repeat(
            plain[f"{part}.images"][:, :1, :1], 64, axis=1
        ).reshape(-1, 8, 8)  # fmt: skip
    save_file(plain, folder / "plain")
    weights = {}
    for data in ("plain", "grey"):
        for shift in (0, 3):
            out = f"shift-{data}-{shift}"
            train(folder, out, "--data", data, "--shift", shift, "--steps", 2)
            weights[data, shift] = load_file(folder / out / FILE)["model.head.weight"]
    np.testing.assert_array_equal(weights["plain", 0], weights["plain", 3])
    assert np.abs(weights["grey", 0] - weights["grey", 3]).max() > 1e-6


def test_wrong_data_is_one_line(folder):
    sound = sample((8, 8))

    def message(arrays: dict, *flags: object, task: str = "images") -> str:
        save_file(arrays, folder / "wrong")
        line = refused("train", "--task", task, "--data", "wrong", "--out", "never", *tiny(),
                       *flags, cwd=folder)  # fmt: skip
        assert not (folder / "never").exists()
        return line

    def labels(value: int) -> np.ndarray:
        changed = sound["valid.labels"].copy()
        changed[4] = value
        return changed

    line = message(sound | {"valid.labels": labels(3)})
    assert line == "gnomon: wrong: the array 'valid.labels' contains 3 at [4]; expected 0 to 2"
    assert "contains -1 at [4]" in message(sound | {"train.labels": labels(-1)})
    assert "has 23 rows" in message(sound | {"train.images": sound["train.images"][:9]})
    assert "'valid.labels' has 5 rows" in message(
        sound | {"valid.labels": sound["valid.labels"][:5]}
    )
    line = message(sound | {"valid.images": np.zeros((11, 8, 12), np.uint8)})
    assert line.endswith(
        "the array 'valid.images' has images of 8x12 with 1 channel, but 'train.images' has 8x8 "
        "with 1 channel; expected the same size"
    )
    line = message(sound | {"valid.images": np.zeros((11, 8, 8, 3), np.uint8)})
    assert "expected the same size" in line
    ragged = {"train.images": np.zeros((9, 8), np.uint8), "train.images_lengths": np.array([4, 5])}
    line = message(sound | ragged)
    assert "'train.images_lengths'" in line
    assert "expected one array with images of one size" in line
    assert "is missing" in message({k: v for k, v in sound.items() if k != "valid.images"})
    assert "expected 3 axes" in message(sound | {"train.images": np.zeros((23, 64), np.uint8)})
    assert "expected 4 axes" in message(sample((8, 8), "volumes"), task="volumes")
    numbers = sound["train.images"].astype(np.float32)
    numbers[2, 3, 4] = np.nan
    assert "contains nan at [2, 3, 4]" in message(sound | {"train.images": numbers})
    assert "expected integers" in message(sound | {"train.labels": np.zeros(23, np.float32)})
    pairs = np.zeros((23, 2), np.int64)
    assert "one label per image" in message(sound | {"train.labels": pairs})

    assert "--patch is 3" in message(sound, "--patch", 3)
    assert "--patch is 3" in message(sample((9, 9)), "--patch", 3, "--stem", "conv")
    assert "--stem is 'none'" in message(sound, "--stem", "none")
    assert "--shift is 8" in message(sound, "--shift", 8)
    assert "--sizes: 'big'" in message(sound, "--sizes", "16,big")
    assert "--sizes: '8x8x8'" in message(sound, "--sizes", "8x8x8")
    assert "--sizes: 10x10 is not a multiple" in message(sound, "--sizes", "10")
    assert "--sizes: 8x8 is the training size" in message(sound, "--sizes", "8")
    assert "--sizes: 16x16 is given twice" in message(sound, "--sizes", "16,16x16")
    assert "rope:shape=net" in message(sound, "--position", "rope:shape=net")
    # The operators accept more positions than tokens, so the model must check this.
    for grid in ("rope:shape=9x9", "rope:shape=2x2", "sinusoidal:shape=2x2:prefix=2"):
        assert "the tokens form the grid 2x2 after 1; use shape=grid" in message(
            sound, "--position", grid
        )
    assert "learned" in message(sound, "--position", "learned:shape=grid")
    assert "'rope+relativ'" in message(sound, "--position", "rope+relativ")
    assert "twice" in message(sound, "--position", "rope:base=1:base=2")
    (folder / "wrong").write_bytes((folder / "colour").read_bytes()[:-9])
    line = refused("train", "--task", "images", "--data", "wrong", cwd=folder)
    assert "wrong" in line


def test_a_column_of_labels_and_floats_are_the_same_images(folder):
    arrays = load_file(folder / "grey")
    other = {}
    for part in ("train", "valid"):
        other[f"{part}.images"] = (arrays[f"{part}.images"] / np.float32(255))[..., None]
        other[f"{part}.labels"] = arrays[f"{part}.labels"].astype(np.uint8)[:, None]
    save_file(other, folder / "other")
    for data in ("grey", "other"):
        train(folder, f"as-{data}", "--data", data, "--steps", 2)
    one, two = (load_file(folder / f"as-{data}" / FILE) for data in ("grey", "other"))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_a_model_meets_other_data(folder):
    train(folder, "own", "--data", "grey", "--position", "rope:shape=grid", "--steps", 1)
    # Images of a different size, without a training split, are resized to the model's size.
    arrays = sample((20, 12))
    large = {name: array for name, array in arrays.items() if name.startswith("valid.")}
    save_file(large, folder / "large")
    (measured,) = evaluate(folder, "own", "--data", "large")
    assert measured["size"] == 8
    ours = Checkpoint(folder, "own", "grey")
    pixels = torch.from_numpy(arrays["valid.images"]).unsqueeze(1) / 255
    small = functional.interpolate(pixels, (8, 8), mode="bilinear").squeeze(1).numpy()
    save_file(large | {"valid.images": small}, folder / "small")
    (again,) = evaluate(folder, "own", "--data", "small")
    assert again["loss"] == pytest.approx(measured["loss"], rel=1e-6)
    assert ours.options["classes"] == 3

    line = refused("eval", "--model", "own", "--data", "colour", cwd=folder)
    assert "have 3 channels, but the model expects 1" in line
    save_file(large | {"valid.labels": large["valid.labels"] + 1}, folder / "wrong")
    assert "contains 3 at" in refused("eval", "--model", "own", "--data", "wrong", cwd=folder)
    table = gnomon("eval", "--model", "own", "--sizes", "16", cwd=folder).stdout
    assert "| size | accuracy | loss, nats per image | images |" in table


def real(name: str) -> pathlib.Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"there is no {SHARED / name}")
    return SHARED / name


@pytest.mark.long
def test_mnist(tmp_path):
    files = real("mnist")
    make_data([
        str(tmp_path / "mnist"),
        *(f"{part}.{array}={files / name}-{kind}-ubyte.gz"
          for part, name in (("train", "train"), ("valid", "t10k"))
          for array, kind in (("images", "images-idx3"), ("labels", "labels-idx1"))),
    ])  # fmt: skip
    train(tmp_path, "run", "--data", "mnist", "--position", "rope:shape=grid", "--steps", 2,
          "--evaluation-examples", 100)  # fmt: skip
    (measured,) = evaluate(tmp_path, "run")
    assert measured["images"] == 100
    assert measured["size"] == 28
    assert 1 < measured["loss"] < 5


@pytest.mark.long
def test_adrenal_mnist_3d(tmp_path):
    file = next(real("adrenalmnist3d").glob("*.npz"))
    make_data([
        str(tmp_path / "adrenal"),
        *(f"{part}.{array}={file}:{name}_{key}"
          for part, name in (("train", "train"), ("valid", "val"))
          for array, key in (("volumes", "images"), ("labels", "labels"))),
    ])  # fmt: skip
    words = ["--data", "adrenal", "--position", "hype:shape=grid", "--steps", 2, "--patch", 14]
    train(tmp_path, "run", *words, "--evaluation-examples", 20, task="volumes")
    (measured,) = evaluate(tmp_path, "run")
    assert measured["volumes"] == 20
    assert measured["size"] == 28
    assert 0.1 < measured["loss"] < 5


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_pictures_show_where_the_model_looks(folder, pool):
    """The attention map is drawn in red over the grey image, with its maximum the brightest."""
    record = compare(
        folder, f"pictures-{pool}", "--data", "grey", "--position", "none,rope:shape=grid",
        "--pool", pool, "--steps", 2, "--seeds", 2,
    )  # fmt: skip
    pictures = [run["picture"] for run in record["runs"]]
    assert [p is not None for p in pictures] == [True, True, False, False]
    what = "the class token attends" if pool == "class" else "all tokens together attend"
    for n, picture in enumerate(pictures[:2]):
        assert picture["file"] == f"picture-{n}.png"
        assert what in picture["title"]
        pixels = np.asarray(PIL.Image.open(folder / f"pictures-{pool}" / picture["file"]))
        images = load_file(folder / "grey")["valid.images"][:8].astype(float)
        times = 84 // 8
        assert pixels.shape == (2 * 8 * times, len(images) * 8 * times, 3)
        shown = pixels[::times, ::times].astype(int).reshape(2, 8, len(images), 8, 3)
        for image, above, below in zip(
            images, shown[0].swapaxes(0, 1), shown[1].swapaxes(0, 1), strict=True
        ):
            spread = (image - image.min()) / (image.max() - image.min())
            assert np.abs(above - 255 * spread[..., None]).max() <= 1
            assert np.abs(below[..., 1:] - 0.4 * 255 * spread[..., None]).max() <= 1
            red = below[..., 0] - below[..., 1]
            assert red.min() >= 0
            assert abs(red.max() - 0.6 * 255) <= 2
    report_program.main([str(folder / f"pictures-{pool}")])
    page = (folder / f"pictures-{pool}" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert page.count(what) == 1


def test_volumes_show_the_slice_in_the_middle(folder):
    record = compare(folder, "slices", "--data", "volumes", "--patch", 2, "--position", "none",
                     "--steps", 1, task="volumes", dim=24)  # fmt: skip
    (run,) = record["runs"]
    pixels = np.asarray(PIL.Image.open(folder / "slices" / run["picture"]["file"]))
    volumes = load_file(folder / "volumes")["valid.volumes"][:8].astype(float)
    times = 84 // 4
    above = pixels[: 6 * times : times, ::times, 0].reshape(6, len(volumes), 4)
    for n, volume in enumerate(volumes):
        spread = (volume - volume.min()) / (volume.max() - volume.min())
        assert np.abs(above[:, n] - 255 * spread[2]).max() <= 1
