"""Explicit positions: documents, trees, random positions, and places on a grid."""

import math
import textwrap
from dataclasses import dataclass

import pytest
import torch
from formulas import (
    POSITIONS,
    SIMILARITIES,
    TOLERANCE,
    Case,
    Mask,
    assert_near,
    check,
    deberta_rows,
    generator_of,
    in_turn,
    pairwise,
    values_and_gradients,
)
from operator_checks import peak_memory

import gnomon
from gnomon import position
from gnomon.lab.models import LanguageModel, LanguageModelCache
from gnomon.nn import KVCache, MultiheadAttention, TokenPosition

B, H, D, DV = 2, 4, 8, 5


def drawn(batch, count, limit=40, first=-7, ordered=True):
    """For each batch element, `count` different positions out of `limit`, starting at `first`."""
    generator = generator_of(count)
    rows = [torch.randperm(limit, generator=generator)[:count] + first for _ in range(batch)]
    return torch.stack([row.sort().values if ordered else row for row in rows])


def documents(batch, count, length):
    """Positions that restart, and the corresponding segments."""
    places = torch.stack([torch.arange(count) + 2 * b for b in range(batch)])
    return places % length, places // length


@dataclass
class Placed(Case):
    """A case with explicit positions (B, L) of queries and keys."""

    places: torch.Tensor | None = None
    key_places: torch.Tensor | None = None

    def arguments(self):
        return super().arguments() | {
            "positions": self.places,
            "key_positions": self.key_places,
        }

    def of_keys(self):
        return self.places if self.key_places is None else self.key_places

    def scores(self, inputs):
        similarity, term = SIMILARITIES[self.similarity], POSITIONS[self.position]
        i, j = (p.double() for p in (self.places, self.of_keys()))
        q, k = self.rotated(inputs, i[:, None], j[:, None])
        shape = self.heads, self.queries, self.keys
        bias = torch.stack(
            [
                torch.as_tensor(term.bias(inputs, i[b, :, None], j[b, None])).expand(shape)
                for b in range(self.batch)
            ]
        )
        scores = similarity.scores(inputs, q, k) + bias
        return scores.masked_fill(~self.visible(), -math.inf)

    def visible(self):
        """The mask (B, 1, Lq, Lk): causality and windows by position, and the rest by column."""
        columns = Mask(
            key_starts=self.mask.key_starts,
            key_lengths=self.mask.key_lengths,
            query_segments=self.mask.query_segments,
            key_segments=self.mask.key_segments,
        )
        rows = torch.zeros(self.queries, 1)
        visible = columns.visible(rows, torch.arange(self.keys)[None], self.batch)
        offset = (self.of_keys()[:, None, :] - self.places[:, :, None])[:, None]
        left, right = self.mask.window or (None, None)
        if self.mask.causal:
            visible &= offset <= 0
        if left is not None:
            visible &= offset >= -left
        if right is not None:
            visible &= offset <= right
        return visible


MASKS = {
    "all": Mask(),
    "causal": Mask(causal=True),
    "window, lengths": Mask(window=(9, 4), key_starts=[0, 3], key_lengths=[13, 10]),
    "segments": Mask(
        causal=True,
        query_segments=[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2],
        key_segments=[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2],
    ),
}


@pairwise(name=POSITIONS, mask=MASKS, dtype=TOLERANCE)
def test_every_position_is_its_formula(name, mask, dtype):
    case = Placed(
        position=name,
        key_heads=2,
        mask=MASKS[mask],
        places=drawn(B, 13, ordered=mask != "all"),
    )
    check(case.ours, case.theirs, case.inputs(), dtype)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_every_similarity_takes_positions(similarity):
    case = Placed(
        similarity=similarity,
        position="rope + hype + t5",
        queries=7,
        mask=Mask(causal=True),
        places=drawn(B, 7, ordered=False),
        key_places=drawn(B, 13, ordered=False),
    )
    check(case.ours, case.theirs, case.inputs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    case = Placed(position="rope + hype + t5", mask=Mask(causal=True), places=drawn(B, 13))
    inputs = {name: x.to(dtype) for name, x in case.inputs().items()}
    o, _ = case.ours(inputs)
    expected, _ = case.theirs({name: x.double() for name, x in inputs.items()})
    assert o.dtype == dtype
    assert float((o.double() - expected).abs().max()) < 16 * torch.finfo(dtype).eps


# Positions that multiply queries by table rows, and biases from tables. Each function returns the
# terms for scores and values, given q (B, H, Lq, D), and positions p (B, Lq, 1) and r (B, 1, Lk).


def by_rows(q, table, index, counts, scale=D**-0.5):
    """q_i . table[index_ij], or 0 for excluded pairs; table (n, D) or (H, n, D), index (B, Lq,
    Lk)."""
    rows = table.expand(H, *table.shape[-2:])[:, index].movedim(0, 1)
    return (torch.einsum("bhid,bhijd->bhij", q, rows) * scale).masked_fill(~counts[:, None], 0)


def relative(far, past=False):
    def scores(x, p, r):
        offset = r - p
        lowest, highest = -6, 0 if past else 6
        counts = (offset >= lowest) & (offset <= highest) | (far == "clip")
        index = offset.clamp(lowest, highest) + 6
        return by_rows(x["q"], x["table"], index, counts), index, counts

    return scores


def disentangled(x, p, r):
    index = deberta_rows(p - r, 8, 20)
    everywhere = torch.ones_like(index, dtype=torch.bool)
    k = x["k"].repeat_interleave(H // x["k"].shape[1], 1)
    of_keys = by_rows(k, x["queries"], index.mT, everywhere.mT)
    return by_rows(x["q"], x["keys"], index, everywhere) + of_keys.mT, None, None


def transformer_xl(x, p, r):
    distance = (p - r).clamp(0, 39)
    k = x["k"].repeat_interleave(H // x["k"].shape[1], 1)
    product = torch.einsum("hd,bhjd->bhj", x["u"], k)[:, :, None] * D**-0.5
    shifted = x["q"] + x["w"][:, None]
    rows = by_rows(shifted, x["rows"], distance, torch.ones_like(distance, dtype=torch.bool))
    return product + rows, None, None


def grid_places(p):
    """Rows and columns on a 5 x 7 grid after two tokens, and whether a token is on the grid."""
    place = p - 2
    return place.div(7, rounding_mode="floor"), place % 7, place >= 0


def relative2d(x, p, r):
    (y, x1, on), (y2, x2, on2) = grid_places(p), grid_places(r)
    counts = on & on2
    rows = by_rows(x["q"], x["rows"], (y2 - y + 4).clamp(0, 8), counts)
    return rows + by_rows(x["q"], x["columns"], (x2 - x1 + 6).clamp(0, 12), counts), None, None


def grid_bias(x, p, r):
    (y, x1, on), (y2, x2, on2) = grid_places(p), grid_places(r)
    bias = x["table"][:, (y2 - y + 4).clamp(0, 8), (x2 - x1 + 6).clamp(0, 12)].movedim(0, 1)
    return bias.masked_fill(~(on & on2)[:, None], 0), None, None


def on_axes(x, p, r):
    (y, x1, on), (y2, x2, on2) = grid_places(p), grid_places(r)
    distance = ((y2 - y).abs() + (x2 - x1).abs()) * (on & on2)
    return -x["slopes"][:, None, None] * distance[:, None], None, None


# For each position: the shapes of its tensors, its formula, whether it requires causal=True, the
# first position, and the number of positions to draw from.
TERMS = {
    "relative, clip": (
        lambda x: position.Relative(x["table"], 6),
        {"table": (13, D)},
        relative("clip"),
        False,
        (-7, 40),
    ),
    "relative, zero, values": (
        lambda x: position.Relative(x["table"], 6, far="zero", values=x["values"]),
        {"table": (H, 13, D), "values": (13, DV)},
        relative("zero"),
        False,
        (-7, 40),
    ),
    "relative, clip, values for the past": (
        lambda x: position.Relative(x["table"], 6, values=x["values"]),
        {"table": (7, D), "values": (H, 7, DV)},
        relative("clip", past=True),
        True,
        (-7, 40),
    ),
    "disentangled": (
        lambda x: position.Disentangled(x["keys"], x["queries"], max_distance=20),
        {"keys": (16, D), "queries": (H, 16, D)},
        disentangled,
        False,
        (-7, 40),
    ),
    "content bias": (
        lambda x: position.ContentBias(x["query"], x["table"], extent=7),
        {"query": (B, H, 13, 3), "table": (13, 3)},
        lambda x, p, r: (
            by_rows(x["query"], x["table"], (r - p).clamp(-6, 6) + 6, (r - p).abs() <= 6, scale=1),
            None,
            None,
        ),
        False,
        (-7, 40),
    ),
    "transformer_xl": (
        lambda x: position.TransformerXL(x["u"], x["w"], x["rows"]),
        {"u": (H, D), "w": (H, D), "rows": (H, 40, D)},
        transformer_xl,
        True,
        (100, 40),
    ),
    "absolute keys": (
        lambda x: position.AbsoluteKeys(x["table"]),
        {"table": (33, D)},
        lambda x, p, r: (
            by_rows(x["q"], x["table"], r.expand(-1, p.shape[1], -1), r + 0 * p >= 0),
            None,
            None,
        ),
        False,
        (0, 33),
    ),
    "offset bias": (
        lambda x: position.OffsetBias(x["table"]),
        {"table": (H, 79)},
        lambda x, p, r: (x["table"][:, r - p + 39].movedim(0, 1), None, None),
        False,
        (-7, 40),
    ),
    "relative2d": (
        lambda x: position.Relative2D(x["rows"], x["columns"], 5, 7, prefix=2),
        {"rows": (9, D), "columns": (H, 13, D)},
        relative2d,
        False,
        (0, 37),
    ),
    "grid bias": (
        lambda x: position.GridBias(x["table"], prefix=2),
        {"table": (H, 9, 13)},
        grid_bias,
        False,
        (0, 37),
    ),
    "alibi on a grid": (
        lambda x: position.Grid((5, 7), [position.ALiBi(x["slopes"])] * 2, prefix=2),
        {"slopes": (H,)},
        on_axes,
        False,
        (0, 37),
    ),
}


def term_inputs(name, key_heads=2, queries=13, keys=13):
    torch.manual_seed(0)
    shapes = {
        "q": (B, H, queries, D),
        "k": (B, key_heads, keys, D),
        "v": (B, key_heads, keys, DV),
        **TERMS[name][1],
    }
    return {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}


def term_ours(name, places, **arguments):
    def attend(x):
        return gnomon.attention(
            *(x["q"], x["k"], x["v"]),
            position=TERMS[name][0](x),
            positions=places,
            causal=TERMS[name][3],
            return_lse=True,
            **arguments,
        )

    return attend


def term_theirs(name, places):
    _, _, added, causal, _ = TERMS[name]

    def attend(x):
        p, r = places[:, :, None], places[:, None, :]
        k, v = (x[key].repeat_interleave(H // x[key].shape[1], 1) for key in "kv")
        scores, index, counts = added(x, p, r)
        scores = scores + torch.einsum("bhid,bhjd->bhij", x["q"], k) * D**-0.5
        if causal:
            scores = scores.masked_fill((r > p)[:, None], -math.inf)
        weights = scores.softmax(-1)
        o = weights @ v
        if "values" in x:
            of_pairs = x["values"].expand(H, *x["values"].shape[-2:])[:, index].movedim(0, 1)
            of_pairs = of_pairs.masked_fill(~counts[:, None, ..., None], 0)
            o = o + torch.einsum("bhij,bhijd->bhid", weights, of_pairs)
        return o, scores.logsumexp(-1)

    return attend


@pairwise(name=TERMS, ordered=[True, False], dtype=TOLERANCE)
def test_every_term_of_tables_is_its_formula(name, ordered, dtype):
    first, limit = TERMS[name][4]
    places = drawn(B, 13, limit, first, ordered)
    check(term_ours(name, places), term_theirs(name, places), term_inputs(name), dtype)


def test_rope_on_a_grid_rotates_by_places():
    torch.manual_seed(0)
    places = drawn(B, 9, 37, 0, ordered=False)
    q, k, v = (torch.randn(B, 2, 9, D, dtype=torch.float64) for _ in range(3))
    term = position.RoPE(shape=(5, 7), prefix=2)
    o = gnomon.attention(q, k, v, position=term, positions=places)
    for b in range(B):
        # The expected call uses all grid tokens and masks tokens outside `places`.
        def whole(x, b=b):
            full = torch.zeros(1, 2, 37, D, dtype=torch.float64)
            return full.index_copy(2, places[b], x[b : b + 1])

        seen = torch.zeros(37, dtype=torch.bool).index_fill(0, places[b], True)
        expected = gnomon.attention(
            whole(q), whole(k), whole(v), position=term, mask=seen[None, None, None]
        )
        torch.testing.assert_close(o[b], expected[0, :, places[b]])


# These terms depend on the order or the number of keys.
ORDERED = {
    "forget": lambda q, log: position.Forget(log),
    "temperature": lambda q, log: position.LogTemperature(length=2),
    "smooth temperature": lambda q, log: position.LogTemperature(length=2, kind="smooth"),
    "scalable softmax": lambda q, log: position.ScalableSoftmax(
        torch.linspace(0.5, 1, H, dtype=torch.float64)
    ),
    "xpos": lambda q, log: position.RoPE(xpos=True),
    "alibi": lambda q, log: position.ALiBi(gnomon.alibi_slopes(H).double()),
    "all": lambda q, log: [
        position.Forget(log),
        position.RoPE(),
        position.HyPE(torch.ones(H, dtype=torch.float64), 0.01),
        position.LogTemperature(length=2),
    ],
}


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, 13, D, dtype=torch.float64) for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(torch.randn(B, H, 13, dtype=torch.float64))


@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_tokens_does_not_matter(name, tokens):
    q, k, v, log = tokens
    places = torch.arange(13)
    expected = gnomon.attention(q, k, v, position=ORDERED[name](q, log), causal=True)
    order = torch.randperm(13)
    q, k, v, log = (x[:, :, order] for x in tokens)
    o = gnomon.attention(
        q, k, v, position=ORDERED[name](q, log), causal=True, positions=places[order]
    )
    torch.testing.assert_close(o, expected[:, :, order])


@pytest.mark.parametrize("name", ORDERED)
def test_restarting_positions_are_separate_documents(name, tokens):
    q, k, v, log = tokens
    o = gnomon.attention(
        *(q, k, v),
        position=ORDERED[name](q, log),
        causal=True,
        positions=[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7],
        query_segments=[0] * 5 + [1] * 8,
        key_segments=[0] * 5 + [1] * 8,
    )
    for part in (slice(0, 5), slice(5, 13)):
        one = [x[:, :, part] for x in tokens]
        expected = gnomon.attention(*one[:3], position=ORDERED[name](one[0], one[3]), causal=True)
        torch.testing.assert_close(o[:, :, part], expected)


class Exact:
    """Disables skipping, which only offset biases allow, and to an extent that varies."""

    def arguments(self):
        return super().arguments() | {"tolerance": 0}


class ExactCase(Exact, Case):
    pass


class ExactPlaced(Exact, Placed):
    pass


@in_turn(name=POSITIONS, dtype=TOLERANCE)
def test_positions_in_their_order_are_an_offset(name, dtype):
    """Results are bitwise equal, because tokens are read in the same way."""
    case = ExactCase(position=name, queries=130, keys=300, mask=Mask(causal=True, query_offset=170))
    placed = ExactPlaced(
        position=name,
        queries=130,
        keys=300,
        mask=Mask(causal=True),
        places=(torch.arange(130) + 170).expand(B, -1),
        key_places=torch.arange(300).expand(B, -1),
    )
    inputs = {key: x.to(dtype) for key, x in case.inputs().items()}
    expected = values_and_gradients(case.ours, inputs)
    actual = values_and_gradients(placed.ours, inputs)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def test_a_tree_is_the_paths_of_its_leaves():
    """In a tree of drafts, tokens attend to their ancestors; positions are depths."""
    torch.manual_seed(0)
    parents = [-1, 0, 0, 1, 1, 2, 5]
    depth = [0, 1, 1, 2, 2, 2, 3]
    q, k, v = (torch.randn(1, H, 7, D, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(7, 7, dtype=torch.bool)
    for i in range(7):
        j = i
        while j >= 0:
            mask[i, j] = True
            j = parents[j]
    terms = [position.RoPE(), position.ALiBi(gnomon.alibi_slopes(H).double())]
    o = gnomon.attention(q, k, v, position=terms, positions=depth, causal=True, mask=mask)
    for path in ([0, 1, 3], [0, 1, 4], [0, 2, 5, 6]):
        one = [x[:, :, path] for x in (q, k, v)]
        expected = gnomon.attention(*one, position=terms, causal=True)
        torch.testing.assert_close(o[:, :, path[-1]], expected[:, :, -1])


def test_hidden_keys_may_hold_nan_and_any_position(tokens):
    q, k, v, _ = tokens
    places, lengths = drawn(B, 13), torch.tensor([13, 9])
    term = [position.RoPE(), position.ALiBi(gnomon.alibi_slopes(H).double())]

    def attend(k, v, of_keys):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = gnomon.attention(
            *leaves,
            position=term,
            positions=places,
            key_positions=of_keys,
            key_lengths=lengths,
            causal=True,
        )
        return [o, *torch.autograd.grad(o.sum(), leaves)]

    expected = attend(k, v, places)
    spoiled, far = [x.clone() for x in (k, v)], places.clone()
    for x in spoiled:
        x[1, :, 9:] = math.nan
    far[1, 9:] = -(2**40)
    for got, want in zip(attend(*spoiled, far), expected, strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert got[0].isfinite().all()


def test_compiled_without_a_break():
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, 13, D) for _ in range(3))
    slopes = gnomon.alibi_slopes(H).requires_grad_()
    table = torch.randn(32, H, requires_grad=True)
    rows = torch.randn(13, D, requires_grad=True)

    def attend(q, k, v, places):
        return gnomon.attention(
            *(q, k, v),
            position=[
                position.RoPE(),
                position.ALiBi(slopes),
                position.T5(table, True),
                position.Relative(rows, 6),
            ],
            positions=places,
            causal=True,
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    # The range of the positions is data, so the graph is not recompiled when it changes.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for limit in (20, 500):
            places = drawn(B, 13, limit)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            results = []
            for function in (attend, compiled):
                o = function(*leaves, places)
                inputs = [*leaves, slopes, table, rows]
                results.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
            for expected, actual in zip(*results, strict=True):
                torch.testing.assert_close(actual, expected)


def test_vmap_maps_positions_and_parameters():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, B, H, 9, D) for _ in range(3))
    slopes = torch.rand(3, H)
    places = torch.stack([drawn(B, 9, limit) for limit in (12, 30, 90)])

    def attend(q, k, v, slopes, places):
        return gnomon.attention(
            q, k, v, position=position.ALiBi(slopes), positions=places, causal=True
        )

    expected = torch.stack([attend(*one) for one in zip(q, k, v, slopes, places, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(q, k, v, slopes, places), expected)
    shared = torch.vmap(attend, in_dims=(0, 0, 0, None, None))(q, k, v, slopes[0], places[0])
    torch.testing.assert_close(shared[2], attend(q[2], k[2], v[2], slopes[0], places[0]))
    gradient = torch.func.vmap(
        torch.func.grad(lambda s, *x: attend(*x[:3], s, x[3]).square().sum()),
        in_dims=(0, 0, 0, 0, 0),
    )(slopes, q, k, v, places)
    for n in range(3):
        leaf = slopes[n].clone().requires_grad_()
        loss = attend(q[n], k[n], v[n], leaf, places[n]).square().sum()
        torch.testing.assert_close(gradient[n], torch.autograd.grad(loss, leaf)[0])


@pytest.mark.cpu("its autocast")
def test_autocast(tokens):
    q, k, v = (x.float() for x in tokens[:3])
    places = drawn(B, 13)
    with torch.autocast("cpu", torch.bfloat16):
        o = gnomon.attention(q, k, v, position="rope+alibi", positions=places, causal=True)
    assert o.dtype == torch.bfloat16
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(
        o, gnomon.attention(*low, position="rope+alibi", positions=places, causal=True)
    )


def test_repeats_to_the_last_bit_for_any_number_of_threads():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 700, 16) for _ in range(3))
    places = drawn(1, 700, 3000, ordered=False)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            slopes = torch.full((2,), 0.1, requires_grad=True)
            rows = torch.randn(33, 16, generator=generator_of(1))
            leaves = [x.clone().requires_grad_() for x in (q, k, v, rows)]
            o = gnomon.attention(
                *leaves[:3],
                position=[position.ALiBi(slopes), position.Relative(leaves[3], 16)],
                positions=places,
                causal=True,
            )
            results.append([o, *torch.autograd.grad(o.square().sum(), [*leaves, slopes])])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.slow
def test_memory_is_linear():
    """With 16384 tokens, a single array over all pairs would take 1 GiB."""
    before = """
        import torch, gnomon
        from gnomon import position
        L = 16384
        q, k, v = (torch.randn(1, 1, L, 16, requires_grad=True) for _ in range(3))
        places = torch.randperm(4 * L)[:L].sort().values
        slopes = gnomon.alibi_slopes(1).requires_grad_()
    """
    step = """
        gnomon.attention(
            q, k, v, position=position.RoPE() + position.ALiBi(slopes), positions=places,
            causal=True, window=(512, 0),
        ).sum().backward()
    """
    assert peak_memory(textwrap.dedent(before), textwrap.dedent(step)) < 200 * 2**10


@pytest.mark.cpu("errors are the same on all devices")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": [0, 1, 2], "query_offset": 0}, "positions and query_offset are both given"),
        ({"key_positions": [0, 1, 2]}, "key_positions is given without positions"),
        ({"positions": [0, 1]}, r"positions has shape \[2\]; expected \(B, length\) = \(1, 3\)"),
        (
            {"positions": [0, 1, 2**30]},
            r"positions of batch element 0 range from 0 to 1073741824; expected values within",
        ),
        (
            {"positions": [0, 1, 2**22], "position": "alibi"},
            "offsets p_j - p_i of the positions range from -4194304 to 4194304; expected a range",
        ),
        (
            {"positions": [0, 1, 3], "position": position.AbsoluteKeys(torch.zeros(3, 4))},
            "positions range from 0 to 3; expected row indices of the position's table, 0 to 2",
        ),
        (
            {"positions": [0, 1, 9], "position": position.RoPE(shape=(2, 2))},
            "positions range from 0 to 9; expected indices of the grid 2x2, from 0 to 3",
        ),
        (
            {"positions": [0, 1, 9], "position": position.GridBias(torch.zeros(2, 3, 3))},
            "positions range from 0 to 9; expected token indices on the grid, 0 to 3",
        ),
        (
            {"positions": [0, 1, 9], "position": position.OffsetBias(torch.zeros(2, 5))},
            r"has n = 3, but p_j - p_i runs from -9 to 9; expected offsets within \+-2",
        ),
        (
            {
                "positions": [0, 1, 9],
                "causal": True,
                "position": position.TransformerXL(*[torch.zeros(2, 4)] * 2, torch.zeros(2, 9, 4)),
            },
            "has rows for 9 distances, but the positions contain the distance p_i - p_j = 9",
        ),
    ],
)
def test_mistakes_are_named(arguments, message):
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        gnomon.attention(q, k, v, **arguments)


def test_other_mistakes():
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="key_positions is None, but Lq = 3 and Lk = 5 differ"):
        gnomon.attention(q, k, k, positions=[0, 1, 2])
    with pytest.raises(TypeError, match="positions has dtype Float; expected integers"):
        gnomon.attention(q, q, q, positions=torch.zeros(3))


def test_empty_calls():
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        q, k = torch.zeros(1, 2, queries, 4), torch.zeros(1, 2, keys, 4)
        slopes = torch.ones(2, requires_grad=True)
        o = gnomon.attention(
            *(q, k, k),
            position=position.RoPE() + position.ALiBi(slopes),
            positions=torch.arange(queries),
            key_positions=torch.arange(keys),
        )
        assert o.shape == q.shape
        assert not o.any()
        o.sum().backward()
        assert torch.equal(slopes.grad, torch.zeros(2))


def test_weights_of_rows(tokens):
    q, k, _, log = tokens
    places = drawn(B, 13, ordered=False)
    arguments = {"position": ORDERED["all"](q, log), "causal": True, "positions": places}
    v = torch.eye(13, dtype=torch.float64).expand(B, H, 13, 13)
    expected = gnomon.attention(q, k, v, **arguments)
    rows = [0, 1, 2, 7, -1]
    torch.testing.assert_close(
        gnomon.attention_weights(q, k, rows, **arguments), expected[:, :, rows]
    )


# Modules.

MODULE_POSITIONS = (
    "rope",
    "alibi",
    "hype:tau=learned:mode=abs",
    "t5",
    "kerple",
    "relative:max_offset=6:values",
    "disentangled:span=8:max_distance=20",
    "absolute_keys:length=64",
    "offset_bias:length=64",
    "content_bias:extent=8:columns=4",
    "transformer_xl",
    "forget",
    "rope:scaling=dynamic:original_max_position_embeddings=8:factor=2",
    "rope+alibi+scalable_softmax",
)


@pytest.mark.parametrize("spec", MODULE_POSITIONS)
def test_modules_take_positions_and_caches_keep_them(spec):
    torch.manual_seed(0)
    module = MultiheadAttention(32, H, kv_heads=2, position=spec).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    x = torch.randn(B, 11, 32, dtype=torch.float64)
    in_order = module(x, causal=True)
    torch.testing.assert_close(module(x, causal=True, positions=torch.arange(11)), in_order)
    order = torch.randperm(11)
    shuffled = module(x[:, order], causal=True, positions=order)
    torch.testing.assert_close(shuffled, in_order[:, order])
    if "dynamic" in spec:
        return  # dynamic scaling depends on the farthest position of each call
    places = drawn(B, 11, 40, 0)
    expected = module(x, causal=True, positions=places)
    cache = KVCache()
    parts = [
        module(x[:, part], causal=True, positions=places[:, part], cache=cache)
        for part in (slice(0, 6), slice(6, 7), slice(7, 11))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    assert torch.equal(cache.positions, places)


def test_a_cache_without_positions_goes_on_with_them():
    torch.manual_seed(0)
    module = MultiheadAttention(32, H, position="rope+alibi").double()
    x = torch.randn(B, 9, 32, dtype=torch.float64)
    cache = KVCache()
    module(x[:, :5], causal=True, cache=cache)
    last = module(x[:, 5:], causal=True, cache=cache, positions=[5, 6, 7, 8])
    torch.testing.assert_close(last, module(x, causal=True)[:, 5:])
    with pytest.raises(ValueError, match="the cache contains positions"):
        module(x[:, :1], causal=True, cache=cache)
    assert cache.length() == 9


@pytest.mark.parametrize("spec", ["sinusoidal", "learned", "cape", "cape:normalize"])
def test_encodings_are_read_at_positions(spec):
    torch.manual_seed(0)
    encoding = TokenPosition(spec, 8, 64).eval()
    x = torch.randn(B, 9, 8)
    assert torch.equal(encoding(x, positions=torch.arange(9)), encoding(x))
    places = drawn(B, 9, 40, 0, ordered=False)
    added = encoding(x, positions=places) - x
    if "normalize" in spec:
        expected = gnomon.sinusoid(places - places.double().mean(1, keepdim=True), 8)
    else:
        expected = (encoding(torch.zeros(1, 64, 8)))[0][places]
    torch.testing.assert_close(added, expected.float())


def test_encodings_of_grids_are_read_at_places():
    torch.manual_seed(0)
    for spec in ("sinusoidal:shape=3x4:prefix=1", "cape:shape=3x4:prefix=1"):
        encoding = TokenPosition(spec, 8, 13).eval()
        places = drawn(B, 9, 13, 0, ordered=False)
        x = torch.randn(B, 9, 8)
        expected = encoding(torch.zeros(1, 13, 8))[0][places]
        torch.testing.assert_close(encoding(x, positions=places) - x, expected)
        with pytest.raises(ValueError, match="expected indices of the grid 3x4 after 1"):
            encoding(x, positions=places + 9)


def test_encodings_name_mistakes():
    x = torch.zeros(B, 9, 8)
    with pytest.raises(ValueError, match="conv reads neighbouring tokens"):
        TokenPosition("conv:groups=1", 8, 64)(x, positions=torch.arange(9))
    with pytest.raises(ValueError, match="positions range from 0 to 8; expected rows of the table"):
        TokenPosition("learned", 8, 8)(x, positions=torch.arange(9))
    with pytest.raises(ValueError, match="positions and offset are both given"):
        TokenPosition("sinusoidal", 8, 8)(x, 3, positions=torch.arange(9))
    with pytest.raises(ValueError, match=r"positions have shape \[3\]; expected \(B, L\) = \(2, 9"):
        TokenPosition("sinusoidal", 8, 8)(x, positions=torch.arange(3))


@pytest.mark.parametrize("spec", ["rope+alibi", "learned", "sinusoidal+relative:max_offset=4"])
def test_language_models_read_packed_documents(spec):
    torch.manual_seed(0)
    model = LanguageModel(vocabulary=17, dim=32, depth=2, heads=4, mlp=32, position=spec).double()
    tokens = torch.randint(17, (B, 12))
    places, segments = documents(B, 12, 5)
    logits = model(tokens, positions=places, segments=segments)
    for b in range(B):
        for segment in segments[b].unique():
            part = segments[b] == segment
            first = int(places[b][part][0])
            if first > 0:
                continue  # the beginning of the document is missing
            expected = model(tokens[b, part][None])[0]
            torch.testing.assert_close(logits[b, part], expected)


def test_language_models_generate_at_positions():
    torch.manual_seed(0)
    model = LanguageModel(vocabulary=17, dim=32, depth=2, heads=4, mlp=32, position="rope+alibi")
    model = model.double()
    tokens, places = torch.randint(17, (B, 12)), drawn(B, 12, 99)
    expected = model(tokens, positions=places)
    cache = LanguageModelCache(2)
    parts = [
        model(tokens[:, part], cache, positions=places[:, part])
        for part in (slice(0, 7), slice(7, 8), slice(8, 12))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    with pytest.raises(ValueError, match="segments and a cache are both given"):
        model(tokens, cache, segments=torch.zeros(12, dtype=torch.int64))
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    assert any(g is not None for g in gradients)
    assert_near({"o": expected.detach()}, {"o": torch.cat(parts, 1).detach()}, 1e-10)


def packed_call(
    lengths, key_lengths=None, heads=4, key_heads=2, dtype=torch.float32, segments=None
):
    """Tokens of consecutive documents, and the segments of queries and keys."""
    key_lengths = key_lengths or lengths
    generator = generator_of(sum(lengths))
    q, k, v = (
        torch.randn(1, count, sum(sizes), 16, generator=generator, dtype=dtype).requires_grad_()
        for count, sizes in ((heads, lengths), (key_heads, key_lengths), (key_heads, key_lengths))
    )
    names = torch.arange(len(lengths)) if segments is None else torch.tensor(segments)
    return (q, k, v), {
        "query_segments": names.repeat_interleave(torch.tensor(lengths))[None],
        "key_segments": names.repeat_interleave(torch.tensor(key_lengths))[None],
    }


def gradients_of(o, inputs):
    d_o = torch.randn(o.shape, generator=generator_of(1), dtype=o.dtype)
    return [o, *torch.autograd.grad(o, inputs, d_o)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "key_lengths"),
    [
        ([300, 37, 1, 260, 90], None),
        ([20, 31, 300, 7], [150, 1, 400, 60]),
        ([10] * 5 + [200, 10, 170], None),
    ],
)
def test_packed_documents_are_calls_of_their_own(lengths, key_lengths, causal):
    # Segment numbers are arbitrary; only the tokens of a document must be contiguous.
    names = [7, -3, 40, 12, 5, 0, 9, 1][: len(lengths)]
    qkv, segments = packed_call(lengths, key_lengths, segments=names)
    # The queries and the keys of a document start at different columns.
    offset = 0 if key_lengths else None
    positions = {}
    if key_lengths:
        positions = {
            "positions": torch.cat([torch.arange(n) for n in lengths]),
            "key_positions": torch.cat([torch.arange(n) for n in key_lengths]),
        }
    slopes = torch.rand(4, generator=generator_of(2))
    arguments = {"causal": causal, "position": position.ALiBi(slopes)}
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2):
            torch.set_num_threads(count)
            packed = gnomon.attention(*qkv, **arguments, **segments, **positions)
            runs.append(gradients_of(packed, qkv))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    documents_of = zip(
        qkv[0].split(lengths, 2),
        *(x.split(key_lengths or lengths, 2) for x in qkv[1:]),
        strict=True,
    )
    looped = torch.cat(
        [gnomon.attention(*one, query_offset=offset, **arguments) for one in documents_of], 2
    )
    for name, own, expected in zip("oqkv", runs[0], gradients_of(looped, qkv), strict=True):
        torch.testing.assert_close(own, expected, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("terms", ["alibi", "rope", "t5+rope", "relative", "none"])
def test_consecutive_positions_are_columns(terms):
    """For terms that depend only on distances, consecutive positions change no bit of the results
    and gradients."""
    qkv, segments = packed_call([130, 65, 105])
    slopes = torch.rand(4, generator=generator_of(3)).requires_grad_()
    rows = torch.randn(9, 16, generator=generator_of(4)).requires_grad_()
    made = {
        "alibi": ([position.ALiBi(slopes)], [slopes]),
        "rope": ([position.RoPE()], []),
        "t5+rope": ([position.T5(rows[:8, :4], True), position.RoPE()], [rows]),
        "relative": ([position.Relative(rows, 4)], [rows]),
        "none": ([], []),
    }
    chosen, learned = made[terms]
    inputs = [*qkv, *learned]

    def run(**arguments):
        return gradients_of(
            gnomon.attention(*qkv, position=chosen, causal=True, **arguments), inputs
        )

    for same, plain in (
        ({"positions": torch.arange(300)}, {}),
        ({"positions": torch.arange(300)[None], **segments}, segments),
    ):
        for own, expected in zip(run(**same), run(**plain), strict=True):
            assert torch.equal(own, expected)
    if "rope" in terms:
        return
    shifted = run(positions=torch.arange(300) + 11)
    for own, expected in zip(shifted, run(), strict=True):
        assert torch.equal(own, expected)
    # Positions restart in each document; a bias may then cover fewer offsets.
    restarts = torch.cat([torch.arange(n) for n in (130, 65, 105)])
    plain = run(**segments)
    for own, expected in zip(run(positions=restarts, **segments), plain, strict=True):
        if terms == "alibi":
            torch.testing.assert_close(own, expected, rtol=2e-5, atol=2e-5)
        else:
            assert torch.equal(own, expected)
    # A single token at a different position is enough to change the result.
    moved = restarts.clone()
    moved[140] += 3
    assert not torch.equal(run(positions=moved, **segments)[0], run(**segments)[0])


@pytest.mark.parametrize("term", ["alibi", "rope"])
@pytest.mark.parametrize("offsets", [(34, 9, 20), (34, 34, 34), (34, 34, 20)])
def test_consecutive_positions_of_each_batch_are_offsets(term, offsets):
    generator = generator_of(5)
    q, k, v = (torch.randn(3, 4, n, 8, generator=generator).requires_grad_() for n in (6, 40, 40))
    slopes = torch.rand(4, generator=generator).requires_grad_()
    offsets = torch.tensor(offsets)
    arguments = {
        "causal": True,
        "position": position.ALiBi(slopes) if term == "alibi" else position.RoPE(),
        "key_lengths": [40, 15, 26],
    }
    inputs = (q, k, v, slopes) if term == "alibi" else (q, k, v)
    placed = gradients_of(
        gnomon.attention(
            q,
            k,
            v,
            positions=offsets[:, None] + torch.arange(6),
            key_positions=torch.arange(40).expand(3, -1),
            **arguments,
        ),
        inputs,
    )
    given = gradients_of(gnomon.attention(q, k, v, query_offset=offsets, **arguments), inputs)
    for own, expected in zip(placed, given, strict=True):
        torch.testing.assert_close(own, expected, rtol=2e-5, atol=2e-5)
