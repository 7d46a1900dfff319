"""Information for bug reports: the installation, and the plans of calls."""

import json
import os
import pathlib
import subprocess

import emulated_gpu
import pytest
import torch

import gnomon
from gnomon import info

pytestmark = pytest.mark.cpu("starts its own processes")


def run(*words, **environment):
    done = subprocess.run(
        [os.environ["GNOMON_PYTHON"], *words], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_the_installation(tmp_path):
    words = ("-m", "gnomon.info")
    chosen = {
        "GNOMON_CACHE": str(tmp_path),
        "GNOMON_TARGET": info.collect()["instruction sets"][-1],
    }
    found = json.loads(run(*words, "--json", **chosen).stdout)
    assert found["gnomon"] == gnomon.__version__
    assert found["PyTorch"].startswith(torch.__version__)
    assert found["cache"] == str(tmp_path)
    assert found["instruction set"] == chosen["GNOMON_TARGET"]
    assert chosen.items() <= found["environment"].items()
    assert (pathlib.Path(found["libraries"]) / "libgnomon_torch.so").exists()
    text = run(*words, **chosen).stdout
    assert [line.partition(":")[0] for line in text.splitlines()] == list(found)
    assert f"instruction set:  {chosen['GNOMON_TARGET']}\n" in text


CALLS = """
import gnomon, torch
from torch.autograd import forward_ad
x = torch.randn(1, 4, 512, 16, requires_grad=True)
gnomon.attention(x, x, x, causal=True).sum().backward()
for keys in (512, 300):
    gnomon.attention(x[:, :, :1], x[:, :, :keys], x[:, :, :keys])
gnomon.attention(x[:, :, :100], x, x, position="alibi", query_offset=412)
gnomon.attention(x.double(), x.double(), x.double(), similarity="umbral")
nodes = torch.randn(2, 1, 4)
gnomon.graph_attention(nodes, nodes, nodes, [0, 1, 2], [1, 0])
x = x.detach()
with forward_ad.dual_level():
    gnomon.attention(forward_ad.make_dual(x, x), x, x, score_softcap=9.0)
    gnomon.graph_attention(forward_ad.make_dual(nodes, nodes), nodes, nodes, [0, 1, 2], [1, 0])
"""


SCRIPT = ("-W", "ignore", "-c")  # PyTorch warns about itself when a first tangent is made


def test_calls():
    assert run(*SCRIPT, CALLS).stderr == ""
    lines = run(*SCRIPT, CALLS, GNOMON_LOG="calls").stderr.splitlines()
    target = info.collect()["instruction set"]
    dot = "forward: dot, float32, head_dim 16"
    plain = f"dot, float32, head_dim 16, causal, CPU {target}, packs all keys first"
    sizes = "batch 1, heads 4, key heads 4, queries"
    assert lines == [
        f"gnomon: forward: {plain}; first call: {sizes} 512, keys 512",
        f"gnomon: backward: {plain}; first call: {sizes} 512, keys 512",
        f"gnomon: {dot}, CPU {target}, reads keys and values in place; "
        f"first call: {sizes} 1, keys 512",
        f"gnomon: {dot}, bias, CPU {target}, packs keys within each task, skips negligible "
        f"tiles; first call: {sizes} 100, keys 512",
        f"gnomon: forward: umbral, float64, head_dim 16, CPU {target}, packs all keys first; first "
        f"call: {sizes} 512, keys 512",
        f"gnomon: graph forward: dot, float32, head_dim 4, CPU {target}; first call: heads 1, "
        "nodes 2, edges 2",
        f"gnomon: forward-mode derivative: dot, float32, head_dim 16, soft cap, CPU {target}; "
        f"first call: {sizes} 512, keys 512",
        f"gnomon: graph forward-mode derivative: dot, float32, head_dim 4, CPU {target}; first "
        "call: heads 1, nodes 2, edges 2",
    ]
    (line,) = run(*SCRIPT, CALLS, GNOMON_LOG="cals").stderr.splitlines()
    assert line == "gnomon: GNOMON_LOG is 'cals'; expected calls or an empty value"


EMULATED_CALLS = """
import gnomon, torch
from emulated_gpu import OnCuda
x = torch.randn(1, 1, 40, 16, requires_grad=True)
with OnCuda():
    gnomon.attention(x, x, x, causal=True).sum().backward()
"""


def test_calls_on_a_gpu(tmp_path):
    if not emulated_gpu.LIBRARY.exists():
        pytest.skip(f"{emulated_gpu.LIBRARY.name} is not built")
    found = run(
        "-c",
        EMULATED_CALLS,
        GNOMON_LOG="calls",
        PYTHONPATH=str(pathlib.Path(__file__).parent),
        **emulated_gpu.environment(tmp_path),
    )
    call = "dot, float32, head_dim 16, causal, CUDA, kernels"
    sizes = "first call: batch 1, heads 1, key heads 1, queries 40, keys 40"
    assert found.stderr.splitlines() == [
        f"gnomon: forward: {call} forward 64x64; {sizes}",
        f"gnomon: backward: {call} backward_queries 64x64, backward_keys 64x64; {sizes}",
    ]
