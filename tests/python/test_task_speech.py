"""The task speech: features, network, loss and metrics compared with other libraries, and
errors."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import wave
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_cli import ROOT, assert_resumes_bitwise, refused, succeed
from test_distributed_training import assert_same, run_one, run_two

from gnomon.lab.data import read_arrays
from gnomon.lab.data.__main__ import main

pytestmark = pytest.mark.cpu("runs the program, which has --device")

FILE = "checkpoint.safetensors"
RATE = 8000
SIZES = {"dim": 16, "depth": 2, "heads": 2, "mlp": 32, "batch": 4, "mels": 12}
FSDD = ROOT.parent / "shared/data/fsdd/fsdd-recordings.tar"
CONV = "conv:kernel=4:groups=2"
NAMES = r"(?P<labels>\d)_(?P<speakers>[a-z]+)_"


def tiny(**other: int) -> list[object]:
    """The options of a small model."""
    return [word for name, n in (SIZES | other).items() for word in (f"--{name}", n)]


def say(word: int, speaker: int, take: int) -> np.ndarray:
    """A word is a gliding chord in noise; its pitch depends on the speaker."""
    rng = np.random.default_rng([word, speaker, take])
    length = int(rng.integers(1400, 2600))
    time = np.arange(length) / RATE
    pitch = (400 + 500 * word) * (1 + 0.2 * speaker)
    sound = np.sin(2 * np.pi * time * (pitch + (1 - word) * 600 * time))
    return 0.3 * np.hanning(length) * sound + 0.003 * rng.normal(size=length)


def write_wav(path: pathlib.Path, samples: np.ndarray, rate: int = RATE) -> None:
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((samples * 2**15).astype("<i2").tobytes())


def write_words(path: pathlib.Path) -> None:
    """Three words by two speakers, as files and as arrays; takes 0 and 1 are the validation
    split."""
    sounds = path / "sounds"
    sounds.mkdir()
    for word in range(3):
        for speaker, name in enumerate(["ann", "bob"]):
            for take in range(6):
                write_wav(sounds / f"{word}_{name}_{take}.wav", say(word, speaker, take))
    words = [f"train.audio={sounds}:{NAMES}[2-9].wav", f"valid.audio={sounds}:{NAMES}[01].wav"]
    assert main([str(path / "words.safetensors"), *words]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("speech")
    write_words(path)
    return path


def train(folder: pathlib.Path, out: str, *arguments: object) -> pathlib.Path:
    words = ["--data", "words.safetensors", "--out", out, "--utterances", "2,5"]
    succeed(
        "train", "--task", "speech", *words, "--evaluation-utterances", 20, *tiny(), *arguments,
        cwd=folder,
    )  # fmt: skip
    return folder / out


def evaluate(folder: pathlib.Path, out: object, *arguments: object) -> list[dict[str, Any]]:
    text = succeed("eval", "--model", out, "--json", *arguments, cwd=folder)
    return json.loads(text)["losses"]


@pytest.fixture(scope="module")
def model(folder) -> pathlib.Path:
    return train(folder, "model", "--steps", 150, "--learning-rate", 0.01, "--position", CONV)


class Reference:
    """The network built from transformers' features and wav2vec 2.0 encoder, in double
    precision."""

    def __init__(self, file: pathlib.Path) -> None:
        from transformers import Wav2Vec2Config
        from transformers.audio_utils import mel_filter_bank
        from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2EncoderStableLayerNorm

        tensors = load_file(file)
        self.weights = {
            name.removeprefix("model."): torch.from_numpy(tensor).double()
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        dim, depth, heads = 16, 2, 2
        self.encoder = Wav2Vec2EncoderStableLayerNorm(
            Wav2Vec2Config(
                hidden_size=dim,
                num_hidden_layers=depth,
                num_attention_heads=heads,
                intermediate_size=32,
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                attn_implementation="eager",
            )
        )
        self.encoder.double().eval().load_state_dict(self._encoder_weights(depth))
        self.bank = mel_filter_bank(129, 12, 0, RATE / 2, RATE, norm=None, mel_scale="htk")

    def _encoder_weights(self, depth: int) -> dict[str, torch.Tensor]:
        own = self.weights
        conv = "encoder.token_position.conv0."
        mapped = {
            "pos_conv_embed.conv.bias": own[conv + "bias"],
            "pos_conv_embed.conv.parametrizations.weight.original0": own[conv + "weight_g"],
            "pos_conv_embed.conv.parametrizations.weight.original1": own[conv + "weight_v"],
        }
        parts = {
            "attention_norm": "layer_norm",
            "attention.q_proj": "attention.q_proj",
            "attention.k_proj": "attention.k_proj",
            "attention.v_proj": "attention.v_proj",
            "attention.out_proj": "attention.out_proj",
            "mlp_norm": "final_layer_norm",
            "mlp_in": "feed_forward.intermediate_dense",
            "mlp_out": "feed_forward.output_dense",
        }
        for layer in range(depth):
            block = f"encoder.blocks.{layer}."
            for ours, theirs in parts.items():
                for kind in ("weight", "bias"):
                    mapped[f"layers.{layer}.{theirs}.{kind}"] = own[f"{block}{ours}.{kind}"]
        for kind in ("weight", "bias"):
            mapped[f"layer_norm.{kind}"] = own[f"encoder.norm.{kind}"]
        return mapped

    def features(self, samples: np.ndarray) -> torch.Tensor:
        """The log-mel features (frames, mels)."""
        from transformers.audio_utils import spectrogram

        mels = spectrogram(
            samples,
            np.hanning(201)[:-1],
            frame_length=200,
            hop_length=80,
            fft_length=256,
            power=2.0,
            pad_mode="constant",
            mel_filters=self.bank,
            log_mel="log",
            dtype=np.float64,
        ).T
        return torch.from_numpy((mels - mels.mean(0)) / (mels.std(0) + 1e-5))

    @torch.no_grad()
    def __call__(self, samples: np.ndarray) -> torch.Tensor:
        """The log-probabilities (tokens, classes) of one unpadded sound."""
        own, functional = self.weights, torch.nn.functional
        x = self.features(samples).T.unsqueeze(0)
        for name in ("front_in", "front_out"):
            weight, bias = own[f"{name}.weight"], own[f"{name}.bias"]
            x = functional.gelu(functional.conv1d(x, weight, bias, stride=2, padding=1))
        norm = own["front_norm.weight"], own["front_norm.bias"]
        x = functional.layer_norm(x.transpose(1, 2), (16,), *norm)
        x = self.encoder(x).last_hidden_state[0]
        return functional.log_softmax(x @ own["head.weight"].T + own["head.bias"], -1)


def ctc(log_probs: torch.Tensor, labels: list[int]) -> float:
    """The CTC loss, computed with forward variables (Graves et al. 2006, section 4.1)."""
    places = [0]
    for label in labels:
        places += [label + 1, 0]
    log_probs = log_probs[:, places]
    alpha = torch.full((len(places),), -math.inf, dtype=torch.float64)
    alpha[:2] = log_probs[0, :2]
    for row in log_probs[1:]:
        paths = [alpha]
        for back in (1, 2):
            moved = torch.cat([torch.full((back,), -math.inf, dtype=torch.float64), alpha[:-back]])
            if back == 2:
                may_skip = [
                    n > 1 and place != 0 and place != places[n - 2]
                    for n, place in enumerate(places)
                ]
                moved = torch.where(torch.tensor(may_skip), moved, -math.inf)
            paths.append(moved)
        alpha = torch.logsumexp(torch.stack(paths), 0) + row
    return -torch.logsumexp(alpha[-2:], 0).item()


def edits(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The Levenshtein distance, computed by its definition."""

    @functools.cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        change = distance(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(change, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(first), len(second))


class Part:
    """Audio, labels and the utterances of each speaker."""

    def __init__(self, file: pathlib.Path, part: str) -> None:
        arrays = load_file(file)
        ends = np.cumsum(arrays[f"{part}.audio_lengths"])
        self.audio = np.split(arrays[f"{part}.audio"].astype(np.float64), ends[:-1])
        self.labels = arrays[f"{part}.labels"].tolist()
        ends = np.cumsum(arrays[f"{part}.speakers_lengths"])
        names = [name.tobytes() for name in np.split(arrays[f"{part}.speakers"], ends[:-1])]
        self.speaker_of = names
        order = dict.fromkeys(names)
        self.by_speaker = {s: [n for n, name in enumerate(names) if name == s] for s in order}

    def evaluated(self, count: int, utterances: int) -> list[list[int]]:
        """Cycles through the speakers, and draws each one's utterances in shuffled rounds."""
        generator = torch.Generator().manual_seed(0)
        left: dict[bytes, list[int]] = {speaker: [] for speaker in self.by_speaker}
        sequences: list[list[int]] = []
        speakers = list(self.by_speaker)
        while len(sequences) < math.ceil(utterances / count):
            speaker = speakers[len(sequences) % len(speakers)]
            sequence = []
            for _ in range(count):
                if not left[speaker]:
                    every = self.by_speaker[speaker]
                    order = torch.randperm(len(every), generator=generator)
                    left[speaker] = [every[n] for n in order]
                sequence.append(left[speaker].pop())
            sequences.append(sequence)
        return sequences

    def sound(self, sequence: list[int]) -> np.ndarray:
        return np.concatenate([self.audio[n] for n in sequence])

    def said(self, sequence: list[int]) -> list[int]:
        return [self.labels[n] for n in sequence]


def test_evaluation_is_that_of_others_with_the_same_weights(folder, model):
    reference = Reference(model / FILE)
    part = Part(folder / "words.safetensors", "valid")
    measured = evaluate(folder, model)
    assert [at["length"] for at in measured] == [2, 5]
    for at in measured:
        sequences = part.evaluated(at["length"], 20)
        assert at["sequences"] == len(sequences)
        loss, wrong, spoken = 0.0, 0, 0
        for sequence in sequences:
            # The reference computes each sequence separately; the program batches and pads them.
            log_probs, labels = reference(part.sound(sequence)), part.said(sequence)
            loss += ctc(log_probs, labels)
            best = torch.unique_consecutive(log_probs.argmax(1)).tolist()
            wrong += edits(tuple(n - 1 for n in best if n > 0), tuple(labels))
            spoken += len(labels)
        assert at["loss"] == pytest.approx(loss / spoken, rel=1e-5)
        assert at["error"] == pytest.approx(100 * wrong / spoken, rel=1e-12)
    # The model has learned something, but not everything.
    assert measured[0]["error"] < 60


# Positions that this task does not support, and the reasons.
NO_CHOICE = {
    "grid_bias": "needs a shape",
    "relative2d": "needs a shape",
    "key_bias": "needs bias, a tensor",
    "pair_bias": "needs bias, a tensor",
    "transformer_xl": "requires causal=True",
}


@pytest.fixture(scope="module")
def comparison(folder) -> dict[str, Any]:
    """The first step with every similarity and position, at a learning rate of 0."""
    catalogue = json.loads(succeed("list", "--json", cwd=folder))
    positions = [entry["name"] for entry in catalogue["positions"]]
    assert set(NO_CHOICE) <= set(positions)
    positions = [CONV, *(name for name in positions if name not in {*NO_CHOICE, "conv"})]
    names = [entry["name"] for entry in catalogue["similarities"]]
    runs = [f"{name}/alibi" for name in names if name != "dot"]
    succeed(
        "compare", "--task", "speech", "--data", "words.safetensors", "--out", "compared",
        "--utterances", "2,40", "--evaluation-utterances", 40, "--position", ",".join(positions),
        *(word for run in runs for word in ("--run", run)), "--steps", 1, "--learning-rate", 0,
        *tiny(), cwd=folder,
    )  # fmt: skip
    return json.loads((folder / "compared" / "results.json").read_text())


def test_every_similarity_and_position(comparison):
    """A position with a table is undefined after the table's last row."""
    combinations = comparison["settings"]["combinations"]
    assert len(comparison["runs"]) == len(combinations) > 15
    for run, combination in zip(comparison["runs"], combinations, strict=True):
        assert [at["length"] for at in run["losses"]] == [2, 40]
        assert [at["sequences"] for at in run["losses"]] == [20, 1]
        is_table = combination["position"] in ("learned", "absolute_keys", "offset_bias")
        for name in ("error", "loss"):
            assert math.isfinite(run["losses"][0][name])
            assert (run["losses"][1][name] is None) == is_table, combination
    assert comparison["task"]["conditions"]["trained"] == 0
    data = comparison["data"]
    assert (data["rate"], data["symbols"], data["train_speakers"]) == (RATE, 3, 2)
    assert (data["train_utterances"], data["valid_utterances"]) == (24, 12)


@pytest.mark.parametrize("name", NO_CHOICE)
def test_positions_that_are_no_choice(folder, name):
    line = refused(
        "train", "--task", "speech", "--data", "words.safetensors", "--position", name, *tiny(),
        cwd=folder,
    )  # fmt: skip
    assert f"position '{name}': " in line
    assert NO_CHOICE[name] in line


def test_loss_of_a_training_step(folder, comparison):
    """The loss of the first step, for the initial weights and the sequences that a run draws."""
    begun = train(folder, "begun", "--position", CONV, "--learning-rate", 0, "--steps", 1)
    reference = Reference(begun / FILE)
    part = Part(folder / "words.safetensors", "train")
    torch.manual_seed(0)
    loss, spoken = 0.0, 0
    lengths = set()
    for how_many, first, *others in torch.rand(4, 3, dtype=torch.float64).tolist():
        sequence = [int(first * len(part.audio))]
        same = part.by_speaker[part.speaker_of[sequence[0]]]
        sequence += [same[int(draw * len(same))] for draw in others[: int(how_many * 2)]]
        lengths.add(len(sequence))
        loss += ctc(reference(part.sound(sequence)), part.said(sequence))
        spoken += len(sequence)
    assert lengths == {1, 2}
    assert comparison["runs"][0]["curve"]["loss"] == [pytest.approx(loss / spoken, rel=1e-5)]


def test_resuming_is_bitwise(folder):
    arguments = ["--position", "rope+cape", "--dropout", 0.2]
    assert_resumes_bitwise(functools.partial(train, folder), folder, arguments)


@pytest.mark.long
def test_two_processes_give_the_result_of_one(folder):
    arguments = [
        "train", "--task", "speech", "--data", "words.safetensors", "--utterances", "3",
        "--evaluation-utterances", 6, "--steps", 3, "--dropout", 0.2, "--position", "rope+cape",
        *tiny(batch=5),
    ]  # fmt: skip
    run_one([*arguments, "--out", "one"], folder)
    run_two([*arguments, "--out", "two"], folder)
    assert_same(folder / "two", folder / "one")


@pytest.mark.long
def test_real_digits(tmp_path):
    if not FSDD.exists():
        pytest.skip(f"{FSDD} is absent")
    words = [f"train.audio={FSDD}:{NAMES}([5-9]|..).wav", f"valid.audio={FSDD}:{NAMES}[0-4].wav"]
    assert main([str(tmp_path / "fsdd.safetensors"), *words]) == 0
    arrays = load_file(tmp_path / "fsdd.safetensors")
    assert len(arrays["train.labels"]) == 2700
    assert len(arrays["valid.labels"]) == 300
    assert np.array_equal(np.bincount(arrays["valid.labels"]), [30] * 10)
    assert (
        len({bytes(name) for name in Part(tmp_path / "fsdd.safetensors", "valid").speaker_of}) == 6
    )
    text = succeed(
        "train", "--task", "speech", "--data", "fsdd.safetensors", "--out", "run", "--steps", 2,
        "--evaluation-utterances", 12, *tiny(), cwd=tmp_path,
    )  # fmt: skip
    assert [line.split(":")[0] for line in text.splitlines()] == [
        f"validation at length {count}" for count in (3, 6, 12, 24)
    ]


def array(values: list[float], kind: type = np.int64) -> np.ndarray:
    return np.array(values, kind)


# Changes to the arrays, each with a part of the resulting error message.
WRONG = {
    "no audio": ({"train.audio": None}, "'train.audio' is missing"),
    "no rate": ({"valid.audio_rate": None}, "'valid.audio_rate' is missing"),
    "no labels": ({"valid.labels": None}, "'valid.labels' is missing"),
    "nan": (
        {"valid.audio": array([0.5, math.nan], np.float32)},
        "'valid.audio' contains nan at [1]",
    ),
    "stereo": ({"train.audio": np.ones((9, 2), np.float32)}, "has shape [9, 2]; expected 1 axis"),
    "lengths": ({"train.audio_lengths": array([3, 4])}, "'train.audio_lengths' sums to 7, but"),
    "another rate": (
        {"valid.audio_rate": array([16000])},
        "'valid.audio_rate' contains 16000, but the model expects 8000 samples per second",
    ),
    "low rate": (
        {"train.audio_rate": array([8])},
        "'train.audio_rate' contains 8 at [0]; expected 1000",
    ),
    "unknown label": (
        {"valid.labels": array([0, 1, 3] + [0] * 9)},
        "'valid.labels' contains 3 at [2]; expected 0 to 2",
    ),
    "negative label": (
        {"train.labels": array([0, -1])},
        "'train.labels' contains -1 at [1]; expected 0",
    ),
    "real label": (
        {"train.labels": array([0, 1], np.float32)},
        "has dtype Float; expected integers",
    ),
    "few labels": (
        {"valid.labels": array([0, 1])},
        "the array 'valid.labels' has 2 rows, but 'valid.audio' has 12",
    ),
    "few speakers": (
        {"valid.speakers": array([0, 1]), "valid.speakers_lengths": None},
        "the array 'valid.speakers' has 2 rows, but 'valid.audio' has 12",
    ),
    "a row without labels": (
        {"valid.labels": array([0] * 12), "valid.labels_lengths": array([1, 0, 2] + [1] * 9)},
        "row 1 of the array 'valid.labels' is empty",
    ),
    "a row without sound": (
        {"valid.audio_lengths": "moved"},
        "row 0 of the array 'valid.audio' has 0 samples, which is too few for its 1 labels; "
        "expected 640",
    ),
    # A row needs a blank between equal labels, and one additional token for the next utterance.
    "many labels": (
        {"valid.labels": array([0, 1, 1, 0, 0, 2] * 12), "valid.labels_lengths": array([6] * 12)},
        "too few for its 6 labels; expected 2880 for 9 tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_are_one_line_with_the_file_and_the_place(folder, tmp_path, name):
    arrays = load_file(folder / "words.safetensors")
    changes, part = WRONG[name]
    for key, value in changes.items():
        if value is None:
            del arrays[key]
        elif isinstance(value, str):
            lengths = arrays[key]
            arrays[key] = np.array([0, lengths[0] + lengths[1], *lengths[2:]])
        else:
            arrays[key] = value
    file = tmp_path / "wrong.safetensors"
    save_file(arrays, file)
    line = refused("train", "--task", "speech", "--data", file, *tiny(), cwd=tmp_path)
    assert line.startswith(f"gnomon: {file}: ")
    assert part in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sizes", "part"),
    [
        (["--utterances", "3,0"], {}, "--utterances contains 0; expected integers from 1 to "),
        (["--utterances", "3,3"], {}, "--utterances: 3 is given twice"),
        (
            [],
            {"mels": 200},
            "mels is 200, which is too many for the 129 frequencies of a window: filter 0",
        ),
        ([], {"heads": 3}, "dim is 16; expected a multiple of heads, 3"),
        (
            ["--position", "learned:length=9"],
            {},
            "defined only up to length 9, but training sequences can have ",
        ),
        (["--position", "alibi:shape=4x5"], {}, "'alibi:shape=4x5': "),
        (["--position", "bogus"], {}, "bogus"),
        ([], {"dim": 2000000}, "not enough memory for --dim 2000000"),
        ([], {"batch": 2000000000}, "not enough memory for --batch 2000000000"),
    ],
)
def test_wrong_words(folder, words, sizes, part):
    arguments = ["--data", "words.safetensors", *tiny(**sizes), *words]
    assert part in refused("train", "--task", "speech", *arguments, cwd=folder)


def test_other_data_of_a_model(folder, model, tmp_path):
    """An evaluation needs only validation data, with the model's rate and labels."""
    arrays = load_file(folder / "words.safetensors")
    valid = {name: a for name, a in arrays.items() if name.startswith("valid.")}
    save_file(valid, tmp_path / "valid.safetensors")
    expected = evaluate(folder, model)
    assert evaluate(folder, model, "--data", tmp_path / "valid.safetensors") == expected
    # Labels of equal length may be rows of a matrix, and speakers may be numbers.
    numbers = {b"ann": 0, b"bob": 1}
    speakers = Part(folder / "words.safetensors", "valid").speaker_of
    valid["valid.labels"] = valid["valid.labels"].reshape(-1, 1)
    valid["valid.speakers"] = np.array([numbers[name] for name in speakers])
    del valid["valid.speakers_lengths"]
    save_file(valid, tmp_path / "valid.safetensors")
    assert evaluate(folder, model, "--data", tmp_path / "valid.safetensors") == expected
    # Speakers do not matter if each of the twelve utterances is evaluated once, separately.
    del valid["valid.speakers"]
    save_file(valid, tmp_path / "valid.safetensors")
    words = ["--utterances", 1, "--evaluation-utterances", 12]
    (known,) = evaluate(folder, model, *words)
    (unknown,) = evaluate(folder, model, *words, "--data", tmp_path / "valid.safetensors")
    assert unknown["loss"] == pytest.approx(known["loss"], rel=1e-5)
    assert unknown["sequences"] == 12
    valid["valid.audio_rate"] = array([16000])
    save_file(valid, tmp_path / "valid.safetensors")
    words = ["eval", "--model", model, "--data", tmp_path / "valid.safetensors"]
    assert "the model expects 8000 samples per second" in refused(*words, cwd=folder)


def test_names_of_sounds_become_arrays(folder, tmp_path, capsys):
    sounds = folder / "sounds"
    got = read_arrays(f"{sounds}:(?P<take>[0-4])?_?.*_(?:ann|bob)_0.wav", "train.audio")
    assert got["train.take"].tolist() == [0, 0, 1, 1, 2, 2]
    assert len(got["train.audio_lengths"]) == 6
    assert got["train.audio_rate"].tolist() == [RATE]
    got = read_arrays(f"{sounds}:.*_(?P<speakers>[^_]*)_0.wav", "train.audio")
    assert got["train.speakers"].tobytes() == b"annbob" * 3
    assert got["train.speakers_lengths"].tolist() == [3] * 6

    other = tmp_path / "sounds"
    other.mkdir()
    for name, rate in [("a.wav", 8000), ("b.wav", 8000), ("c.wav", 16000)]:
        write_wav(other / name, np.zeros(9), rate)
    refusals = {
        "": "c.wav has 16000 samples per second, but a.wav has 8000 samples per second; expected "
        "files of one kind",
        ":[ab].mp3": ".png, .wav file whose name fully matches '[ab].mp3'",
        ":(": "'(' is not a valid regular expression",
        ":(?P<audio>a).wav": "has a group with the same name as the array train.audio",
    }
    for pattern, part in refusals.items():
        with pytest.raises(SystemExit):
            main([str(tmp_path / "out"), f"train.audio={other}{pattern}"])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"gnomon: data: {other}")
        assert part in line
    (other / "b.wav").write_bytes((other / "b.wav").read_bytes()[:-3])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), f"train.audio={other}:[ab].wav"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "b.wav is truncated: it has 15 bytes of samples, but its header says 18" in line
