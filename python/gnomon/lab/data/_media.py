"""Reads sound and image files."""

from __future__ import annotations

import dataclasses
import importlib
import io
import struct
import warnings
from typing import Any

import numpy as np

from gnomon.lab.data._arrays import Array, WrongFileError

SOUNDS = (".flac", ".wav")
IMAGES = (".bmp", ".jpeg", ".jpg", ".png")
# .wav formats: integers, floats, and the extensible format with a subformat field.
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


@dataclasses.dataclass(frozen=True)
class Row:
    """The contents of a sound or image file; all files of an array must have the same `kind`."""

    values: Array
    kind: str
    rate: int | None = None  # samples per second, for sounds


def _library(module: str, package: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: soundfile without libsndfile
        raise WrongFileError(
            f"{what} {package}, but the package cannot be imported; run: pip install {package}, "
            "or pip install 'gnomon[data]'"
        ) from error


def read_row(content: bytes, suffix: str) -> Row:
    if not content:
        raise WrongFileError("is empty")
    if suffix in IMAGES:
        return _image(content)
    with np.errstate(all="ignore"):  # for non-finite floats
        samples, rate = (_wav(content) if content[:4] == b"RIFF" else None) or _decoded(content)
        if not len(samples):
            raise WrongFileError("contains no samples")
        mono = samples.mean(axis=1).astype(np.float32)
    if not np.isfinite(mono).all():
        place = np.isfinite(mono).argmin()
        raise WrongFileError(f"contains {mono[place]} at sample {place}; expected finite numbers")
    return Row(mono, f"has {rate} samples per second", rate)


def _wav(content: bytes) -> tuple[Array, int] | None:
    """Returns the samples (frames, channels) of a .wav file in [-1, 1), and the sample rate.

    Returns None if the samples are neither integers nor floats.
    """
    chunks: dict[bytes, tuple[int, int]] = {}
    at = 12
    while at + 8 <= len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        chunks.setdefault(content[at : at + 4], (at + 8, size))
        at += 8 + size + size % 2
    start, size = chunks.get(b"data", (0, 0))
    head, head_size = chunks.get(b"fmt ", (0, 0))
    # Bytes 4 to 7 contain the size of everything after them.
    expected = int.from_bytes(content[4:8], "little") + 8
    if len(content) < 12 or (expected > len(content) and (start == 0 or at < start)):
        raise WrongFileError("is truncated: it ends before its samples")
    for name, place in (("fmt", head), ("data", start)):
        if place == 0:
            raise WrongFileError(f"is not a valid WAV file: it has no {name} chunk")
    if head_size < 16:
        raise WrongFileError(f"is not a valid WAV file: its fmt chunk has {head_size} bytes")
    if start + size > len(content):
        raise WrongFileError(
            f"is truncated: it has {len(content) - start} bytes of samples, but its header says "
            f"{size}"
        )
    kind, channels, rate, _, block = struct.unpack_from("<HHIIH", content, head)
    if kind == _EXTENSIBLE and head_size >= 26:
        (kind,) = struct.unpack_from("<H", content, head + 24)
    if channels == 0 or block == 0 or block % channels:
        raise WrongFileError(
            f"is not a valid WAV file: its header specifies {channels} channels and {block} bytes "
            "per frame"
        )
    width = block // channels
    data = np.frombuffer(content, np.uint8, size - size % block, start)
    if kind == _FLOAT and width in (4, 8):
        samples = data.view(f"<f{width}").astype(np.float64)
    elif kind == _PCM and width == 1:
        samples = data / 128 - 1
    elif kind == _PCM and width <= 4:
        # Pad samples to 32 bits with zeros in the low bytes.
        whole = np.zeros((len(data) // width, 4), np.uint8)
        whole[:, 4 - width :] = data.reshape(-1, width)
        samples = whole.view("<i4") / 2.0**31
    else:
        return None
    return samples.reshape(-1, channels), rate


def _decoded(content: bytes) -> tuple[Array, int]:
    """Returns the samples (frames, channels) and the sample rate, decoded by libsndfile."""
    what = "is not a WAV file of integers or floats; other formats require"
    soundfile = _library("soundfile", "soundfile", what)
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as sound:
            frames, rate = sound.frames, sound.samplerate
            # Read in blocks, because a corrupt header may state more samples than fit in memory.
            parts = [np.empty((0, sound.channels))]
            while len(part := sound.read(2**20, dtype="float64", always_2d=True)):
                parts.append(part)
            samples = np.concatenate(parts)
    except soundfile.LibsndfileError as error:
        fault = error.error_string.removeprefix("Error : ")
        is_known = content.startswith((b"fLaC", b"RIFF"))
        what = "is truncated or damaged" if is_known else "has an unknown audio format"
        raise WrongFileError(f"{what}: {fault}") from error
    if len(samples) < frames:
        raise WrongFileError(
            f"is truncated: it has {len(samples)} samples, but its header says {frames}"
        )
    return samples, rate


def _image(content: bytes) -> Row:
    """Returns the pixels as bytes, or as floats in [0, 1] for 16-bit images.

    Their shape is (height, width) for greyscale images, otherwise (height, width, 3).
    """
    library = _library("PIL.Image", "pillow", "is an image, which requires")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for images that can be read despite a warning
            with library.open(io.BytesIO(content), formats=("BMP", "JPEG", "PNG")) as image:
                if image.mode.startswith("I"):
                    pixels = np.asarray(image, np.float32) / 65535
                else:
                    is_grey = image.mode in ("1", "L", "LA")
                    pixels = np.asarray(image.convert("L" if is_grey else "RGB"))
    except Exception as error:  # Pillow raises several exception classes
        if _is_truncated_image(content):
            raise WrongFileError(
                f"is truncated: the image ends after {len(content)} bytes"
            ) from error
        if isinstance(error, library.UnidentifiedImageError):
            raise WrongFileError("is not a BMP, JPEG or PNG image") from error
        raise WrongFileError(f"is not a valid image: {error}") from error
    return Row(
        pixels,
        f"has height {pixels.shape[0]}, width {pixels.shape[1]} and "
        f"{'1 channel' if pixels.ndim == 2 else '3 channels'} of "
        f"{8 if pixels.dtype == np.uint8 else 16} bits",
    )


_PNG, _JPEG, _BMP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"BM"


def _is_truncated_image(content: bytes) -> bool:
    """Returns whether an unreadable image has a valid header, but ends too early."""
    if any(mark.startswith(content) for mark in (_PNG, _JPEG, _BMP)):
        return True
    if content.startswith(_PNG):
        at = len(_PNG)
        while at + 12 <= len(content):
            if content[at + 4 : at + 8] == b"IEND":
                return False
            at += 12 + int.from_bytes(content[at : at + 4], "big")
        return True
    if content.startswith(_JPEG):
        return not content.rstrip(b"\0").endswith(b"\xff\xd9")
    if content.startswith(_BMP):
        return len(content) < 6 or len(content) < int.from_bytes(content[2:6], "little")
    return False
