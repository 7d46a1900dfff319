"""The task diffusion: its network, losses and samples compared with published formulas."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import shutil

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from test_cli import ROOT, assert_resumes_bitwise, refused, runs_of_the_catalogue, succeed
from test_distributed_training import assert_same, run_one, run_two
from test_task_images import Checkpoint

from gnomon.lab.data.__main__ import main

pytestmark = pytest.mark.cpu("runs the program, which has --device")

FILE = "checkpoint.safetensors"
SIZES = {"dim": 16, "depth": 2, "heads": 2, "mlp": 32, "batch": 6, "patch": 4}
MNIST = ROOT.parent / "shared/data/mnist"
RANGES = ["0-999", "0-249", "250-499", "500-749", "750-999"]
functional = torch.nn.functional


def tiny(**other: int) -> list[object]:
    """The options of a small model."""
    return [word for name, n in (SIZES | other).items() for word in (f"--{name}", n)]


def bars() -> dict[str, np.ndarray]:
    """Images of 8 x 12 pixels and three channels, with a vertical or a horizontal bar."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 40), ("valid", 24)):
        labels = np.arange(count) % 2
        images = rng.integers(0, 60, size=(count, 8, 12, 3))
        for image, label in zip(images, labels, strict=True):
            at = rng.integers(7)
            image[(slice(None), at) if label == 0 else (at, slice(None))] += 190
        arrays |= {f"{part}.images": images.astype(np.uint8), f"{part}.labels": labels}
    return arrays


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("diffusion")
    save_file(bars(), path / "bars.safetensors")
    return path


def train(
    folder: pathlib.Path, out: str, *arguments: object, data: str = "bars.safetensors"
) -> pathlib.Path:
    words = ["--data", data, "--out", out, "--evaluation-images", 12]
    succeed("train", "--task", "diffusion", *words, *tiny(), *arguments, cwd=folder)
    return folder / out


def draw(folder: pathlib.Path, run: str, picture: str, *words: object) -> str:
    arguments = ["--model", run, "--out", picture, "--samples", 3, "--steps", 5, *words]
    return succeed("generate", *arguments, cwd=folder)


def compare(folder: pathlib.Path, out: str, *words: object, **sizes: int) -> list[dict]:
    """The runs of a comparison, without its report, which takes seconds and is tested elsewhere."""
    succeed(
        "compare", "--task", "diffusion", "--data", "bars.safetensors", "--out", out,
        "--evaluation-images", 12, *tiny(**sizes), *words, cwd=folder,
        GNOMON_PYTHON="/no/such/python",
    )  # fmt: skip
    return json.loads((folder / out / "results.json").read_text())["runs"]


class Reference:
    """DiT as described in the paper and its figures, in double precision."""

    def __init__(self, file: pathlib.Path) -> None:
        self.weights = {
            name.removeprefix("model."): torch.from_numpy(tensor).double()
            for name, tensor in load_file(file).items()
            if name.startswith("model.")
        }

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    @staticmethod
    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + 1e-6
        ).sqrt()

    def attend(self, block: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.linear(f"{block}.attention.{name}_proj", x).unflatten(-1, (2, 8)).transpose(1, 2)
            for name in "qkv"
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1)
        return self.linear(f"{block}.attention.out_proj", (weights @ v).transpose(1, 2).flatten(2))

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, times: torch.Tensor, labels: torch.Tensor):
        height, width = images.shape[2:]
        p, dim = 4, 16
        x = functional.unfold(images, p, stride=p).transpose(1, 2)  # (B, tokens, C p p)
        x = self.linear("patches", x) + grid_sinusoids(height // p, width // p, dim)
        waves = times[:, None] * 10000.0 ** -(torch.arange(128, dtype=torch.float64) / 128)
        c = self.linear("time_in", torch.cat([waves.cos(), waves.sin()], 1))
        c = self.linear("time_out", functional.silu(c)) + self.weights["labels.weight"][labels]
        for n in range(2):
            block = f"blocks.{n}"
            parts = self.linear(f"{block}.modulation", functional.silu(c))[:, None].chunk(6, -1)
            shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
            x = x + gate * self.attend(block, self.norm(x) * (1 + scale) + shift)
            hidden = self.linear(f"{block}.mlp_in", self.norm(x) * (1 + scale_mlp) + shift_mlp)
            x = x + gate_mlp * self.linear(f"{block}.mlp_out", functional.gelu(hidden))
        shift, scale = self.linear("modulation", functional.silu(c))[:, None].chunk(2, -1)
        x = self.linear("out", self.norm(x) * (1 + scale) + shift)
        return functional.fold(x.transpose(1, 2), (height, width), p, stride=p)


def grid_sinusoids(height: int, width: int, dim: int) -> torch.Tensor:
    """Half of the columns encode each coordinate; sine and cosine of a frequency are adjacent."""
    half = dim // 2
    waves = 10000.0 ** -(torch.arange(half // 2, dtype=torch.float64) * 2 / half)

    def along(positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * waves
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.cat([along(rows.flatten()), along(columns.flatten())], 1)


def left(step: int) -> float:
    """The product of 1 - beta over the steps up to this one (Ho et al. 2020)."""
    return math.prod(1 - (1e-4 + (0.02 - 1e-4) * n / 999) for n in range(step + 1))


def noisy(images: torch.Tensor, noise: torch.Tensor, times: list[int]) -> torch.Tensor:
    a = torch.tensor([left(t) for t in times], dtype=torch.float64).view(-1, 1, 1, 1)
    return a.sqrt() * images + (1 - a).sqrt() * noise


def centred(file: pathlib.Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = load_file(file)
    pixels = torch.from_numpy(arrays[f"{part}.images"]).double().permute(0, 3, 1, 2)
    return pixels / 127.5 - 1, torch.from_numpy(arrays[f"{part}.labels"])


@pytest.fixture(scope="module")
def model(folder) -> pathlib.Path:
    words = ["--steps", 120, "--learning-rate", 0.01, "--position", "sinusoidal:shape=grid"]
    return train(folder, "model", *words)


def test_evaluation_is_the_formula_of_the_paper(folder, model):
    reference = Reference(model / FILE)
    images, labels = centred(folder / "bars.safetensors", "valid")
    images, labels = images[:12], labels[:12]
    times = [n * 1000 // 12 for n in range(12)]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).double()
    predicted = reference(noisy(images, noise, times), torch.tensor(times).double(), labels)
    losses = (predicted - noise).square().flatten(1).mean(1)
    text = succeed("eval", "--model", model, "--json", "--evaluation-images", 12, cwd=folder)
    measured = json.loads(text)["losses"]
    assert [at["timesteps"] for at in measured] == RANGES
    assert [at["images"] for at in measured] == [12, 3, 3, 3, 3]
    expected = [losses.mean(), *losses.view(4, 3).mean(1)]
    for at, loss in zip(measured, expected, strict=True):
        assert at["loss"] == pytest.approx(loss.item(), rel=1e-5)
    # The model has learned something: predicting 0 would give a loss of 1.
    assert measured[0]["loss"] < 0.8


@pytest.mark.parametrize("guidance", [1, 3])
def test_samples_are_those_of_ddim(folder, model, guidance):
    reference = Reference(model / FILE)
    picture = f"samples{guidance}.png"
    text = draw(folder, "model", picture, "--seed", 7, "--guidance", guidance)
    assert text == f"6 images, {picture}\n"
    generator = torch.Generator().manual_seed(7)
    rows = []
    for label in range(2):
        x = torch.randn(3, 3, 8, 12, generator=generator).double()
        named, none = torch.full((3,), label), torch.full((3,), 2)
        for time, after in [(999, 799), (799, 599), (599, 399), (399, 199), (199, None)]:
            times = torch.full((3,), time, dtype=torch.float64)
            noise = reference(x, times, named)
            if guidance != 1:
                without = reference(x, times, none)
                noise = without + guidance * (noise - without)
            now, then = left(time), 1.0 if after is None else left(after)
            image = ((x - math.sqrt(1 - now) * noise) / math.sqrt(now)).clamp(-1, 1)
            rest = (x - math.sqrt(now) * image) / math.sqrt(1 - now)
            x = math.sqrt(then) * image + math.sqrt(1 - then) * rest
        rows.append(np.concatenate([((one + 1) * 127.5).permute(1, 2, 0) for one in x], 1))
    got = np.asarray(Image.open(folder / picture)).astype(float)
    assert got.shape == (16, 36, 3)
    np.testing.assert_allclose(got, np.concatenate(rows), atol=0.6)


def test_with_fresh_noise_and_all_steps_they_are_those_of_ddpm(folder, model):
    """Algorithm 2 of Ho et al. 2020, with the posterior variance."""
    reference = Reference(model / FILE)
    succeed("generate", "--model", "model", "--out", "ddpm.png", "--samples", 3, "--seed", 3,
            "--steps", 1000, "--eta", 1, "--guidance", 1, cwd=folder)  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    products = [left(t) for t in range(1000)]
    rows = []
    for label in range(2):
        x = torch.randn(3, 3, 8, 12, generator=generator).double()
        for t in reversed(range(1000)):
            noise = reference(x, torch.full((3,), float(t)), torch.full((3,), label))
            now, before = products[t], products[t - 1] if t > 0 else 1.0
            beta = 1 - now / before
            image = ((x - math.sqrt(1 - now) * noise) / math.sqrt(now)).clamp(-1, 1)
            x = (math.sqrt(before) * beta * image + math.sqrt(1 - beta) * (1 - before) * x) / (
                1 - now
            )
            if t > 0:
                variance = (1 - before) / (1 - now) * beta
                x = x + math.sqrt(variance) * torch.randn(3, 3, 8, 12, generator=generator)
        rows.append(np.concatenate([((one + 1) * 127.5).permute(1, 2, 0) for one in x], 1))
    got = np.asarray(Image.open(folder / "ddpm.png")).astype(float)
    np.testing.assert_allclose(got, np.concatenate(rows).clip(0, 255), atol=1)


def ddim(reference: Reference, labels: torch.Tensor, steps: int, seed: int) -> torch.Tensor:
    """Samples without guidance, in `steps` evenly spaced timesteps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), 3, 8, 12, generator=generator).double()
    for step in range(steps, 0, -1):
        time = step * 1000 // steps - 1
        noise = reference(x, torch.full((len(labels),), float(time)), labels)
        now, then = left(time), 1.0 if step == 1 else left((step - 1) * 1000 // steps - 1)
        image = ((x - math.sqrt(1 - now) * noise) / math.sqrt(now)).clamp(-1, 1)
        rest = (x - math.sqrt(now) * image) / math.sqrt(1 - now)
        x = math.sqrt(then) * image + math.sqrt(1 - then) * rest
    return x


def train_classifier(folder: pathlib.Path, out: str, *words: object) -> None:
    succeed(
        "train", "--task", "images", "--data", "bars.safetensors", "--out", out, "--dim", 16,
        "--depth", 2, "--heads", 2, "--mlp", 32, "--patch", 4, "--batch", 6, "--steps", 20,
        "--position", "none", "--pool", "mean", *words, cwd=folder,
    )  # fmt: skip


def test_the_frechet_distance_is_that_of_the_features(folder, model):
    train_classifier(folder, "classifier")
    text = succeed("eval", "--model", model, "--json", "--classifier", "classifier",
                   "--frechet-images", 20, cwd=folder)  # fmt: skip
    first, *others = json.loads(text)["losses"]
    assert [at["frechet"] for at in others] == [None] * 4

    classifier = Checkpoint(folder, "classifier", "bars.safetensors")
    pixels = load_file(folder / "bars.safetensors")["train.images"].reshape(-1, 3) / 255
    mean, deviation = (
        torch.from_numpy(part)[:, None, None] for part in (pixels.mean(0), pixels.std(0))
    )

    def features(images: torch.Tensor) -> np.ndarray:
        """The features of images with values from 0 to 1."""
        patches = functional.unfold(((images - mean) / deviation).float(), 4, stride=4)
        tokens = functional.linear(patches.mT, *classifier.layer("patches.projection"))
        return classifier.encode(tokens).mean(1).double().numpy()

    images, labels = centred(folder / "bars.safetensors", "valid")
    drawn = ddim(Reference(model / FILE), labels[:20], 50, 0)
    real, made = (features((each.clamp(-1, 1) + 1) / 2) for each in (images[:20], drawn))
    product = scipy.linalg.sqrtm(np.cov(real.T) @ np.cov(made.T)).real
    expected = ((real.mean(0) - made.mean(0)) ** 2).sum() + np.trace(
        np.cov(real.T) + np.cov(made.T) - 2 * product
    )
    assert first["frechet"] == pytest.approx(expected, rel=1e-3)


def test_a_wrong_classifier_is_named(folder, model):
    arguments = ["eval", "--model", model, "--classifier"]
    assert "--classifier: no such checkpoint" in refused(*arguments, "nothing", cwd=folder)
    line = refused(*arguments, model, cwd=folder)
    assert "--classifier: " in line
    assert "task" in line
    line = refused("eval", "--model", model, "--frechet-images", 20, cwd=folder)
    assert "--frechet-images needs --classifier" in line


def test_distances_of_a_comparison_are_by_one_classifier(folder):
    train_classifier(folder, "judge")
    words = ["--position", "none,learned", "--steps", 2, "--seeds", 1, "--classifier", "judge"]
    compare(folder, "judged", *words)
    record = json.loads((folder / "judged/results.json").read_text())
    assert len(record["data"]["classifier_sha256"]) == 64
    # The default exceeds the number of validation images, so all of them are used.
    assert record["settings"]["frechet_images"] == 24
    head = (folder / "judged/table.md").read_text().splitlines()[0]
    assert head.endswith("loss at 750-999 | Frechet distance at 0-999 |")
    shutil.rmtree(folder / "judge")
    train_classifier(folder, "judge")
    # A comparison can also be resumed from a different folder.
    succeed("compare", "--resume", folder / "judged", cwd=folder.parent)
    shutil.rmtree(folder / "judge")
    train_classifier(folder, "judge", "--seed", 1)
    line = refused("compare", "--resume", "judged", cwd=folder)
    assert (
        f"--classifier: {folder / 'judge'} differs from the classifier of the earlier distances"
        in line
    )


def test_loss_of_a_training_step(folder):
    words = ["--position", "sinusoidal:shape=grid", "--steps", 1]
    begun = train(folder, "begun", *words, "--learning-rate", 1e-12)
    (run,) = compare(folder, "compared", *words)
    reference = Reference(begun / FILE)
    images, labels = centred(folder / "bars.safetensors", "train")
    torch.manual_seed(0)
    rows, times = torch.randint(40, (6,)), torch.randint(1000, (6,))
    named = labels[rows].masked_fill(torch.rand(6) < 0.1, 2)
    noise = torch.randn(6, 3, 8, 12).double()
    predicted = reference(noisy(images[rows], noise, times.tolist()), times.double(), named)
    expected = (predicted - noise).square().mean().item()
    assert run["curve"]["loss"] == [pytest.approx(expected, rel=1e-5)]


def test_resuming_is_bitwise(folder):
    arguments = ["--position", "rope:shape=grid", "--dropout", 0.2]
    assert_resumes_bitwise(functools.partial(train, folder), folder, arguments)


@pytest.mark.long
def test_two_processes_give_the_result_of_one(folder):
    arguments = [
        "train", "--task", "diffusion", "--data", "bars.safetensors", "--evaluation-images", 8,
        "--steps", 3, "--dropout", 0.2, "--position", "cape", *tiny(batch=5),
    ]  # fmt: skip
    run_one([*arguments, "--out", "one"], folder)
    run_two([*arguments, "--out", "two"], folder)
    assert_same(folder / "two", folder / "one")


def test_the_catalogue_goes_in_by_name(folder):
    """Positions that require causal attention are rejected by name."""
    runs, positions = runs_of_the_catalogue(folder)
    for entry in positions:
        name = entry["name"]
        if entry["needs_causal"]:
            line = refused(
                "train", "--task", "diffusion", "--data", "bars.safetensors", *tiny(),
                "--position", name, cwd=folder,
            )  # fmt: skip
            assert f"position '{name}'" in line
            assert "causal" in line
            continue
        runs.append(f"penumbral/{name}")
        if "grid" in entry["tokens"]:
            # A table that both axes share requires equal lengths, but these are 2 and 3.
            axis = ":axis=1" if name == "offset_bias" else ""
            runs.append(f"dot/{name}:shape=grid{axis}")
    runs = list(dict.fromkeys([*runs, "dot/sinusoidal:shape=grid;rope:shape=grid"]))
    flags = [flag for run in runs for flag in ("--run", run)]
    made = compare(folder, "all", *flags, "--steps", 1)
    # Each run has drawn a picture.
    for n, run in enumerate(made):
        picture = Image.open(folder / "all" / run["picture"]["file"])
        assert run["picture"]["file"] == f"picture-{n}.png"
        assert picture.size == (2 * 2 * 12, 2 * 3 * 8)
    assert len(made) == len(runs)
    assert all(0.5 < run["losses"][0]["loss"] < 2 for run in made)


def test_options_of_the_transformer_act(folder):
    words = ["--steps", 30, "--learning-rate", 0.01, "--position", "sinusoidal:shape=grid"]
    weights = {}
    losses = set()
    for option in ("norm=rms", "activation=relu", "activation=swiglu", "activation=geglu"):
        name, value = option.split("=")
        run = train(folder, option, *words, f"--{name}", value)
        weights[value] = load_file(run / FILE)
        text = succeed("eval", "--model", run, "--json", cwd=folder)
        losses.add(json.loads(text)["losses"][0]["loss"])
    bare = load_file(train(folder, "bare", *words, "--no-bias") / FILE)
    assert len(losses) == 4
    assert weights["relu"]["model.blocks.1.mlp_in.weight"].shape == (32, 16)
    assert weights["swiglu"]["model.blocks.1.mlp_in.weight"].shape == (64, 16)
    gone = {name.rsplit(".", 2)[1] for name in weights["rms"].keys() - bare.keys()}
    assert gone == {"q_proj", "k_proj", "v_proj", "out_proj", "mlp_in", "mlp_out"}
    assert draw(folder, "norm=rms", "rms.png") == "6 images, rms.png\n"


def test_drawing_again_makes_the_same_picture(folder, model):
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        draw(folder, "model", f"{name}.png", "--seed", seed)
    first, again, other = (
        (folder / f"{name}.png").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("words", "sizes", "part"),
    [
        ([], {"patch": 5}, "--patch is 5, but the images are 8x12; expected a divisor"),
        ([], {"heads": 3}, "dim is 16; expected a multiple of heads, 3"),
        (
            ["--position", "learned:length=3"],
            {},
            "defined only up to length 3, but an image has 6 patches",
        ),
        (["--position", "rope:shape=2x2"], {}, "the grid 2x2, but the tokens form the grid 2x3"),
        (
            ["--position", "sinusoidal:shape=9x9"],
            {},
            "the grid 9x9, but the tokens form the grid 2x3",
        ),
        (["--position", "rope;learned"], {}, "'learned' is added to the embeddings"),
        (["--label-dropout", 2], {}, "--label-dropout"),
        ([], {"dim": 2000000}, "not enough memory for --dim 2000000"),
        ([], {"batch": 10**11}, "not enough memory for --batch 100000000000"),
    ],
)
def test_wrong_words(folder, words, sizes, part):
    arguments = ["--data", "bars.safetensors", *tiny(**sizes), *words]
    assert part in refused("train", "--task", "diffusion", *arguments, cwd=folder)


def test_wrong_words_of_generation(folder, model):
    words = ["generate", "--model", "model"]
    assert "--out is required" in refused(*words, cwd=folder)
    words += ["--out", "never.png"]
    assert "--steps" in refused(*words, "--steps", 1001, cwd=folder)
    assert "--guidance" in refused(*words, "--guidance", -1, cwd=folder)
    assert not (folder / "never.png").exists()


def changed(folder: pathlib.Path, name: str, **arrays: np.ndarray) -> str:
    known = load_file(folder / "bars.safetensors")
    known |= {key.replace("_", "."): array for key, array in arrays.items()}
    save_file(known, folder / name)
    return name


def test_wrong_data(folder, model):
    def line(*arguments: object) -> str:
        return refused("train", "--task", "diffusion", *tiny(), "--data", *arguments, cwd=folder)

    pixels = np.full((24, 8, 12, 3), 0.5, np.float32)
    pixels[5, 1, 2, 0] = 2.5
    bright = changed(folder, "bright", valid_images=pixels)
    expected = "'valid.images' contains 2.5 in image 5; expected bytes, or numbers from 0 to 1"
    assert line(bright) == f"gnomon: {bright}: the array {expected}"
    wide = changed(folder, "wide", valid_images=pixels[:, :, :8].clip(0, 1))
    assert "'valid.images' has images of 8x8 with 3 channels, but 'train.images'" in line(wide)
    seen = refused("eval", "--model", "model", "--data", wide, cwd=folder)
    assert (
        "'valid.images' has images of 8x8 with 3 channels, but the model needs 8x12 with 3" in seen
    )
    # Two channels can be learned but not drawn.
    two = {
        f"{part}_images": load_file(folder / "bars.safetensors")[f"{part}.images"][..., :2].copy()
        for part in ("train", "valid")
    }
    train(folder, "two channels", "--steps", 1, data=changed(folder, "pairs", **two))
    words = ["generate", "--model", "two channels", "--out", "never.png"]
    assert "images have 2 channels; a PNG needs 1 or 3" in refused(*words, cwd=folder)


def test_few_images_leave_ranges_unmeasured(folder, model):
    valid = load_file(folder / "bars.safetensors")
    few = changed(
        folder, "few", valid_images=valid["valid.images"][:2].copy(),
        valid_labels=valid["valid.labels"][:2].copy(),
    )  # fmt: skip
    text = succeed("eval", "--model", model, "--json", "--data", few, cwd=folder)
    measured = json.loads(text)["losses"]
    assert [at["images"] for at in measured] == [2, 1, 0, 1, 0]
    assert [at["loss"] is None for at in measured] == [False, False, True, False, True]


@pytest.mark.long
def test_real_digits(tmp_path):
    if not MNIST.exists():
        pytest.skip(f"{MNIST} is absent")
    parts = {"train": "train", "valid": "t10k"}
    words = []
    for part, name in parts.items():
        words += [
            f"{part}.images={MNIST / f'{name}-images-idx3-ubyte.gz'}",
            f"{part}.labels={MNIST / f'{name}-labels-idx1-ubyte.gz'}",
        ]
    assert main([str(tmp_path / "mnist.safetensors"), *words]) == 0
    text = succeed(
        "train", "--task", "diffusion", "--data", "mnist.safetensors", "--out", "run", "--steps", 2,
        "--evaluation-images", 8, *tiny(), "--position", "sinusoidal:shape=grid", cwd=tmp_path,
    )  # fmt: skip
    assert [line.split(":")[0] for line in text.splitlines()] == [
        f"validation at timesteps {values}" for values in RANGES
    ]
