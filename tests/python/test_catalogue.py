"""The catalogue: the library's description of its terms, and texts derived from it."""

import inspect
import json

import pytest
import torch
from formulas import SIMILARITIES, Case
from test_cli import succeed

import gnomon
from gnomon import position, similarity
from gnomon._catalogue import biases_of_axes, components_of, entry_of

pytestmark = pytest.mark.cpu("files alone")

CATALOGUE = gnomon.catalogue()
ENTRIES = CATALOGUE["similarities"] + CATALOGUE["positions"]
#: The API of the first release: names, order and defaults of arguments.
SIGNATURES = {
    "Additive": "(slope=0.2)",
    "Dot": "(softcap=None)",
    "Entailment": "(gamma, K=0.1, map='ball')",
    "Gaussian": "(gamma)",
    "Hyperbolic": "(beta, model='hyperboloid', map=None)",
    "Cosine": "(scale)",
    "Laplacian": "(gamma)",
    "Lorentz": "(scale, c=1.0, bias=0.0, map='space')",
    "Penumbral": "(gamma, r=1.0, map='xi', score='height')",
    "Umbral": "(gamma, r=0.1, map='psi', score='height')",
    "T5": "(table, bidirectional, max_distance=128)",
    "ALiBi": "(slopes)",
    "AbsoluteKeys": "(table, scale=None)",
    "Grid": "(shape, axes, prefix=0)",
    "GridBias": "(table, prefix=0)",
    "GridBias.from_query_minus_key": "(table, prefix=0)",
    "HyPE": "(tau, mu, mode='abs')",
    "Kerple": "(r1, r2, kind='log')",
    "OffsetBias": "(table)",
    "Sandwich": "(factor, dims=128, base=10000.0)",
    "KeyBias": "(bias)",
    "PairBias": "(bias)",
    "Forget": "(log_forget)",
    "ContentBias": "(query, table, extent=1024)",
    "Disentangled": "(keys, queries, max_distance=0, scale=None)",
    "Gate": "(values)",
    "QKNorm": "(q_weight, k_weight, epsilon=1e-06)",
    "Sink": "(score)",
    "ScalableSoftmax": "(s)",
    "LogTemperature": "(scale=0.1, length=8192.0, kind='steps')",
    "Relative": "(table, max_offset, far='clip', values=None, query=None, scale=None)",
    "Relative.from_future_first": "(table, max_offset, far='clip', values=None, query=None, "
    "scale=None)",
    "Relative2D": "(rows, columns, height, width, prefix=0, scale=None)",
    "RoPE": "(base=10000.0, layout='interleaved', dims=None, shape=None, prefix=0, "
    "scaling=None, xpos=False, sections=None, section_order='contiguous', angles=None, "
    "key_angles=None)",
    "RoPEMixed": "(frequencies, layout='interleaved', shape=None, prefix=0)",
    "TransformerXL": "(u, v, r, bidirectional=False, scale=None)",
    "CAPE": "(dim, global_shift=None, local_shift=None, global_scale=None, normalize=False, "
    "shape=None, prefix=0, device=None, dtype=None)",
    "Convolutional": "(dim, kernel=128, groups=16, causal=False, device=None, dtype=None)",
    "LearnedAbsolute": "(max_length, dim, device=None, dtype=None)",
    "Sinusoidal": "(dim, layout='interleaved', shape=None, prefix=0, device=None, dtype=None)",
}


@pytest.mark.slow
def test_the_catalogue_matches_the_program_list(tmp_path):
    assert json.loads(succeed("list", "--json", cwd=tmp_path)) == CATALOGUE


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_an_entry_is_whole(entry):
    assert entry["title"]
    assert entry["formula"]
    assert entry["source"]
    assert entry_of(entry["name"]) == entry
    for parameter in entry["parameters"]:
        said = parameter["default"] is not None or parameter["otherwise"] is not None
        required = parameter["kind"] == "table" and parameter["argument"] == "required"
        assert said != required, parameter["name"]
        assert (parameter["kind"] == "choice") == bool(parameter["choices"])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay_as_they_are(name):
    first, *parts = name.split(".")
    (what,) = (
        getattr(module, first)
        for module in (similarity, position, gnomon.nn)
        if hasattr(module, first)
    )
    for part in parts:
        what = getattr(what, part)
    signature = inspect.signature(what)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_every_term_has_a_class():
    named = {entry["class_name"] for entry in ENTRIES}
    assert (
        SIGNATURES.keys()
        - {
            "Grid",
            "GridBias.from_query_minus_key",
            "Relative.from_future_first",
        }
        <= named
    )
    for entry in ENTRIES:
        assert (entry["class_name"] == "") == (entry["role"] == "none")
        assert all(parameter["meaning"] for parameter in entry["parameters"]), entry["name"]


def test_formulas_include_all_similarities():
    terms = [entry.ours(Case(name).inputs()) for name, entry in SIMILARITIES.items()]
    names = {entry["class_name"] for entry in CATALOGUE["similarities"]}
    assert {type(term).__name__ for term in terms if term is not None} == names


def test_all_offset_biases_support_an_axis():
    biases = biases_of_axes()
    assert biases == [entry["name"] for entry in ENTRIES if entry["role"] == "bias"]
    assert {"alibi", "hype", "kerple", "offset_bias", "sandwich", "t5"} <= set(biases)


def test_components():
    rope, bias, unknown = components_of("rope:shape=3x4+alibi:slopes=tensor+nonsense:a=b")
    assert (rope.name, rope.options, rope.spec) == ("rope", {"shape": "3x4"}, "rope:shape=3x4")
    assert rope.lies_on_a_grid
    assert rope.tensors == []
    assert bias.tensors == ["slopes"]
    assert not bias.lies_on_a_grid
    assert unknown.entry == {}
    # Tensors have the order of the operator's arguments, not that of the specification.
    (relative,) = components_of("relative:values=tensor:max_offset=3:table=tensor")
    assert relative.tensors == ["table", "values"]
    assert relative.tables("near_offsets") == ["table", "values"]
    assert components_of("relative2d")[0].lies_on_a_grid


def test_terms_of_a_specification_and_tensors():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    gamma = torch.rand(4).requires_grad_()
    slopes = torch.rand(4).requires_grad_()
    ours = gnomon.attention(
        q,
        k,
        v,
        similarity=similarity.Specified("penumbral:gamma=tensor:score=height2", (gamma,)),
        position="rope" + position.Specified("alibi:slopes=tensor", (slopes,)),
    )
    expected = gnomon.attention(
        q,
        k,
        v,
        similarity=similarity.Penumbral(gamma, score="height2"),
        position=[position.RoPE(), position.ALiBi(slopes)],
    )
    assert torch.equal(ours, expected)
    assert all(g.any() for g in torch.autograd.grad(ours.sum(), [gamma, slopes]))
    # This bias works along grid axes, like any other.
    tokens = torch.randn(1, 4, 6, 8)
    grids = [
        position.Grid((2, 3), [position.Specified("alibi:slopes=tensor", (slopes,)), bias])
        for bias in (position.Specified("kerple"), position.Kerple(*_kerple_starts(4)))
    ]
    first, second = (gnomon.attention(tokens, tokens, tokens, position=grid) for grid in grids)
    torch.testing.assert_close(first, second)
    with pytest.raises(ValueError, match=r"axes contains rope; expected offset biases: alibi"):
        position.Grid((2, 3), [position.ALiBi(0.5), position.Specified("rope")])


def _kerple_starts(heads):
    module = gnomon.nn.MultiheadAttention(8 * heads, heads, position="kerple")
    values = module.learned_values()
    return values["kerple_r1"].start.float(), values["kerple_r2"].start.float()
