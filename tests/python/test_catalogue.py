"""The catalogue: what the library says of its terms, and what is written of them elsewhere."""

import dataclasses
import json

import pytest
import torch
from test_cli import succeed

import gnomon
from gnomon import position, similarity
from gnomon._catalogue import components_of, entry_of, names_of

CATALOGUE = gnomon.catalogue()
ENTRIES = CATALOGUE["similarities"] + CATALOGUE["positions"]
CLASSES = {
    term._name: term
    for module in (similarity, position)
    for term in (getattr(module, name) for name in module.__all__)
    if hasattr(term, "_name")
}
#: A sum over axes, which has no entry.
CLASSES.pop("grid")


def test_it_is_what_the_program_lists(tmp_path):
    assert json.loads(succeed("list", "--json", cwd=tmp_path)) == CATALOGUE


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_an_entry_is_whole(entry):
    assert entry["title"]
    assert entry["formula"]
    assert entry["source"]
    assert entry_of(entry["name"]) == entry
    for parameter in entry["parameters"]:
        said = parameter["default"] is not None or parameter["otherwise"] is not None
        assert said == (parameter["kind"] != "table"), parameter["name"]
        assert (parameter["kind"] == "choice") == bool(parameter["choices"])


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ENTRIES if entry["role"] not in ("none", "embedding")],
    ids=lambda entry: entry["name"],
)
def test_python_has_a_class_of_each_with_its_parameters(entry):
    """What modules alone have is no field, and neither is a shape that a table tells."""
    term = CLASSES[entry["name"]]
    fields = {field.name: field for field in dataclasses.fields(term)}
    parameters = {parameter["name"]: parameter for parameter in entry["parameters"]}
    beside = {"height", "width"}  # of Relative2D: its shape
    assert fields.keys() - beside <= parameters.keys()
    for name, parameter in parameters.items():
        if parameter["kind"] in ("per_head", "table"):
            assert name in fields, name
    for name, field in fields.items():
        if field.default in (dataclasses.MISSING, None) or name in beside:
            continue
        default = parameters[name]["default"]
        if parameters[name]["kind"] in ("number", "integer"):
            assert float(default) == field.default, name
        elif parameters[name]["kind"] == "flag":
            assert default == str(field.default).lower(), name
        else:
            assert default == field.default, name
        if parameters[name]["kind"] == "choice":
            assert field.default == parameters[name]["choices"][0]


def test_names_of_a_role():
    assert names_of("rotation") == ["rope"]
    assert names_of("bias") == ["alibi", "hype", "kerple", "offset_bias", "t5"]
    assert {"sinusoidal", "learned", "conv", "cape"} == set(names_of("embedding"))


def test_components():
    rope, bias, unknown = components_of("rope:shape=3x4+alibi:slopes=tensor+nonsense:a=b")
    assert (rope.name, rope.options, rope.spec) == ("rope", {"shape": "3x4"}, "rope:shape=3x4")
    assert rope.lies_on_a_grid
    assert rope.tensors == []
    assert bias.tensors == ["slopes"]
    assert not bias.lies_on_a_grid
    assert unknown.entry == {}
    # In the operator's order, whatever that of the text.
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
    # Along the axes of a grid, as any other bias.
    tokens = torch.randn(1, 4, 6, 8)
    grids = [
        position.Grid((2, 3), [position.Specified("alibi:slopes=tensor", (slopes,)), bias])
        for bias in (position.Specified("kerple"), position.Kerple(*_kerple_starts(4)))
    ]
    first, second = (gnomon.attention(tokens, tokens, tokens, position=grid) for grid in grids)
    torch.testing.assert_close(first, second)
    with pytest.raises(ValueError, match=r"axes have rope; expected biases of one offset: alibi"):
        position.Grid((2, 3), [position.ALiBi(0.5), position.Specified("rope")])


def _kerple_starts(heads):
    module = gnomon.nn.MultiheadAttention(8 * heads, heads, position="kerple")
    values = module.learned_values()
    return values["kerple_r1"].start.float(), values["kerple_r2"].start.float()
