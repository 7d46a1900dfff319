"""Named data sets that ``gnomon data get`` downloads from their authors or a mirror.

Each file is identified by its SHA-256 checksum. Files in Git repositories are pinned to a commit.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gnomon._files import replacing
from gnomon.lab.data import _planetoid, read_arrays, write
from gnomon.lab.data._download import File, obtain

__all__ = ["SETS", "File", "NamedSet", "convert", "fetch", "get"]


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """A data set: its source, its files and the files derived from them.

    ``arrays`` maps each array SPLIT.NAME of the converted file to FILE or FILE:KEY. ``texts``
    returns additional text files, derived from the downloaded files in a folder.
    """

    name: str
    title: str
    source: str
    licence: str
    files: tuple[File, ...]
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
    texts: Callable[[pathlib.Path], Mapping[str, str]] | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def fetch(
    chosen: NamedSet, folder: pathlib.Path, tell: Callable[[str], None] = lambda line: None
) -> dict[pathlib.Path, bool]:
    """Downloads the files of a set to a folder, and returns whether each was downloaded.

    Existing files are kept. ``.source.txt`` in the same folder records their origin and licence.
    This file is hidden, because tasks may read all other text files in the folder as data.

    Args:
        tell: called with a progress message before each download attempt.

    Raises:
        ValueError: no URL provides a file with the expected size and checksum, or a different file
            exists at its path.
        OSError: the folder cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = {folder / file.name: obtain(file, folder, tell) for file in chosen.files}
    lines = [
        f"{chosen.name}: {chosen.title}",
        f"source: {chosen.source}",
        f"licence: {chosen.licence}",
        *(f"{file.name}: {file.sum_in_words()}, {file.urls[0]}" for file in chosen.files),
    ]
    _write_text(folder / ".source.txt", "\n".join(lines) + "\n")
    return there


def convert(
    chosen: NamedSet, folder: pathlib.Path
) -> dict[pathlib.Path, dict[str, np.ndarray[Any, Any]]]:
    """Converts the files of a set to the files that tasks read, and replaces existing ones.

    Returns the written files, each with its arrays; text files have none.

    Raises:
        ValueError: a file cannot be read.
        OSError: a file cannot be written.
    """
    made: dict[pathlib.Path, dict[str, np.ndarray[Any, Any]]] = {}
    for name, text in (chosen.texts(folder) if chosen.texts else {}).items():
        _write_text(folder / name, text)
        made[folder / name] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, source in chosen.arrays.items():
        arrays |= read_arrays(str(folder / source), name)
    if arrays:
        path = folder / f"{chosen.name}.safetensors"
        write(path, arrays)
        made[path] = arrays
    return made


def get(name: str, folder: pathlib.Path | str) -> list[pathlib.Path]:
    """Downloads a data set in SETS to a folder, converts it, and returns the resulting files.

    Raises:
        ValueError: the set does not exist, or as in fetch and convert.
        OSError: as in fetch and convert.
    """
    if name not in SETS:
        raise ValueError(f"unknown data set {name!r}; expected one of {', '.join(SETS)}")
    folder = pathlib.Path(folder)
    return [*fetch(SETS[name], folder), *convert(SETS[name], folder)]


def _write_text(path: pathlib.Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def _files(rows: str, *places: str) -> tuple[File, ...]:
    """Parses rows with the checksum, size and name of files that every mirror provides."""
    files = []
    for row in rows.strip().splitlines():
        sha256, size, name = row.split()
        files.append(File(name, int(size), sha256, tuple(place + name for place in places)))
    return tuple(files)


def _github(repository: str, commit: str, folder: str = "") -> str:
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{folder}"


_FSDD = (
    "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/"
    "26eb9aaf76e81b692f806f9140c2d2777410d7a1.tar.gz",
)


_ALL = (
    NamedSet(
        name="tinyshakespeare",
        title="Shakespeare's plays, 1.1 MB of text in one file",
        source="https://github.com/karpathy/char-rnn (Karpathy 2015)",
        licence="the text is in the public domain",
        files=_files(
            """
86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed  1115394 input.txt
""",
            _github(
                "karpathy/char-rnn",
                "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e",
                "data/tinyshakespeare/",
            ),
        ),
    ),
    NamedSet(
        name="wikitext-2",
        title="Wikipedia articles, with a vocabulary of 33,278 words",
        source="https://github.com/pytorch/examples (Merity et al. 2017)",
        licence="CC BY-SA 3.0",
        files=_files(
            """
9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f 10797148 train.txt
f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8  1121681 valid.txt
d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0  1256449 test.txt
""",
            _github(
                "pytorch/examples",
                "77f55b912142e11fcfdf5b530231fb9c52f181e8",
                "word_language_model/data/wikitext-2/",
            ),
        ),
    ),
    NamedSet(
        name="cora",
        title="2,708 papers with words, citations and 7 classes (Planetoid split)",
        source="https://github.com/kimiyoung/planetoid (Yang et al. 2016)",
        licence="none is stated for the data; the repository is under the MIT licence",
        files=_files(
            """
94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1     4054 ind.cora.y
b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a   148025 ind.cora.tx
41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad    28135 ind.cora.ty
9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543   257305 ind.cora.allx
2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71    47959 ind.cora.ally
58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d    59847 ind.cora.graph
297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875     5000 ind.cora.test.index
""",
            _github("kimiyoung/planetoid", "af6abf468a772cc055bec88c52e4d6f51b7c37e3", "data/"),
        ),
        arrays={
            "graph.edges": "edges.txt",
            "graph.words": "features.txt",
            "graph.labels": "labels.txt",
            "train.nodes": "train.index",
            "valid.nodes": "val.index",
            "test.nodes": "test.index",
        },
        texts=lambda folder: _planetoid.texts(folder, "cora"),
    ),
    NamedSet(
        name="multi30k",
        title="image captions in German and English, 31,014 pairs",
        source="https://github.com/multi30k/dataset (Elliott et al. 2016)",
        licence="non-commercial research and education",
        files=_files(
            """
726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6   637044 train.de.gz
d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f   568929 train.en.gz
f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a    24681 val.de.gz
14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28    21650 val.en.gz
9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8    22890 test_2016_flickr.de.gz
611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9    21077 test_2016_flickr.en.gz
""",
            _github(
                "multi30k/dataset", "a3d2e0d26b56f3846f66a952536ffed4e401d05a", "data/task1/raw/"
            ),
        ),
    ),
    NamedSet(
        name="mnist",
        title="70,000 handwritten digits, 28 x 28",
        source="http://yann.lecun.com/exdb/mnist (LeCun et al. 1998)",
        licence="none is stated",
        files=_files(
            """
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  9912422 train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c    28881 train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  1648877 t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6     4542 t10k-labels-idx1-ubyte.gz
""",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
        arrays={
            "train.images": "train-images-idx3-ubyte.gz",
            "train.labels": "train-labels-idx1-ubyte.gz",
            "valid.images": "t10k-images-idx3-ubyte.gz",
            "valid.labels": "t10k-labels-idx1-ubyte.gz",
        },
    ),
    NamedSet(
        name="adrenalmnist3d",
        title="1,584 shapes of adrenal glands, 28 x 28 x 28, 2 classes",
        source="https://medmnist.com (Yang et al. 2023)",
        licence="CC BY 4.0",
        files=(
            File(
                "adrenalmnist3d.npz",
                276833,
                "8ffd78c0f000265deb7cf4ee0b454136fb3170f9839ecaa7bb01adf9f88aa7d1",
                (
                    "https://zenodo.org/records/10519652/files/adrenalmnist3d.npz?download=1",
                    "https://zenodo.org/records/5208230/files/adrenalmnist3d.npz?download=1",
                ),
            ),
        ),
        arrays={
            "train.volumes": "adrenalmnist3d.npz:train_images",
            "train.labels": "adrenalmnist3d.npz:train_labels",
            "valid.volumes": "adrenalmnist3d.npz:val_images",
            "valid.labels": "adrenalmnist3d.npz:val_labels",
        },
    ),
    NamedSet(
        name="jsb-chorales",
        title="382 Bach chorales, as the pitches sounding at each time step",
        source="https://github.com/czhuang/JSB-Chorales-dataset (Allan and Williams 2005)",
        licence="none is stated for the files; the music is in the public domain",
        files=_files(
            """
8730aca7b64e7d29493733d1cf19fad4a5b351d8f1845e57dac27728104fd39f  1741172 jsb-chorales-16th.json
2db9329f1881a1d3f49703ec556bf1d6f84b4f6c1d702c156536e93cf31e1c91   407200 jsb-chorales-quarter.json
""",
            _github("czhuang/JSB-Chorales-dataset", "9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d"),
        ),
        arrays={
            f"{part}.pieces": f"jsb-chorales-16th.json:{part}"
            for part in ("train", "valid", "test")
        },
    ),
    NamedSet(
        name="fsdd",
        title="3,000 digits spoken by 6 speakers, 8 kHz",
        source="https://github.com/Jakobovski/free-spoken-digit-dataset (Jackson et al. 2018)",
        licence="CC BY-SA 4.0",
        files=(
            File(
                "fsdd.tar.gz",
                21128848,
                "1801eae019c063377d98f831d3f93574f259475df7332bb0e3d1b080fb5e6959",
                _FSDD,
                members=".wav",
            ),
        ),
        # As in the authors' split, takes 0 to 4 are the test set.
        arrays={
            f"{part}.audio": "fsdd.tar.gz:(?:.*/)?"
            rf"(?P<labels>\d)_(?P<speakers>[a-z]+)_{takes}\.wav"
            for part, takes in (("train", r"(?:\d\d|[5-9])"), ("valid", "[0-4]"))
        },
    ),
    NamedSet(
        name="scan",
        title="commands and the actions that they describe (length split)",
        source="https://github.com/brendenlake/SCAN (Lake and Baroni 2018)",
        licence="BSD",
        files=_files(
            """
b034212dc7cf87ce62f3a067dd6ad49c4d5cd18d51d615d13825516bcb1ebbc2  2723418 tasks_train_length.txt
0760752ed34a75116ae11dcc1ee17526b7500060da1366540730fa24894d7db3  1356970 tasks_test_length.txt
""",
            _github(
                "brendenlake/SCAN", "c4b756cbc010d75c912f16c42c8f15dc6b7e6c8f", "length_split/"
            ),
        )
        + _files(
            """
5caff9408d400e1d9b271bf48b967154cdf6a37c16c965f91775da3af9291f67     1532 LICENSE
""",
            _github("brendenlake/SCAN", "c4b756cbc010d75c912f16c42c8f15dc6b7e6c8f"),
        ),
    ),
    NamedSet(
        name="wordnet-mammals",
        title="6,540 pairs of mammals and their hypernyms, from WordNet",
        source="https://github.com/ydtydr/HyperbolicTiling_Learning (Nickel and Kiela 2017)",
        licence="the WordNet licence; the repository is under CC BY-NC 4.0",
        files=_files(
            """
9bf947ed2e7caef996ac10df58837160cb6966b633435a1c0bcf408311009cb4   215025 mammal_closure.csv
""",
            _github(
                "ydtydr/HyperbolicTiling_Learning",
                "7d045009bac7bb60f36d4db5683274c7f56778e8",
                "wordnet/",
            ),
            _github(
                "mic-marcinkowski/HyperbolicTiling_Learning",
                "7d045009bac7bb60f36d4db5683274c7f56778e8",
                "wordnet/",
            ),
        ),
        arrays={"train.pairs": "mammal_closure.csv:id1,id2"},
    ),
)

SETS: Mapping[str, NamedSet] = {chosen.name: chosen for chosen in _ALL}
