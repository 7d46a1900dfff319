"""Attention exported to ONNX as plain operators gives the same results as the fused operator."""

import numpy as np
import pytest
import torch

import gnomon
from gnomon import nn, position, similarity
from gnomon.integrations import onnx

pytestmark = pytest.mark.cpu("exports CPU programs")

B, H, HKV, L, D = 2, 4, 2, 7, 6
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2]])

CALLS = {
    "dot": {},
    "causal": {"causal": True, "position": "rope+alibi"},
    "window": {"window": (2, 1), "position": "hype:tau=0.5:mu=0.1"},
    "lengths": {"key_lengths": torch.tensor([0, 5]), "key_starts": torch.tensor([0, 2])},
    "segments": {"query_segments": SEGMENTS, "key_segments": SEGMENTS},
    "chunks": {"chunks": (3, 1, 0), "query_offset": -2},
    "offsets": {"causal": True, "query_offset": torch.tensor([-3, 2]), "position": "alibi"},
    "positions": {"positions": torch.tensor([[3, 1, 0, 2, 9, 8, 7], [0, 1, 2, 3, 4, 5, 6]]),
                  "causal": True},
    "mask": {"mask": torch.rand(B, 1, L, L, generator=torch.Generator().manual_seed(0)) > 0.4},
    "pairs": {"position": position.PairBias(torch.randn(1, H, L, L) * 3)},
    "t5": {"position": position.T5(torch.randn(32, H), bidirectional=True), "scale": 0.7},
    "softcap": {"similarity": "dot:softcap=2.0"},
    "scaling": {"position": "scalable_softmax"},
    "laplacian": {"similarity": similarity.Laplacian(0.7)},
    "gaussian": {"similarity": similarity.Gaussian(torch.rand(H)), "causal": True},
    "additive": {"similarity": similarity.Additive(0.2)},
    "hyperbolic": {"similarity": similarity.Hyperbolic(0.8)},
}  # fmt: skip


class Call(torch.nn.Module):
    def __init__(self, arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, q, k, v):
        return gnomon.attention(q, k, v, **self.arguments)


def tokens(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    dim = 1 if name == "additive" else D
    shapes = ((B, H, L, dim), (B, HKV, L, dim), (B, HKV, L, 5))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", CALLS)
def test_plain_operators_compute_the_same(name):
    call, inputs = Call(CALLS[name]), tokens(name)
    program = torch.export.export(call, inputs)
    plain = onnx.plain(program)
    assert not [name for name in operators(plain) if "gnomon" in name]
    torch.testing.assert_close(plain.module()(*inputs), call(*inputs), atol=2e-5, rtol=2e-5)
    # torch.export itself keeps the fused operator.
    assert any("gnomon" in name for name in operators(program))


def test_a_module_of_any_length():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(24, H, HKV, position="rope+kerple", sink=True).eval()
    x = torch.randn(2, 9, 24)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(module, (x,), {"causal": True}, dynamic_shapes={
        "query": {1: length}, "causal": None,
    })  # fmt: skip
    plain = onnx.plain(program).module()
    for n in (3, 9, 40):
        x = torch.randn(2, n, 24)
        torch.testing.assert_close(
            plain(x, causal=True), module(x, causal=True), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"similarity": similarity.Penumbral(1.0)}, "penumbral"),
        ({"position": "relative:max_offset=2"}, "relative keys of a position"),
        ({"dropout": 0.5, "seed": 1}, r"the model has dropout; .* model.eval\(\)"),
    ],
    ids=["cone", "relative keys", "dropout"],
)
def test_terms_without_plain_form_are_named(arguments, part):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 4, position="relative:max_offset=2")

        def forward(self, q, k, v):
            return self.attention(q.transpose(1, 2).flatten(2))

    call = Module() if "position" in arguments else Call(arguments)
    program = torch.export.export(call, tokens(""))
    with pytest.raises(NotImplementedError, match=f"gnomon: .*{part}"):
        onnx.plain(program)


@pytest.mark.parametrize("by", ["module", "program"])
def test_onnx_by_another_runtime(tmp_path, by):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    module = nn.MultiheadAttention(24, H, position="rope+alibi", similarity="dot").eval()
    x = torch.randn(2, 9, 24)
    path = tmp_path / "model.onnx"
    if by == "module":
        torch.onnx.export(module, (x,), path, kwargs={"causal": True}, verbose=False)
    else:
        program = torch.export.export(module, (x,), {"causal": True})
        torch.onnx.export(onnx.plain(program), f=path, verbose=False)
    session = runtime.InferenceSession(path)
    (o,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(o, module(x, causal=True).detach().numpy(), atol=1e-5)
    # The exporter's settings do not affect anything else: a similarity that it cannot export still
    # compiles.
    cone = Call({"similarity": similarity.Penumbral(1.0)})
    compiled = torch.compile(cone, backend="aot_eager", dynamic=True, fullgraph=True)
    inputs = tokens("")
    torch.testing.assert_close(compiled(*inputs), cone(*inputs))


def test_the_exporter_names_unsupported_terms(tmp_path):
    pytest.importorskip("onnxscript")
    cone = Call({"similarity": similarity.Penumbral(1.0)}).eval()
    with pytest.raises(
        Exception, match="gnomon: the pair function 'penumbral' cannot be exported to ONNX"
    ):
        torch.onnx.export(cone, tokens(""), tmp_path / "model.onnx", verbose=False)
