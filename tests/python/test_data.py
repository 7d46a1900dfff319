"""Conversions by `gnomon data`, compared with the arrays from which the files were written."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import re
import struct
import tarfile
import wave

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gnomon.lab.data import read_arrays, write
from gnomon.lab.data.__main__ import main

pytestmark = pytest.mark.cpu("runs the program, which has --device")

IDX = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx(array: np.ndarray, kind: int) -> bytes:
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(IDX[kind]).tobytes()


def wav(samples: np.ndarray, width: int, channels: int = 1) -> bytes:
    """A WAV file with integer samples of the given width in bytes; one-byte samples are
    unsigned."""
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(8000)
        if width == 1:
            sound.writeframes((samples + 128).astype(np.uint8).tobytes())
        else:
            sound.writeframes(b"".join(int(s).to_bytes(width, "little", signed=True)
                                       for s in samples.ravel()))  # fmt: skip
    return out.getvalue()


def read(path: pathlib.Path, content: bytes, key: str = "") -> dict[str, np.ndarray]:
    path.write_bytes(content)
    plain = read_arrays(f"{path}:{key}" if key else str(path), "a.x")
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(content, mtime=0))
    again = read_arrays(f"{packed}:{key}" if key else str(packed), "a.x")
    assert plain.keys() == again.keys()
    for name, array in plain.items():
        np.testing.assert_array_equal(array, again[name])
    return plain


@pytest.mark.parametrize("kind", IDX)
@pytest.mark.parametrize("shape", [(5,), (3, 2, 4)])
def test_idx(tmp_path, kind, shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    got = read(tmp_path / "file", idx(array, kind))
    np.testing.assert_array_equal(got["a.x"], array)


def test_arrays_of_numpy(tmp_path):
    array = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    out = io.BytesIO()
    np.save(out, array)
    np.testing.assert_array_equal(read(tmp_path / "x.npy", out.getvalue())["a.x"], array)
    out = io.BytesIO()
    np.savez(out, first=array, second=array + 1)
    got = read(tmp_path / "x.npz", out.getvalue(), "second")
    np.testing.assert_array_equal(got["a.x"], array + 1)


def test_json(tmp_path):
    content = json.dumps({"train": {"x": [[1, 2], [3, 4]]}, "y": [[[1, 2]], [], [[3, 4], [5, 6]]]})
    got = read(tmp_path / "x.json", content.encode(), "train.x")
    np.testing.assert_array_equal(got["a.x"], [[1, 2], [3, 4]])
    got = read(tmp_path / "x.json", content.encode(), "y")
    np.testing.assert_array_equal(got["a.x"], [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(got["a.x_lengths"], [1, 0, 2])


def test_doubly_ragged_json(tmp_path):
    """Chorales with a varying number of voices per chord."""
    chorales = [[[1, 2], [3]], [[4, 5, 6]], []]
    got = read(tmp_path / "x.json", json.dumps(chorales).encode())
    np.testing.assert_array_equal(got["a.x"], [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(got["a.x_lengths"], [2, 1, 3])
    np.testing.assert_array_equal(got["a.x_lengths_lengths"], [2, 1, 0])


def test_whole_numbers_of_json_are_integers(tmp_path):
    got = read(tmp_path / "x.json", b"[[58, 60.0], [3.0, -1e3]]")
    np.testing.assert_array_equal(got["a.x"], [[58, 60], [3, -1000]])
    assert got["a.x"].dtype == np.int64
    for content in (b"[[58, 60.0], [3.5, 4]]", b"[1.0, 1e300]", b"[1.0, NaN]", b"[Infinity]"):
        assert read(tmp_path / "x.json", content)["a.x"].dtype == np.float64


def test_text(tmp_path):
    got = read(tmp_path / "x.txt", b"3\n-1\n7\n")
    np.testing.assert_array_equal(got["a.x"], [3, -1, 7])
    assert got["a.x"].dtype == np.int64
    got = read(tmp_path / "x.csv", b"1, 2.5\n3,4\n")
    np.testing.assert_array_equal(got["a.x"], [[1, 2.5], [3, 4]])
    got = read(tmp_path / "x.txt", b"1 2\n3\n")
    np.testing.assert_array_equal(got["a.x"], [1, 2, 3])
    np.testing.assert_array_equal(got["a.x_lengths"], [2, 1])
    np.testing.assert_array_equal(read(tmp_path / "x.index", b"5\n2\n")["a.x"], [5, 2])


def test_marks_of_byte_order_are_no_part_of_a_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    np.testing.assert_array_equal(read(tmp_path / "x.txt", mark + b"3\n4\n")["a.x"], [3, 4])
    np.testing.assert_array_equal(read(tmp_path / "x.json", mark + b"[3, 4]")["a.x"], [3, 4])
    got = read(tmp_path / "x.csv", mark + b"a,b\nc,d\n", "a")
    assert got["a.x_names"].tobytes() == b"c"
    with pytest.raises(ValueError, match=r"x\.csv: byte 5 is not UTF-8"):
        read(tmp_path / "x.csv", mark + b"a,\xff\n", "a")


def test_columns_of_names(tmp_path):
    content = 'above,weight,below\n"a, b",1,\u00e9\nc,1,"a, b"\n'.encode()
    got = read(tmp_path / "x.csv", content, "below,above")
    np.testing.assert_array_equal(got["a.x"], [[2, 0], [0, 1]])
    assert got["a.x_names"].tobytes().decode() == "a, bc\u00e9"
    np.testing.assert_array_equal(got["a.x_names_lengths"], [4, 1, 2])
    for wrong, key, part in (
        (content, "under", "x.csv has no column 'under'; it has above, weight, below"),
        (b"a,b\n1,2\n3\n", "a", "x.csv: line 3 has 1 columns, but the first has 2"),
        (b'a,b\n1,"2\n', "a", "x.csv: line 2: unexpected end of data"),
        (b"a,b\n", "a", "x.csv contains no rows"),
        (b"a,b\n\xff,2\n", "a", "x.csv: byte 4 is not UTF-8"),
    ):
        with pytest.raises(ValueError, match=re.escape(part)):
            read(tmp_path / "x.csv", wrong, key)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_sounds(tmp_path, width, channels):
    scale = 2 ** (8 * width - 1)
    rng = np.random.default_rng(width)
    samples = rng.integers(-scale, scale, size=12)
    samples[:2] = -scale, scale - 1
    expected = (samples / scale).reshape(-1, channels).mean(axis=1).astype(np.float32)
    got = read(tmp_path / "x.wav", wav(samples, width, channels))
    np.testing.assert_allclose(got["a.x"][0], expected, rtol=1e-7, atol=0)
    assert got["a.x_rate"].tolist() == [8000]


def test_folders_and_archives_of_sounds(tmp_path):
    rows = {"b.wav": np.array([1, 2, 3]), "a.wav": np.array([-4, 5])}
    (tmp_path / "sounds").mkdir()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, samples in rows.items():
            content = wav(samples, 2)
            (tmp_path / "sounds" / name).write_bytes(content)
            member = tarfile.TarInfo(f"inside/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    for got in (
        read_arrays(str(tmp_path / "sounds"), "a.x"),
        read(tmp_path / "x.tar", out.getvalue()),
    ):
        np.testing.assert_array_equal(got["a.x"] * 2**15, [-4, 5, 1, 2, 3])
        np.testing.assert_array_equal(got["a.x_lengths"], [2, 3])
        assert got["a.x_names"].tobytes() == b"a.wavb.wav"
        np.testing.assert_array_equal(got["a.x_names_lengths"], [5, 5])


IMAGES = idx(np.arange(24).reshape(2, 3, 4), 0x08)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("x", IMAGES[:-1], "uint8 requires 24 bytes, but the file contains 23"),
        (
            "x",
            IMAGES + b"0",
            "is not a valid IDX file: an array of shape [2, 3, 4] and dtype uint8",
        ),
        ("x", IMAGES[:9], "is truncated: the sizes of 3 axes end at byte 16"),
        ("x.gz", gzip.compress(IMAGES, mtime=0)[:-9], "is truncated: its gzip data end"),
        ("x.gz", gzip.compress(IMAGES, mtime=0)[:-8] + b"\0" * 8, "is damaged"),
        ("x", b"hello", "has an unknown format"),
        ("x.npy", b"\x93NUMPY", "is truncated"),
        ("x.npy", b"hello!", "is not a valid .npy file"),
        ("x.npz", b"PK", "is truncated"),
        ("x.npz", b"hello", "is not a valid .npz file"),
        ("x.json", b"{", "is not JSON"),
        ("x.json", b'{"a": [1]}', "is a dict; expected FILE:KEY with one of a"),
        ("x.json", b"7", "is an int; expected a list"),
        ("x.json", b'[1, "a"]', "row 1 does not contain only numbers"),
        ("x.json", b"[[1], [[2]]]", "row 1 contains elements of shape [1], but those of the first"),
        ("x.txt", b"1\n2 x\n", "line 2 does not contain only numbers"),
        ("x.txt", b"1\n\n2\n", "line 2 does not contain only numbers"),
        ("x.txt", b"1\n2\n99999999999999999999\n", "line 3 has a number beyond 64 bits"),
        ("x.csv", b"1,2\n3,-99999999999999999999\n", "line 2 has a number beyond 64 bits"),
        ("x.txt", b"\xff", "byte 0 is not UTF-8"),
        ("x.wav", wav(np.arange(9), 2)[:-3], "is truncated: it has 15 bytes of samples"),
        ("x.wav", b"RIFF", "is truncated: it ends before its samples"),
        ("x.tar", b"", "tar"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_wrong_files_are_one_line_with_the_file_and_the_place(
    tmp_path, capsys, name, content, part
):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "out"), f"train.images={path}"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gnomon: data: {path}")
    assert part in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "written"),
    [
        ("uint8", "uint8"), ("uint16", "int32"), ("uint32", "int64"), ("uint64", "int64"),
        (">u2", "int32"), (">u8", "int64"), ("int8", "int8"), ("int16", "int16"),
        ("int32", "int32"), ("bool", "bool"), ("float16", "float16"), (">f8", "float64"),
    ],
)  # fmt: skip
def test_numbers_of_any_kind(tmp_path, capsys, dtype, written):
    kind = np.dtype(dtype)
    top = 2 if kind.kind in "bf" else min(int(np.iinfo(kind).max), 2**63 - 1)
    array = np.array([[0, 1, top]], object).astype(kind)
    np.save(tmp_path / "x.npy", array)
    assert main([str(tmp_path / "out"), f"train.x={tmp_path / 'x.npy'}"]) == 0
    assert capsys.readouterr().out == f"train.x: {written}, 1 x 3\n"
    stored = load_file(tmp_path / "out")["train.x"]
    assert stored.dtype == written
    np.testing.assert_array_equal(stored, array)


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (np.array([1j]), "train.x has dtype complex128; expected real numbers of at most 64 bits"),
        (np.array([1], np.longdouble), "train.x has dtype float128; expected real numbers"),
        (np.array(["a"]), "train.x has dtype <U1; expected real numbers"),
        (
            np.array(["2026-01-01"], "M8[D]"),
            "train.x has dtype datetime64[D]; expected real numbers",
        ),
        (
            np.array([2**63], np.uint64),
            "train.x contains 9223372036854775808; expected at most 2^63",
        ),
    ],
)
def test_numbers_that_no_file_holds(tmp_path, capsys, array, part):
    for name in ("x.npy", "x.npz:k"):
        (np.save if name == "x.npy" else lambda path, x: np.savez(path, k=x))(
            tmp_path / name.partition(":")[0], array
        )
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path / "out"), f"train.x={tmp_path / name}"])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["out"], "required"),
        (["out", "images=x"], "'images=x' is invalid; expected SPLIT.NAME=FILE"),
        (["out", "a.b="], "is invalid; expected SPLIT.NAME=FILE"),
        (["out", "a.b=absent"], "absent: No such file"),
        (["out", "a.b=x.txt", "a.b=x.txt"], "a.b is given twice"),
        (["out", "a.b=x.txt:key"], "contains one array; leave out 'key'"),
        (["absent/out", "a.b=x.txt"], "cannot write absent/out"),
        (["x.txt", "a.b=x.txt"], "OUT is x.txt, which is also the source of a.b"),
        (["x.txt", "a.b=./x.txt:key"], "OUT is x.txt, which is also the source of a.b"),
        (["x.txt", "a.b=."], "OUT is x.txt, which is also the source of a.b"),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, capsys, words, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("1\n")
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line
    assert (tmp_path / "x.txt").read_text() == "1\n"


def test_other_programs_read_written_files(tmp_path, capsys):
    for name, kind in (("x", 0x0C), ("y", 0x0E)):
        (tmp_path / name).write_bytes(idx(np.arange(6).reshape(2, 3), kind))
    out = tmp_path / "out.safetensors"
    assert main([str(out), f"train.x={tmp_path / 'x'}", f"valid.y={tmp_path / 'y'}"]) == 0
    assert capsys.readouterr().out == "train.x: int32, 2 x 3\nvalid.y: float64, 2 x 3\n"
    got = load_file(out)
    assert got.keys() == {"train.x", "valid.y"}
    np.testing.assert_array_equal(got["train.x"], np.arange(6).reshape(2, 3))
    assert got["valid.y"].dtype == np.float64


def test_nothing_but_data_is_replaced(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("1\n2\n")
    words = [f"train.x={tmp_path / 'x.txt'}"]
    checkpoint = tmp_path / "checkpoint.safetensors"
    save_file({"train.x": np.zeros(2, np.float32)}, checkpoint, {"what": "a model"})
    (tmp_path / "poem").write_text("of some length\n" * 30)
    (tmp_path / "folder").mkdir()
    for name, part in (("checkpoint.safetensors", "data"), ("poem", "data"), ("folder", "folder")):
        before = (tmp_path / name).read_bytes() if part == "data" else None
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path / name), *words])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"OUT is {tmp_path / name}" in line
        assert part in line
        assert before is None or (tmp_path / name).read_bytes() == before
    (tmp_path / "empty").touch()
    for name in ("empty", "new", "new"):
        assert main([str(tmp_path / name), *words]) == 0
        assert load_file(tmp_path / name)["train.x"].tolist() == [1, 2]


def test_paths_to_write_to_may_be_texts(tmp_path):
    arrays = {"train.labels": np.arange(3)}
    write(str(tmp_path / "one.safetensors"), arrays)
    write(tmp_path / "two.safetensors", arrays)
    assert (tmp_path / "one.safetensors").read_bytes() == (
        tmp_path / "two.safetensors"
    ).read_bytes()
