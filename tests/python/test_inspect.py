"""Tests gnomon inspect: the data of each figure against independent formulas; invalid input."""

import json
import math

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from test_cli import gnomon as gnomon_program
from test_cli import refused, succeed

import gnomon
from gnomon.lab.inspect import model_pictures, rank
from gnomon.lab.inspect.__main__ import PICTURES, main
from gnomon.lab.inspect._model import load_model
from gnomon.lab.inspect._probe import weights
from gnomon.lab.inspect.decay import turned_columns
from gnomon.nn import MultiheadAttention

pytestmark = pytest.mark.cpu("the program")

SMALL = ["--dim", "16", "--depth", "2", "--heads", "2", "--mlp", "32", "--batch", "4"]


def close(numbers, expected, tolerance=1e-6):
    torch.testing.assert_close(
        torch.tensor(numbers, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.fixture
def draw(tmp_path):
    """Draws a figure, checks that the file exists, and returns the figure's numbers."""

    def run(*arguments):
        out = tmp_path / "pictures" / "one.png"
        assert main([*map(str, arguments), "--out", str(out)]) == 0
        assert imread(out)[..., :3].std() > 0.01
        return json.loads(out.with_suffix(".json").read_text())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect")
    (path / "text.txt").write_text("".join(f"line {n}: the quick fox\n" for n in range(300)))
    return path


def trained(folder, position, similarity="dot", *flags):
    out = folder / position.replace(":", "_")
    succeed(
        "train", "--data", "text.txt", "--out", out, "--steps", 6, "--length", 32,
        "--learning-rate", 0.01, "--position", position, "--similarity", similarity,
        *flags, *SMALL, cwd=folder,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def absolute(folder):
    return trained(folder, "learned+conv:kernel=4:groups=2+alibi:slopes=learned", "penumbral")


@pytest.fixture(scope="module")
def buckets(folder):
    return trained(folder, "rope:layout=half+t5:buckets=8:max_distance=20")


def test_products_of_sinusoids(draw):
    numbers = draw("encoding", "--position", "sinusoidal,cape", "--length", 9, "--dim", 6)
    p = torch.arange(9, dtype=torch.float64)
    offsets = p[:, None] - p
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    expected = torch.cos(offsets[..., None] * frequencies).sum(-1)
    for entry in numbers["encodings"]:
        close(entry["products"], expected)


def test_products_on_a_grid(draw):
    numbers = draw("encoding", "--position", "sinusoidal:shape=3x5", "--dim", 8)
    table = gnomon.grid_sinusoid((3, 5), 8).double()
    close(numbers["encodings"][0]["products"], table @ table.T)


def test_decay_of_biases(draw):
    numbers = draw(
        "decay", "--heads", 2, "--head-dim", 3, "--distance", 40, "--position",
        "alibi,hype:tau=0.5:mu=0.1,kerple:kind=power,t5:buckets=8:max_distance=20+alibi:slopes=3",
    )  # fmt: skip
    t = torch.arange(41, dtype=torch.float64)
    slopes = gnomon.alibi_slopes(2).double()[:, None]
    buckets = gnomon.t5_bucket(-torch.arange(41), False, 8, 20)
    expected = [
        -slopes * t,
        (-0.5 * torch.sinh(0.1 * t)).expand(2, -1),
        -slopes * t,
        -buckets.double().expand(2, -1),
        (-3 * t).expand(2, -1),
    ]
    for panel, curves in zip(numbers["panels"], expected, strict=True):
        close(panel["curves"], curves)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dims", [None, 6])
def test_decay_of_rope(draw, layout, dims):
    spec = f"rope:base=100:layout={layout}" + (f":dims={dims}" if dims else "")
    numbers = draw("decay", "--position", spec, "--head-dim", 10, "--distance", 30)
    width = dims or 10
    expected = []
    for t in range(31):
        sums, total = [], 0j
        for i in range(width // 2):
            angle = t * 100 ** (-2 * i / width)
            total += complex(math.cos(angle), math.sin(angle))
            sums.append(abs(total))
        expected.append(sum(sums) / len(sums))
    close(numbers["panels"][0]["curves"], [expected])


@pytest.mark.parametrize(
    ("similarity", "position"),
    [
        ("dot", "rope+alibi"),
        ("penumbral", "rope"),
        ("umbral:score=log", "t5"),
        ("gaussian", None),
        ("dot", "relative:max_offset=3"),
        ("dot", "transformer_xl"),
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_weights_are_those_of_the_output(similarity, position, kv_heads):
    torch.manual_seed(0)
    module = MultiheadAttention(
        12, 4, kv_heads, qk_dim=6, similarity=similarity, position=position
    ).double()
    x = torch.randn(1, 11, 12, dtype=torch.float64)
    ours = weights(module, x, causal=True)
    assert ours.shape == (4, 11, 11)
    assert ours.triu(1).abs().max() == 0
    torch.testing.assert_close(ours.sum(2), torch.ones(4, 11, dtype=torch.float64))
    v = module.v_proj(x)[0].unflatten(1, (kv_heads, 3)).transpose(0, 1)
    o = ours @ v.repeat_interleave(4 // kv_heads, 0)
    expected = module(x, causal=True)[0]
    torch.testing.assert_close(module.out_proj(o.transpose(0, 1).flatten(1)), expected)


@pytest.mark.parametrize("run", ["absolute", "buckets"])
def test_the_model_is_the_programs(run, request, folder):
    path = request.getfixturevalue(run)
    prompt = "line 1"
    text = succeed(
        "generate", "--model", path, "--prompt", prompt, "--tokens", 12, "--temperature", 0,
        cwd=folder,
    )  # fmt: skip
    model = load_model(path).model
    tokens = list(prompt.encode())
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    written = bytes(tokens).decode(errors="backslashreplace")
    assert written.removeprefix(prompt).strip() == text.removeprefix(prompt).strip()


@pytest.mark.parametrize(
    ("similarity", "columns"), [("dot", 6), ("laplacian", 6), ("umbral", 4), ("penumbral", 4)]
)
def test_columns_that_rope_turns(similarity, columns):
    module = MultiheadAttention(6, 1, similarity=similarity, position="rope")
    assert turned_columns(module) == columns
    # The operator rotates the same columns.
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 6, dtype=torch.float64)
    by_default, same, fewer = (
        gnomon.attention(q, k, v, similarity=similarity, position=position)
        for position in ("rope", f"rope:dims={columns}", f"rope:dims={columns - 2}")
    )
    assert torch.equal(by_default, same)
    assert not torch.allclose(by_default, fewer)


def test_attention(draw, buckets):
    texts = ["--text", "a quick fox", "--text", "a quick hat"]
    numbers = draw("attention", "--model", buckets, *texts)
    first, second = (torch.tensor(entry["weights"]) for entry in numbers["texts"])
    assert first.shape == second.shape == (2, 2, 11, 11)
    torch.testing.assert_close(first.sum(3), torch.ones(2, 2, 11))
    assert first.triu(1).abs().max() == 0
    # The weights are equal up to the first letter that differs between the texts.
    assert torch.equal(first[..., :8, :], second[..., :8, :])
    assert not torch.equal(first[..., 8, :], second[..., 8, :])
    model = load_model(buckets).model
    block = model.blocks[0]
    tokens = torch.tensor(list(b"a quick fox"))
    with torch.no_grad():
        x = block.attention_norm(model.embedding(tokens) * 4.0)
        expected = weights(block.attention, x[None], causal=True)
    close(numbers["texts"][0]["weights"][0], expected)
    one = draw("attention", "--model", buckets, *texts, "--layer", 1, "--head", 0)
    assert one["texts"][1]["weights"] == [[numbers["texts"][1]["weights"][1][0]]]


def test_tables(draw, absolute, buckets):
    numbers = draw("tables", "--model", absolute)
    (entry,) = numbers["tables"]
    table = load_file(absolute / "checkpoint.safetensors")["model.token_position.learned0.table"]
    rows = table.double()
    expected = [[float(a @ b / (a.norm() * b.norm())) for b in rows] for a in rows]
    assert entry["kind"] == "cosines"
    close(entry["values"], expected)

    numbers = draw("tables", "--model", buckets)
    tensors = load_file(buckets / "checkpoint.safetensors")
    assert len(numbers["tables"]) == 2
    for layer, entry in enumerate(numbers["tables"]):
        assert entry["kind"] == "biases"
        close(entry["values"], tensors[f"model.blocks.{layer}.attention.t5_table"])


@pytest.fixture(scope="module")
def pattern(folder):
    return trained(folder, "rope:base=50;t5+t5:buckets=8")


def test_layers_with_positions_of_their_own(draw, pattern):
    tensors = load_file(pattern / "checkpoint.safetensors")
    tables = draw("tables", "--model", pattern)["tables"]
    assert [table["name"] for table in tables] == [
        "blocks.1.attention.t5_table",
        "blocks.1.attention.t52_table",
    ]
    for table in tables:
        assert table["kind"] == "biases"
        close(table["values"], tensors[f"model.{table['name']}"])
    panels = draw("decay", "--model", pattern, "--distance", 20)["panels"]
    assert [(panel["title"], panel["kind"]) for panel in panels] == [
        ("rope:base=50", "bound"),
        ("layer 1", "bias"),
    ]


def test_tables_by_index_kind():
    """All learned tables of a position, with any names, are drawn, one panel each."""
    positions = {
        "t5": {"t5_table": "buckets"},
        "grid_bias:shape=3x4": {"grid_bias_table": "grid"},
        "offset_bias": {"offset_bias_table": "offsets"},
        "absolute_keys": {"absolute_keys_table": "keys"},
        "relative:values=true:max_offset=3": {
            "relative_table": "near_offsets",
            "relative_values": "near_offsets",
        },
        "disentangled:span=4": {
            "disentangled_keys": "bucket_rows",
            "disentangled_queries": "bucket_rows",
        },
        "relative2d:shape=3x4": {
            "relative2d_rows": "first_axis",
            "relative2d_columns": "second_axis",
        },
        "transformer_xl:r=learned": {"transformer_xl_r": "distances"},
        "transformer_xl": {},
        "t5+alibi:slopes=learned+t5:buckets=8": {"t5_table": "buckets", "t52_table": "buckets"},
        "forget+content_bias": {"content_bias_table": "near_offsets"},
        "alibi:slopes=learned+rope_mixed": {},
    }
    for position, expected in positions.items():
        found = model_pictures.learned_tables(MultiheadAttention(12, 2, position=position))
        assert {table.name.strip("."): table.indexed_by for table in found} == expected, position
        specs = {table.name.strip("."): table.spec for table in found}
        if len(specs) > 1 and "t52_table" in specs:
            assert specs == {"t5_table": "t5", "t52_table": "t5:buckets=8"}


def test_tables_that_a_module_was_given():
    learned = torch.nn.Parameter(torch.ones(2, 9, 6))
    vectors = torch.ones(2, 6)
    for r, count in ((learned, 1), (learned.detach(), 0)):
        module = MultiheadAttention(
            12, 2, position=gnomon.position.TransformerXL(vectors, vectors, r)
        )
        assert len(model_pictures.learned_tables(module)) == count


@pytest.mark.parametrize("spec", ["laplacian", "hyperbolic:model=ball", "penumbral:score=height2"])
def test_rank_of_any_similarity(draw, spec):
    arguments = ["rank", "--similarity", spec, "--dims", "4", "--depth", 2]
    (entry,) = draw(*arguments, "--steps", 3, "--restarts", 1)["results"]
    assert entry["similarity"] == spec
    assert math.isfinite(entry["margins"][0])


def test_buckets_are_drawn_over_distance(buckets):
    table = torch.randn(8, 2, dtype=torch.float64)
    axes = Figure().add_subplot()
    model_pictures._draw_buckets(axes, "rope+t5:buckets=8:max_distance=20", table)
    distances = torch.arange(model_pictures.FARTHEST + 1)
    bucket = gnomon.t5_bucket(-distances, False, num_buckets=8, max_distance=20)
    for head, line in enumerate(axes.get_lines()):
        close(line.get_ydata().tolist(), table[bucket, head] - table[0, head])


def test_decay_that_a_model_has_learned(draw, absolute, buckets):
    numbers = draw("decay", "--model", absolute, "--distance", 20)
    tensors = load_file(absolute / "checkpoint.safetensors")
    t = torch.arange(21, dtype=torch.float64)
    for layer, panel in enumerate(numbers["panels"]):
        theta = tensors[f"model.blocks.{layer}.attention.alibi_slopes_theta"].double()
        assert theta.abs().max() > 1e-4
        slopes = gnomon.alibi_slopes(2).double() * (5 * theta).exp()
        close(panel["curves"], -slopes[:, None] * t, 1e-5)
        close(panel["starts"], -gnomon.alibi_slopes(2).double()[:, None] * t, 1e-5)
    kinds = [panel["kind"] for panel in draw("decay", "--model", buckets)["panels"]]
    assert kinds == ["bound", "bias", "bias"]


def test_cones(draw):
    pairs = ["--pair=-1,0.5,0.4,0.3", "--pair=0,0.8,0.1,0.2", "--pair=0,0.5,3,0.4"]
    penumbral, umbral = draw("cones", "--r", 0.9, *pairs)["cones"]
    assert [pair["has_common_ancestor"] for pair in penumbral["pairs"]] == [True, True, False]
    assert [pair["ancestor"] for pair in penumbral["pairs"]] == [False, True, False]
    # On the edge of a penumbral cone, sqrt(r^2 - h^2) grows at the same rate as the distance from
    # its axis.
    a, b = math.sqrt(0.81 - 0.25), math.sqrt(0.81 - 0.09)
    top = (a + b - 1.4) / 2
    close(
        penumbral["pairs"][0]["lowest_common_ancestor"],
        [-1 + a - top, math.sqrt(0.81 - top**2)],
    )
    height = (0.5 + 0.3 + 1.4 / math.sinh(0.9)) / 2
    place = -1 + (height - 0.5) * math.sinh(0.9)
    close(umbral["pairs"][0]["lowest_common_ancestor"], [place, height])
    # The lowest common ancestor is the top of the half-circle through both points.
    centre = 1.5 + (0.16 - 0.25) / 6
    close(penumbral["pairs"][2]["lowest_common_ancestor"], [centre, math.hypot(centre, 0.5)])


@pytest.mark.parametrize("layout", ["interleaved", "split", "split_xl"])
def test_rotation(draw, layout):
    numbers = draw("rotation", "--layout", layout, "--dim", 8, "--shift", 5)
    matrix = torch.tensor(numbers["matrix"])
    close((matrix @ matrix.T).tolist(), torch.eye(8))
    steps = 3 if layout == "split" else 4
    angles = [5 * 10000 ** (-i / steps) for i in range(4)]
    close([math.cos(angle) for angle in numbers["angles"]], [math.cos(angle) for angle in angles])
    close([math.sin(angle) for angle in numbers["angles"]], [math.sin(angle) for angle in angles])
    assert numbers["largest_error"] < 1e-9


def test_terms(draw):
    numbers = draw("terms", "--text", "abca", "--dim", 16)
    names = ["content_content", "content_position", "position_content", "position_position"]
    terms = [torch.tensor(numbers[name], dtype=torch.float64) for name in names]
    close(numbers["sum"], sum(terms), 1e-5)
    torch.testing.assert_close(terms[1], terms[2].T)
    # The first and the last letter are equal: the same vector at two positions.
    assert torch.equal(terms[0][0], terms[0][3])
    assert not torch.equal(terms[3][0], terms[3][3])
    close(numbers["position_position"][0][2], math.sqrt(16) / 8 * sum(
        math.cos(2 * 10000 ** (-i / 8)) for i in range(8)
    ))  # fmt: skip


def test_descendants_of_a_tree():
    below = rank.descendants(3, 2)
    for i in range(13):
        for j in range(13):
            node, found = j, j == i
            while node > 0:
                node = (node - 1) // 3
                found = found or node == i
            assert bool(below[i, j]) == found


def test_margins():
    torch.manual_seed(0)
    below = rank.descendants(2, 2)
    s = torch.randn(3, 7, 7, dtype=torch.float64)
    expected = []
    for matrix in s.tolist():
        differences, squares = [], []
        for i, row in enumerate(matrix):
            inside = [x for j, x in enumerate(row) if below[i, j]]
            outside = [x for j, x in enumerate(row) if not below[i, j]]
            if outside:
                differences.append(min(inside) - max(outside))
                squares += [(x - sum(row) / 7) ** 2 for x in row]
        expected.append(min(differences) / math.sqrt(sum(squares) / len(squares)))
    close(rank.margins(s, below).tolist(), expected)
    moved = 3 * s + torch.randn(3, 7, 1, dtype=torch.float64)
    torch.testing.assert_close(rank.margins(moved, below), rank.margins(s, below))


def test_scores_of_pairs():
    q, k = torch.randn(2, 2, 7, 3, dtype=torch.float64)
    dot = rank.scores("dot", q, k)
    torch.testing.assert_close(dot, q @ k.transpose(1, 2) / math.sqrt(3))


def test_rank(draw):
    arguments = ["rank", "--dims", "2,6", "--depth", 2, "--steps", 80, "--restarts", 2]
    numbers = draw(*arguments)
    assert numbers["nodes"] == 7
    best = {
        (entry["similarity"], entry["dim"]): max(entry["margins"]) for entry in numbers["results"]
    }
    for name in ("dot", "penumbral", "umbral"):
        assert best[name, 6] > max(1.0, best[name, 2])
    assert draw(*arguments) == numbers
    for entry in numbers["results"]:
        before = entry["margins_before_last_quarter"]
        assert all(a <= b for a, b in zip(before, entry["margins"], strict=True))
    assert any(entry["margins"] != entry["margins_before_last_quarter"]
               for entry in numbers["results"])  # fmt: skip


WRONG = {
    "no picture": (["decya"], 'unknown picture "decya"; did you mean decay?'),
    "no picture name": ([], "PICTURE"),
    "option": (["decay", "--distence", "3"], "--distence 3; did you mean --distance?"),
    "required option": (
        ["attention", "--modle", "x"],
        "are required: --model; --modle is unknown, did you mean --model?",
    ),
    "position": (["decay", "--position", "alibbi"], "did you mean alibi?"),
    "no decay": (["decay", "--position", "sinusoidal"], '"sinusoidal" adds no distance bias'),
    "no encoding": (["encoding", "--position", "alibi"], '"alibi" is not added to embeddings'),
    "learned": (["encoding", "--position", "learned"], "gnomon inspect tables"),
    "length": (["encoding", "--length", "0"], "--length: '0' is not an integer from 1 to 4096"),
    "distance": (["decay", "--distance", "0"], "--distance: '0' is not an integer"),
    "layout": (["rotation", "--layout", "splitt"], "splitt"),
    "model": (["attention", "--model", "absent"], "no such checkpoint file or run folder: absent"),
    "out": (["cones", "--out", "cones.svg"], "cones.svg; expected a file NAME.png"),
    "folder of out": (["terms", "--out", "/dev/null/x.png"], "/dev/null"),
    "cone": (
        ["cones", "--cone", "penumbra"],
        'unknown cone "penumbra"; did you mean penumbral or umbral?',
    ),
    "pair": (["cones", "--pair", "1,2,3"], "'1,2,3'; expected four numbers"),
    "height": (["cones", "--pair", "1,2,3,-1"], "heights of at least 1e-06"),
    "above the light": (["cones", "--pair", "0,2,1,1"], "expected heights of at most r = 1"),
    "radius": (["cones", "--r", "0"], "--r is 0"),
    "text": (["terms", "--text", "a"], "2 to 256"),
    "similarity": (["rank", "--similarity", "dott"], "did you mean dot?"),
    "dims": (["rank", "--dims", "2,x"], "--dims: '2,x' is not a comma-separated list"),
    "one dimension": (["rank", "--dims", "1"], "--dims: '1' is not a comma-separated list"),
    "depth": (["rank", "--depth", "30"], "a smaller tree"),
}  # fmt: skip


def refuses(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("gnomon: ")
    return line


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, part = WRONG[name]
    assert part in refuses(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


def test_wrong_models(buckets, absolute, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--model", buckets]
    assert "--layer is 2; expected 0 to 1" in refuses(["attention", *model, "--layer", 2], capsys)
    assert "--head is -1; expected 0 to 1" in refuses(["attention", *model, "--head", -1], capsys)
    assert "--text has 0 bytes" in refuses(["attention", *model, "--text", ""], capsys)
    assert "contains no checkpoint" in refuses(["tables", "--model", tmp_path], capsys)
    mixed = ["decay", "--position", "rope_mixed"]
    assert "rope_mixed rotates by its learned frequencies" in refuses(mixed, capsys)
    line = refuses(["attention", "--model", absolute, "--text", 40 * "x"], capsys)
    assert "32" in line  # the table has 32 rows

    content = (buckets / "checkpoint.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    damaged = {
        "empty": b"",
        "cut": content[:-1],
        "cut in its header": content[:100],
        "no JSON": content[:8] + b"?" * size + content[8 + size :],
        "a huge header": b"\xff" * 8 + content[8:],
        "a list": (2).to_bytes(8, "little") + b"[]",
    }
    for what, data in damaged.items():
        (tmp_path / "damaged").write_bytes(data)
        line = refuses(["tables", "--model", "damaged"], capsys)
        assert "damaged is not a valid safetensors file" in line, what
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    assert "is not a checkpoint" in refuses(["tables", "--model", "other"], capsys)


def test_models_of_words(draw, folder, capsys):
    words = trained(folder, "absolute_keys:length=40", "dot", "--tokens", "words")
    line = refuses(["attention", "--model", words], capsys)
    assert "reads words; expected a model that reads bytes" in line
    names = [table["name"] for table in draw("tables", "--model", words)["tables"]]
    assert names == [f"blocks.{layer}.attention.absolute_keys_table" for layer in range(2)]


def test_the_program_hands_its_words_over(folder, tmp_path):
    text = succeed("inspect", "--help", cwd=tmp_path)
    assert all(f"    {name}" in text for name in PICTURES)
    assert "--shift" in succeed("inspect", "rotation", "--help", cwd=tmp_path)
    assert succeed("inspect", "rotation", "--shift", "-2", cwd=tmp_path) == "rotation.png\n"
    assert {p.name for p in tmp_path.iterdir()} == {"rotation.png", "rotation.json"}
    assert "did you mean cones?" in refused("inspect", "cone", cwd=tmp_path)
    done = gnomon_program("inspect", "cones", cwd=tmp_path, GNOMON_PYTHON="/no/such/python")
    assert done.returncode == 2
    assert done.stderr == "gnomon: cannot run /no/such/python\n"
