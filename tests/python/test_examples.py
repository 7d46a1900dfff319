"""The programs of examples/python run unchanged, and their output is correct."""

import functools
import importlib.util
import math
import os
import re
import subprocess

import pytest
import torch
from formulas import assert_near
from test_cli import ROOT

import gnomon

pytestmark = pytest.mark.cpu("starts its own processes")

FOLDER = ROOT / "examples" / "python"


def run(name: str) -> str:
    return subprocess.run(
        [os.environ["GNOMON_PYTHON"], FOLDER / name],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def replace_sdpa(printed: str) -> None:
    (difference,) = re.findall(r"largest difference ([\d.e+-]+)", printed)
    assert float(difference) < 1e-5


def learned_hype(printed: str) -> None:
    # Without position information, the best possible loss is log(16) = 2.77.
    first, *_, last = losses(printed)
    assert last < 0.1 < first < 2.5
    before, after = re.findall(r"tau \[(.*)\]", printed)
    assert before != after


def cone_vit(printed: str) -> None:
    first, *_, last = losses(printed)
    assert last < 0.4 < 1.2 < first
    (right,) = re.findall(r"accuracy on new images: (\d+)%", printed)
    assert int(right) > 85


def mean_flow(printed: str) -> None:
    first, *_, last = losses(printed)
    assert last < 0.5 * first
    # For pure noise, the distance would be about 2.
    (distance,) = re.findall(r"nearest image: ([\d.]+)", printed)
    assert float(distance) < 0.7


def gradient_penalty(printed: str) -> None:
    estimate, exact = map(float, re.findall(r"[\d.]+", printed.splitlines()[-1]))
    assert abs(estimate / exact - 1) < 0.2


def hessian_vector_product(printed: str) -> None:
    first, *_, last = losses(printed)
    assert last < 0.85 * first
    assert all(float(s) > 0.1 for s in re.findall(r"sharpness ([\d.]+)", printed))


EXAMPLES = {
    check.__name__: check
    for check in (
        replace_sdpa,
        learned_hype,
        cone_vit,
        mean_flow,
        gradient_penalty,
        hessian_vector_product,
    )
}


NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
LONG = {"mean_flow"}  # trains for half a minute


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in NAMES]
)
def test_examples(name):
    EXAMPLES[name](run(f"{name}.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_attention(q, k, v, similarity=None, position=None, causal=False):
    """The gnomon.attention calls of the examples that use derivatives, in plain PyTorch."""
    if similarity is None:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
    else:
        distances = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
        scores = -similarity.gamma[:, None, None] * distances
    rows = torch.arange(q.shape[2])
    if position is not None:
        assert position == "alibi"
        slopes = 2.0 ** (-8 * torch.arange(1, q.shape[1] + 1) / q.shape[1])
        scores = scores - slopes[:, None, None] * (rows[:, None] - rows).abs()
    if causal:
        scores = scores.masked_fill(rows > rows[:, None], -math.inf)
    return scores.softmax(-1) @ v


def gradients(model, loss):
    return dict(
        zip(
            (name for name, _ in model.named_parameters()),
            torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True),
            strict=True,
        )
    ) | {"loss": loss.detach()}


def of_mean_flow(example):
    model = example.DiffusionTransformer()
    inputs = example.draw(6)
    return lambda dtype: gradients(
        model.to(dtype), example.mean_flow_loss(model, *(x.to(dtype) for x in inputs))
    )


def of_gradient_penalty(example):
    critic = example.Critic()
    inputs = example.draw(6)
    return lambda dtype: gradients(
        critic.to(dtype), example.critic_loss(critic, *(x.to(dtype) for x in inputs))
    )


def of_hessian_vector_product(example):
    model = example.LanguageModel()
    tokens = example.draw(3)
    vector = {name: torch.randn_like(x) for name, x in model.named_parameters()}

    def product(dtype):
        parameters = {name: x.detach() for name, x in model.to(dtype).named_parameters()}
        return example.hessian_vector_product(
            example.loss_of(model, tokens), parameters, {n: x.to(dtype) for n, x in vector.items()}
        )

    return product


@pytest.mark.parametrize("of", [of_mean_flow, of_gradient_penalty, of_hessian_vector_product])
def test_derivatives_in_examples_match_the_plain_formula(of, monkeypatch):
    torch.manual_seed(1)
    example = load(of.__name__.removeprefix("of_"))
    results = of(example)
    ours = {dtype: results(dtype) for dtype in (torch.float32, torch.float64)}
    calls = []

    @functools.wraps(plain_attention)
    def plain(*tokens, **arguments):
        calls.append(arguments)
        return plain_attention(*tokens, **arguments)

    monkeypatch.setattr(gnomon, "attention", plain)
    expected = results(torch.float64)
    assert calls
    assert sum(float(x.abs().sum()) for x in expected.values()) > 1
    assert_near(ours[torch.float64], expected, 1e-9)
    assert_near({name: x.double() for name, x in ours[torch.float32].items()}, expected, 1e-4)


def test_the_readme_lists_every_example():
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (path for path in (ROOT / "examples").iterdir() if path.is_dir()):
        names = path.glob("*.py") if path.name == "python" else [path]
        for name in names:
            assert f"\n| `{name.name}` |" in text, name
