"""`gnomon data get` with a local test server: downloads are kept only if they are complete.

Also compares the table of data sets with the files in ../shared/data, if they exist.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import gzip
import hashlib
import http.server
import io
import os
import pathlib
import pickle
import re
import resource
import signal
import socket
import subprocess
import tarfile
import threading
import urllib.request

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_data import idx, wav

from gnomon.lab.data import _planetoid
from gnomon.lab.data.__main__ import main
from gnomon.lab.data.sets import SETS, File, NamedSet, convert, get

pytestmark = pytest.mark.cpu("runs the program, which has --device")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
IMAGES = idx(np.arange(60).reshape(5, 3, 4), 0x08)
LABELS = gzip.compress(idx(np.array([0, 1, 2, 1, 0]), 0x08), mtime=0)


@dataclasses.dataclass
class Server:
    """A test server; `answers` maps a path to its status, its body and the announced size."""

    url: str
    answers: dict[str, tuple[int, bytes, int | None]]
    asked: list[str]

    def has(self, path: str, body: bytes, status: int = 200, told: int | None = -1) -> str:
        self.answers[f"/{path}"] = (status, body, len(body) if told == -1 else told)
        return f"{self.url}/{path}"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    answers: dict[str, tuple[int, bytes, int | None]] = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, body, told = answers.get(self.path, (404, b"", 0))
            if status == 0:  # not HTTP
                self.wfile.write(body)
                return
            self.send_response(status)
            if told is not None:
                self.send_header("Content-Length", str(told))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Server(f"http://127.0.0.1:{served.server_port}", answers, asked)
    served.shutdown()
    thread.join()
    served.server_close()


def file_of(name: str, content: bytes, *urls: str) -> File:
    return File(name, len(content), hashlib.sha256(content).hexdigest(), urls)


def add_set(monkeypatch, *files: File, **rest) -> None:
    sample = NamedSet("sample", "five pictures", "https://example.org", "CC0", files, **rest)
    monkeypatch.setitem(SETS, "sample", sample)


@pytest.fixture
def pictures(server, monkeypatch):
    add_set(
        monkeypatch,
        file_of("images", IMAGES, server.has("images", IMAGES)),
        file_of("labels.gz", LABELS, server.has("labels.gz", LABELS)),
        arrays={"train.images": "images", "train.labels": "labels.gz"},
    )
    return server


def visible(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".source.txt")


def failed(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["get", *words])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gnomon: data: ")
    return line


def test_a_set_is_fetched_and_converted(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["get", "sample"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sample: five pictures",
        "source: https://example.org",
        "licence: CC0",
        "sample/images: downloaded, 0.1 kB",
        f"sample/labels.gz: downloaded, {len(LABELS) / 1e3:.1f} kB",
        "sample/sample.safetensors: created, 0.3 kB",
        "train.images: uint8, 5 x 3 x 4",
        "train.labels: uint8, 5",
    ]
    assert visible(tmp_path / "sample") == ["images", "labels.gz", "sample.safetensors"]
    assert (tmp_path / "sample" / "images").read_bytes() == IMAGES
    assert (tmp_path / "sample" / "labels.gz").read_bytes() == LABELS
    made = load_file(tmp_path / "sample" / "sample.safetensors")
    np.testing.assert_array_equal(made["train.images"], np.arange(60).reshape(5, 3, 4))
    np.testing.assert_array_equal(made["train.labels"], [0, 1, 2, 1, 0])
    told = (tmp_path / "sample" / ".source.txt").read_text()
    for part in ("CC0", "https://example.org", pictures.url, hashlib.sha256(IMAGES).hexdigest()):
        assert part in told
    # The command for local files gives the same result.
    main(["own", "train.images=sample/images", "train.labels=sample/labels.gz"])
    own = (tmp_path / "own").read_bytes()
    assert own == (tmp_path / "sample" / "sample.safetensors").read_bytes()


def test_files_that_are_there_are_kept(pictures, tmp_path, capsys):
    folder = tmp_path / "some" / "place"
    folder.mkdir(parents=True)
    (folder / "images").write_bytes(IMAGES)  # not downloaded by the program
    assert main(["get", "sample", "--out", str(folder)]) == 0
    assert pictures.asked == ["/labels.gz"]
    assert f"{folder / 'images'}: already present" in capsys.readouterr().out
    assert main(["get", "sample", "--out", str(folder)]) == 0
    assert pictures.asked == ["/labels.gz"]
    assert "downloaded" not in capsys.readouterr().out


def test_a_different_file_is_neither_used_nor_overwritten(pictures, tmp_path, capsys):
    other = bytes(len(IMAGES))
    (tmp_path / "images").write_bytes(other)
    line = failed(capsys, "sample", "--out", str(tmp_path))
    assert f"{tmp_path / 'images'}: sha256 is {hashlib.sha256(other).hexdigest()}" in line
    assert f"expected {hashlib.sha256(IMAGES).hexdigest()}" in line
    (tmp_path / "images").write_bytes(IMAGES[:-1])
    line = failed(capsys, "sample", "--out", str(tmp_path))
    assert f"size is {len(IMAGES) - 1} bytes; expected {len(IMAGES)}" in line
    assert pictures.asked == []
    assert visible(tmp_path) == ["images"]


WRONG = bytes(reversed(IMAGES))
FAULTS = {
    "sum": (
        {"body": WRONG},
        f"sha256 is {hashlib.sha256(WRONG).hexdigest()}; expected "
        f"{hashlib.sha256(IMAGES).hexdigest()}",
    ),
    "short": ({"body": IMAGES[:-3]}, f"size is {len(IMAGES) - 3} bytes; expected {len(IMAGES)}"),
    "long": ({"body": IMAGES + b"0"}, f"size is more than {len(IMAGES)} bytes"),
    "absent": ({"body": b"", "status": 404}, "HTTP 404 Not Found"),
    "cut": (
        {"body": IMAGES[:30], "told": len(IMAGES)},
        f"the connection ended after 30 of {len(IMAGES)} bytes",
    ),
    "cut without a size": (
        {"body": IMAGES[:30], "told": None},
        f"size is 30 bytes; expected {len(IMAGES)}",
    ),
    "no HTTP": ({"body": b"hello\n", "status": 0}, "hello"),
    "nothing": ({"body": b"", "status": 0}, "without response"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_incomplete_downloads_are_discarded(server, tmp_path, monkeypatch, capsys, fault):
    answer, part = FAULTS[fault]
    url = server.has("images", **answer)
    add_set(monkeypatch, file_of("images", IMAGES, url))
    line = failed(capsys, "sample", "--out", str(tmp_path))
    assert f"cannot download {tmp_path / 'images'}" in line
    assert f"{url}: " in line
    assert part in line
    assert "place the file there yourself" in line
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_said_with_the_address(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:  # bound but not listening
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/images"
        add_set(monkeypatch, file_of("images", IMAGES, url))
        line = failed(capsys, "sample", "--out", str(tmp_path))
    assert f"{url}: {os.strerror(errno.ECONNREFUSED)}" in line
    assert f"cannot download {tmp_path / 'images'}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["sum", "absent", "cut"])
def test_the_next_address_is_tried(server, tmp_path, monkeypatch, capsys, fault):
    urls = server.has("first", **FAULTS[fault][0]), server.has("second", IMAGES)
    add_set(monkeypatch, file_of("images", IMAGES, *urls))
    assert main(["get", "sample", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    assert server.asked == ["/first", "/second"]
    assert (tmp_path / "images").read_bytes() == IMAGES


def test_files_that_came_before_a_fault_are_kept(pictures, tmp_path, capsys):
    pictures.has("labels.gz", b"", status=503)
    assert "HTTP 503" in failed(capsys, "sample", "--out", str(tmp_path))
    assert visible(tmp_path) == ["images"]
    pictures.has("labels.gz", LABELS)
    assert main(["get", "sample", "--out", str(tmp_path)]) == 0
    assert pictures.asked == ["/images", "/labels.gz", "/labels.gz"]


def test_a_full_disk_is_one_line(server, tmp_path, monkeypatch, capsys):
    content = bytes(1 << 18)
    add_set(monkeypatch, file_of("zeros", content, server.has("zeros", content)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    try:
        line = failed(capsys, "sample", "--out", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert line == f"gnomon: data: {tmp_path / 'zeros'}: {os.strerror(errno.EFBIG)}"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_one_line(pictures, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    line = failed(capsys, "sample", "--out", str(tmp_path / "file"))
    assert line == f"gnomon: data: {tmp_path / 'file'}: {os.strerror(errno.EEXIST)}"


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    add_set(monkeypatch, file_of("images", IMAGES, "http://127.0.0.1/images"))
    monkeypatch.setattr(urllib.request, "urlopen", interrupted)
    assert main(["get", "sample", "--out", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []


def archive(sounds: dict[str, bytes], level: int = 9) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        for name, content in sounds.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return gzip.compress(out.getvalue(), level, mtime=0)


def test_archives_are_identified_by_their_content(server, tmp_path, monkeypatch, capsys):
    sounds = {f"top/{n}.wav": wav(np.arange(n + 3), 2) for n in range(3)}
    listed = "".join(
        f"{hashlib.sha256(sounds[name]).hexdigest()}  {name[4:]}\n" for name in sorted(sounds)
    )
    url = server.has("sounds.tar.gz", archive(sounds))
    size = sum(map(len, sounds.values()))
    sha256 = hashlib.sha256(listed.encode()).hexdigest()
    packed = File("sounds.tar.gz", size, sha256, (url,), members=".wav")
    add_set(monkeypatch, packed, arrays={"train.audio": "sounds.tar.gz"})
    folder = tmp_path / "a"
    assert main(["get", "sample", "--out", str(folder)]) == 0
    made = load_file(folder / "sample.safetensors")
    np.testing.assert_array_equal(made["train.audio_lengths"], [3, 4, 5])
    assert f"sha256 of its *.wav files {sha256}" in (folder / ".source.txt").read_text()
    # The archive may be packed differently: with other files, in a different folder and order.
    again = {f"other/{name[4:]}": sounds[name] for name in reversed(sounds)} | {"README": b"x"}
    server.has("sounds.tar.gz", archive(again, level=1))
    assert main(["get", "sample", "--out", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    name = next(iter(sounds))
    for content, part in (
        (archive(sounds | {name: sounds[name][:-1] + b"\1"}), "sha256 of its *.wav files is"),
        (archive({name: sounds[name]}), f"size of its *.wav files is {len(sounds[name])} bytes"),
        (
            archive(sounds | {"more.wav": b"0"}),
            f"size of its *.wav files is more than {size} bytes",
        ),
        (archive(sounds)[:-30], "is not a valid tar file"),
        (b"hello", "is not a valid tar file"),
    ):
        server.has("sounds.tar.gz", content)
        assert part in failed(capsys, "sample", "--out", str(tmp_path / "c"))
        assert list((tmp_path / "c").iterdir()) == []


class csr_matrix:  # noqa: N801 - scipy's
    """Pickled like scipy's class: the arrays in a dictionary."""

    def __init__(self, rows):
        self.indices = np.array([word for row in rows for word in row], np.int32)
        self.indptr = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)


def pickled(value: object) -> bytes:
    """Pickles with the module names that scipy and numpy had in 2016."""
    text = pickle.dumps(value, protocol=3)
    text = text.replace(f"c{__name__}\ncsr_matrix\n".encode(), b"cscipy.sparse.csr\ncsr_matrix\n")
    return text.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def test_a_graph_of_planetoid_becomes_text(tmp_path, monkeypatch):
    nodes, tested = 510, [508, 506, 509, 507]
    rng = np.random.default_rng(0)
    words = [sorted(rng.choice(40, 3, replace=False).tolist()) for _ in range(nodes)]
    labels = rng.integers(0, 7, nodes)
    neighbours = collections.defaultdict(list)
    for one, other in ((0, 1), (1, 0), (0, 1), (3, 3), (509, 2), (2, 509), (4, 5)):
        neighbours[one].append(other)
    for part, value in {
        "y": np.eye(7, dtype=np.int32)[labels[:6]],
        "allx": csr_matrix([row[::-1] for row in words[:506]]),
        "ally": np.eye(7, dtype=np.int32)[labels[:506]],
        "tx": csr_matrix([words[node] for node in tested]),
        "ty": np.eye(7, dtype=np.int32)[labels[tested]],
        "graph": neighbours,
    }.items():
        (tmp_path / f"ind.some.{part}").write_bytes(pickled(value))
    (tmp_path / "ind.some.test.index").write_text("".join(f"{node}\n" for node in tested))
    add_set(monkeypatch, texts=lambda folder: _planetoid.texts(folder, "some"))
    made = convert(SETS["sample"], tmp_path)

    def read(name: str) -> list[list[int]]:
        return [list(map(int, line.split())) for line in (tmp_path / name).read_text().splitlines()]

    assert read("edges.txt") == [[0, 1], [2, 509], [4, 5]]
    assert read("features.txt") == words
    assert read("labels.txt") == [[label] for label in labels]
    assert read("train.index") == [[node] for node in range(6)]
    assert read("val.index") == [[node] for node in range(6, 506)]
    assert read("test.index") == [[node] for node in range(506, 510)]
    assert len(made) == 6
    # Loading a pickle must not call any function that is not allowed.
    (tmp_path / "ind.some.graph").write_bytes(pickle.dumps(os.getcwd, protocol=3))
    with pytest.raises(ValueError, match=r"ind\.some\.graph is not .*posix\.getcwd"):
        convert(SETS["sample"], tmp_path)


def test_get_from_python(pictures, tmp_path):
    paths = get("sample", tmp_path)
    assert [path.name for path in paths] == ["images", "labels.gz", "sample.safetensors"]
    assert all(path.is_file() for path in paths)
    with pytest.raises(
        ValueError, match="unknown data set 'simple'; expected one of tinyshakespeare"
    ):
        get("simple", tmp_path)


def test_the_list(capsys):
    assert main(["get", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SETS)
    for line, chosen in zip(lines, SETS.values(), strict=True):
        assert chosen.licence in line
        assert chosen.title in line
    (mnist,) = (line for line in lines if line.startswith("mnist "))
    assert " 11.6 MB " in mnist


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no data set given; expected one of tinyshakespeare, "),
        (
            ["mnits"],
            "unknown data set 'mnits'; did you mean mnist? Expected one of tinyshakespeare, ",
        ),
        (["--lst"], "unexpected argument: --lst; did you mean --list"),
        (["mnist", "--uot=x"], "unexpected argument: --uot=x; did you mean --out?"),
        (["mnist", "--list"], "--list cannot be combined with NAME"),
        (["mnist", "more"], "unexpected argument: more"),
        (["mnist", "--out"], "expected one argument"),
    ],
)
def test_wrong_words(capsys, words, part):
    assert part in failed(capsys, *words)


def test_the_program_has_it():
    done = subprocess.run(
        [os.environ["GNOMON_PYTHON"], "-m", "gnomon", "data", "get", "--list"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(SETS)


@pytest.mark.parametrize("chosen", SETS.values(), ids=SETS)
def test_an_entry_of_the_table(chosen):
    names = [file.name for file in chosen.files]
    assert len(set(names)) == len(names)
    assert chosen.title
    assert chosen.licence
    assert chosen.source.startswith("http")
    for file in chosen.files:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256), file.name
        assert file.urls
        for url in file.urls:
            assert url.startswith("https://")
            if "github" in url:
                assert re.search(r"/[0-9a-f]{40}[/.]", url), url
    sources = {source.partition(":")[0] for source in chosen.arrays.values()}
    # The files of Cora are converted to text first.
    assert chosen.texts or sources <= set(names)


ARRAYS = {
    "cora": {"graph.edges": (5278, 2), "graph.labels": (2708,), "train.nodes": (140,)},
    "jsb-chorales": {
        "train.pieces_lengths_lengths": (229,),
        "test.pieces_lengths_lengths": (77,),
    },
    "fsdd": {"train.labels": (2700,), "valid.labels": (300,), "valid.audio_lengths": (300,)},
    "wordnet-mammals": {"train.pairs": (6540, 2)},
    "adrenalmnist3d": {"train.volumes": (1188, 28, 28, 28)},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_tasks_read_the_converted_sets(name, tmp_path):
    folder = SHARED / FOLDERS.get(name, name)
    if not folder.is_dir():
        pytest.skip(f"there is no ../shared/data/{folder.name}")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    if name == "fsdd":
        # GitHub packs the file in a folder with other files.
        with (
            tarfile.open(folder / "fsdd-recordings.tar") as sounds,
            tarfile.open(tmp_path / "fsdd.tar.gz", "w:gz", compresslevel=1) as packed,
        ):
            for member in sounds.getmembers():
                if member.isfile():
                    content = sounds.extractfile(member)
                    member.name = f"fsdd-1/recordings/{pathlib.Path(member.name).name}"
                    packed.addfile(member, content)
            packed.addfile(tarfile.TarInfo("fsdd-1/README.md"))
    chosen = dataclasses.replace(SETS[name], texts=None)
    (arrays,) = convert(chosen, tmp_path).values()
    assert {key: arrays[key].shape for key in ARRAYS[name]} == ARRAYS[name]


def test_the_page_has_them_all():
    page = (ROOT / "docs" / "howto" / "data.md").read_text(encoding="utf-8")
    rows = page.partition("## Named sets")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", rows, re.M) == list(SETS)


# Excludes Cora, which is available only as converted text, and MNIST, whose files are repacked.
FOLDERS = {name: name for name in SETS if name not in ("cora", "mnist")} | {
    "wordnet-mammals": "wordnet"
}


@pytest.mark.parametrize("name", FOLDERS)
def test_sums_are_of_the_files(name):
    folder = SHARED / FOLDERS[name]
    if not folder.is_dir():
        pytest.skip(f"there is no ../shared/data/{FOLDERS[name]}")
    for file in SETS[name].files:
        path = folder / ("fsdd-recordings.tar" if name == "fsdd" else file.name)
        assert file.fault(path) == "", path
