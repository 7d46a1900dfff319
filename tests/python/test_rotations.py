"""RoPE with user-supplied angles, and with mixed frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import pairwise
from torch import Tensor

import gnomon
from gnomon.position import ALiBi, Relative, RoPE, RoPEMixed

B, H, HKV, L, D = 2, 4, 2, 9, 8
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(queries: int = L, keys: int = L, dim: int = D) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"q": draw(B, H, queries, dim), "k": draw(B, HKV, keys, dim), "v": draw(B, HKV, keys, 5)}


def turned(x: Tensor, angles: Tensor, layout: str) -> Tensor:
    """Rotates pairs of the first columns, as complex numbers, by the angles (..., L, pairs)."""
    dims = 2 * angles.shape[-1]
    first, rest = x[..., :dims], x[..., dims:]
    turn = torch.polar(torch.ones_like(angles), angles)
    if layout == "half":
        pairs = torch.complex(first[..., : dims // 2], first[..., dims // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag, rest], -1)
    pairs = torch.complex(first[..., 0::2], first[..., 1::2]) * turn
    return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def repeated(x: Tensor) -> Tensor:
    """Repeats tensors or angles of the key heads for each query head."""
    return x.repeat_interleave(H // x.shape[1], 1) if x.shape[1] in (1, HKV) else x


def check(ours, theirs, inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compares outputs and all gradients: ours in the given dtype, theirs in float64."""
    results = []
    for function, given in ((ours, dtype), (theirs, torch.float64)):
        leaves = {
            name: x.to(dtype).to(given).detach().requires_grad_() for name, x in inputs.items()
        }
        o = function(**leaves)
        assert o.dtype == given
        weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).reshape(o.shape).to(given)
        results.append([o, *torch.autograd.grad((o * weights).sum(), list(leaves.values()))])
    for name, own, expected in zip(["o", *inputs], *results, strict=True):
        largest = max(1.0, float(expected.detach().abs().max()))
        error = float((own.double() - expected).detach().abs().max()) / largest
        assert error <= TOLERANCE[dtype], f"{name}: off by {error}"


@pairwise(
    shape=[(1, 1), (B, 1), (1, HKV), (1, H), (B, H)],
    pairs=[D // 2, 3, 1],
    layout=["interleaved", "half"],
    dtype=TOLERANCE,
)
def test_angles(shape, pairs, layout, dtype):
    inputs = tokens() | {"angles": draw(*shape, L, pairs)}

    def ours(q, k, v, angles):
        return gnomon.attention(q, k, v, position=RoPE(layout=layout, angles=angles))

    def theirs(q, k, v, angles):
        angles = repeated(angles)
        return dense(turned(q, angles, layout), turned(repeated(k), angles, layout), repeated(v))

    check(ours, theirs, inputs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("offset", [0, 3, [4, 1]], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (B, HKV), (1, H)], ids=str)
def test_angles_at_the_positions_of_queries(shape, offset, dtype):
    queries, keys = 4, 7
    inputs = tokens(queries, keys) | {"angles": draw(*shape, 8, 3)}
    offsets = torch.tensor(offset) if isinstance(offset, list) else offset

    def ours(q, k, v, angles):
        return gnomon.attention(q, k, v, position=RoPE(angles=angles), query_offset=offsets)

    def theirs(q, k, v, angles):
        angles = repeated(angles).expand(B, H, 8, 3)
        starts = offset if isinstance(offset, list) else [offset] * B
        rows = torch.stack([angles[b, :, s : s + queries] for b, s in enumerate(starts)])
        return dense(
            turned(q, rows, "interleaved"),
            turned(repeated(k), angles[:, :, :keys], "interleaved"),
            repeated(v),
        )

    check(ours, theirs, inputs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shapes", [((1, 1), (B, H)), ((B, H), (1, HKV)), ((1, HKV), (1, 1))])
def test_angles_of_queries_and_of_keys(shapes, dtype):
    queries, keys = 4, 7
    inputs = tokens(queries, keys)
    inputs |= {"angles": draw(*shapes[0], queries, 3), "key_angles": draw(*shapes[1], keys, 3)}

    def ours(q, k, v, angles, key_angles):
        position = [RoPE(angles=angles, key_angles=key_angles), ALiBi(0.3)]
        return gnomon.attention(q, k, v, position=position, query_offset=2)

    def theirs(q, k, v, angles, key_angles):
        rows, columns = torch.arange(queries)[:, None] + 2, torch.arange(keys)
        q = turned(q, repeated(angles), "interleaved")
        k = turned(repeated(k), repeated(key_angles), "interleaved")
        scores = q @ k.mT / math.sqrt(D) - 0.3 * (rows - columns).abs().double()
        return scores.softmax(-1) @ repeated(v)

    check(ours, theirs, inputs, dtype)


def test_positions_times_frequencies_are_rope():
    q, k, v = tokens().values()
    frequencies = 100.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = (torch.arange(L, dtype=torch.float64)[:, None] * frequencies)[None, None]
    for layout in ("interleaved", "half"):
        torch.testing.assert_close(
            gnomon.attention(q, k, v, position=RoPE(layout=layout, angles=angles), causal=True),
            gnomon.attention(q, k, v, position=RoPE(100.0, layout), causal=True),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("angle_dtype", ["own", torch.float32], ids=str)
def test_low_precision(dtype, angle_dtype):
    q, k, v = (x.to(dtype) for x in tokens().values())
    angles = draw(1, H, L, 3).to(dtype if angle_dtype == "own" else angle_dtype)
    o = gnomon.attention(q, k, v, position=RoPE(angles=angles))
    assert o.dtype == dtype
    exact = gnomon.attention(
        *(x.double() for x in (q, k, v)), position=RoPE(angles=angles.double())
    )
    assert (o.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize(
    "similarity",
    ["penumbral", "umbral", "hyperbolic", "hyperbolic:map=exp", "laplacian", "entailment"]
    + ["lorentz", "lorentz:map=none", "lorentz:map=exp"],
)
@pytest.mark.parametrize("heads", [1, HKV, H])
def test_heights_and_times_stay(similarity, heads):
    """Rotating tokens before the call gives the same distances as rotating them inside."""
    inputs = tokens()
    angles = draw(1, heads, L, 3)
    o = gnomon.attention(*inputs.values(), similarity=similarity, position=RoPE(angles=angles))
    first = 1 if similarity == "lorentz:map=none" else 0
    q, k = (
        torch.cat([x[..., :first], turned(x[..., first:], repeated(angles), "interleaved")], -1)
        for x in (inputs["q"], repeated(inputs["k"]))
    )
    expected = gnomon.attention(q, k, repeated(inputs["v"]), similarity=similarity)
    torch.testing.assert_close(o, expected)
    assert not torch.allclose(o, gnomon.attention(*inputs.values(), similarity=similarity))
    if similarity in ("penumbral", "umbral", "hyperbolic", "lorentz:map=none"):
        with pytest.raises(ValueError, match="at most 7 "):
            gnomon.attention(
                *inputs.values(), similarity=similarity, position=RoPE(angles=draw(1, 1, L, 4))
            )


def test_keys_of_each_query_head_go_with_all_else():
    """Combines per-head angles with a shared key table, a per-head value table and lengths."""
    inputs = tokens() | {"angles": draw(1, H, L, 4), "rows": draw(5, D), "values": draw(H, 5, 5)}

    def ours(q, k, v, angles, rows, values):
        position = [RoPE(angles=angles), Relative(rows, 2, values=values)]
        return gnomon.attention(q, k, v, position=position, key_lengths=[L, 5])

    def theirs(q, k, v, angles, rows, values):
        q_turned, k_turned = (turned(x, angles, "interleaved") for x in (q, repeated(k)))
        offset = (torch.arange(L) - torch.arange(L)[:, None]).clamp(-2, 2) + 2
        scores = (q_turned @ k_turned.mT + (q @ rows.mT).gather(3, offset.expand(B, H, L, L))) / (
            math.sqrt(D)
        )
        hidden = torch.arange(L) >= torch.tensor([L, 5])[:, None, None, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return weights @ repeated(v) + torch.einsum("bhij,hijc->bhic", weights, values[:, offset])

    check(ours, theirs, inputs, torch.float64)


def test_hidden_keys_may_be_nan():
    q, k, v = tokens().values()
    k[:, :, 6:] = math.nan
    v[:, :, 6:] = math.nan
    angles = draw(1, H, L, 4)
    angles[:, :, 6:] = math.nan
    query_angles = angles.nan_to_num()
    o = gnomon.attention(
        q, k, v, position=RoPE(angles=query_angles, key_angles=angles), key_lengths=[6, 6]
    )
    assert o.isfinite().all()


def test_a_module_learns_angles_and_decodes_with_them():
    torch.manual_seed(0)
    angles = torch.nn.Parameter(0.1 * torch.randn(1, H, 12, 4))
    module = gnomon.nn.MultiheadAttention(H * D, H, kv_heads=HKV, position=RoPE(angles=angles))
    assert module.rope_angles is angles
    x = torch.randn(B, L, H * D)
    whole = module(x, causal=True)
    whole.square().mean().backward()
    assert (angles.grad[:, :, :L] != 0).any(-1).all()
    assert not angles.grad[:, :, L:].any()
    cache = gnomon.nn.KVCache()
    parts = [module(part, causal=True, cache=cache) for part in x.split(2, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, causal=True), whole)
    with pytest.raises(ValueError, match="angles of RoPE has 12 rows"):
        module(torch.randn(B, 13, H * D), causal=True)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (lambda: RoPE(angles=draw(L, 4)), r"angles of RoPE has shape \[9, 4\]"),
        (lambda: RoPE(angles=draw(3, 1, L, 4)), r"expected \(1 or B, 1 or H, L, dims / 2\)"),
        (lambda: RoPE(angles=draw(1, 3, L, 4)), r"expected \(1 or B, 1 or H, L, dims / 2\)"),
        (lambda: RoPE(angles=draw(1, 1, L - 1, 4)), "angles of RoPE has 8 rows"),
        (lambda: RoPE(angles=draw(1, 1, L, 5)), "dims = 10; expected an even number, at most 8"),
        (lambda: RoPE(dims=4, angles=draw(1, 1, L, 2)), "angles and dims"),
        (lambda: RoPE(shape=(3, 3), angles=draw(1, 1, L, 2)), "angles and shape"),
        (lambda: RoPE(xpos=True, angles=draw(1, 1, L, 2)), "angles and xpos"),
        (lambda: RoPE(scaling="linear:factor=2", angles=draw(1, 1, L, 2)), "angles and scaling"),
        (lambda: RoPE(sections=(1, 1), angles=draw(1, 1, L, 2)), "angles and sections"),
        (lambda: RoPE(base=500, angles=draw(1, 1, L, 2)), "angles and base"),
        (lambda: RoPE(prefix=1, angles=draw(1, 1, L, 2)), "angles and prefix"),
        (
            lambda: RoPE(section_order="interleaved", angles=draw(1, 1, L, 2)),
            "angles and section_order",
        ),
        (lambda: RoPE(section_order="interleaved"), "section_order but no sections"),
        (lambda: RoPE(key_angles=draw(1, 1, L, 2)), "key_angles but no angles"),
        (
            lambda: RoPE(angles=draw(1, 1, L, 2), key_angles=draw(1, 1, L + 1, 2)),
            "key_angles of RoPE has 10 rows; expected one row for each token of k, 9",
        ),
        (
            lambda: RoPE(sections=(1, 2)),
            "sections = 1x2, which sum to 3 pairs; expected dims / 2 = 4",
        ),
        (
            lambda: RoPE(sections=(1, 3), section_order="interleaved"),
            "axis 0 gets 2 pairs; expected the first section to be the largest",
        ),
        (lambda: RoPEMixed(draw(H, 2, 4)), "frequencies of rope_mixed has shape"),
        (lambda: RoPEMixed(draw(3, 1, 4)), "frequencies of rope_mixed has shape"),
        (lambda: RoPEMixed(draw(1, 1, 5)), "dims = 10; expected an even number, at most 8"),
        (lambda: RoPEMixed(draw(1, 2, 2), shape=(2, 3)), "the grid 2x3 has 6"),
    ],
)
def test_wrong_rotations(position, message):
    with pytest.raises(ValueError, match=message):
        gnomon.attention(*tokens().values(), position=position())


def test_angles_must_have_a_type_that_goes_with_q():
    q, k, v = (x.float() for x in tokens().values())
    with pytest.raises(TypeError, match="angles of rope has dtype Double"):
        gnomon.attention(q, k, v, position=RoPE(angles=draw(1, 1, L, 2)))
    with pytest.raises(TypeError, match="angles is a list"):
        RoPE(angles=[1.0])


# RoPE-ViT: each head has its own frequencies along each axis.


@pairwise(
    grid=[((3, 4), 0), ((2, 5), 2), ((2, 2, 3), 1)],
    heads=[1, HKV, H],
    layout=["interleaved", "half"],
    dtype=TOLERANCE,
)
def test_mixed_frequencies(grid, heads, layout, dtype):
    shape, prefix = grid
    count = prefix + math.prod(shape)
    inputs = tokens(count, count) | {"frequencies": draw(heads, len(shape), 3)}
    coordinates = torch.cartesian_prod(*(torch.arange(n) for n in shape)).double()
    coordinates = torch.cat([torch.zeros(prefix, len(shape)).double(), coordinates])

    def ours(q, k, v, frequencies):
        position = RoPEMixed(frequencies, layout, shape, prefix)
        return gnomon.attention(q, k, v, position=position)

    def theirs(q, k, v, frequencies):
        angles = torch.einsum("la,han->hln", coordinates, frequencies)
        angles = repeated(angles[None])
        return dense(turned(q, angles, layout), turned(repeated(k), angles, layout), repeated(v))

    check(ours, theirs, inputs, dtype)


def test_mixed_frequencies_in_a_sequence():
    q, k, v = tokens(5, L).values()
    frequencies = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    for offset in (4, torch.tensor([4, 1])):
        torch.testing.assert_close(
            gnomon.attention(
                q, k, v, position=RoPEMixed(frequencies[None, None]), query_offset=offset
            ),
            gnomon.attention(q, k, v, position=RoPE(), query_offset=offset),
        )


@pytest.mark.parametrize(("spec", "axes"), [("shape=4x4", 2), ("shape=2x2x4", 3), ("axes=1", 1)])
def test_mixed_frequencies_start_in_directions_at_right_angles(spec, axes):
    torch.manual_seed(0)
    head_dim = 24
    module = gnomon.nn.MultiheadAttention(4 * head_dim, 4, position=f"rope_mixed:{spec}")
    start = module.rope_mixed_frequencies
    assert start.requires_grad
    assert start.shape == (4, axes, head_dim // 2)
    per_group = head_dim // 2 // axes
    groups = start.detach().unflatten(2, (axes, per_group))
    # The frequencies of a group have the same direction, and decrease like RoPE's with base 10.
    lengths = groups.norm(dim=1)
    falling = 10.0 ** (-torch.arange(per_group) / per_group)
    torch.testing.assert_close(lengths, falling.expand(4, axes, -1))
    directions = groups[..., 0]
    eye = torch.eye(axes).expand(4, -1, -1)
    torch.testing.assert_close(directions.mT @ directions, eye, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.det(directions), torch.ones(4))
    if axes > 1:
        assert not torch.allclose(directions[0], directions[1], atol=1e-2)
    # A second module has different frequencies, unless the seed is the same.
    other = gnomon.nn.MultiheadAttention(4 * head_dim, 4, position=f"rope_mixed:{spec}")
    torch.manual_seed(0)
    again = gnomon.nn.MultiheadAttention(4 * head_dim, 4, position=f"rope_mixed:{spec}")
    assert torch.equal(again.rope_mixed_frequencies, start)
    assert (axes == 1) == torch.allclose(other.rope_mixed_frequencies, start)


@pytest.mark.parametrize("similarity", ["dot", "penumbral", "lorentz", "lorentz:map=none"])
def test_a_module_learns_mixed_frequencies(similarity):
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(
        H * D, H, kv_heads=HKV, similarity=similarity, position="rope_mixed:shape=2x4:prefix=1"
    )
    has_height = similarity in ("penumbral", "lorentz:map=none")
    assert module.rope_mixed_frequencies.shape == (H, 2, 2 if has_height else 4)
    x = torch.randn(B, 9, H * D)
    module(x).square().mean().backward()
    assert (module.rope_mixed_frequencies.grad != 0).all()
    assert "rope_mixed_frequencies" in module.learned_values()
    # Weights depend on the positions of the patches.
    weights = module.attention_weights(x, rows=0)
    moved = x[:, [0, *range(8, 0, -1)]]
    assert not torch.allclose(
        weights, module.attention_weights(moved, rows=0)[..., [0, *range(8, 0, -1)]]
    )


def test_a_module_turns_by_the_coordinates_of_its_calls():
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(32, 4, position="rope_mixed:axes=2")
    assert module.rope_mixed_frequencies.shape == (4, 2, 4)
    on_grid = gnomon.nn.MultiheadAttention(32, 4, position="rope_mixed:shape=2x3")
    on_grid.load_state_dict(module.state_dict())
    x = torch.randn(B, 6, 32)
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3))[None]
    torch.testing.assert_close(module(x, positions=places), on_grid(x))
    (ours,) = torch.autograd.grad(module(x, positions=places).square().sum(),
                                  [module.rope_mixed_frequencies])  # fmt: skip
    (theirs,) = torch.autograd.grad(on_grid(x).square().sum(), [on_grid.rope_mixed_frequencies])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(
        ValueError, match=("axes = 2, but positions have 1; expected the same number")
    ):
        module(x)
    with pytest.raises(
        ValueError, match=("axes = 2, but positions have 3; expected the same number")
    ):
        module(x, positions=torch.zeros(1, 6, 3, dtype=torch.long))


def test_bounds_of_mixed_frequencies():
    with pytest.raises(ValueError, match="axes=3 is invalid; expected 2"):
        gnomon.nn.MultiheadAttention(32, 4, position="rope_mixed:shape=2x2:axes=3")
    with pytest.raises(ValueError, match=r"dims = 6; expected a positive multiple of .* at most 8"):
        gnomon.nn.MultiheadAttention(32, 4, position="rope_mixed:shape=2x2:dims=6")
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="rope is rope_mixed"):
        gnomon.linear_attention(q, q, q, rope="rope_mixed")


def by_sections(positions: Tensor, sections: tuple[int, ...], order: str) -> Tensor:
    """The angles (B, 1, L, pairs) of coordinates (B, L, axes), pair by pair."""
    pairs = sum(sections)
    frequencies = [10000.0 ** (-pair / pairs) for pair in range(pairs)]
    if order == "contiguous":
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    else:
        axes = [
            pair % len(sections) if pair < len(sections) * sections[pair % len(sections)] else 0
            for pair in range(pairs)
        ]
    columns = [
        positions[..., axis].double() * frequency
        for axis, frequency in zip(axes, frequencies, strict=True)
    ]
    return torch.stack(columns, -1)[:, None]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("sections", "order"), [((1, 2, 1), "contiguous"), ((2, 1, 1), "interleaved"), (None, None)]
)
@pytest.mark.parametrize("batch", [1, B])
def test_positions_of_several_axes(sections, order, layout, batch, dtype):
    """Sections of pairs or, without sections, an equal number of columns per axis."""
    axes = 3 if sections else 2
    positions = torch.randint(-20, 50, (batch, L, axes))
    if sections:
        rope = RoPE(sections=sections, section_order=order, layout=layout)
        angles = by_sections(positions, sections, order)
    else:
        rope = RoPE(layout=layout)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sections:
            q, k = (turned(x, angles, layout) for x in (q, k))
        else:
            half = D // 2
            parts = [by_sections(positions[..., axis : axis + 1], (half // 2,), "contiguous")
                     for axis in range(2)]  # fmt: skip
            q, k = (
                torch.cat(
                    [turned(x[..., n * half : (n + 1) * half], parts[n], layout) for n in (0, 1)],
                    -1,
                )
                for x in (q, k)
            )
        scores = q @ repeated(k).mT / math.sqrt(D)
        # The causal mask depends on the order of the tokens, not on their positions.
        hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ repeated(v)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gnomon.attention(q, k, v, position=rope, causal=True, positions=positions)

    check(ours, theirs, tokens(), dtype)


def test_coordinates_in_modules_caches_and_weights():
    module = gnomon.nn.MultiheadAttention(32, 4, position="rope:sections=1x2x1").double()
    x = draw(B, L, 32)
    positions = torch.randint(50, (B, L, 3))
    whole = module(x, causal=True, positions=positions)
    cache = gnomon.nn.KVCache()
    parts = [
        module(part, causal=True, positions=at, cache=cache)
        for part, at in zip(
            x.split([4, 1, L - 5], 1), positions.split([4, 1, L - 5], 1), strict=True
        )
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    weights = module.attention_weights(x, rows=[2, 5, 6], causal=True, positions=positions)
    every = module.attention_weights(x, rows=range(L), causal=True, positions=positions)
    assert torch.equal(weights, every[:, :, [2, 5, 6]])
    assert not every.triu(1).any()
    with pytest.raises(ValueError, match="different numbers of axes"):
        module(x[:, :1], causal=True, positions=positions[:, :1, 0], cache=cache)


def test_terms_that_do_not_support_coordinates():
    x = tokens()
    positions = torch.randint(50, (B, L, 3))
    for position, name in (
        (
            [RoPE(sections=(1, 2, 1)), ALiBi(torch.ones(H, dtype=torch.float64))],
            "alibi does not support",
        ),
        (
            Relative(torch.zeros(3, D, dtype=torch.float64), max_offset=1),
            "relative does not support",
        ),
    ):
        with pytest.raises(ValueError, match=name):
            gnomon.attention(**x, position=position, positions=positions)
    rope = RoPE(sections=(1, 2, 1))
    for wrong in (positions[:, :-1], positions[:1].expand(3, -1, -1)):
        with pytest.raises(ValueError, match="positions has shape"):
            gnomon.attention(**x, position=rope, positions=wrong)
    with pytest.raises(ValueError, match="positions have 2 axes"):
        gnomon.attention(**x, position=rope, positions=positions[..., :2])
    with pytest.raises(ValueError, match="key_positions has shape"):
        gnomon.attention(**x, position=rope, positions=positions, key_positions=positions[..., :2])
