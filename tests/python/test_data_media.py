"""Audio and image conversions by `gnomon data` compared with other programs."""

from __future__ import annotations

import gzip
import io
import pathlib
import re
import struct
import sys
import tarfile
import zlib

import numpy as np
import PIL.Image
import pytest
from safetensors.numpy import load_file
from test_cli import succeed
from test_data import idx, read, wav

from gnomon.lab.data import read_arrays
from gnomon.lab.data.__main__ import main

pytestmark = pytest.mark.cpu("runs the program, which has --device")

RATE = 8000


@pytest.fixture
def soundfile():
    return pytest.importorskip("soundfile")


def noise(frames: int, channels: int) -> np.ndarray:
    """Samples that 16 bits represent exactly, including the ends of the range."""
    samples = np.random.default_rng(channels).integers(-(2**15), 2**15, (frames, channels))
    samples[0], samples[1] = -(2**15), 2**15 - 1
    return samples / 2.0**15


def sound(soundfile, samples: np.ndarray, kind: str, subtype: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format=kind, subtype=subtype)
    return out.getvalue()


def picture(pixels: np.ndarray | PIL.Image.Image, kind: str = "PNG", **options: object) -> bytes:
    image = pixels if isinstance(pixels, PIL.Image.Image) else PIL.Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def pixels_of(*shape: int, kind: type = np.uint8) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)
    pixels.flat[:2] = 0, np.iinfo(kind).max
    return pixels


def put(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def texts(arrays: dict[str, np.ndarray], name: str) -> list[str]:
    parts = np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
    return [part.tobytes().decode() for part in parts]


def refusal(capsys, out: pathlib.Path, source: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(out), f"train.x={source}"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not out.exists()
    return re.sub(f"^gnomon: data: {re.escape(str(source))}:? ", "", line)


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", "PCM_U8")]
    + [("WAVEX", "PCM_U8")]
    + [
        (kind, subtype)
        for kind in ("WAV", "WAVEX")
        for subtype in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW")
    ]
    + [("FLAC", "PCM_S8"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("RF64", "PCM_16")],
)
def test_sounds_are_as_libsndfile_reads_them(tmp_path, soundfile, kind, subtype, channels):
    samples = noise(50, channels)
    content = sound(soundfile, samples, kind, subtype)
    got = read(tmp_path / ("x.flac" if kind == "FLAC" else "x.wav"), content)
    theirs, _ = soundfile.read(io.BytesIO(content), dtype="float64", always_2d=True)
    assert got["a.x"].dtype == np.float32
    np.testing.assert_array_equal(got["a.x"], theirs.mean(axis=1).astype(np.float32)[None])
    assert got["a.x_rate"].tolist() == [RATE]
    if subtype not in ("PCM_U8", "PCM_S8", "ULAW"):
        np.testing.assert_allclose(got["a.x"][0], samples.mean(axis=1), rtol=1e-6, atol=1e-7)


def test_chunks_around_the_samples_of_a_wav_are_passed_over(tmp_path):
    plain = wav(np.arange(-3, 4), 2)
    junk = b"JUNK" + struct.pack("<I", 3) + b"abc\0"
    content = plain[:12] + junk + plain[12:36] + junk + plain[36:] + junk
    expected = read(tmp_path / "x.wav", plain)["a.x"]
    np.testing.assert_array_equal(read(tmp_path / "x.wav", content)["a.x"], expected)
    np.testing.assert_array_equal(expected[0] * 2**15, np.arange(-3, 4))


def test_a_folder_of_sounds_of_several_formats(tmp_path, soundfile):
    samples = noise(6, 1)
    folder = put(
        tmp_path / "sounds",
        {
            "b.FLAC": sound(soundfile, samples[:4], "FLAC", "PCM_16"),
            "a.wav": sound(soundfile, samples, "WAVEX", "FLOAT"),
            "no/c.wav": sound(soundfile, samples[:2], "WAV", "PCM_24"),
            "._a.wav": b"what a system keeps",
            ".trash/d.wav": b"",
            "notes.txt": b"x",
        },
    )
    got = read_arrays(str(folder), "a.x")
    np.testing.assert_array_equal(
        got["a.x"], np.concatenate([samples, samples[:4], samples[:2]])[:, 0].astype(np.float32)
    )
    assert got["a.x_lengths"].tolist() == [6, 4, 2]
    assert texts(got, "a.x_names") == ["a.wav", "b.FLAC", "no/c.wav"]
    assert got["a.x_rate"].tolist() == [RATE]


WAV = wav(np.arange(9), 2)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"RIFF", "is truncated: it ends before its samples"),
        (WAV[:30], "is truncated: it ends before its samples"),
        (WAV[:40], "is truncated: it ends before its samples"),
        (WAV[:12] + WAV[36:], "is not a valid WAV file: it has no fmt chunk"),
        (WAV[:-3], "is truncated: it has 15 bytes of samples, but its header says 18"),
        (wav(np.arange(0), 2), "contains no samples"),
        (
            WAV[:22] + b"\0\0" + WAV[24:],
            "is not a valid WAV file: its header specifies 0 channels and 2 bytes per frame",
        ),
        (
            WAV[:32] + b"\0\0" + WAV[34:],
            "is not a valid WAV file: its header specifies 1 channels and 0 bytes per frame",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_wrong_wavs_are_one_line_with_the_file_and_a_reason(tmp_path, capsys, content, part):
    put(tmp_path, {"x.wav": content, "y/x.wav": content})
    assert refusal(capsys, tmp_path / "out", tmp_path / "x.wav").startswith(part)
    assert refusal(capsys, tmp_path / "out", tmp_path / "y").startswith(f"x.wav {part}")


def test_wrong_sounds_of_other_formats(tmp_path, capsys, soundfile):
    flac = sound(soundfile, noise(9000, 2), "FLAC", "PCM_16")
    float_wav = sound(soundfile, noise(9, 1), "WAVEX", "FLOAT")
    broken = bytearray(flac)
    broken[len(flac) // 2] ^= 255
    vast = bytearray(flac)
    vast[21] |= 15  # the number of samples, in 36 bits
    for name, content, part in (
        ("x.flac", b"", "is empty"),
        ("x.flac", flac[:20], "is truncated or damaged: "),
        ("x.flac", flac[: len(flac) // 2], "is truncated or damaged: "),
        ("x.flac", bytes(broken), "is truncated or damaged: "),
        ("x.flac", bytes(vast), "is truncated"),
        ("x.flac", b"hello", "has an unknown audio format: Format not recognised."),
        ("x.wav", b"hello", "has an unknown audio format: Format not recognised."),
        ("x.wav", float_wav[:-5], "is truncated: it has 31 bytes of samples, but its header says"),
    ):
        put(tmp_path, {name: content})
        assert refusal(capsys, tmp_path / "out", tmp_path / name).startswith(part)


def test_formats_of_missing_libraries_are_rejected_in_one_line(tmp_path, capsys, monkeypatch):
    for module in ("soundfile", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    put(tmp_path, {"x.flac": b"fLaC", "x.png": b"PNG"})
    line = refusal(capsys, tmp_path / "out", tmp_path / "x.flac")
    assert (
        "require soundfile, but the package cannot be imported; run: pip install soundfile, or "
        "pip install 'gnomon[data]'" in line
    )
    line = refusal(capsys, tmp_path / "out", tmp_path / "x.png")
    assert line == (
        "is an image, which requires pillow, but the package cannot be imported; run: pip install "
        "pillow, or pip install 'gnomon[data]'"
    )
    # Some inputs need neither package.
    np.testing.assert_array_equal(read(tmp_path / "x.wav", WAV)["a.x"][0] * 2**15, np.arange(9))
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 48, b"WAVE", b"fmt ", 16, 3, 1, RATE,
                         4 * RATE, 4, 32, b"data", 12)  # fmt: skip
    floats = np.array([0.1, -2.5, 1e-9], np.float32)
    got = read(tmp_path / "x.wav", header + floats.tobytes())
    np.testing.assert_array_equal(got["a.x"], floats[None])
    for wrong, word in ((np.nan, "nan"), (np.inf, "inf")):
        floats[1] = wrong
        put(tmp_path, {"x.wav": header + floats.tobytes()})
        line = refusal(capsys, tmp_path / "out", tmp_path / "x.wav")
        assert line == f"contains {word} at sample 1; expected finite numbers"


GREY, COLOUR = pixels_of(5, 7), pixels_of(5, 7, 3)
DEEP = pixels_of(5, 7, kind=np.uint16)
ALPHA = pixels_of(5, 7, 1)
PALETTE = PIL.Image.frombytes("P", (7, 5), (GREY % 4).tobytes())
COLOURS = pixels_of(4, 3)
PALETTE.putpalette(COLOURS.tobytes())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (picture(GREY), GREY),
        (picture(GREY, "BMP"), GREY),
        (picture(COLOUR), COLOUR),
        (picture(COLOUR, "BMP"), COLOUR),
        (picture(np.concatenate([COLOUR, ALPHA], 2)), COLOUR),
        (picture(np.concatenate([GREY[:, :, None], ALPHA], 2)), GREY),
        (picture(PALETTE), COLOURS[GREY % 4]),
        (picture(PALETTE, transparency=bytes([0, 128])), COLOURS[GREY % 4]),
        (picture(PALETTE, "BMP"), COLOURS[GREY % 4]),
        (picture(PIL.Image.fromarray(GREY > 99)), np.where(GREY > 99, 255, 0).astype(np.uint8)),
        (picture(DEEP), (DEEP / 65535).astype(np.float32)),
    ],
    ids="grey grey-bmp colour colour-bmp colour-alpha grey-alpha palette palette-alpha palette-bmp"
    " bits deep".split(),
)
def test_images(tmp_path, content, expected):
    got = read(tmp_path / "x.png", content)
    assert list(got) == ["a.x"]
    assert got["a.x"].dtype == expected.dtype
    np.testing.assert_allclose(got["a.x"], expected[None], rtol=2e-7)


def png(rows: np.ndarray, width: int, bits: int, colour: int) -> bytes:
    """Rows in PNG format: a leading 0 marks each row as unfiltered."""
    lines = np.concatenate([np.zeros((len(rows), 1), np.uint8), rows], 1).tobytes()
    header = struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))
        for tag, data in chunks
    )


def test_images_of_other_depths_written_by_hand(tmp_path):
    deep = pixels_of(5, 7, kind=np.uint16)
    rows = deep.astype(">u2").view(np.uint8).reshape(5, -1)
    got = read(tmp_path / "x.png", png(rows, 7, 16, 0))["a.x"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[0], deep / 65535, rtol=2e-7)
    deep = pixels_of(5, 7, 3, kind=np.uint16)
    rows = deep.astype(">u2").view(np.uint8).reshape(5, -1)
    got = read(tmp_path / "x.png", png(rows, 7, 16, 2))["a.x"]
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got[0], deep >> 8)
    nibbles = pixels_of(5, 8) >> 4
    rows = (nibbles[:, ::2] << 4) | nibbles[:, 1::2]
    got = read(tmp_path / "x.png", png(rows, 8, 4, 0))["a.x"]
    np.testing.assert_array_equal(got[0], nibbles * 17)


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".JPG"])
def test_photographs(tmp_path, suffix):
    """JPEG preserves gradual changes of brightness and colour almost exactly."""
    ramp = np.add.outer(8 * np.arange(16), 4 * np.arange(24)).astype(np.uint8)
    colour = np.stack([ramp, ramp[::-1], 255 - ramp], 2)
    for pixels in (ramp, colour):
        got = read(tmp_path / f"x{suffix}", picture(pixels, "JPEG", quality=100, subsampling=0))
        assert got["a.x"].shape == (1, *pixels.shape)
        assert got["a.x"].dtype == np.uint8
        np.testing.assert_allclose(got["a.x"][0].astype(int), pixels.astype(int), atol=3)
    for mode, axes in (("CMYK", 4), ("L", 3)):
        image = PIL.Image.new(mode, (7, 5))
        assert read(tmp_path / f"x{suffix}", picture(image, "JPEG"))["a.x"].ndim == axes


def test_a_folder_of_images(tmp_path):
    files = {f"{name}.{kind}": picture(COLOUR // n, kind.upper())
             for n, (name, kind) in enumerate([("1_b", "png"), ("0_c", "bmp"), ("11_a", "png")], 1)
             }  # fmt: skip
    folder = put(tmp_path / "images", files | {"labels.csv": b"x", ".hidden.png": b""})
    got = read_arrays(f"{folder}:(?P<labels>\\d+)_(?P<who>.)\\..*", "train.images")
    np.testing.assert_array_equal(got["train.images"], [COLOUR // 2, COLOUR // 3, COLOUR])
    assert got["train.images"].dtype == np.uint8
    assert texts(got, "train.images_names") == ["0_c.bmp", "11_a.png", "1_b.png"]
    assert got["train.labels"].tolist() == [0, 11, 1]
    assert got["train.who"].tolist() == [2, 0, 1]
    assert texts(got, "train.who_names") == ["a", "b", "c"]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, "top")
    packed = read(tmp_path / "x.tar", out.getvalue())
    np.testing.assert_array_equal(packed["a.x"], got["train.images"])
    assert texts(packed, "a.x_names") == texts(got, "train.images_names")
    single = read_arrays(str(folder / "1_b.png"), "train.images")["train.images"]
    np.testing.assert_array_equal(single, COLOUR[None])


def test_subfolders_are_classes_that_all_parts_share(tmp_path, capsys):
    """The format of `--task images`: a split with missing classes uses the same numbering."""
    rng = np.random.default_rng(0)
    for part, classes in (("train", ["cat", "dog", "newt"]), ("valid", ["dog", "newt"])):
        for name in classes:
            for n in range(3):
                pixels = rng.integers(0, 256, (8, 8), np.uint8)
                put(tmp_path / part, {f"{name}/{n}.png": picture(pixels)})
    pattern = "(?P<labels>[^/]+)/.*"
    words = [f"{part}.images={tmp_path / part}:{pattern}" for part in ("train", "valid")]
    assert main([str(tmp_path / "out"), *words]) == 0
    assert "train.images: uint8, 9 x 8 x 8\n" in capsys.readouterr().out
    got = load_file(tmp_path / "out")
    assert got["train.labels"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert got["valid.labels"].tolist() == [1] * 3 + [2] * 3
    for part in ("train", "valid"):
        assert texts(got, f"{part}.labels_names") == ["cat", "dog", "newt"]
    assert texts(got, "valid.images_names")[:2] == ["dog/0.png", "dog/1.png"]
    succeed(
        "train", "--task", "images", "--data", "out", "--out", "run", "--steps", 2, "--dim", 16,
        "--depth", 1, "--heads", 2, "--mlp", 32, "--batch", 4, "--threads", 1, cwd=tmp_path,
    )  # fmt: skip
    # Columns may also contain class names.
    put(tmp_path, {"a.csv": b"x,y\n1,b\n", "b.csv": b"x,y\n1,a\n2,b\n"})
    words = [f"train.labels={tmp_path / 'a.csv'}:y", f"valid.labels={tmp_path / 'b.csv'}:y"]
    assert main([str(tmp_path / "csv"), *words]) == 0
    got = load_file(tmp_path / "csv")
    assert got["train.labels"].tolist() == [[1]]
    assert got["valid.labels"].tolist() == [[0], [1]]
    # Names that the user passes are kept.
    words = [f"train.{name}={tmp_path / 'n.txt'}" for name in ("labels", "labels_names")]
    put(tmp_path, {"n.txt": b"3\n1\n"})
    assert main([str(tmp_path / "own"), *words]) == 0
    assert load_file(tmp_path / "own")["train.labels"].tolist() == [3, 1]
    # Labels may also be images, such as masks, which are not numbered as classes.
    assert main([str(tmp_path / "masks"), f"train.labels={tmp_path / 'valid'}"]) == 0
    assert load_file(tmp_path / "masks")["train.labels"].shape == (6, 8, 8)


def of(height: int, width: int, channels: str, bits: int = 8) -> str:
    return f"has height {height}, width {width} and {channels} of {bits} bits"


@pytest.mark.parametrize(
    ("second", "content", "part"),
    [
        ("b.png", picture(COLOUR), of(5, 7, "3 channels")),
        ("b.png", picture(GREY.T.copy()), of(7, 5, "1 channel")),
        ("b.bmp", picture(GREY[:4], "BMP"), of(4, 7, "1 channel")),
        ("b.png", picture(DEEP), of(5, 7, "1 channel", 16)),
        ("b.wav", WAV, "has 8000 samples per second"),
    ],
)
def test_images_of_several_kinds_are_one_line_with_two_of_them(
    tmp_path, capsys, second, content, part
):
    grey = picture(GREY)
    folder = put(tmp_path / "images", {"0.png": grey, "a.png": grey, second: content})
    assert refusal(capsys, tmp_path / "out", folder) == (
        f"{second} {part}, but 0.png {of(5, 7, '1 channel')}; expected files of one kind"
    )
    (folder / second).rename(folder / "b.txt")
    assert len(read_arrays(str(folder), "a.x")["a.x"]) == 2


BROKEN = bytearray(picture(COLOUR))
BROKEN[len(BROKEN) // 2] ^= 255


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("x.png", b"", "is empty"),
        ("x.png", b"hello", "is not a BMP, JPEG or PNG image"),
        ("x.jpg", b"\xff\xd8", "is truncated: "),
        ("x.png", picture(COLOUR, "GIF"), "is not a BMP, JPEG or PNG image"),
        ("x.png", bytes(BROKEN), "is not a valid image: "),
        ("x.png", picture(COLOUR)[:60], "is truncated: "),
        ("x.bmp", picture(COLOUR, "BMP")[:-9], "is truncated: "),
        ("x.jpg", picture(pixels_of(40, 40), "JPEG")[:-300], "is truncated: "),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_wrong_images_are_one_line_with_the_file_and_a_reason(
    tmp_path, capsys, name, content, part
):
    put(tmp_path, {name: content, f"y/{name}": content})
    assert refusal(capsys, tmp_path / "out", tmp_path / name).startswith(part)
    assert refusal(capsys, tmp_path / "out", tmp_path / "y").startswith(f"{name} {part}")


def test_an_image_of_more_pixels_than_memory_is_refused(tmp_path, capsys):
    """A file of a few bytes whose header claims 900 million pixels."""
    content = bytearray(picture(np.zeros((1, 1), np.uint8), "BMP"))
    content[18:26] = struct.pack("<ii", 30000, 30000)
    put(tmp_path, {"x.bmp": bytes(content)})
    assert refusal(capsys, tmp_path / "out", tmp_path / "x.bmp").startswith(
        "is not a valid image: "
    )


def test_a_file_that_may_not_be_read_is_named(tmp_path, capsys, monkeypatch):
    folder = put(tmp_path / "images", {"a.png": picture(GREY)})

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "read_bytes", denied)
    line = refusal(capsys, tmp_path / "out", folder)
    assert re.search(r"a\.png: Permission denied$", line)


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


#: Files by name, each with the number of bytes that identify its format.
WHOLE = {
    "x.png": (picture(COLOUR), 1),
    "x.jpg": (picture(pixels_of(24, 24), "JPEG"), 1),
    "x.bmp": (picture(COLOUR, "BMP"), 1),
    "x.wav": (WAV, 4),
    "x.npy": (npy(np.arange(9)), 1),
    "x.npz:a": (npz(a=np.arange(9)), 1),
    "x.gz": (gzip.compress(idx(np.arange(24).reshape(2, 3, 4), 0x08)), 2),
    "x": (idx(np.arange(24).reshape(2, 3, 4), 0x08), 4),
    "x.tar": (tar({"a.wav": WAV, "b.wav": WAV}), 512),
}


@pytest.mark.parametrize("source", WHOLE)
def test_truncated_files_are_reported_as_truncated(tmp_path, source):
    """A file that is cut at any point is rejected, unless only dispensable final bytes are missing.
    Such a file is read completely."""
    content, known = WHOLE[source]
    path = tmp_path / source.split(":")[0]
    path.write_bytes(content)
    expected = read_arrays(str(tmp_path / source), "x")
    cuts = [*range(known, min(len(content), 200)), *range(200, len(content), 37), len(content) - 1]
    messages = {}
    for cut in cuts:
        path.write_bytes(content[:cut])
        try:
            got = read_arrays(str(tmp_path / source), "x")
        except ValueError as error:
            messages[cut] = str(error)
        else:
            assert got.keys() == expected.keys()
            assert all(np.array_equal(got[name], expected[name]) for name in got), cut
    assert {cut: text for cut, text in messages.items() if "is truncated" not in text} == {}
    # Bytes that may be missing: the padding of a .tar and the checksum of a .png.
    half = len(content.rstrip(b"\0")) // 2
    assert messages.keys() >= {cut for cut in cuts if cut < half}
