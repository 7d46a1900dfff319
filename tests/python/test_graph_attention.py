"""Graph attention compared with a loop over the nodes, dense attention and torch_geometric."""

import math
import re

import pytest
import torch
from formulas import (
    ONE_PER_PAIR_FUNCTION,
    SIMILARITIES,
    assert_near,
    generator_of,
    pairwise,
    values_and_gradients,
)
from operator_checks import CHECKS, opcheck_derivatives, opcheck_forward_and_backward, peak_memory
from torch import Tensor

import gnomon
from gnomon.similarity import Laplacian, Penumbral, Umbral

ops = torch.ops.gnomon


def csr(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    degrees = torch.tensor([0, *(len(row) for row in rows)])
    return degrees.cumsum(0), torch.tensor([j for row in rows for j in row], dtype=torch.int64)


def random_rows(nodes: int, keys: int, hub: int = 0, seed: int = 0) -> list[list[int]]:
    """Rows with 0 to 5 edges, some of them repeated, and one row with `hub` edges."""
    generator = generator_of(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(keys, (count,), generator=generator).tolist()

    rows = [draw(i % 6) for i in range(nodes)]
    for i, row in enumerate(rows):
        if len(row) > 1:
            row[0] = i % keys  # a self-loop if queries and keys are the same nodes
        if len(row) > 4:
            row[1] = row[2]
    if hub:
        rows[nodes // 2] = draw(hub)
    return rows


GRAPHS = {
    "few": random_rows(9, 9),
    "bipartite": random_rows(12, 5, seed=1),
    "skewed": random_rows(40, 40, hub=700, seed=2),
    "no edges": [[], [], []],
    "no nodes": [],
}


def graph_inputs(name: str, rows: list[list[int]], keys: int, heads=4, key_heads=4, dim=6):
    torch.manual_seed(0)
    similarity = SIMILARITIES[name]
    dim = getattr(similarity, "columns", 0) or dim
    q = torch.randn(len(rows), heads, dim, dtype=torch.float64)
    k = torch.randn(keys, key_heads, dim, dtype=torch.float64)
    v = torch.randn(keys, key_heads, 3, dtype=torch.float64)
    return {
        "q": similarity.prepare(q),
        "k": similarity.prepare(k),
        "v": v,
    } | similarity.parameters(heads)


def loop(name: str, rows: list[list[int]], inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The formula for one node at a time, in plain PyTorch."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    # A zero that depends on all inputs, so that a graph without edges also has gradients.
    nothing = sum(x.sum() * 0 for x in inputs.values())
    outputs, lses = [q.new_zeros(0, q.shape[1], 3) + nothing], [q.new_zeros(0, q.shape[1])]
    for i, row in enumerate(rows):
        if not row:
            outputs.append(torch.zeros_like(outputs[0].new_zeros(1, q.shape[1], 3)) + nothing)
            lses.append(torch.full((1, q.shape[1]), -math.inf, dtype=q.dtype))
            continue
        node, keys = q[i : i + 1].transpose(0, 1)[None], k[row].transpose(0, 1)[None]
        scores = SIMILARITIES[name].scores(inputs, node, keys)[0, :, 0]  # (H, edges)
        outputs.append(torch.einsum("he,ehd->hd", scores.softmax(-1), v[row])[None])
        lses.append(scores.logsumexp(-1)[None])
    return torch.cat(outputs), torch.cat(lses) + nothing


def ours(name: str, rows: list[list[int]], inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return gnomon.graph_attention(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        *csr(rows),
        SIMILARITIES[name].ours(inputs),
        return_lse=True,
    )


@pairwise(name=ONE_PER_PAIR_FUNCTION, graph=GRAPHS, heads_and_key_heads=[(4, 4), (6, 2)])
def test_every_pair_function_against_a_loop(name, graph, heads_and_key_heads):
    heads, key_heads = heads_and_key_heads
    rows = GRAPHS[graph]
    keys = max((j for row in rows for j in row), default=1) + 2  # the last key has no edge
    inputs = graph_inputs(name, rows, keys, heads, key_heads)
    assert_near(
        values_and_gradients(lambda x: ours(name, rows, x), inputs),
        values_and_gradients(lambda x: loop(name, rows, x), inputs),
        1e-9,
    )
    floats = {key: x.float() for key, x in inputs.items()}
    exact = {key: x.double() for key, x in floats.items()}
    assert_near(
        values_and_gradients(lambda x: ours(name, rows, x), floats),
        values_and_gradients(lambda x: loop(name, rows, x), exact),
        1e-4,
    )


@pytest.mark.parametrize("name", SIMILARITIES)
def test_the_complete_graph_is_dense_attention(name):
    rows = [list(range(11))] * 7
    inputs = graph_inputs(name, rows, 11, heads=4, key_heads=2)

    def dense(x):
        batch = [x[n].transpose(0, 1)[None] for n in ("q", "k", "v")]
        o, lse = gnomon.attention(*batch, similarity=SIMILARITIES[name].ours(x), return_lse=True)
        return o[0].transpose(0, 1), lse[0].t()

    assert_near(
        values_and_gradients(lambda x: ours(name, rows, x), inputs),
        values_and_gradients(dense, inputs),
        1e-11,
    )


@pytest.mark.parametrize(
    "name",
    ["dot", "laplacian", "umbral", "penumbral height2", "half_space", "entailment", "additive"],
)
def test_gradcheck(name):
    rows = GRAPHS["few"]
    inputs = graph_inputs(name, rows, 9, heads=2, key_heads=1, dim=3)
    nodes = torch.tensor([bool(row) for row in rows])

    def attend(*tensors):
        o, lse = ours(name, rows, dict(zip(inputs, tensors, strict=True)))
        return o, lse[nodes]

    leaves = [x.requires_grad_() for x in inputs.values()]
    torch.autograd.gradcheck(attend, leaves)


def test_scale_and_strides():
    torch.manual_seed(0)
    rows = GRAPHS["skewed"]
    q = torch.randn(40, 6, 4, dtype=torch.float64).mT  # gaps between columns
    k = torch.randn(4, 40, 9, dtype=torch.float64).transpose(0, 1)[..., :6]  # nodes inside heads
    v = torch.randn(40, 8, 5, dtype=torch.float64)[:, ::2]  # gaps between heads
    assert not any(x.is_contiguous() for x in (q, k, v))
    expected = gnomon.graph_attention(q * 2.5 * math.sqrt(q.shape[2]), k, v, *csr(rows))
    result = gnomon.graph_attention(q, k, v, *csr(rows), scale=2.5)
    torch.testing.assert_close(result, expected)
    floats = gnomon.graph_attention(q.float(), k.float(), v.float(), *csr(rows), scale=2.5)
    torch.testing.assert_close(floats.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [-3e4, 0.0, 3e4])
def test_huge_scores(dtype, offset):
    """Unless each row's largest score is subtracted, exp of these scores is 0 or infinite."""
    torch.manual_seed(0)
    rows = GRAPHS["skewed"]
    source, target = torch.randn(2, 40, 2, 1, dtype=dtype) * 100
    source = source + offset
    v = torch.randn(40, 2, 3, dtype=dtype)
    inputs = {"q": target, "k": source, "v": v}

    def graph(x):
        return gnomon.graph_attention(
            x["q"], x["k"], x["v"], *csr(rows), gnomon.similarity.Additive(), return_lse=True
        )

    exact = {name: x.double() for name, x in inputs.items()}
    theirs = values_and_gradients(lambda x: loop("additive", rows, x), exact)
    ours = values_and_gradients(graph, inputs)
    # Scores of 3e4 have rounding errors of 1e-3 in float32.
    tolerance = 1e-10 if dtype == torch.float64 else 5e-3
    assert_near(ours, theirs, tolerance)
    assert all(x[torch.isfinite(theirs[name])].isfinite().all() for name, x in ours.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_removed_edges_may_be_nan(dtype):
    q, k, v = torch.randn(3, 3, 2, 4, dtype=dtype)
    v[2] = math.nan
    bias = torch.zeros(4, 2, dtype=dtype)
    bias[1, 0] = -math.inf  # edge (0, 2), only for the first head
    o = gnomon.graph_attention(q, k, v, *csr([[0, 2], [1], [1]]), edge_bias=bias)
    torch.testing.assert_close(o[0, 0], v[0, 0])
    assert o[0, 1].isnan().all()
    assert o[1:].isfinite().all()


def test_isolated_nodes_and_unseen_keys():
    rows = [[], [3, 3], []]
    q, k, v = torch.randn(3, 2, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    k[0], v[0] = math.nan, math.inf  # no edge leads to this node
    q[0] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = gnomon.graph_attention(*leaves, *csr(rows), return_lse=True)
    assert torch.equal(o[[0, 2]], torch.zeros(2, 2, 4))
    assert torch.equal(lse[[0, 2]], torch.full((2, 2), -math.inf))
    torch.testing.assert_close(o[1], v[3])
    (o.sum() + lse[1].sum()).backward()
    for x, used in ((q, [1]), (k, [3]), (v, [3])):
        unused = [i for i in range(len(x)) if i not in used]
        assert torch.equal(x.grad[unused], torch.zeros_like(x.grad[unused]))
        assert x.grad.isfinite().all()


def test_a_node_at_distance_zero_from_itself():
    x = torch.randn(4, 2, 3, requires_grad=True)
    rows = [[i, (i + 1) % 4] for i in range(4)]
    for similarity in (Laplacian(1.0), Umbral(1.0), Penumbral(1.0)):
        o = gnomon.graph_attention(x, x, x, *csr(rows), similarity)
        (gradient,) = torch.autograd.grad(o.square().sum(), x)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["dot", "umbral"])
def test_threads_change_nothing(name, dtype):
    rows = random_rows(3000, 2000, hub=9000)
    inputs = {key: x.to(dtype) for key, x in graph_inputs(name, rows, 2000, 8, 4, 8).items()}
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(values_and_gradients(lambda x: ours(name, rows, x), inputs))
    finally:
        torch.set_num_threads(1)
    for result in results[1:]:
        assert all(torch.equal(result[key], x) for key, x in results[0].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_rounds_only_inputs_and_outputs(dtype):
    rows = GRAPHS["skewed"]
    q, k, v = (torch.randn(40, 4, 6).to(dtype) for _ in range(3))
    o, lse = gnomon.graph_attention(q, k, v, *csr(rows), return_lse=True)
    exact, exact_lse = gnomon.graph_attention(
        q.float(), k.float(), v.float(), *csr(rows), return_lse=True
    )
    assert torch.equal(o, exact.to(dtype))
    assert torch.equal(lse, exact_lse)


def test_gat_conv():
    """torch_geometric's layer with the same edges, self-loops and heads."""
    from torch_geometric.nn import GATConv  # slow to import

    torch.manual_seed(0)
    nodes, features, heads, columns = 60, 20, 8, 8
    layer = GATConv(features, columns, heads=heads, add_self_loops=False, bias=False).double()
    x = torch.randn(nodes, features, dtype=torch.float64, requires_grad=True)
    rows = random_rows(nodes, nodes, hub=50)
    indptr, indices = csr(rows)
    targets = torch.repeat_interleave(torch.arange(nodes), indptr.diff())
    expected = layer(x, torch.stack([indices, targets])).unflatten(1, (heads, columns))

    values = layer.lin(x).unflatten(1, (heads, columns))
    source = (values * layer.att_src).sum(-1, keepdim=True)
    target = (values * layer.att_dst).sum(-1, keepdim=True)
    o = gnomon.graph_attention(
        target, source, values, indptr, indices, gnomon.similarity.Additive()
    )
    torch.testing.assert_close(o, expected)
    weights = torch.randn_like(expected)
    leaves = [x, *layer.parameters()]
    for got, want in zip(
        torch.autograd.grad((o * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_csr_of_an_edge_index():
    torch.manual_seed(0)
    nodes = 30
    edge_index = torch.randint(nodes, (2, 200))
    indptr, indices = gnomon.csr(edge_index, nodes)
    assert (indptr.shape, indices.shape) == ((nodes + 1,), (200,))
    source, target = edge_index
    for i in range(nodes):
        assert torch.equal(indices[indptr[i] : indptr[i + 1]], source[target == i])
    empty = gnomon.csr(torch.zeros(2, 0, dtype=torch.int64), 3)
    assert [x.tolist() for x in empty] == [[0, 0, 0, 0], []]
    assert [x.tolist() for x in gnomon.csr([[0, 1], [1, 0]], 2)] == [[0, 1, 2], [1, 0]]


@pytest.mark.real_device
def test_csr_compiled():
    edge_index = torch.randint(9, (2, 40), generator=generator_of(0))
    x = torch.randn(9, 2, 4)

    def step(x, edge_index):
        return gnomon.graph_attention(x, x, x, *gnomon.csr(edge_index, 9))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, edge_index), step(x, edge_index))


@pytest.mark.parametrize(
    ("edge_index", "nodes", "error", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), 4, ValueError, r"has shape \[3, 4\]"),
        (torch.zeros(2, 4), 4, ValueError, "expected .2, E. integers"),
        (
            torch.tensor([[0, 0], [1, 4]]),
            4,
            ValueError,
            "targets from 1 to 4; expected nodes from 0 to 3",
        ),
        (torch.tensor([[0, 0], [-1, 3]]), 4, ValueError, "targets from -1 to 3"),
        (torch.tensor([[0], [0]]), 0, ValueError, "expected no edges, because num_nodes is 0"),
        (torch.zeros(2, 4, dtype=torch.int64), -1, ValueError, "num_nodes is -1"),
        (torch.zeros(2, 4, dtype=torch.int64), 1.5, TypeError, "num_nodes is a float"),
    ],
)
def test_errors_of_csr(edge_index, nodes, error, message):
    with pytest.raises(error, match=message):
        gnomon.csr(edge_index, nodes)


@pytest.mark.parametrize("shape", [(4,), (9, 4), ()])
def test_sinks_are_one_more_edge_without_a_value(shape):
    torch.manual_seed(0)
    rows = GRAPHS["few"]
    x = torch.randn(3, 9, 4, 6, dtype=torch.float64).unbind()
    sink = torch.randn(shape, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (*x, sink)]
    q, k, v, _ = leaves
    o, lse = gnomon.graph_attention(q, k, v, *csr(rows), sink=sink, return_lse=True)
    outputs, sums = [], []
    for i, row in enumerate(rows):
        scores = torch.einsum("hd,jhd->hj", q[i], k[row]) / math.sqrt(6)
        its_sink = (sink[i] if sink.dim() == 2 else sink).expand(4)
        with_sink = torch.cat([scores, its_sink.unsqueeze(1)], 1)
        outputs.append(torch.einsum("hj,jhd->hd", with_sink.softmax(1)[:, :-1], v[row]))
        sums.append(with_sink.logsumexp(1))
    expected, expected_lse = torch.stack(outputs), torch.stack(sums)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)
    for got, want in zip(
        torch.autograd.grad(o.square().sum() + lse.sum(), leaves),
        torch.autograd.grad(expected.square().sum() + expected_lse.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_a_sink_of_minus_infinity_has_no_effect():
    torch.manual_seed(0)
    x = torch.randn(3, 9, 4, 6).unbind()
    graph = csr(GRAPHS["few"])
    ours = gnomon.graph_attention(*x, *graph, sink=-math.inf, return_lse=True)
    torch.testing.assert_close(ours, gnomon.graph_attention(*x, *graph, return_lse=True))
    with pytest.raises(ValueError, match=r"sink has shape \[3\]"):
        gnomon.graph_attention(*x, *graph, sink=torch.zeros(3))


def kept_edges(edges: int, nodes: int, heads: int, rate: float, seed: int) -> Tensor:
    """The dropout factors (nodes, heads, edges), read from dense attention with one key per
    edge."""
    q, k = torch.zeros(1, heads, nodes, 1), torch.zeros(1, heads, edges, 1)
    v = torch.eye(edges).expand(1, heads, -1, -1) * edges
    o = gnomon.attention(q.double(), k.double(), v.double(), dropout=rate, seed=seed)
    return o[0].transpose(0, 1)


@pairwise(
    name=["dot", "umbral", "additive", "gaussian"],
    graph=["few", "bipartite", "skewed", "no edges", "no nodes"],
    heads=[(4, 4), (6, 2), (1, 1)],
    rate=[0.0, 0.4, 1.0],
    bias=["none", "edges", "edges and heads"],
)
def test_edge_biases_and_dropout_against_a_loop(name, graph, heads, rate, bias):
    rows = GRAPHS[graph]
    keys = max((j for row in rows for j in row), default=1) + 2
    inputs = graph_inputs(name, rows, keys, *heads)
    indptr, indices = csr(rows)
    edges = len(indices)
    if bias != "none":
        inputs["edge_bias"] = torch.randn(
            (edges, heads[0]) if bias == "edges and heads" else (edges,), dtype=torch.float64
        )
        inputs["edge_bias"][::7] = -math.inf
    factors = kept_edges(max(edges, 1), max(len(rows), 1), heads[0], rate, 11)

    def by_node(x):
        k, v = (x[n].repeat_interleave(heads[0] // heads[1], 1) for n in "kv")
        edge_bias = x.get("edge_bias")
        if edge_bias is not None and edge_bias.dim() == 1:
            edge_bias = edge_bias[:, None].expand(-1, heads[0])
        nothing = sum(t[t.isfinite()].sum() * 0 for t in x.values())
        outputs = [torch.zeros(0, heads[0], 3, dtype=torch.float64) + nothing]
        lses = [torch.zeros(0, heads[0], dtype=torch.float64) + nothing]
        for i in range(len(rows)):
            own = range(int(indptr[i]), int(indptr[i + 1]))
            # This reference omits edges with bias -inf, separately for each head.
            o, lse = [], []
            for h in range(heads[0]):
                seen = [e for e in own if edge_bias is None or edge_bias[e, h] > -math.inf]
                if not seen:
                    o.append(torch.zeros(3, dtype=torch.float64) + nothing)
                    lse.append(torch.tensor(-math.inf, dtype=torch.float64))
                    continue
                node = x["q"][i : i + 1].transpose(0, 1)[None]
                scores = SIMILARITIES[name].scores(x, node, k[indices[seen]].transpose(0, 1)[None])
                scores = scores[0, h, 0]
                if edge_bias is not None:
                    scores = scores + edge_bias[seen, h]
                weights = scores.softmax(0) * factors[i, h, seen]
                o.append(weights @ v[indices[seen], h])
                lse.append(scores.logsumexp(0))
            outputs.append(torch.stack(o)[None])
            lses.append(torch.stack(lse)[None])
        return torch.cat(outputs), torch.cat(lses)

    def fused(x):
        return gnomon.graph_attention(
            x["q"],
            x["k"],
            x["v"],
            indptr,
            indices,
            SIMILARITIES[name].ours(x),
            edge_bias=x.get("edge_bias"),
            dropout=rate,
            seed=11,
            return_lse=True,
        )

    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        own = {key: x.to(dtype) for key, x in inputs.items()}
        exact = {key: x.double() for key, x in own.items()}
        assert_near(
            values_and_gradients(fused, own), values_and_gradients(by_node, exact), tolerance
        )


def test_dropout_of_edges_follows_seeds_and_generators():
    x = torch.randn(3, 40, 4, 6).unbind()
    graph = csr(GRAPHS["skewed"])

    def attend(**arguments):
        return gnomon.graph_attention(*x, *graph, dropout=0.5, **arguments)

    assert torch.equal(attend(seed=1), attend(seed=1))
    assert not torch.equal(attend(seed=1), attend(seed=2))
    torch.manual_seed(5)
    drawn = attend()
    assert not torch.equal(drawn, attend())
    torch.manual_seed(5)
    assert torch.equal(drawn, attend())
    # Half of 700 equal weights are dropped; the others are doubled.
    zeros = torch.zeros(1, 4, 6)
    indptr, indices = torch.tensor([0, 700]), torch.zeros(700, dtype=torch.int64)
    ones = torch.ones(1, 4, 6)
    o = gnomon.graph_attention(zeros, zeros, ones, indptr, indices, dropout=0.5, seed=0)
    assert (o - 1).abs().max() < 0.2
    for samples in ({}, {"dropout": 0.5, "seed": 3}):
        many = torch.randn(5, 40, 4, 6)
        bias = torch.randn(5, len(graph[1]), 4)

        def one(q, b, samples=samples):
            return gnomon.graph_attention(q, x[1], x[2], *graph, edge_bias=b, **samples)

        mapped = torch.func.vmap(one, randomness="different")(many, bias)
        torch.testing.assert_close(mapped, torch.stack([one(*z) for z in zip(many, bias)]))  # noqa: B905


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"edge_bias": torch.zeros(3, 2)},
            ValueError,
            r"edge_bias has shape \[3, 2\]",
        ),
        ({"edge_bias": torch.zeros(2, 3)}, ValueError, r"\(E,\) or \(E, H\) = \(2, 2\)"),
        ({"edge_bias": torch.zeros(2).double()}, TypeError, "edge_bias has dtype Double"),
        ({"edge_bias": 1.0}, TypeError, "edge_bias is a float"),
        ({"dropout": 1.5}, ValueError, "dropout is 1.5; expected a probability from 0 to 1"),
        ({"dropout": 0.5, "seed": 0.5}, TypeError, "seed is a float"),
    ],
)
def test_errors_of_edge_biases_and_dropout(arguments, error, message):
    x = torch.randn(2, 2, 4)
    with pytest.raises(error, match=message):
        gnomon.graph_attention(x, x, x, [0, 1, 2], [0, 1], **arguments)


def low_level_arguments(dtype):
    torch.manual_seed(0)
    rows = GRAPHS["bipartite"]
    tensors = [
        torch.randn(12, 4, 3, dtype=dtype),
        torch.randn(5, 2, 3, dtype=dtype),
        torch.randn(5, 2, 6, dtype=dtype),
        torch.rand(1, 4, 12, dtype=dtype),
        torch.rand(1, 2, 5, dtype=dtype),
        None,
        torch.rand(4, dtype=dtype),
        torch.rand(sum(map(len, rows)), 4, dtype=dtype),
    ]
    return tensors, (*csr(rows), torch.tensor(7), "umbral", 0.25)


@pytest.mark.cpu("float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck_of_the_pair(dtype):
    opcheck_forward_and_backward(ops.graph_forward, ops.graph_backward, *low_level_arguments(dtype))


@pytest.mark.cpu("forward mode and second derivatives")
def test_opcheck_of_derivatives():
    opcheck_derivatives(ops.graph_jvp, ops.graph_backward_jvp, *low_level_arguments(torch.float32))


@pytest.mark.real_device
def test_opcheck_of_the_composition():
    q = torch.randn(9, 2, 4, requires_grad=True)
    gamma = torch.ones(2, requires_grad=True)
    torch.library.opcheck(
        ops.graph_attention,
        (q, q, q, *csr(GRAPHS["few"]), "penumbral:gamma=tensor", [gamma], None),
        test_utils=CHECKS,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def layer(q, gamma, indptr, indices):
        return gnomon.graph_attention(q, q, q, indptr, indices, Umbral(gamma), return_lse=True)

    for nodes in (9, 17):
        graph = csr(random_rows(nodes, nodes, hub=20))
        gamma = torch.rand(2, dtype=torch.float64)
        inputs = {"q": torch.randn(nodes, 2, 4, dtype=torch.float64), "gamma": gamma}

        def eager(x):
            tokens = [x["q"]] * 3
            return gnomon.graph_attention(*tokens, *graph, Umbral(x["gamma"]), return_lse=True)  # noqa: B023

        assert_near(
            values_and_gradients(lambda x: layer(x["q"], x["gamma"], *graph), inputs),  # noqa: B023
            values_and_gradients(eager, inputs),
            1e-12,
        )


def test_gradients_that_are_not_needed_are_not_computed():
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    v.requires_grad_()
    gnomon.graph_attention(q, k, v, *csr(GRAPHS["few"])).sum().backward()
    assert q.grad is None
    assert k.grad is None
    assert v.grad is not None


@pytest.mark.slow
def test_memory_is_linear_in_the_edges():
    before = """
nodes, degree = int(sys.argv[1]), 4
q = torch.randn(nodes, 2, 8, requires_grad=True)
indptr = torch.arange(0, nodes * degree + 1, degree)
indices = torch.randint(nodes, (nodes * degree,))
"""
    step = """
gnomon.graph_attention(q, q, q, indptr, indices, gnomon.similarity.Laplacian(1.0)).sum().backward()
"""
    peaks = [peak_memory(before, step, nodes) for nodes in (50_000, 100_000)]
    # The second graph has twice the nodes and edges. The scores of all pairs would take 80 GB.
    assert 10_000 < peaks[1] < 200_000
    assert peaks[1] < 2.3 * peaks[0]


def attend(**changes):
    indptr, indices = csr([[0, 1], [2], []])
    arguments = {
        **{name: torch.randn(3, 4, 2) for name in ("q", "k", "v")},
        "indptr": indptr,
        "indices": indices,
    }
    return gnomon.graph_attention(**(arguments | changes))


ERRORS = {
    "q is not a tensor": ({"q": [1.0]}, TypeError, "q is a list; expected a Tensor"),
    "indptr is not a list": ({"indptr": "0"}, TypeError, "indptr is a str; expected a Tensor"),
    "two axes": ({"q": torch.randn(3, 4)}, ValueError, "q has shape [3, 4]; expected three axes"),
    "no column": (
        {"k": torch.randn(3, 4, 0)},
        ValueError,
        "k has shape [3, 4, 0]; expected head_dim >= 1",
    ),
    "columns": ({"k": torch.randn(3, 4, 3)}, ValueError, "k has shape [3, 4, 3]; expected (Nk"),
    "keys": ({"v": torch.randn(2, 4, 2)}, ValueError, "v has shape [2, 4, 2]; expected (Nk"),
    "heads": (
        {"k": torch.randn(3, 3, 2), "v": torch.randn(3, 3, 2)},
        ValueError,
        "q has 4 heads and k has 3; expected the number of heads of q to be a multiple",
    ),
    "dtype": (
        {"k": torch.randn(3, 4, 2).double()},
        TypeError,
        "k has dtype Double, but q has Float",
    ),
    "integers": ({"q": torch.ones(3, 4, 2).long()}, TypeError, "q has dtype Long; expected bf"),
    "floats": ({"indices": torch.zeros(3)}, TypeError, "indices has dtype Float; expected integ"),
    "bools": ({"indptr": torch.ones(4).bool()}, TypeError, "indptr has dtype Bool; expected int"),
    "short indptr": (
        {"indptr": torch.tensor([0, 3])},
        ValueError,
        "indptr has shape [2]; expected (N + 1,) = (4,)",
    ),
    "indices with two axes": (
        {"indices": torch.zeros(3, 1, dtype=torch.int64)},
        ValueError,
        "indices has shape [3, 1]; expected one axis",
    ),
    "indptr from 1": (
        {"indptr": torch.tensor([1, 2, 3, 3])},
        ValueError,
        "indptr[0] is 1; expected 0",
    ),
    "indptr falls": (
        {"indptr": torch.tensor([0, 3, 2, 3])},
        ValueError,
        "indptr[2] is 2, but indptr[1] is 3; expected non-decreasing values",
    ),
    "indptr has too few edges": (
        {"indptr": torch.tensor([0, 1, 1, 2])},
        ValueError,
        "indptr[3] is 2; expected the number of indices, 3",
    ),
    "a key index out of range": (
        {"indices": torch.tensor([0, 3, 1])},
        ValueError,
        "indices[1] is 3; expected a key index from 0 to 2",
    ),
    "a negative key": ({"indices": torch.tensor([0, 1, -1])}, ValueError, "indices[2] is -1"),
    "similarity": (
        {"similarity": 1},
        TypeError,
        "similarity is an int; expected a gnomon.similarity",
    ),
    "scale": (
        {"scale": 1.0, "similarity": Laplacian(1.0)},
        ValueError,
        "scale applies to similarities such as dot, not to",
    ),
    "a string as scale": ({"scale": "1"}, TypeError, "scale is a str; expected a number"),
    "gamma": (
        {"similarity": Laplacian(torch.ones(3))},
        ValueError,
        "gamma of laplacian has shape [3]; expected (H,) = (4,)",
    ),
    "a height alone": (
        {"q": torch.randn(3, 4, 1), "k": torch.randn(3, 4, 1), "similarity": Umbral(1.0)},
        ValueError,
        "needs at least 2, because",
    ),
}


@pytest.mark.cpu("errors are the same on all devices")
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, kind, message = ERRORS[name]
    with pytest.raises(kind, match=re.escape(message)) as error:
        attend(**changes)
    assert "graph_attention" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_other_integers(dtype):
    torch.manual_seed(0)
    expected = attend()
    indptr, indices = csr([[0, 1], [2], []])
    torch.manual_seed(0)
    assert torch.equal(attend(indptr=indptr.to(dtype), indices=indices.to(dtype)), expected)


@pytest.mark.parametrize(
    ("index", "change", "argument"),
    [
        (1, lambda t: t[:, :1], "v"),
        (2, lambda t: t[:3], "v"),
        (3, lambda t: t.repeat(2, 1, 1), "row_scalars"),
        (4, lambda t: t[..., :3], "column_scalars"),
        (6, lambda t: t[:1], "factor"),
        (6, lambda t: t.double(), "factor"),
    ],
)
def test_the_operator_pair_checks_its_arguments(index, change, argument):
    tensors, rest = low_level_arguments(torch.float32)
    tensors[index] = change(tensors[index])
    with pytest.raises((ValueError, TypeError), match=rf"gnomon.graph_attention: {argument} has"):
        ops.graph_forward(*tensors, *rest)
