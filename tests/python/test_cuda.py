"""Tests of GPU support that do not need a GPU.

Fake GPU tensors provide shapes, dtypes and devices. CUDA kernels composed of PyTorch operators run
on CPU tensors. Fused kernels are launched on a mock driver and compiler (tests/core/fakes).
"""

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from test_cli import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

import gnomon
from gnomon.position import RoPE
from gnomon.similarity import Penumbral

pytestmark = pytest.mark.cpu("tests GPU code without a GPU")

ops = torch.ops.gnomon
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
FAKES = ROOT / "build" / "lib"


def on_cuda(operator, *arguments):
    """The result of the CUDA kernel for CPU tensors."""
    return operator.default.redispatch(ON_CUDA, *arguments)


def dot_arguments(x, y, v, factor, bias=None):
    """The arguments of attention_forward for a dot product without further options."""
    tensors = (x, y, v, None, None, None, factor, bias, *[None] * 23)
    numbers = (1.0, 0.0, 0.0, False, 0.0, False)
    return *tensors, "dot", 0, None, None, None, None, "", None, "clip", *numbers


def fake_tokens(dtype, *shape, grad=False):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


# All similarities except additive, which needs head_dim 1; required arguments are 0.5.
SIMILARITIES = {
    entry["name"]: getattr(gnomon.similarity, entry["class_name"])(
        *(0.5 for parameter in entry["parameters"] if parameter["argument"] == "required")
    )
    for entry in gnomon.catalogue()["similarities"]
    if entry["name"] != "additive"
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("similarity", SIMILARITIES.values(), ids=SIMILARITIES)
def test_shapes_types_and_devices(similarity, dtype):
    with FakeTensorMode():
        q = fake_tokens(dtype, 2, 4, 5, 8, grad=True)
        k = fake_tokens(dtype, 2, 2, 7, 8, grad=True)
        v = fake_tokens(dtype, 2, 2, 7, 6, grad=True)
        slopes = fake_tokens(torch.float32, 4, grad=True)
        o, lse = gnomon.attention(
            q,
            k,
            v,
            similarity=similarity,
            position=[RoPE(), gnomon.position.ALiBi(slopes)],
            causal=True,
            query_offset=2,
            return_lse=True,
        )
        assert (o.shape, o.dtype, o.device.type) == ((2, 4, 5, 6), dtype, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 5), torch.float32, "cuda")
        assert o.requires_grad
        assert lse.requires_grad


def test_calls_of_other_forms():
    """Code that reads tensor values on the CPU must not do so on a GPU."""
    with FakeTensorMode(), torch.device("cuda"):
        q = fake_tokens(torch.bfloat16, 2, 4, 5, 8, grad=True)
        numbers = torch.ones(2, 5, dtype=torch.int64)
        lengths = torch.tensor([5, 3])
        for options in (
            {"dropout": 0.1},
            {"dropout": 0.1, "seed": 3},
            {"key_lengths": lengths, "key_starts": lengths},
            {"query_segments": numbers, "key_segments": numbers},
            {"query_offset": lengths, "causal": True},
            {"mask": torch.ones(5, 5, dtype=torch.bool)},
            {"temperature": torch.ones(4, 5), "sink": torch.ones(4)},
            {"position": gnomon.position.Relative(torch.ones(5, 8), max_offset=2)},
            {"position": gnomon.position.HyPE(torch.ones(4), torch.ones(4))},
        ):
            o = gnomon.attention(q, q, q, **options)
            assert (o.shape, o.dtype, o.device.type) == (q.shape, q.dtype, "cuda")


def test_modules():
    with FakeTensorMode(), torch.device("cuda"):
        for similarity, position in [("dot", "rope"), ("dot", None)]:
            attention = gnomon.nn.MultiheadAttention(
                16, 4, similarity=similarity, position=position
            )
            o = attention(torch.empty(2, 5, 16), causal=True)
            assert (o.shape, o.device.type) == ((2, 5, 16), "cuda")
            assert o.requires_grad


class _Types(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the dtypes that the operator's passes receive."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [argument.name for argument in function._schema.arguments]
        if function.namespace == "gnomon":
            self.seen[function._schema.name.partition("::")[2]] = {
                name: value.dtype
                for name, value in zip(names, args, strict=False)
                if isinstance(value, torch.Tensor)
            }
        return function(*args, **(kwargs or {}))


def test_tokens_stay_in_their_type():
    with FakeTensorMode(), _Types() as types:
        q = fake_tokens(torch.bfloat16, 2, 4, 5, 8, grad=True)
        slopes = fake_tokens(torch.float32, 4, grad=True)
        gnomon.attention(q, q, q, similarity=Penumbral(0.5), position=gnomon.position.ALiBi(slopes))
    seen = types.seen["attention_forward"]
    assert {name for name, dtype in seen.items() if dtype == torch.bfloat16} == {"x", "y", "v"}
    wide = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert wide >= {"row_scalars", "column_scalars", "factor", "bias"}


def test_types_of_gradients():
    """Autograd itself requires a GPU, but the operator does not."""
    with FakeTensorMode(), torch.device("cuda"):
        x = fake_tokens(torch.bfloat16, 2, 4, 5, 8)
        y = fake_tokens(torch.bfloat16, 2, 2, 7, 8)
        factor, bias = torch.ones(4), torch.ones(1, 4, 11)
        arguments = dot_arguments(x, y, y, factor, bias)
        o, lse, statistics = ops.attention_forward(*arguments)
        assert {t.dtype for t in (o, lse, statistics)} == {torch.float32}
        gradients = ops.attention_backward(
            *(o, lse, o, lse, statistics),
            *arguments,
            [n in (0, 1, 2, 6, 7) for n in range(17)],
        )
        for gradient, of in zip(gradients, [x, y, y, *[None] * 3, factor, bias], strict=False):
            if of is not None:
                assert (gradient.shape, gradient.dtype) == (of.shape, of.dtype)
                assert gradient.device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_derived_tokens_are_float32_on_the_cpu(dtype):
    q = torch.randn(2, 4, 5, 8, dtype=dtype)
    slopes = torch.rand(4)
    cases = [
        ({"position": gnomon.position.ALiBi(slopes), "causal": True}, {"x", "y", "v"}),
        ({"similarity": gnomon.similarity.Laplacian(0.5)}, {"x", "y", "v"}),
        ({"similarity": Penumbral(0.5)}, {"v"}),
        ({"position": gnomon.position.RoPE()}, {"v"}),
        ({"position": gnomon.position.Relative(torch.randn(5, 8), max_offset=2)}, {"x", "y", "v"}),
        ({"aggregation": "einstein_midpoint"}, {"x", "y"}),
    ]
    for options, low in cases:
        with _Types() as types:
            gnomon.attention(q, q, q, **options)
        seen = types.seen["attention_forward"]
        assert {name for name, of in seen.items() if of == dtype} == low, options


@pytest.mark.parametrize(
    ("x", "y", "v", "message"),
    [
        ("bfloat16", "float32", "float32", "y has dtype Float; expected the dtype of x, BFloat16"),
        ("float32", "bfloat16", "float32", "y has dtype BFloat16; expected the dtype of x, Float"),
        ("float32", "float32", "float64", "v has dtype Double; expected Float"),
        ("int64", "int64", "int64", "x has dtype Long; expected bfloat16, float16, float32 or"),
    ],
)
def test_types_beside_each_other_on_the_cpu(x, y, v, message):
    tokens = [torch.ones(2, 4, 5, 8, dtype=getattr(torch, name)) for name in (x, y, v)]
    with pytest.raises(TypeError, match=message):
        ops.attention_forward(*dot_arguments(*tokens, torch.ones(4)))


CONES = [
    ("umbral", "psi", 0.1),
    ("umbral", "none", 0.1),
    ("penumbral", "xi", 1.0),
    ("penumbral", "none", 0.7),
]


@pytest.mark.parametrize(("function", "map_name", "r"), CONES)
def test_cone_map_in_operators_of_torch(function, map_name, r):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 7, 8).double()
    if map_name == "none":
        # Some heights are outside the clamping range.
        q, k = ((torch.cat([x[..., :-1], 2 * r * x[..., -1:].sigmoid()], -1)) for x in (q, k))
    arguments = (q, k, function, map_name, r)
    outputs = ops.cone_map(*arguments)
    for ours, expected in zip(on_cuda(ops.cone_map, *arguments), outputs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    d_outputs = [torch.randn_like(output) for output in outputs]
    for needed, absent in itertools.product(
        ([True, True], [True, False], [False, True]), (None, 0, 1, 2, 3)
    ):
        d = [None if n == absent else t for n, t in enumerate(d_outputs)]
        expected = ops.cone_map_backward(*d, *arguments, needed)
        for ours, theirs in zip(
            on_cuda(ops.cone_map_backward, *d, *arguments, needed), expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_cone_map_rejects_the_same_as_the_cpu():
    q = torch.randn(1, 1, 2, 3)
    for arguments in [(q, q, "umbral", "xi", 0.1), (q, q, "conical", "none", 0.1)]:
        messages = []
        for call in (ops.cone_map, lambda *a: on_cuda(ops.cone_map, *a)):
            with pytest.raises(ValueError, match=r"gnomon\.cone_map") as error:
                call(*arguments)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("reverse", [False, True])
def test_causal_sums_in_operators_of_torch(length, reverse):
    torch.manual_seed(0)
    x = torch.randn(2, 4, length, 5)
    y, z = torch.randn(2, 2, length, 5), torch.randn(2, 2, length, 3)
    torch.testing.assert_close(
        on_cuda(ops.causal_sums, x, y, z, reverse),
        ops.causal_sums(x.double(), y.double(), z.double(), reverse).float(),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("feature", ["elu", "relu"])
def test_causal_linear_in_operators_of_torch(feature):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 70, 5), torch.randn(2, 2, 70, 5), torch.randn(2, 2, 70, 3)
    ours = on_cuda(ops.causal_linear, q, k, v, feature)
    for ours_one, theirs in zip(ours, ops.causal_linear(q, k, v, feature), strict=True):
        torch.testing.assert_close(ours_one, theirs, rtol=1e-4, atol=1e-4)


def test_the_random_matrix_is_the_same_everywhere():
    like = torch.empty(3, 6)
    ours, theirs = on_cuda(ops.favor_projection, like, 8, 3), ops.favor_projection(like, 8, 3)
    assert torch.equal(ours, theirs)


def run(code, **environment):
    """The output of a new process, with these environment variables."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


PREAMBLE = """
import ctypes, torch, gnomon
torch.set_num_threads(1)
ops = torch.ops.gnomon
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
def forward(x, function="dot", right=None, dropout=0.0, seed=None):
    heads = torch.ones(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return ops.attention_forward.default.redispatch(
        keys, x, x, x, None, None, None, heads, *[None] * 23,
        seed, function, 0, None, right, None, None, "", None, "clip", 1.0,
        dropout, 0.0, False, 0.0, False)
def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def test_without_driver_and_compiler_all_else_works(tmp_path):
    output = run(
        PREAMBLE
        + """
        q = torch.randn(1, 2, 5, 8)
        print(torch.isfinite(gnomon.attention(q, q, q)).all().item())
        print(error_of(lambda: forward(q)))
        print(torch.isfinite(gnomon.attention(q, q, q)).all().item())
        """.replace("\n        ", "\n"),
        GNOMON_CUDA_DRIVER=str(tmp_path / "libcuda.so.1"),
        GNOMON_NVRTC=str(tmp_path / "libnvrtc.so.13"),
        GNOMON_CACHE=str(tmp_path),
    )
    first, error, last = output.splitlines()
    assert (first, last) == ("True", "True")
    assert error.startswith("RuntimeError: gnomon.attention: CUDA: cannot load the driver: ")
    assert str(tmp_path / "libcuda.so.1") in error


@pytest.fixture
def fakes(tmp_path):
    paths = {name: FAKES / f"libgnomon_fake_{name}.so" for name in ("driver", "nvrtc")}
    for path in paths.values():
        if not path.exists():
            pytest.skip(f"{path.name} is not built")
    return {
        "GNOMON_CUDA_DRIVER": str(paths["driver"]),
        "GNOMON_NVRTC": str(paths["nvrtc"]),
        "GNOMON_CACHE": str(tmp_path / "cache"),
        "FAKE_NVRTC_LOG": str(tmp_path / "compilations"),
    }


def test_an_operator_launches_its_kernels(fakes, tmp_path):
    """The forward and backward passes compile each kernel that they need once, and launch it."""
    code = (
        PREAMBLE
        + """
        import os
        driver = ctypes.CDLL(os.environ["GNOMON_CUDA_DRIVER"])
        driver.fake_take_log.restype = ctypes.c_char_p
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(1, 2, 40, 16, dtype=dtype)
            o, lse, statistics = forward(x, right=0)
            assert {t.dtype for t in (o, lse, statistics)} == {torch.float32}
            print(len([l for l in driver.fake_take_log().splitlines() if l.startswith(b"launch")]))
        print(error_of(lambda: forward(torch.randn(1, 2, 3, 320))))
        print(error_of(lambda: forward(torch.randn(1, 2, 3, 4), function="no_such_function")))
        print(error_of(lambda: forward(torch.randn(1, 2, 3, 4), dropout=0.5)))
        o, lse, _ = forward(torch.randn(1, 2, 0, 4))
        print(o.shape, lse.shape, driver.fake_take_log())
        """.replace("\n        ", "\n")
    )
    lines = run(code, **fakes).splitlines()
    assert all(int(count) >= 2 for count in lines[:3])
    assert "head_dim is 320; expected at most 256" in lines[3]
    assert lines[3].startswith("NotImplementedError")
    assert lines[4].startswith("ValueError: attention: unknown pair function 'no_such_function'")
    assert lines[5].startswith("ValueError: gnomon.attention: dropout is 0.5, but seed is missing")
    assert lines[6] == "torch.Size([1, 2, 0, 4]) torch.Size([1, 2, 0]) b''"
    compiled = (tmp_path / "compilations").read_text().splitlines()
    assert compiled
    assert run(code, **fakes).splitlines()[3:] == lines[3:]
    # The second process found all kernels in the cache.
    assert (tmp_path / "compilations").read_text().splitlines() == compiled


def test_tensors_of_another_device_are_named():
    q = torch.randn(1, 2, 3, 4)
    arguments = dot_arguments(q, q, q, torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="factor is on meta; expected cpu"):
        ops.attention_forward.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments
        )
