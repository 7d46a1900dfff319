"""Keys and values in pages, compared with the same tokens in a row."""

import pytest
import torch
from formulas import generator_of
from torch.func import jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import gnomon
from gnomon import _plain, nn
from gnomon.position import ALiBi, KeyBias, PairBias, Relative, RoPE

B, H, KV_HEADS, QUERIES, D, DV = 3, 4, 2, 5, 8, 6
LENGTHS = torch.tensor([24, 9, 0])
STARTS = torch.tensor([2, 4, 0])


def paged(size: int, dtype: torch.dtype = torch.float32, count: int = 24, shared: bool = False):
    """q, k and v in pages, a page table, and k and v in a row.

    Pages are in any order. Rows of hidden keys contain NaN, and entries without visible keys are no
    pages. With `shared`, the first batch elements have the same first page.
    """
    generator = generator_of(size)
    q = torch.randn(B, H, QUERIES, D, generator=generator, dtype=torch.float64).to(dtype)
    columns = count // size
    pages = 1 + B * columns
    order = torch.randperm(pages, generator=generator)
    table = order[1:].view(B, columns).clone()
    if shared:
        table[1, 0] = table[0, 0]
    inside = torch.arange(columns) * size
    hidden = (inside >= LENGTHS[:, None]) | (inside + size <= STARTS[:, None])
    tokens = []
    for width in (D, DV):
        shape = (pages, KV_HEADS, size, width)
        in_pages = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        in_a_row = in_pages[table].transpose(1, 2).reshape(B, KV_HEADS, count, width)
        if not shared:
            seen = torch.zeros(pages, size, dtype=torch.bool)
            j = torch.arange(count).view(columns, size)
            for b in range(B):
                seen[table[b]] = (j >= STARTS[b]) & (j < LENGTHS[b])
            in_pages = in_pages.masked_fill(~seen[:, None, :, None], torch.nan)
        tokens.append((in_pages, in_a_row))
    (k, k_row), (v, v_row) = tokens
    table[hidden] = torch.where(torch.arange(int(hidden.sum())) % 2 == 0, -7, pages + 3)
    return q, k, v, table, k_row, v_row


TERMS = {
    "dot": lambda k: {},
    "weights": lambda k: {
        "dropout": 0.3,
        "seed": 7,
        "temperature": torch.linspace(0.5, 2, QUERIES).to(k),
        "score_softcap": 2.0,
        "mask": torch.arange(24) % 5 != 3,
    },
    "alibi": lambda k: {"position": ALiBi(gnomon.alibi_slopes(H).to(k)), "causal": True},
    "biases": lambda k: {
        "position": [
            KeyBias(torch.linspace(-1, 1, 24).to(k).expand(B, H, 24)),
            PairBias(torch.linspace(-1, 1, 24).to(k).sin().expand(1, 1, QUERIES, 24)),
        ],
        "window": (11, 3),
        "sink": torch.zeros(H).to(k),
    },
    "laplacian": lambda k: {"similarity": "laplacian"},
    "gaussian": lambda k: {"similarity": "gaussian", "position": "hype", "causal": True},
    "cosine": lambda k: {"similarity": "cosine"},
    "umbral": lambda k: {"similarity": "umbral", "position": "kerple", "causal": True},
    "rope": lambda k: {"position": RoPE(), "causal": True},
    "relative": lambda k: {
        "position": Relative(torch.linspace(-1, 1, 7 * D).view(7, D).to(k), max_offset=3)
    },
    "midpoint": lambda k: {"aggregation": "einstein_midpoint"},
}
# Terms whose pages kernels read in place.
IN_PLACE = {"dot", "weights", "alibi", "biases", "laplacian", "gaussian"}


class Spy(TorchDispatchMode):
    """Records whether the operator has received pages."""

    def __init__(self):
        super().__init__()
        self.tables = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name == "gnomon::attention_forward":
            self.names = names = [argument.name for argument in function._schema.arguments]
            self.tables.append(dict(zip(names, args, strict=False)).get("page_table") is not None)
            self.arguments = args
        return function(*args, **(kwargs or {}))


def masks() -> dict:
    return {
        "key_lengths": LENGTHS,
        "key_starts": STARTS,
        "query_offset": torch.tensor([19, 4, 0]),
    }


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", TERMS)
def test_as_in_a_row(name, size):
    dtype = {1: torch.float64, 3: torch.float32, 8: torch.bfloat16}[size]
    q, k, v, table, k_row, v_row = paged(size, dtype)
    terms = TERMS[name](q.float() if dtype == torch.bfloat16 else q)
    expected = gnomon.attention(q, k_row, v_row, **masks(), **terms, return_lse=True)
    with Spy() as spy:
        ours = gnomon.attention(q, k, v, **masks(), **terms, page_table=table, return_lse=True)
    assert spy.tables == [name in IN_PLACE and size != 3]
    # On a GPU, long calls without pages may use other kernels.
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert not ours[0][2].any()
    assert ours[0].isfinite().all()


@pytest.mark.parametrize(
    "form",
    [
        *("int32", "shared by the batch", "rows first", "other strides"),
        *("part of a table", "expanded", "transposed"),
    ],
)
def test_tables_and_strides(form):
    q, k, v, table, k_row, v_row = paged(4)
    arguments = masks()
    if form == "int32":
        table = table.int()
    elif form == "shared by the batch":
        table, k_row, v_row = table[0], k_row[:1].expand_as(k_row), v_row[:1].expand_as(v_row)
        arguments = {"key_lengths": 24, "key_starts": 2, "query_offset": 3}
    elif form == "part of a table":
        table = torch.cat((table, table.flip(1)), dim=1)[:, : table.shape[1]]
    elif form == "expanded":
        table = table[:1].expand_as(table)
        k_row, v_row = k_row[:1].expand_as(k_row), v_row[:1].expand_as(v_row)
        arguments = {"key_lengths": 24, "key_starts": 2, "query_offset": 3}
    elif form == "transposed":
        table = table.t().contiguous().t()
    elif form == "rows first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    else:
        k, v = (torch.stack((x, -x), dim=-1)[..., 0] for x in (k, v))
        assert k.stride(3) == 2
    ours = gnomon.attention(q, k, v, **arguments, causal=True, page_table=table)
    expected = gnomon.attention(q, k_row, v_row, **arguments, causal=True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "umbral"])
def test_derivatives(name):
    """Gradients of a page are sums over the batch elements that share it."""
    q, k, v, table, *_ = paged(4, torch.float64, shared=True)
    terms = masks() | TERMS[name](q)
    table = table.clamp(0, len(k) - 1)

    def of_pages(q, k, v):
        return gnomon.attention(q, k, v, page_table=table, **terms)

    def in_a_row(q, k, v):
        k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return gnomon.attention(q, k, v, **terms)

    tokens = [x.requires_grad_() for x in (q, k, v)]
    tangents = [torch.randn(x.shape, generator=generator_of(1)).to(x) for x in tokens]
    d_o = torch.randn(B, H, QUERIES, DV, generator=generator_of(2)).to(q)
    ours, expected = (
        torch.autograd.grad(function(*tokens), tokens, d_o) for function in (of_pages, in_a_row)
    )
    torch.testing.assert_close(ours, expected)
    detached = tuple(x.detach() for x in tokens)
    torch.testing.assert_close(
        jvp(of_pages, detached, tuple(tangents)), jvp(in_a_row, detached, tuple(tangents))
    )


def test_samples():
    q, k, v, table, k_row, v_row = paged(4)
    both = torch.stack((q, 2 * q))

    def attend(q):
        return gnomon.attention(q, k, v, page_table=table, **masks())

    expected = [gnomon.attention(x, k_row, v_row, **masks()) for x in both]
    torch.testing.assert_close(vmap(attend)(both), torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.cpu("torch.compile does not support the emulation")
@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_compiled(name):
    q, k, v, table, *_ = paged(8)

    def attend(q, k, v, table):
        return gnomon.attention(q, k, v, page_table=table, **masks(), **TERMS[name](q))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, table), attend(q, k, v, table))


def test_exported_to_plain_operators():
    q, k, v, table, *_ = paged(4, torch.float64)
    with Spy() as spy:
        expected = gnomon.attention(q, k, v, page_table=table, **masks())
    call = dict(zip(spy.names, spy.arguments, strict=True))
    ours, *_ = _plain._attention_forward(*call.values())
    torch.testing.assert_close(ours, expected)


def test_no_pages_in_the_table():
    q, k, v, table, *_ = paged(4)
    assert not gnomon.attention(q, k, v, page_table=table[:, :0]).any()


def test_a_cache_of_a_server():
    """Tokens are appended to pages, and every sequence is continued by one token at a time."""
    generator = generator_of(0)
    size, steps = 4, 11
    q, k, v = torch.randn(3, 2, H, steps, D, generator=generator).unbind()
    k_pages, v_pages = torch.full((2, 8, H, size, D), torch.nan)
    table = torch.full((2, 4), -1)
    free = [5, 0, 7, 2, 1, 6]
    for step in range(steps):
        for b in range(2):
            if step % size == 0:
                table[b, step // size] = free.pop()
            page = table[b, step // size]
            k_pages[page, :, step % size] = k[b, :, step]
            v_pages[page, :, step % size] = v[b, :, step]
        ours = gnomon.attention(
            q[:, :, step : step + 1], k_pages, v_pages, page_table=table, key_lengths=step + 1
        )
        expected = gnomon.attention(
            q[:, :, step : step + 1], k[:, :, : step + 1], v[:, :, : step + 1]
        )
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


WRONG = {
    "axes": (
        lambda c: c | {"k": c["k"][0]},
        r"k and v have shapes \[2, 4, 8\] and \[\d+, 2, 4, 6\]; expected \(pages, Hkv, page size",
    ),
    "no pages": (lambda c: c | {"k": c["k"][:0], "v": c["v"][:0]}, "expected at least one page"),
    "values": (lambda c: c | {"v": c["v"][:, :, :3]}, "v has shape .* with the first three sizes"),
    "head_dim": (lambda c: c | {"q": c["q"][..., :5]}, "k has shape .* with B = 3 and D = 5"),
    "heads": (lambda c: c | {"q": c["q"][:, :3]}, "q has 3 heads and k has 2"),
    "dtype": (lambda c: c | {"page_table": c["page_table"].float()}, "page_table has dtype Float"),
    "table": (lambda c: c | {"page_table": c["page_table"][:2]}, "page_table has shape"),
    "number": (lambda c: c | {"page_table": 3}, "page_table has shape"),
    "entry": (
        lambda c: c | {"page_table": c["page_table"].index_fill(1, torch.tensor([2]), 99)},
        r"page_table\[0, 2\] is 99; expected 0 to 18",
    ),
    "hidden entry": (
        lambda c: c | {"key_lengths": torch.tensor([24, 9, 1])},
        r"page_table\[2, 0\] is -?\d+; expected 0 to 18",
    ),
    "offset": (lambda c: c | {"causal": True, "query_offset": None}, "query_offset"),
    "lengths": (
        lambda c: c | {"key_lengths": torch.tensor([1, 2])},
        r"key_lengths has shape \[2\]; expected \(B,\) = \(3,\)",
    ),
}


@pytest.mark.cpu("entries are clamped on a GPU")
@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    q, k, v, table, *_ = paged(4)
    change, message = WRONG[name]
    call = change({"q": q, "k": k, "v": v, "page_table": table} | masks())
    with pytest.raises((ValueError, TypeError), match=f"gnomon.attention: .*{message}"):
        gnomon.attention(**call)


@pytest.mark.cpu("checks of the operator itself")
def test_the_operator_checks_its_pages():
    q, k, v, table, *_ = paged(4)
    with Spy() as spy:
        gnomon.attention(q, k, v, page_table=table, **masks())
    call = dict(zip(spy.names, spy.arguments, strict=True))

    def error(**changes):
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            torch.ops.gnomon.attention_forward(*(call | changes).values())
        return str(caught.value)

    assert "expected all three or none" in error(key_pages=None)
    assert "expected all three or none" in error(page_table=None)
    assert "y has 24 keys, but page_table and key_pages have 8" in error(page_table=table[:, :2])
    assert "v" in error(value_pages=v[:, :1])
    assert "have no derivatives" in error(x=q.requires_grad_())


def test_other_calls_refuse_tables():
    q, k, v, table, k_row, _ = paged(4)
    with pytest.raises(TypeError, match="unexpected argument page_table"):
        gnomon.attention_weights(q, k, page_table=table)
    with pytest.raises(TypeError, match="unexpected argument page_table"):
        nn.MultiheadAttention(8, 2)(torch.zeros(1, 3, 8), page_table=table)
    with pytest.raises(TypeError, match="unexpected argument block_table; expected page_table="):
        gnomon.attention(q, k, v, block_table=table)
    with pytest.raises(NotImplementedError, match="page_table is supported only by attention"):
        torch.ops.gnomon.attention_weights(
            q, k_row, [0], "dot", [], [], [], query_offset=0, page_table=table
        )
