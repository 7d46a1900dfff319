"""gnomon.similarity.define: the C++ generated from a formula, and the resulting similarities."""

from __future__ import annotations

import ast
import json
import math
import os
import pathlib
import random
import re
import subprocess

import pytest
import torch
from test_cli import ROOT, TINY, succeed

import gnomon
from gnomon._formula import definition_of

pytestmark = pytest.mark.cpu("starts its own processes")

# Each formula, its head scalars, and whether g is a squared distance.
FORMULAS = [
    ("g", (), True),
    ("g", (), False),
    ("log1p(g)", (), True),
    ("log1p(g / nu)", ("nu",), True),
    ("sqrt(g)", (), True),
    ("sqrt(1 + g) - 1", (), True),
    ("g ** 1.5 + 2 * g ** 0.5 - g ** -0.5", (), True),
    ("(1 + g) ** -3", (), True),
    ("(1 + g / a) ** (-b)", ("a", "b"), True),
    ("g ** 0.3", (), True),
    ("exp(-g) - exp(g / 4)", (), True),
    ("tanh(t * g) / t", ("t",), False),
    ("softplus(g) + sigmoid(g)", (), False),
    ("abs(g - 1) + max(g, 2, t) - min(g, -0.5)", ("t",), False),
    ("max(0, g) ** 2 - (g + 1) ** 2 * 0.1", (), False),
    ("log(1 + g * g) * (g - 2)", (), False),
    ("log1p(g * g) + log1p(-0.5 * sigmoid(g))", (), False),
    ("(g + a) * (g - b) / (1 + c * c)", ("a", "b", "c"), False),
    ("g / (2 + abs(g)) - 3", (), False),
    ("1 / (1 + g) - +g / 7", (), True),
    ("(g / 8) ** 17 - (g / 9) ** -3", (), False),
    ("log(sigmoid(g)) + sigmoid(g) ** 0.5", (), False),
    ("1e4 * log1p(g / 1e4)", (), False),
    ("g ** 3.3 / (g + 2) ** 0.7", (), True),
]

PROGRAM = """
#include <cstdio>
#include <cstdlib>

#include "reference/vocabulary.h"

namespace gnomon::reference {

enum class PairInput { kNone, kInnerProduct, kSquaredDistance };
struct Derivatives {
  double g;
  double a[1];
  double b[1];
  double t[4];
};
struct Range {
  double least;
  double most;
};

DEFINITIONS

template <class F>
void Print(char** words) {
  double numbers[6];
  for (int n = 0; n < 6; ++n) numbers[n] = std::strtod(words[n], nullptr);
  const double* t = numbers + 3;
  Derivatives d{};
  const Range* const none = nullptr;
  F::Gradient(numbers[0], t, t, t, d);
  std::printf("%.17g %.17g %.17g %.17g %.17g", F::Value(numbers[0], t, t, t), d.g, d.t[0], d.t[1],
              d.t[2]);
  if constexpr (requires { F::Bounds(Range{}, t, none, t); }) {
    const Range range = F::Bounds(Range{numbers[1], numbers[2]}, t, none, t);
    std::printf(" %.17g %.17g", range.least, range.most);
  }
  std::printf("\\n");
}

}  // namespace gnomon::reference

int main(int, char** words) {
  using namespace gnomon::reference;
  for (++words; *words != nullptr; words += 7) {
    switch (std::atoi(*words)) {
      CASES
    }
  }
}
"""

FUNCTIONS = {
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.nn.functional.softplus(x, threshold=700),
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}


def joined(function):
    def join(first, *others):
        for other in others:
            first = function(*(torch.as_tensor(x, dtype=torch.float64) for x in (first, other)))
        return first

    return join


FUNCTIONS |= {"max": joined(torch.maximum), "min": joined(torch.minimum)}


def value_of(formula: str, heads: tuple[str, ...], g: torch.Tensor, t: list) -> torch.Tensor:
    code = compile(ast.parse(formula, mode="eval"), formula, "eval")
    return torch.as_tensor(eval(code, {**FUNCTIONS, "g": g, **dict(zip(heads, t, strict=False))}))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> pathlib.Path:
    """A program that evaluates the definitions of all formulas in double precision."""
    folder = tmp_path_factory.mktemp("formulas")
    definitions = [
        definition_of(f"F{n}", *formula, {"kTitle": 'a "title", of \\ ä'})
        for n, formula in enumerate(FORMULAS)
    ]
    cases = [f"case {n}: Print<F{n}>(words + 1); break;" for n in range(len(FORMULAS))]
    text = PROGRAM.replace("DEFINITIONS", "\n".join(definitions)).replace("CASES", "\n".join(cases))
    (folder / "formulas.cc").write_text(text, encoding="utf-8")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'src'}"]
    command = ["c++", *flags, "formulas.cc", "-o", "formulas"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return folder / "formulas"


def test_definitions_are_their_formulas(program):
    random.seed(0)
    draws = []
    for n, (_, _, of_distance) in enumerate(FORMULAS):
        for _ in range(60):
            ends = sorted(random.choice((0.1, 1, 10, 80)) * random.uniform(-1, 1) for _ in "ab")
            if of_distance:
                ends = sorted(abs(x) for x in ends)
            draws.append(
                (n, random.uniform(*ends), *ends, *(random.uniform(0.1, 3) for _ in "abc"))
            )
    words = [repr(x) for draw in draws for x in draw]
    printed = subprocess.run([program, *words], check=True, capture_output=True, text=True).stdout
    told = 0
    for (n, g, least, most, *t), line in zip(draws, printed.splitlines(), strict=True):
        formula, heads, _ = FORMULAS[n]
        leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (g, *t)]
        f = value_of(formula, heads, leaves[0], leaves[1:])
        gradients = torch.autograd.grad(f, leaves, allow_unused=True)
        expected = [f.item(), *(0.0 if x is None else x.item() for x in gradients)]
        ours = [float(x) for x in line.split()]
        assert ours[:5] == pytest.approx(expected, rel=1e-9, abs=1e-9), (formula, g, t)
        if len(ours) == 7:
            told += 1
            for inside in (least, most, g, random.uniform(least, most)):
                f = value_of(formula, heads, torch.tensor(inside, dtype=torch.float64), t).item()
                assert ours[5] - 1e-9 <= f <= ours[6] + 1e-9, (formula, least, most, inside, t)
    # A quotient whose divisor may be 0 has no bounds.
    assert told == 60 * (len(FORMULAS) - 2)


def test_kinks_and_ends(program):
    """Ties are split evenly, equal tokens have gradient 0, and overflow is clamped."""

    def at(formula, g, t=1.0):
        (n,) = [n for n, (f, _, _) in enumerate(FORMULAS)
                if f == formula]  # fmt: skip
        words = [str(n), *(repr(float(x)) for x in (g, g, g, t, t, t))]
        done = subprocess.run([program, *words], check=True, capture_output=True, text=True)
        return [float(x) for x in done.stdout.split()]

    kinked = "abs(g - 1) + max(g, 2, t) - min(g, -0.5)"
    assert at(kinked, 1)[1] == 0  # |g - 1|
    assert at(kinked, 2)[1:3] == [1.5, 0]  # 1 + half of max(g, 2)
    assert at(kinked, -0.5)[1] == -1.5
    assert at("sqrt(g)", 0)[:2] == [0, 0]
    assert at("g ** 1.5 + 2 * g ** 0.5 - g ** -0.5", 0)[1] == 0
    assert at("exp(-g) - exp(g / 4)", 1e6)[0] == -math.exp(88)
    assert all(math.isfinite(x) for x in at("exp(-g) - exp(g / 4)", 1e30))
    assert at("1e4 * log1p(g / 1e4)", 0)[:2] == [0, 1]
    assert at("1e4 * log1p(g / 1e4)", -1e-4)[0] == pytest.approx(-1e-4, rel=1e-7)
    assert at("softplus(g) + sigmoid(g)", 0)[1] == 0.75
    assert at("log(sigmoid(g)) + sigmoid(g) ** 0.5", -60)[:2] == pytest.approx([-60, 1])
    assert at("softplus(g) + sigmoid(g)", -1e4)[0] == 0
    assert at("softplus(g) + sigmoid(g)", 1e4)[0] == 1e4 + 1
    assert math.isnan(at("softplus(g) + sigmoid(g)", math.nan)[0])


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("g +", "not an expression"),
        ("x + g", "it contains x; expected g, nu"),
        ("erf(g) + nu", r"it contains erf\(\); expected one of abs"),
        ("max(g) + nu", r"it passes 1 arguments to max"),
        ("exp(g, nu)", r"it passes 2 arguments to exp"),
        ("nu", "it does not contain g"),
        ("g", "it does not contain nu"),
        ("g * nu * 1e300", "a number that float32 cannot represent"),
        ("g * nu * 1e30 * 1e30 ** 2", "a number that float32 cannot represent"),
        ("g * nu / 0", "it divides by 0"),
        (f"g * nu * {10**399}", r"a number that float32 cannot represent \(400 digits\)"),
        ("g ** 2000 + nu", "it contains the power 2000; expected an exponent from -1024 to 1024"),
        ("g ** 0 + nu", "it does not depend on g"),
        ("g if nu else g", "it contains 'g if nu else g'"),
        ("g.sqrt() + nu", "it contains 'g.sqrt"),
        ("g * True + nu", "it contains 'True'"),
        ("g @ nu", "it contains 'g @ nu'"),
        ("g" + " + g" * 5000, "it is nested too deeply"),
    ],
    ids=lambda text: text[:20],
)
def test_wrong_formulas(formula, told):
    with pytest.raises(ValueError, match=rf"(?s)gnomon.similarity.define: formula is .*{told}"):
        gnomon.similarity.define("wrong", formula, heads=("gamma", "nu"))


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"name": "Wrong"}, ValueError, "name is 'Wrong'; expected lowercase letters"),
        ({"name": "wrong__"}, ValueError, "name is"),
        ({"name": "dot"}, ValueError, "a term named dot already exists"),
        ({"name": "alibi"}, ValueError, "a term named alibi already exists"),
        ({"name": 3}, TypeError, "name is an int"),
        ({"name": "x" * 61}, ValueError, "at most 60"),
        ({"title": 5}, TypeError, "title is an int"),
        ({"heads": None}, TypeError, "heads is None; expected a sequence of names"),
        ({"heads": {"gamma"}}, TypeError, "heads is {'gamma'}; expected a sequence of names"),
        (
            {"heads": ("gamma", "formula")},
            ValueError,
            "names other than formula, which is reserved",
        ),
        ({"heads": ("gamma", "shape")}, ValueError, "names other than shape, which is reserved"),
        ({"formula": None}, TypeError, "formula is a NoneType"),
        ({"input": "distance"}, ValueError, "input is 'distance'; expected 'squared_distance'"),
        ({"heads": "gamma"}, TypeError, "heads is 'gamma'; expected a sequence of names"),
        ({"heads": ("gamma", "g")}, ValueError, "names other than g, which is reserved"),
        (
            {"heads": ("gamma", "gamma")},
            ValueError,
            "names other than gamma, which is reserved or repeated",
        ),
        ({"heads": ("gamma", "max")}, ValueError, "names other than max, which is reserved"),
        ({"heads": ("gamma", "a b")}, ValueError, "heads is"),
        ({"heads": ("gamma", "lambda")}, ValueError, "heads is"),
        ({"heads": ()}, ValueError, "factor is '-gamma'; expected 'scale'"),
        ({"factor": "beta"}, ValueError, "factor is 'beta'; expected 'scale' or 'gamma' or '-ga"),
        ({"factor": "-scale"}, ValueError, "factor is '-scale'"),
        (
            {"heads": tuple("abcde"), "factor": "a"},
            ValueError,
            "at most three names in the formula",
        ),
    ],
    ids=str,
)
def test_wrong_arguments(change, error, told):
    arguments = {"name": "wrong", "formula": "log1p(g)"} | change
    with pytest.raises(error, match=f"gnomon.similarity.define: .*{told}"):
        gnomon.similarity.define(**arguments)


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"cannot run no-such-compiler: .*g\+\+.*CXX"):
        gnomon.similarity.define("absent", "log1p(g)")
    monkeypatch.setenv("CXX", "sh -c 'echo of no use >&2; exit 3'")
    with pytest.raises(RuntimeError, match=r"sh cannot compile absent \(exit code 3\):\nof no use"):
        gnomon.similarity.define("absent", "log1p(g)")
    for wrong in (" ", 'g++ "'):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(RuntimeError, match=f"CXX is '{re.escape(wrong)}'; expected a C"):
            gnomon.similarity.define("absent", "log1p(g)")
    monkeypatch.setenv("CXX", "sh -c 'exit 3'")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"cannot write to .*GNOMON_CACHE"):
        gnomon.similarity.define("absent", "log1p(g)")
    assert not list((tmp_path / "cache" / "terms").iterdir())


CHECKS = """
import os
import pickle
import torch
import gnomon

torch.set_num_threads(1)
StudentT = gnomon.similarity.define(
    "student_t", "log1p(g / nu)", heads=("gamma", "nu"), title="Student's t",
    source="van der Maaten and Hinton 2008, Visualizing Data using t-SNE",
)
assert gnomon.similarity.define("student_t", "log1p(g / nu)", heads=("gamma", "nu"),
    title="Student's t",
    source="van der Maaten and Hinton 2008, Visualizing Data using t-SNE") is StudentT
try:
    gnomon.similarity.define("student_t", "log1p(g)")
    raise AssertionError
except ValueError as error:
    assert "a term named student_t already exists" in str(error), error
(entry,) = [e for e in gnomon.catalogue()["similarities"] if e["name"] == "student_t"]
assert (entry["title"], entry["class_name"]) == ("Student's t", "StudentT"), entry
assert entry["formula"] == "-gamma f, f = log1p(g / nu), g = |q - k|^2"
assert [p["name"] for p in entry["parameters"]] == ["gamma", "nu"]
assert issubclass(StudentT, gnomon.similarity.Similarity) and "log1p(g / nu)" in StudentT.__doc__
term = StudentT(0.5, nu=2.0)
again = pickle.loads(pickle.dumps(term))
assert (again.gamma, again.nu) == (0.5, 2.0)

def plain(q, k, v, gamma, nu, causal):
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    g = (q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1)
    scores = -gamma.view(-1, 1, 1) * torch.log1p(g / nu.view(-1, 1, 1))
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    return scores.softmax(-1) @ v

for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
    for length, dim, kv_heads, causal in ((1, 1, 4, True), (37, 5, 2, True), (70, 16, 4, False)):
        torch.manual_seed(length)
        q, k = torch.randn(2, 4, length, dim), torch.randn(2, kv_heads, length, dim)
        v, gamma, nu = torch.randn(2, kv_heads, length, 3), torch.rand(4) + 0.1, torch.rand(4) + 1
        rounded = [x.to(dtype) for x in (q, k, v)]
        wide = [x.double() for x in rounded] + [gamma.double(), nu.double()]
        narrow = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = [x.requires_grad_() for x in (*rounded, gamma.to(narrow), nu.to(narrow))]
        expected = [x.requires_grad_() for x in wide]
        ours = gnomon.attention(*leaves[:3], similarity=StudentT(*leaves[3:]), causal=causal)
        theirs = plain(*expected, causal)
        found = [ours, *torch.autograd.grad(ours.double().square().sum(), leaves)]
        right = [theirs, *torch.autograd.grad(theirs.square().sum(), expected)]
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(
                a.double(), b, rtol=0, atol=tolerance * max(1, float(b.detach().abs().max())))

# In float64, fused kernels compute first and second derivatives. These equal the reference's.
tokens = [torch.randn(1, 2, 90, 6, dtype=torch.float64).requires_grad_() for _ in range(3)]
heads = [torch.rand(2, dtype=torch.float64).add(0.5).requires_grad_() for _ in range(2)]
leaves = [*tokens, *heads]
indptr, indices = torch.arange(0, 90 * 7 + 1, 7), torch.randint(90, (90 * 7,))
results = []
for implementation in ("", "reference"):
    os.environ["GNOMON_FLOAT64"] = implementation
    o = gnomon.attention(*tokens, similarity=StudentT(*heads), causal=True)
    first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    tangent = torch.func.jvp(
        lambda q: gnomon.attention(q, *tokens[1:], similarity=StudentT(*heads), causal=True),
        (tokens[0],), (tokens[1],))[1]
    nodes = [x[0].transpose(0, 1) for x in tokens]
    o_graph = gnomon.graph_attention(*nodes, indptr, indices, similarity=StudentT(*heads))
    first_graph = torch.autograd.grad(o_graph.square().sum(), leaves, create_graph=True)
    second_graph = torch.autograd.grad(sum(x.square().sum() for x in first_graph), leaves)
    results.append([o, *first, *second, tangent, *first_graph, *second_graph])
del os.environ["GNOMON_FLOAT64"]
for fused, reference in zip(*results, strict=True):
    torch.testing.assert_close(fused, reference, rtol=1e-10, atol=1e-10)
# Identical bits would mean that the reference computed both.
assert any(not torch.equal(fused, reference) for fused, reference in zip(*results, strict=True))
assert not torch.equal(results[0][-1], results[1][-1])

# Tiles with provably negligible weight are skipped.
x = torch.randn(1, 2, 512, 8)
all_tiles, few = (
    gnomon.attention(
        x, x, x, similarity=StudentT(8.0, 1.0), position="alibi", causal=True, tolerance=tolerance
    )
    for tolerance in (0, 2**-24)
)
torch.testing.assert_close(few, all_tiles)

module = gnomon.nn.MultiheadAttention(16, 4, similarity="student_t")
x = torch.randn(2, 9, 16)
module(x, causal=True).square().sum().backward()
learned = {n: p for n, p in module.named_parameters() if "proj" not in n}
assert len(learned) == 2 and all(p.grad.abs().sum() > 0 for p in learned.values()), learned
compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(x, causal=True), module(x, causal=True))
q = torch.randn(2, 2, 4, 9, 8)
mapped = torch.vmap(lambda q: gnomon.attention(q, q, q, similarity=StudentT(1.0, 1.0)))(q)
one = gnomon.attention(q[1], q[1], q[1], similarity="student_t:gamma=1:nu=1")
torch.testing.assert_close(mapped[1], one)

# A formula of an inner product with all functions, the scale and per-head parameters. Their names
# do not clash with names in the kernels.
formula = (
    "tanh(t * g) + exp(-abs(g)) + softplus(g) - sigmoid(g) + max(g, 0.1) ** 1.7 - min(g, 2) / 3"
    " - sqrt(1 + g * g) + log1p(min(g, 0.5) / 9) + log(1 + g * g)"
)
Value = gnomon.similarity.define(
    "value", formula, input="inner_product", heads=("t",), factor="scale"
)
names = ("tanh", "exp", "abs", "sigmoid", "sqrt", "log1p", "log")
functions = {name: getattr(torch, name) for name in names}
functions |= {
    "softplus": torch.nn.functional.softplus,
    "max": lambda x, y: x.clamp(min=y),
    "min": lambda x, y: x.clamp(max=y),
}
for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
    for given in (True, False):
        q, k, v = torch.randn(3, 2, 4, 33, 7, dtype=torch.float64).mul(0.4).to(dtype)
        t = torch.rand(4, dtype=dtype) + 0.5 if given else torch.ones(4, dtype=dtype)
        leaves = [x.requires_grad_() for x in (q, k, v, t)]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        similarity = Value(leaves[3]) if given else "value"
        ours = gnomon.attention(*leaves[:3], similarity=similarity, scale=0.7)
        g = wide[0] @ wide[1].transpose(-1, -2)
        scores = eval(formula, {**functions, "g": g, "t": wide[3].view(-1, 1, 1)})
        theirs = (0.7 * scores).softmax(-1) @ wide[2]
        count = 4 if given else 3
        found = [ours, *torch.autograd.grad(ours.square().sum(), leaves[:count])]
        right = [theirs, *torch.autograd.grad(theirs.square().sum(), wide[:count])]
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(
                a.double(), b, rtol=0, atol=tolerance * max(1, float(b.detach().abs().max())))
gnomon.nn.MultiheadAttention(8, 2, similarity="value")(torch.randn(1, 5, 8)).sum().backward()

# Terms that require the dot product do not work with a different similarity that has the scale.
q = torch.randn(1, 4, 9, 8)
for position, told in (
    ("rope:xpos", "expected the similarity dot"),
    (
        gnomon.position.TransformerXL(*torch.randn(2, 4, 8), torch.randn(4, 9, 8)),
        "works only with the similarity dot",
    ),
):
    try:
        gnomon.attention(q, q, q, similarity="value", position=position, causal=True)
        raise SystemExit(f"{position} is accepted")
    except ValueError as error:
        assert told in str(error), error
print(StudentT.library)
"""


def test_a_similarity_of_a_formula(tmp_path):
    """Runs in separate processes, because definitions persist. The second one has no compiler."""
    (tmp_path / "checks.py").write_text(CHECKS)
    # The recipe page defines the same similarity, which may be in this cache.
    environment = os.environ | {"GNOMON_CACHE": str(ROOT / "build" / "cache")}
    found = set()
    for change in ({}, {"PATH": "/nowhere"}):
        done = subprocess.run(
            [os.environ["GNOMON_PYTHON"], "checks.py"],
            cwd=tmp_path,
            env=environment | change,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.add(done.stdout.strip())
    (library,) = found

    (tmp_path / "text").write_text("some words of a text\n" * 200)
    succeed(
        "compare", "--terms", library, "--data", "text", "--out", "run", "--run", "student_t/rope",
        "--steps", 2, "--lengths", 16, "--evaluation-bytes", 64, *TINY, cwd=tmp_path,
    )  # fmt: skip
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [one["losses"][0]["loss"] < 10 for one in results["runs"]] == [True]
