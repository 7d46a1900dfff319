"""The task `music`: losses compared with GPT-2, and MIDI files compared with mido."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import mido
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_cli import copy_with_steps
from test_distributed_training import FILE, assert_same, run_one, run_two
from test_task_generated import as_gpt2

from gnomon.lab.data.__main__ import main as make_data

pytestmark = pytest.mark.cpu("runs the program, which has --device")

TINY = ["--dim", 16, "--depth", 2, "--heads", 2, "--mlp", 32]
TRAIN = ["train", "--task", "music", "--data", "pieces", *TINY, "--batch", 5]
TWO_STEPS = [*TRAIN, "--steps", 2, "--lengths", "20"]
JSB = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "jsb-chorales"
STEP, BOUND = 128, 129

Pieces = list[list[list[int]]]


def random_pieces(seed: int, count: int) -> Pieces:
    """Pieces of up to 12 steps with up to 4 pitches each."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(40, 80, size=rng.integers(0, 5)).tolist() for _ in range(steps)]
        for steps in rng.integers(2, 13, size=count)
    ]


@pytest.fixture
def pieces(tmp_path) -> dict[str, Pieces]:
    """Converts JSON with `gnomon data` to the file `pieces`."""
    parts = {part: random_pieces(n, 9) for n, part in enumerate(("train", "valid", "test"))}
    write(tmp_path, parts)
    return parts


def write(folder: pathlib.Path, parts: dict[str, Pieces], name: str = "pieces") -> None:
    source = folder / f"{name}.json"
    source.write_text(json.dumps(parts))
    words = [f"{part}.pieces={source}:{part}" for part in parts]
    assert make_data([str(folder / name), *words]) == 0


def events_of(piece: list[list[int]]) -> list[int]:
    return [BOUND, *(event for step in piece for event in (*step, STEP)), BOUND]


def test_losses_are_those_of_gpt2(gnomon, pieces):
    transformers = pytest.importorskip("transformers")
    gnomon(*TRAIN, "--lengths", "20", "--steps", 30, "--position", "learned", "--out", "run")
    words = ["--model", "run", "--json", "--lengths", "20,7,21"]
    measured = {part: json.loads(gnomon("eval", *words, "--part", part))
                for part in ("valid", "test")}  # fmt: skip
    ours = {
        name.removeprefix("model."): torch.from_numpy(tensor)
        for name, tensor in load_file("run/" + FILE).items()
        if name.startswith("model.")
    }
    assert ours["token_position.learned0.table"].shape[0] == 20
    config = transformers.GPT2Config(
        vocab_size=130, n_positions=20, n_embd=16, n_layer=2, n_head=2, n_inner=32,
        activation_function="gelu", tie_word_embeddings=False, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    model.load_state_dict(as_gpt2(ours), strict=True)
    for part, result in measured.items():
        rows = [events_of(piece) for piece in pieces[part]]
        events = sum(len(row) - 1 for row in rows)
        steps = sum(len(piece) for piece in pieces[part])
        assert result["data"][part] == {"pieces": 9, "events": events, "steps": steps}
        for at in result["losses"][:2]:
            length, total, windows = at["length"], 0.0, 0
            for row in rows:
                for start in range(0, len(row) - 1, length):
                    window = torch.tensor([row[start : start + length + 1]])
                    with torch.no_grad():
                        log_p = model(window[:, :-1]).logits.log_softmax(2)
                    total -= log_p.gather(2, window[:, 1:, None]).double().sum().item()
                    windows += 1
            assert at["windows"] == windows
            np.testing.assert_allclose(at["loss"], total / events, rtol=1e-5)
            np.testing.assert_allclose(at["step_loss"], total / steps, rtol=1e-5)
        # This length exceeds the position table.
        assert result["losses"][2] == {
            "length": 21, "loss": None, "step_loss": None, "windows": 0,
        }  # fmt: skip


def test_the_same_pieces_in_every_layout_are_the_same(gnomon, tmp_path):
    rng = np.random.default_rng(0)
    block = rng.integers(30, 90, size=(6, 8, 3))
    pieces = block.tolist()
    silent = np.concatenate([block, np.full((6, 8, 1), -1)], 2)
    ragged = {
        "pieces": block.reshape(-1),
        "pieces_lengths": np.full(48, 3),
        "pieces_lengths_lengths": np.full(6, 8),
    }
    layouts: dict[str, dict[str, np.ndarray[Any, Any]]] = {
        "block": {"pieces": block},
        "silent": {"pieces": silent.astype(np.int16)},
        "rows": {"pieces": block.reshape(-1, 3), "pieces_lengths": np.full(6, 8)},
        "ragged": ragged,
    }
    for name, arrays in layouts.items():
        named = {f"{part}.{key}": value for part in ("train", "valid")
                 for key, value in arrays.items()}  # fmt: skip
        save_file(named, tmp_path / name)
    write(tmp_path, {"train": pieces, "valid": pieces})
    gnomon(*TWO_STEPS, "--out", "run")
    losses = [
        json.loads(gnomon("eval", "--model", "run", "--data", name, "--json"))["losses"]
        for name in ("pieces", *layouts)
    ]
    assert all(other == losses[0] for other in losses)


def test_windows_are_moved_as_far_as_their_pitches_can_go(gnomon, tmp_path):
    def trained(pieces: Pieces, transpose: int) -> dict[str, np.ndarray[Any, Any]]:
        write(tmp_path, {"train": pieces, "valid": pieces})
        gnomon(*TWO_STEPS, "--transpose", transpose, "--out", "run")
        tensors = load_file("run/" + FILE)
        for file in pathlib.Path("run").iterdir():
            file.unlink()
        pathlib.Path("run").rmdir()
        return tensors

    def same(pieces: Pieces) -> bool:
        still, moved = trained(pieces, 0), trained(pieces, 5)
        return all(np.array_equal(still[name], moved[name]) for name in still)

    assert same([[[0, 127]] * 4] * 3)
    assert same([[[], [0, 127], [], []]] * 3)
    assert not same([[[1, 126]] * 4] * 3)


@pytest.mark.parametrize("position", ["rope", "cape+relative"])
def test_resumes_bitwise(gnomon, pieces, position):
    # During warm-up, the learning rate does not depend on the number of steps.
    arguments = [*TRAIN, "--lengths", 20, "--warmup", 3, "--dropout", 0.1]
    arguments += ["--position", position]
    gnomon(*arguments, "--steps", 5, "--out", "whole")
    gnomon(*arguments, "--steps", 3, "--out", "half")
    pathlib.Path("resumed").mkdir()
    copy_with_steps(pathlib.Path("half") / FILE, pathlib.Path("resumed") / FILE, 5)
    gnomon("train", "--resume", "resumed")
    resumed, whole = load_file("resumed/" + FILE), load_file("whole/" + FILE)
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(resumed[name], tensor, err_msg=name)


@pytest.mark.long
def test_two_processes_match_one(tmp_path, pieces):
    arguments = [*TRAIN, "--lengths", 60, "--dropout", 0.2, "--position", "rope", "--steps", 4]
    run_one([*arguments, "--out", "one"], tmp_path)
    run_two([*arguments, "--out", "two"], tmp_path)
    assert_same(tmp_path / "two", tmp_path / "one")


def test_compare(gnomon, pieces):
    gnomon(
        "compare", "--task", "music", "--data", "pieces", *TINY, "--steps", 2, "--lengths",
        "16,32", "--position", "none,rope,learned", "--out", "runs",
    )  # fmt: skip
    record = json.loads(pathlib.Path("runs/results.json").read_text())
    assert record["status"] == "finished"
    assert record["data"]["train"]["pieces"] == 9
    assert [at["loss"] is None for run in record["runs"] for at in run["losses"]] == [
        False, False, False, False, False, True,
    ]  # fmt: skip
    colours = {(30, 30, 30), (225, 225, 225), (255, 255, 255), (60, 110, 200)}
    for run in record["runs"]:
        pixels = np.asarray(PIL.Image.open(pathlib.Path("runs") / run["picture"]["file"]))
        # The picture is a grid of five-pixel cells, and includes the notes of the prompt.
        cells = pixels[::5, ::5]
        assert np.array_equal(cells.repeat(5, 0).repeat(5, 1), pixels)
        assert {tuple(cell) for cell in cells.reshape(-1, 3).tolist()} <= colours
        assert (cells == (60, 110, 200)).all(-1).any()
    assert "| loss at 16 | loss at 32 | loss per step at 16 |" in (
        pathlib.Path("runs/table.md").read_text()
    )


def notes_of(file: str) -> tuple[list[tuple[int, int, int]], mido.MidiFile]:
    """(start, pitch, end) of each note in ticks, as read by mido."""
    midi = mido.MidiFile(file)
    (track,) = midi.tracks
    now, sounding, notes = 0, {}, []
    for message in track:
        now += message.time
        if message.type == "note_on" and message.velocity > 0:
            assert message.note not in sounding
            sounding[message.note] = now
        elif message.type in ("note_on", "note_off"):
            notes.append((sounding.pop(message.note), message.note, now))
    assert not sounding
    assert track[-1].type == "end_of_track"
    return sorted(notes), midi


def notes_by_definition(steps: list[list[int]], ticks: int) -> list[tuple[int, int, int]]:
    notes = []
    for pitch in range(128):
        sounds = [pitch in step for step in steps]
        for n, on in enumerate(sounds):
            if on and (n == 0 or not sounds[n - 1]):
                end = next((m for m in range(n, len(steps)) if not sounds[m]), len(steps))
                notes.append((n * ticks, pitch, end * ticks))
    return sorted(notes)


def test_generates_a_file_that_others_read(gnomon, pieces):
    gnomon(*TWO_STEPS, "--out", "run", "--position", "rope")
    # There are held and repeated notes, unisons, short and long rests, and extreme pitches.
    held = [[60, 64, 60]] * 700 + [[60, 127]] + [[0, 60], [], [60]] + [[]] * 9 + [[72]]
    prompt = "; ".join(" ".join(map(str, step)) for step in held)
    words = ["generate", "--model", "run", "--prompt", prompt]
    said = gnomon(
        *words, "--tokens", 1, "--out", "one.mid", "--steps-per-quarter", 2, "--tempo", 90
    )
    notes, midi = notes_of("one.mid")
    assert said.endswith("steps, one.mid\n")
    assert midi.type == 0
    assert next(m for m in midi.tracks[0] if m.type == "set_tempo").tempo == 666667
    ticks = midi.ticks_per_beat // 2
    # The one generated event may start a new step.
    steps = int(said.split()[0])
    assert steps - len(held) in (0, 1)
    expected = notes_by_definition(held, ticks)
    assert [n for n in notes if n[0] < len(held) * ticks and n[2] < len(held) * ticks] == [
        n for n in expected if n[2] < len(held) * ticks
    ]
    assert len(notes) - len(expected) in (0, 1)


def test_generates_the_same_again(gnomon, pieces):
    gnomon(*TRAIN, "--lengths", 20, "--steps", 30, "--position", "rope", "--out", "run")
    words = ["generate", "--model", "run", "--tokens", 80]

    def made(*more: object) -> bytes:
        gnomon(*words, *more, "--out", "out.mid")
        mido.MidiFile("out.mid")
        return pathlib.Path("out.mid").read_bytes()

    drawn = made("--seed", 3)
    assert drawn == made("--seed", 3, "--no-cache")
    assert drawn != made("--seed", 4)
    assert made("--temperature", 0) == made("--temperature", 0, "--seed", 9)


@pytest.mark.parametrize("grid", ["quarter", "16th"])
@pytest.mark.long
def test_chorales_of_bach(gnomon, tmp_path, grid):
    source = JSB / f"jsb-chorales-{grid}.json"
    if not source.exists():
        pytest.skip(f"{source} is not there")
    parts = ("train", "valid", "test")
    assert make_data(["pieces", *(f"{part}.pieces={source}:{part}" for part in parts)]) == 0
    gnomon(*TWO_STEPS, "--out", "run")
    for part in parts[1:]:
        content = json.loads(source.read_text())[part]
        result = json.loads(gnomon("eval", "--model", "run", "--part", part, "--json"))
        assert result["data"][part] == {
            "pieces": len(content),
            "events": sum(len(events_of(piece)) - 1 for piece in content),
            "steps": sum(map(len, content)),
        }
        assert 0 < result["losses"][0]["loss"] < 6


ARRAYS = {"pieces": np.arange(24).reshape(8, 3), "pieces_lengths": np.array([3, 5])}


@pytest.mark.parametrize(
    ("arrays", "part"),
    [
        (ARRAYS | {"pieces": np.full((8, 3), 128)}, "contains 128 at [0, 0]; expected -1 to 127"),
        (ARRAYS | {"pieces": np.full((8, 3), 0.5)}, "has dtype Double; expected integers"),
        (ARRAYS | {"pieces": np.arange(8)}, "has shape [8]; expected 2 axes"),
        (ARRAYS | {"pieces_lengths": np.array([3, 4])}, "sums to 7, but 'valid.pieces' has 8 rows"),
        (ARRAYS | {"pieces_lengths": np.array([8, 0])}, "contains no steps for piece 1"),
        ({"pieces": np.arange(24)}, "has shape [24]; expected 3 axes"),
        ({"notes": np.arange(24)}, "the array 'valid.pieces' is missing"),
        (
            {"pieces": np.arange(6), "pieces_lengths": np.array([3, 3]),
             "pieces_lengths_lengths": np.array([1, 2])},
            "'valid.pieces_lengths_lengths' sums to 3, but 'valid.pieces_lengths' has 2 rows",
        ),
    ],
)  # fmt: skip
def test_wrong_data_is_one_line_with_the_file_and_the_place(refused, arrays, part):
    named = {f"train.{name}": array for name, array in ARRAYS.items()}
    save_file(named | {f"valid.{name}": array for name, array in arrays.items()}, "wrong")
    line = refused("train", "--task", "music", "--data", "wrong", *TINY)
    assert line.startswith("gnomon: wrong: the array 'valid.pieces")
    assert part in line


def test_wrong_words_are_one_line(gnomon, refused, tmp_path):
    pieces = random_pieces(0, 3)
    write(tmp_path, {"train": pieces, "valid": pieces})
    train = ["train", "--task", "music", "--data", "pieces", *TINY]
    assert "--lengths: 9 is given twice" in refused(*train, "--lengths", "9,9")
    assert "not enough memory for --batch" in refused(*train, "--batch", 10**11)
    assert "defined only up to length 9, but the training length is 256" in refused(
        *train, "--position", "learned:length=9"
    )
    gnomon(*TWO_STEPS, "--out", "run", "--position", "learned")
    assert "'test.pieces' is missing" in refused("eval", "--model", "run", "--part", "test")
    assert "--part is 'train'" in refused("eval", "--model", "run", "--part", "train")
    generate = ["generate", "--model", "run"]
    assert "generate: --out is required" in refused(*generate)
    generate += ["--out", "x.mid"]
    assert "--prompt has '128' in step 1" in refused(*generate, "--prompt", "60; 128")
    assert "--prompt has 'x' in step 0" in refused(*generate, "--prompt", "x")
    assert "--top-k is 131, but the vocabulary has only 130 events" in refused(
        *generate, "--top-k", 131
    )
    assert "--tempo" in refused(*generate, "--tempo", 1)
    assert "is defined for only 20 events, but --prompt and --tokens need 21" in refused(
        *generate, "--tokens", 21
    )
    assert not pathlib.Path("x.mid").exists()
