"""Tests of the loaded terms of examples/terms; test_terms.py runs them in a separate process."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from warm_python import run_together

import gnomon
from gnomon import position, similarity
from gnomon._library import ops
from gnomon.distributed import context_parallel_attention, context_parallel_rows

LIBRARY = os.environ["GNOMON_TEST_TERMS"]
NAMES = ["adaptive", "student_t", "bits", "root"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    assert not set(NAMES) & {e["name"] for es in gnomon.catalogue().values() for e in es}
    with pytest.raises(ValueError, match="student_t"):
        gnomon.attention(*torch.randn(3, 1, 2, 4, 4), similarity="student_t")
    assert sorted(gnomon.load_terms(LIBRARY)) == sorted(NAMES)


def gradients_of(o: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(o.square().sum(), leaves))


def student_t(q, k, gamma):
    distance = (q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1)
    return -gamma.view(-1, 1, 1) * torch.log1p(distance)


def adaptive(q, k, gamma):
    distance = (q[..., None, :-1] - k[..., None, :, :-1]).square().sum(-1)
    return -gamma.view(-1, 1, 1) * q[..., -1:].clamp(-8, 8).exp() * distance


def root(slopes, queries, keys, offset):
    distance = torch.arange(queries)[:, None] + offset - torch.arange(keys)
    return -slopes.view(-1, 1, 1) * distance.abs().to(slopes.dtype).sqrt()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scores", [student_t, adaptive], ids=lambda scores: scores.__name__)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 1, 2), (5, 9, 3), (70, 67, 16)])
def test_attention_is_the_formula(scores, queries, keys, dim, dtype):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, queries, dim), torch.randn(2, 3, keys, dim)
    v, gamma, slopes = torch.randn(2, 3, keys, 4), torch.rand(3) + 0.1, torch.rand(3)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, gamma, slopes)]
    q, k, v, gamma, slopes = leaves
    ours = gnomon.attention(
        q,
        k,
        v,
        similarity=similarity.Specified(f"{scores.__name__}:gamma=tensor", (gamma,)),
        position=position.Specified("root:slopes=tensor", (slopes,)),
        query_offset=keys - queries,
    )
    weights = (scores(q, k, gamma) + root(slopes, queries, keys, keys - queries)).softmax(-1)
    theirs = weights @ v
    found = [ours, *gradients_of(ours, *leaves)]
    for own, expected in zip(found, [theirs, *gradients_of(theirs, *leaves)], strict=True):
        largest = max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(own, expected, atol=TOLERANCE[dtype] * largest, rtol=0)


@pytest.mark.cpu("tests GPU code without a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["student_t", "adaptive"])
def test_kernels_for_gpus_are_compiled_from_the_text(name, dtype, tmp_path, monkeypatch):
    """Runs the operators on the GPU that tests/cuda emulates."""
    if not emulated_gpu.LIBRARY.exists():
        pytest.skip(f"{emulated_gpu.LIBRARY.name} is not built")
    for variable, value in emulated_gpu.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    torch.manual_seed(0)
    tokens = [torch.randn(2, 3, 19, 8).to(dtype).float() for _ in range(3)]
    gamma = torch.rand(3) + 0.1

    def run():
        leaves = [x.clone().requires_grad_() for x in (*tokens, gamma)]
        q, k, v, of_heads = leaves
        o = gnomon.attention(
            q, k, v, similarity=similarity.Specified(f"{name}:gamma=tensor", (of_heads,))
        )
        return [o, *gradients_of(o, *leaves)]

    expected = run()
    with emulated_gpu.OnCuda(dtype) as mode:
        ours = run()
    assert mode.calls["attention_forward"] == mode.calls["attention_backward"] == 1
    tolerance = {torch.float32: 3e-5, torch.bfloat16: 2.5e-2}[dtype]
    for own, of_cpu in zip(ours, expected, strict=True):
        largest = float(of_cpu.detach().abs().max())
        torch.testing.assert_close(own, of_cpu, atol=tolerance * largest, rtol=0)


def test_numbers_defaults_and_mistakes_are_those_of_the_entry():
    q = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    entries = {e["name"]: e for es in gnomon.catalogue().values() for e in es if e["library"]}
    assert entries.keys() == set(NAMES)
    assert all(
        entry["library"] == str(pathlib.Path(LIBRARY).resolve()) for entry in entries.values()
    )
    limited = gnomon.attention(q, q, q, similarity="adaptive:gamma=1:limit=0.5")
    assert not torch.equal(limited, gnomon.attention(q, q, q, similarity="adaptive:gamma=1"))
    with pytest.raises(ValueError, match="limit=-1 is invalid; expected a positive number"):
        gnomon.attention(q, q, q, similarity="adaptive:limit=-1")
    with pytest.raises(ValueError, match=r"students_t.*student_t"):
        gnomon.attention(q, q, q, similarity="students_t")


def test_grids_take_the_bias():
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.2], dtype=torch.float64)
    bias = position.Specified("root:slopes=tensor", (slopes,))
    ours = gnomon.attention(x, x, x, position=position.Grid((2, 3), [bias, bias]))
    y, column = torch.arange(6) // 3, torch.arange(6) % 3
    steps = sum((p[:, None] - p).abs().double().sqrt() for p in (y, column))
    scores = x @ x.mT / 2 - slopes.view(2, 1, 1) * steps
    torch.testing.assert_close(ours, scores.softmax(-1) @ x)


def test_modules_learn_them():
    torch.manual_seed(0)
    for name in ("student_t", "adaptive"):
        module = gnomon.nn.MultiheadAttention(
            8, 2, similarity=name, position="rope+root:slopes=learned"
        )
        x = torch.randn(2, 7, 8, requires_grad=True)
        module(x, causal=True).square().sum().backward()
        learned = dict(module.named_parameters())
        assert learned["gamma_theta"].grad.abs().min() > 0
        assert learned["root_slopes_theta"].grad.abs().min() > 0
    encoding = gnomon.nn.TokenPosition("bits:scale=2", 4, 16)
    added = encoding(torch.zeros(1, 6, 4))
    digits = (torch.arange(6)[:, None] >> torch.arange(4)) & 1
    assert torch.equal(added[0], 2.0 * digits)


def work(group: str, rank: int) -> None:
    """Compares attention over the whole sequence with the shard of this process (one of two)."""
    torch.set_num_threads(1)
    gnomon.load_terms(LIBRARY)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    arguments = {
        "similarity": "student_t:gamma=0.5",
        "position": position.Specified("root:slopes=tensor", (slopes,)),
        "causal": True,
    }
    rows = context_parallel_rows(9, layout="zigzag")
    ours = context_parallel_attention(*whole[:, :, :, rows], layout="zigzag", **arguments)
    theirs = gnomon.attention(*whole, **arguments)
    torch.testing.assert_close(ours, theirs[:, :, rows])
    (share,) = gradients_of(ours, slopes)
    dist.all_reduce(share)
    torch.testing.assert_close([share], gradients_of(theirs, slopes))
    dist.destroy_process_group()


def test_context_parallel_attention_takes_them(tmp_path):
    run_together(2, __file__, tmp_path / "group")


def test_transformers_take_them():
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from gnomon.integrations.transformers import with_cone_attention

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, vocab_size=61, pad_token_id=0,
        )
    )  # fmt: skip
    tokens = torch.randint(1, 61, (2, 9))
    for name in ("student_t", "adaptive"):
        changed = with_cone_attention(model, name)
        logits = changed(tokens).logits
        assert logits.isfinite().all()
        logits.square().sum().backward()
        thetas = [p for n, p in changed.named_parameters() if n.endswith("gamma_theta")]
        assert len(thetas) == 2
        assert all(theta.grad.abs().min() > 0 for theta in thetas)
        # No token attends to a later one.
        earlier = changed(tokens[:, :5]).logits
        torch.testing.assert_close(logits[:, :5], earlier, atol=1e-4, rtol=1e-4)


def test_loading_a_library_again_returns_its_names(tmp_path):
    link = tmp_path / "other.so"
    link.symlink_to(LIBRARY)
    for path in (LIBRARY, pathlib.Path(LIBRARY), link):
        assert sorted(gnomon.load_terms(path)) == sorted(NAMES)
    torch.library.opcheck(ops.load_terms, (LIBRARY,), test_utils=("test_schema",))


def test_a_duplicate_name_adds_nothing(tmp_path):
    copy = tmp_path / "libcopy.so"
    shutil.copy(LIBRARY, copy)
    before = gnomon.catalogue()
    with pytest.raises(
        ValueError, match=r"libcopy\.so defines .*(adaptive|student_t).*that name is already in use"
    ):
        gnomon.load_terms(copy)
    assert gnomon.catalogue() == before


def compiled(folder: pathlib.Path, source: str) -> pathlib.Path:
    (folder / "some.cc").write_text(source, encoding="utf-8")
    command = ["c++", "-shared", "-fPIC", "some.cc", "-o", "libsome.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "libsome.so"


def test_files_that_are_not_term_libraries(tmp_path):
    with pytest.raises(ValueError, match=r"load_terms: .*absent\.so is not a file"):
        gnomon.load_terms(tmp_path / "absent.so")
    with pytest.raises(ValueError, match="is not a file"):
        gnomon.load_terms(tmp_path)
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ValueError, match=r"load_terms: cannot load .*text\.so"):
        gnomon.load_terms(text)
    with pytest.raises(ValueError, match="is not a term library; build one with gnomon_add_terms"):
        gnomon.load_terms(compiled(tmp_path, "int nothing = 0;"))
    with pytest.raises(TypeError, match="load_terms: path is an int; expected a path"):
        gnomon.load_terms(3)  # type: ignore[arg-type]


def test_a_library_for_another_gnomon(tmp_path):
    other = compiled(
        tmp_path,
        'extern "C" { extern const char gnomon_terms_for_9_9_torch_1; }\n'
        "const char* const gnomon_terms = &gnomon_terms_for_9_9_torch_1;\n"
        "const char* const* of() { return &gnomon_terms; }\n",
    )
    with pytest.raises(ValueError, match=r"libsome\.so was not built for the loaded gnomon"):
        gnomon.load_terms(other)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
