"""Terms, modules and the program on a device other than the CPU: a GPU or, without one, a stand-in
(other_device.py).

Results must match those of the CPU, and tensors left on the CPU are errors. Registering the
stand-in device would affect all other tests, so these tests run in separate processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import textwrap
from collections.abc import Callable, Iterator

import numpy as np
import other_device
import PIL.Image
import pytest
import test_task_diffusion
import test_task_graphs
import test_task_hierarchy
import test_task_images
import test_task_music
import test_task_speech
import test_task_translation
import torch
from other_device import LIBRARY
from safetensors.numpy import load_file, save_file
from test_cli import ROOT

pytestmark = pytest.mark.real_device

FILE = "checkpoint.safetensors"

PREAMBLE = f"""
import copy, json, os, sys
sys.path.insert(0, {str(ROOT / "tests" / "python")!r})
import torch
import gnomon
import other_device
name, bound = sys.argv[1], float(sys.argv[2])
there = torch.device(name, 0) if name == "cuda" else other_device.install()
torch.set_num_threads(1)

def same(here, beyond, message=None, slack=1):
    assert beyond.device == there, message
    # The order of summation may differ, which changes the last bits of sums.
    largest = max(1.0, here.detach().abs().max().item())
    off = slack * max(bound, torch.finfo(here.dtype).eps) if here.is_floating_point() else 0
    torch.testing.assert_close(beyond.detach().cpu(), here.detach(), rtol=0, atol=off * largest,
                               msg=lambda text: f"{{message}}: {{text}}")
"""


@pytest.fixture
def there(device) -> Iterator[str]:
    """The name of the device. Tensors created in this process are on the CPU."""
    if device.type == "cpu" and not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built")
    with torch.device("cpu"):
        yield device.type if device.type == "cuda" else other_device.NAME


@pytest.fixture
def run(there, tmp_path) -> Callable[..., str]:
    """The output of a process with the device, which runs in the test's folder."""

    def process(code: str, before: str = "") -> str:
        code = PREAMBLE + before + textwrap.dedent(code) + "other_device.leave()"
        done = subprocess.run(
            [os.environ["GNOMON_PYTHON"], "-c", code, there, "3e-3" if there == "cuda" else "1e-5"],
            cwd=tmp_path,
            env=os.environ | {"GNOMON_PYTHON": "/no/such/python"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return process


def test_the_device_rejects_the_same_as_a_gpu(run, there):
    output = run(
        """
        x = torch.randn(3, 4)
        y = x.to(there)
        tokens = y[None, None]

        def refused(call):
            try:
                call()
            except (RuntimeError, TypeError) as error:
                return any(word in str(error) for word in ("device", "expected the same"))

        print([refused(call) for call in (
            lambda: x + y,
            lambda: y.index_select(0, torch.tensor([0])),
            lambda: torch.cat([x, y]),
            lambda: torch.randn(3, device=there, generator=torch.Generator()),
            lambda: gnomon.attention(tokens, x[None, None], tokens),
            lambda: gnomon.attention(tokens, tokens, tokens, key_lengths=torch.tensor([2])),
            lambda: torch.ops.gnomon.causal_sums(tokens, tokens, x[None, None], False),
        )])
        print(y[torch.tensor([1])].device, torch.equal((2 * y).cpu(), 2 * x))
        """,
    )
    assert output.splitlines() == [str([True] * 7), f"{there}:0 True"]


#: Code shared by the processes of the tests below.
SAME = """
def check(name, module, inputs, *calls):
    twin = copy.deepcopy(module).to(there)
    for call in calls:
        torch.manual_seed(1)
        here = module(*inputs, **call)
        torch.manual_seed(1)
        try:
            beyond = twin(*(x.to(there) for x in inputs), **moved(call))
        except NotImplementedError as error:
            # Features without GPU kernels raise an error that says so.
            assert there.type == "cuda" and "on a GPU; expected" in str(error), (name, error)
            continue
        same(here, beyond, name)
        if not here.requires_grad:
            continue
        module.zero_grad()
        twin.zero_grad()
        here.square().sum().backward()
        beyond.square().sum().backward()
        for (key, ours), (_, theirs) in zip(
            module.named_parameters(), twin.named_parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None), (name, key)
            if ours.grad is not None:
                # In several layers, the terms of a similarity parameter's gradient nearly cancel:
                # each device is up to 1.5e-5 of the largest number away from float64.
                same(ours.grad, theirs.grad, f"{name}: {key}", slack=4)

def moved(call):
    return {key: x.to(there) if isinstance(x, torch.Tensor) else x for key, x in call.items()}
"""


def test_every_module_of_attention(run):
    output = run(
        """
        torch.manual_seed(0)
        x = torch.randn(2, 12, 24)
        lengths = torch.tensor([12, 7])
        seen = torch.rand(2, 1, 12, 12) < 0.7
        calls = [{}, {"causal": True, "key_lengths": lengths}, {"mask": seen}]
        placed = {"positions": torch.randperm(12), "causal": True}

        def specifications(entry):
            \"\"\"Those that say each choice, and each number of a head in both ways.\"\"\"
            yield entry["name"]
            for parameter in entry["parameters"]:
                values = list(parameter["choices"])
                if parameter["kind"] == "per_head":
                    values = ["learned", "fixed"]
                for value in values:
                    yield f"{entry['name']}:{parameter['name']}={value}"

        def attention(name, **options):
            \"\"\"The module, with what its parameter needs beside it; None if there is none.\"\"\"
            key = "similarity" if name in similarities else "position"
            for beside in ("", *BESIDE):
                try:
                    module = gnomon.nn.MultiheadAttention(24, 4, **{key: name + beside}, **options)
                    module(x, causal=entry["name"] in ONLY_CAUSAL)
                    return module
                except ValueError:
                    pass
            unmade.append(name)
            return None

        extended = ":factor=2:original_max_position_embeddings=8"
        BESIDE = [
            ":shape=3x4", ":factor=2", ":sections=1x1x1", ":model=half_space", extended,
            f"{extended}:short_factor=1x1x1:long_factor=2x2x2",
        ]
        ONLY_CAUSAL = ("forget", "transformer_xl")

        catalogue = gnomon.catalogue()
        similarities = [s for entry in catalogue["similarities"] for s in specifications(entry)]
        count, unmade = 0, []
        for name in similarities:
            entry = {"name": name}
            columns = 1 if name.startswith("additive") else None
            module = attention(name, qk_dim=columns)
            if module is None:
                continue
            check(name, module, (x,), *calls)
            count += 1
        for entry in catalogue["positions"]:
            if entry["role"] == "embedding" or "modules" not in entry["use"]:
                continue
            for name in specifications(entry):
                module = attention(name, kv_heads=2)
                if module is None:
                    continue
                few = calls[:1] if "grid" in name or "shape=3x4" in module.position else calls
                check(name, module, (x,), *(calls[1:2] if entry["name"] in ONLY_CAUSAL else few))
                count += 1
        for spec in (
            "rope", "alibi", "t5", "hype:tau=learned", "relative:max_offset=3", "rope+kerple"
        ):
            module = gnomon.nn.MultiheadAttention(24, 4, position=spec)
            check(spec, module, (x,), placed)
            twin = copy.deepcopy(module).to(there)
            cache, other = gnomon.nn.KVCache(), gnomon.nn.KVCache()
            for part in x.split([5, 1, 6], 1):
                same(module(part, causal=True, cache=cache),
                     twin(part.to(there), causal=True, cache=other), f"{spec} with a cache")
        print(json.dumps([count, unmade]))
        """,
        SAME,
    )
    count, unmade = json.loads(output)
    assert count > 90
    # A bias common to all scores has no gradient, so it must be a number or a user tensor.
    assert unmade == ["lorentz:bias=learned"]


def test_modules_made_there_start_apart(run):
    output = run(
        """
        with there:
            for position in ("relative:max_offset=3", "rope_mixed:shape=4x4"):
                torch.manual_seed(0)
                one, other = (gnomon.nn.MultiheadAttention(16, 2, position=position)
                              for _ in range(2))
                torch.manual_seed(0)
                again = gnomon.nn.MultiheadAttention(16, 2, position=position)
                for (key, x), y, z in zip(one.named_parameters(), other.parameters(),
                                          again.parameters(), strict=True):
                    assert x.device == there and torch.equal(x, z), key
                    print(bool((x == 0).all()) or not torch.equal(x, y))
        """
    )
    assert set(output.split()) == {"True"}


def test_every_token_encoding(run):
    run(
        """
        torch.manual_seed(0)
        x = torch.randn(2, 12, 32)
        for entry in gnomon.catalogue()["positions"]:
            if entry["role"] != "embedding":
                continue
            for more in ("", ":shape=3x4") if entry["name"] in ("sinusoidal", "cape") else ("",):
                # The generator of a GPU draws different positions.
                for training in (False, True) if name != "cuda" else (False,):
                    module = gnomon.nn.TokenPosition(entry["name"] + more, 32, max_length=16)
                    module.train(training)
                    check(entry["name"] + more, module, (x,), {},
                          {"positions": torch.arange(12).flip(0)} if more
                          else {"lengths": torch.tensor([12, 7])})
        """,
        SAME,
    )


def test_calls_with_everything_that_they_take(run):
    run(
        """
        from gnomon import position as P, similarity as S
        torch.manual_seed(0)

        def both(name, function, tensors, **options):
            results = []
            for where in ("cpu", there):
                own = [x.detach().to(where).requires_grad_(x.is_floating_point()) for x in tensors]
                torch.manual_seed(2)
                out = function(*own, **{k: v.to(where) if isinstance(v, torch.Tensor) else v
                                        for k, v in options.items()})
                parts = out if isinstance(out, tuple) else (out,)
                sum(part.float().square().sum() for part in parts).backward()
                results.append([*parts, *(x.grad for x in own if x.grad is not None)])
            for here, beyond in zip(*results, strict=True):
                same(here, beyond, name)

        q, k, v = torch.randn(3, 2, 4, 12, 8)
        heads = torch.rand(4) + 0.5
        integers = torch.tensor
        calls = {
            "lengths": {"key_lengths": integers([12, 5]), "key_starts": integers([1, 0])},
            "segments": {"query_segments": torch.arange(12) // 5,
                         "key_segments": torch.arange(12) // 5},
            "window": {"window": (3, 1)},
            "chunks": {"chunks": (4, 1, 0)},
            "offsets": {"query_offset": integers([0, 3]), "causal": True},
            "mask": {"mask": torch.rand(2, 1, 12, 12) < 0.8},
            "dropout": {"dropout": 0.3},
            "dropout by a seed": {"dropout": 0.3, "seed": 5},
            "midpoint": {"aggregation": "einstein_midpoint"},  # of values within the ball
            "centroid": {"aggregation": "lorentz_centroid"},
        }
        for name, options in calls.items():
            values = v / 10 if name == "midpoint" else v
            both(name, lambda q, k, v, **o: gnomon.attention(q, k, v, return_lse=True, **o),
                 (q, k, values), **options)
        both("sink", lambda q, k, v, s: gnomon.attention(q, k, v, sink=s), (q, k, v, heads))
        both("temperature", lambda q, k, v, t: gnomon.attention(q, k, v, temperature=t),
             (q, k, v, torch.rand(4, 1) + 0.5))
        terms = {
            "ALiBi": (lambda s: P.ALiBi(s), heads),
            "KeyBias": (lambda b: P.KeyBias(b), torch.randn(2, 4, 12)),
            "PairBias": (lambda b: P.PairBias(b), torch.randn(4, 12, 12)),
            "OffsetBias": (lambda b: P.OffsetBias(b), torch.randn(4, 23)),
            "Relative": (lambda t: P.Relative(t, 3), torch.randn(7, 8)),
            "AbsoluteKeys": (lambda t: P.AbsoluteKeys(t), torch.randn(12, 8)),
            "Grid": (lambda s: P.Grid((3, 4), [P.ALiBi(s), P.ALiBi(s)]), heads),
            "Relative2D": (lambda t: P.Relative2D(t[:5], t[5:12], 3, 4), torch.randn(12, 8)),
            "Forget": (lambda b: P.Forget(b), -torch.rand(2, 4, 12)),
        }
        for name, (make, tensor) in terms.items():
            both(name, lambda q, k, v, t, make=make: gnomon.attention(
                q, k, v, position=make(t), causal=name == "Forget"), (q, k, v, tensor))
        for make in (S.Laplacian, S.Gaussian, S.Umbral, S.Penumbral, S.Hyperbolic, S.Lorentz,
                     S.Entailment):
            both(make.__name__, lambda q, k, v, g, make=make: gnomon.attention(
                q, k, v, similarity=make(g), position=P.RoPE(dims=4)), (q, k, v, heads))
        both("linear", lambda q, k, v: gnomon.linear_attention(q, k, v, causal=True), (q, k, v))
        both("weights", lambda q, k: gnomon.attention_weights(q, k, [0, -1], position="alibi"),
             (q, k))
        both("low precision", lambda q, k, v: gnomon.attention(q, k, v),
             (q.bfloat16(), k.bfloat16(), v.bfloat16()))
        nodes = torch.randn(3, 5, 4, 8)
        indptr, indices = integers([0, 2, 3, 3, 5, 6]), integers([0, 1, 2, 0, 4, 3])
        both("graph", lambda q, k, v, indptr, indices: gnomon.graph_attention(
            q, k, v, indptr, indices), (*nodes.unbind(), indptr, indices))
        compiled = torch.compile(lambda q, k, v: gnomon.attention(
            q, k, v, similarity="penumbral", position="rope+alibi", causal=True),
            fullgraph=True, backend="aot_eager")
        both("compiled", compiled, (q, k, v))
        both("vmap", torch.vmap(lambda q, k, v: gnomon.attention(q, k, v, position="alibi")),
             tuple(torch.randn(3, 3, 2, 4, 12, 8).unbind()))
        """,
        SAME,
    )


def test_a_language_model(run):
    run(
        """
        torch.manual_seed(0)
        tokens = torch.randint(256, (2, 12))
        for similarity, position in (
            ("dot", "rope"), ("penumbral", "alibi"), ("dot", "rope,rope,rope,none"),
            ("dot", "conv:kernel=3:groups=2+t5"), ("umbral", "learned+forget"),
        ):
            model = gnomon.models.LanguageModel(
                dim=32, depth=4, heads=2, mlp=48, max_length=16, similarity=similarity,
                position=position,
            )
            check(f"{similarity}/{position}", model, (tokens,), {})
        """,
        SAME,
    )


def test_models_of_transformers(run):
    run(
        """
        import transformers
        from gnomon.integrations.transformers import use_gnomon, with_cone_attention
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=40)
        words = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
        llama = transformers.LlamaConfig(
            **sizes, **words, intermediate_size=48, num_key_value_heads=2
        )
        t5 = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=40,
            decoder_start_token_id=0, dropout_rate=0.0, **words,
        )
        ids = torch.randint(1, 40, (2, 9))
        seen = torch.ones_like(ids)
        seen[1, :4] = 0
        for change, model in (
            (use_gnomon, transformers.LlamaForCausalLM(llama)),
            (with_cone_attention, transformers.LlamaForCausalLM(llama)),
            (use_gnomon, transformers.T5ForConditionalGeneration(t5)),
        ):
            name = f"{change.__name__} of {type(model).__name__}"
            model = change(model.eval())
            twin = copy.deepcopy(model).to(there)
            options = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            here = model(ids, attention_mask=seen, **options).logits
            beyond = twin(ids.to(there), attention_mask=seen.to(there), **moved(options)).logits
            same(here, beyond, name)
            written = [
                each.generate(ids.to(where), attention_mask=seen.to(where), max_new_tokens=5,
                              min_new_tokens=5, do_sample=False).cpu()
                for each, where in ((model, "cpu"), (twin, there))
            ]
            assert torch.equal(*written), name
        """,
        SAME,
    )


def test_autocast_of_the_device(run):
    output = run(
        """
        q = torch.randn(1, 2, 5, 8, device=there)
        with torch.autocast(there.type, torch.bfloat16):
            print(gnomon.attention(q, q, q).dtype)
            wide = q.double() if name != "cuda" else q.double().cpu()
            print(gnomon.attention(wide, wide, wide).dtype)
        with torch.autocast("cpu", torch.bfloat16):
            print(gnomon.attention(q, q, q).dtype)
        """,
    )
    assert output.split() == ["torch.bfloat16", "torch.float64", "torch.float32"]


TINY = ["--dim", 16, "--depth", 2, "--heads", 2, "--mlp", 32]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A task's data in a folder, and the arguments of its commands."""

    make: Callable[[pathlib.Path], object]
    words: list[object]
    training: list[object] = dataclasses.field(default_factory=list)
    comparison: list[object] = dataclasses.field(default_factory=list)
    generation: list[object] | None = None


def write_text(path: pathlib.Path) -> None:
    generator = np.random.default_rng(0)
    (path / "text").write_bytes(generator.choice(list(b"abcd efg\n"), 6000).astype(np.uint8))


FEW = ["--threads", 1, "--batch", 4]
TASKS = {
    "text": Sample(
        write_text,
        ["--data", "text", "--evaluation-bytes", 100, *TINY, *FEW,
         "--position", "rope+hype:tau=learned", "--similarity", "penumbral"],
        training=["--length", 32],
        comparison=["--lengths", 32, 48],
        generation=["--tokens", 9, "--temperature", 0],
    ),
    "translation": Sample(
        lambda path: test_task_translation.write_pairs(path / "data"),
        ["--data", "data", "--source-language", "de", "--tokens", "words", *TINY, "--threads", 1,
         "--position", "t5"],
    ),
    "images": Sample(
        lambda path: save_file(test_task_images.sample((8, 8)), path / "grey"),
        ["--data", "grey", *TINY, *FEW, "--shift", 1, "--position", "cape:shape=grid",
         "--similarity", "umbral"],
    ),
    "volumes": Sample(
        lambda path: save_file(test_task_images.sample((4, 6, 4), "volumes"), path / "volumes"),
        ["--data", "volumes", *TINY, *FEW, "--patch", 2, "--position", "hype:shape=grid"],
    ),
    "graphs": Sample(
        lambda path: save_file(test_task_graphs.sample(), path / "graph"),
        ["--data", "graph", "--threads", 1, "--similarity", "laplacian"],
    ),
    "diffusion": Sample(
        lambda path: save_file(test_task_diffusion.bars(), path / "bars"),
        ["--data", "bars", *TINY, *FEW, "--patch", 4, "--evaluation-images", 6,
         "--position", "alibi:shape=grid"],
        generation=["--samples", 2, "--steps", 3, "--eta", 0.5, "--out", "FOLDER.png"],
    ),
    "music": Sample(
        lambda path: test_task_music.write(
            path,
            {
                part: test_task_music.random_pieces(seed, 9)
                for seed, part in enumerate(("train", "valid"))
            },
        ),
        ["--data", "pieces", *TINY, *FEW, "--lengths", 20, "--position", "relative:max_offset=8"],
        generation=["--tokens", 9, "--temperature", 0, "--out", "FOLDER.mid"],
    ),
    "speech": Sample(
        test_task_speech.write_words,
        ["--data", "words.safetensors", *TINY, *FEW, "--mels", 12, "--utterances", 2,
         "--evaluation-utterances", 4, "--position", "conv:kernel=4:groups=2"],
    ),
    "hierarchy": Sample(
        lambda path: save_file({"train.pairs": np.array(test_task_hierarchy.ALL, np.int32)},
                               path / "tree"),
        ["--data", "tree", "--negatives", 6, "--batch", 32, "--threads", 1,
         "--similarity", "entailment"],
    ),
    "generated": Sample(
        lambda path: None,
        [*TINY, *FEW, "--evaluation-examples", 4, "--random-positions", 600, "--position", "alibi"],
    ),
}  # fmt: skip

PROGRAM = """
import ctypes
from gnomon.__main__ import main

def program(*words):
    \"\"\"What the program prints.\"\"\"
    words = [str(word) for word in words]
    sys.stdout.flush()
    kept = os.dup(1)
    with open("printed", "w+b") as printed:
        os.dup2(printed.fileno(), 1)
        code = main(words)
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    assert code == 0, words
    return text
"""


def tensors_of(file: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in load_file(file).items()}


def assert_close_files(one: pathlib.Path, other: pathlib.Path, there: str) -> None:
    """Compares the weights after a few steps. On a GPU, compares most of each tensor, because AdamW
    enlarges gradients that are only rounding errors to full steps."""
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        # These biases shift all scores of a row equally, so their gradients are rounding errors,
        # which AdamW enlarges.
        if name.endswith("k_proj.bias"):
            continue
        bounds = {"rtol": 1e-4, "atol": 1e-5}
        if there == "cuda":
            assert torch.isclose(theirs[name], tensor, **bounds).float().mean() >= 0.95, name
            continue
        torch.testing.assert_close(
            theirs[name], tensor, **bounds, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_close_numbers(one: object, other: object, place: str = "") -> None:
    """Compares records, except for measured times."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one.keys() - {"machine", "command", "started", "updated", "versions"}:
            if not key.endswith(
                ("seconds", "_per_second", "ms_per_step", "ms_quartiles", "others")
            ):
                assert_close_numbers(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_close_numbers(a, b, f"{place}[{n}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4), place
    else:
        assert one == other, place


@pytest.mark.cpu("names alone")
def test_every_task_has_a_sample():
    known = subprocess.run(
        [ROOT / "build" / "bin" / "gnomon", "train", "--task", "none-of-them"],
        capture_output=True, text=True,
    ).stderr  # fmt: skip
    assert {word.strip(" .,\n") for word in known.split("expected")[1].split()} - {
        "or",
        "one",
        "of",
    } == (TASKS.keys())


@pytest.mark.parametrize("task", TASKS)
def test_a_task_gives_the_same_results_on_a_device(task, run, there, tmp_path):
    sample = TASKS[task]
    sample.make(tmp_path)
    output = run(
        f"""
        task, words = {task!r}, {[str(word) for word in sample.words]!r}
        generation = {sample.generation and [str(word) for word in sample.generation]!r}
        training, comparison = {[*map(str, sample.training)]!r}, {[*map(str, sample.comparison)]!r}
        words = ["--task", task, *words]
        told = {{}}
        for folder, device in (("here", "cpu"), ("there", "{there}")):
            on = ["--device", device]
            program("train", *words, *training, "--steps", 4, "--out", folder, *on)
            # The model from the CPU is used on both devices.
            told[folder] = [json.loads(program("eval", "--model", "here", "--json", *on))]
            if generation is not None:
                made = [word.replace("FOLDER", folder) for word in generation]
                text = program("generate", "--model", "here", *made, *on)
                told[folder].append(text.replace(folder, ""))
            program("compare", *words, *comparison, "--steps", 2, "--out",
                    f"compared-{{folder}}", *on)
        print(json.dumps(told))
        """,
        PROGRAM,
    )
    told = json.loads(output.splitlines()[-1])
    assert_close_numbers(told["here"], told["there"])
    # On a GPU, dropout, shifts and noise use a different generator, so weights differ.
    if there != "cuda":
        assert_close_files(tmp_path / "here" / FILE, tmp_path / "there" / FILE, there)
    records = [
        json.loads((tmp_path / f"compared-{folder}" / "results.json").read_text())
        for folder in ("here", "there")
    ]
    devices = [record["sessions"][0]["machine"]["device"] for record in records]
    name = torch.cuda.get_device_name() if there == "cuda" else there
    assert devices == ["cpu", name] or devices == ["cpu", f"{name}:0"]
    if there != "cuda":
        assert_close_numbers(records[0]["runs"], records[1]["runs"])
    if (picture := tmp_path / "here.png").exists():
        one, other = (
            np.asarray(PIL.Image.open(tmp_path / f"{folder}.png"), np.int64)
            for folder in ("here", "there")
        )
        assert np.abs(one - other).max() <= 1, picture
    if (tmp_path / "here.mid").exists():
        assert (tmp_path / "here.mid").read_bytes() == (tmp_path / "there.mid").read_bytes()


def test_a_run_goes_on_elsewhere(run, there, tmp_path):
    write_text(tmp_path)
    words = [str(word) for word in (*TASKS["text"].words, *TASKS["text"].training)]
    output = run(
        f"""
        from test_cli import copy_with_steps
        import pathlib
        words = ["train", *{words!r}, "--warmup", 2]
        program(*words, "--steps", 4, "--out", "whole")
        for first, then in (("cpu", "{there}"), ("{there}", "cpu")):
            program(*words, "--steps", 2, "--out", first, "--device", first)
            file = pathlib.Path(first) / "{FILE}"
            copy_with_steps(file, file, steps=4)
            program("train", "--resume", first, "--device", then)
        program("bench", "--length", 32, "--dim", 8, "--heads", 2, "--repeats", 1, "--cases",
                "alibi,penumbral,relative,t5-learned", "--device", "{there}")
        program("bench", "--model", "dot/rope,umbral/rope", "--batch", 2, "--length", 16, "--depth",
                1, "--repeats", 1, "--device", "{there}")
        """,
        PROGRAM,
    )
    assert output == ""
    for first in ("cpu", there):
        assert_close_files(tmp_path / "whole" / FILE, tmp_path / first / FILE, there)


def test_wrong_devices_are_one_line(refused, tmp_path):
    (tmp_path / "text").write_text("some words\n" * 200)
    words = ["train", "--data", "text", *TINY, *FEW, "--steps", 1, "--device"]
    assert "--device is 'gpu'; expected cpu, cuda or cuda:N" in refused(*words, "gpu")
    assert "--device is 'meta'; expected cpu, cuda or cuda:N" in refused(*words, "meta")
    assert "--device is 'cpu:1'; expected cpu, cuda or cuda:N" in refused(*words, "cpu:1")
    assert "--device is 'cuda:256'; expected cpu, cuda or cuda:N" in refused(*words, "cuda:256")
    if not torch.cuda.is_available():
        assert "--device is cuda, but PyTorch finds no GPU" in refused(*words, "cuda")
        assert "--device is cuda:7, but PyTorch finds no GPU" in refused(*words, "cuda:7")
