"""A sample of the sweep over transformers' model types; tests/sweep runs the full sweep."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu("starts its own processes")

pytest.importorskip("transformers", minversion="5.23")

SWEEP = Path(__file__).resolve().parents[1] / "sweep"

# The sample has models of text, images and audio, with rotations, biases, windows, sinks, caps and
# latent keys. Some use the attention interface; others are adapted or written by hand.
EQUAL = """
    albert aria_text bart beit bert bloom bridgetower_vision_model clip codegen cohere2 deepseek_v3
    deepseek_v4 deit distilbert electra falcon gemma2 git glm4 gpt2 gpt_neo gpt_neox gpt_oss gptj
    granite_swa jetmoe llama mbart mistral mixtral modernbert mpt mt5 openai-gpt opt phi3 qwen2_vl
    qwen3_moe sew-d starcoder2 swin swinv2 t5 umt5 vit wav2vec2 wav2vec2-conformer
""".split()
OTHERS = {"mamba": "no attention"}


@pytest.mark.long
def test_a_sample_of_model_types(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    command = [sys.executable, SWEEP / "sweep.py", path, *EQUAL, *OTHERS, "--jobs", "2"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = [json.loads(line) for line in path.read_text().splitlines()]
    found = {outcome["type"]: outcome["class"] for outcome in outcomes}
    assert found == dict.fromkeys(EQUAL, "equal") | OTHERS
    checks = {check for outcome in outcomes for check in outcome.get("checks", [])}
    assert checks >= {"none", "left", "right", "generation", "autocast"}
    # The command continues with the missing types (here none), and writes its page.
    page = tmp_path / "page.md"
    path.write_text(path.read_text() + '{"type": "cut of')
    again = subprocess.run([*command, "--table", page], capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{len(EQUAL)} equal" in again.stdout
    assert f"| equal | {len(EQUAL)} |" in page.read_text()


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(str(SWEEP))
    monkeypatch.delitem(sys.modules, "sweep", raising=False)
    import sweep

    return sweep


def test_outcomes_from_before_a_change_are_reported(sweep, tmp_path):
    outcome = {"type": "bert", "class": "equal", "why": "", "interface": True, "as_sdpa": True}
    outcome["transformers"] = "5.24.0"
    now = outcome | {"code": sweep._code()}
    page = sweep.to_markdown({"bert": now, "t5": outcome | {"type": "t5"}}, 3)
    assert "With 5.24, 1 model types were compared before" in page
    assert "| not compared | 1 |" in page
    assert (
        "Of 2 types with the attention interface and a softmax over keys, 2 are equal (100.0%)."
    ) in page
    assert "Boolean masks to the scores: `bert`, `t5`." in page
    page = sweep.to_markdown({"bert": now}, 1)
    assert "compared before" not in page
    assert "stay dense" not in page.split("What to do")[0]


def test_outcomes_of_several_releases_are_in_one_file(sweep, tmp_path):
    path = tmp_path / "outcomes.jsonl"
    lines = [
        {"type": "bert", "class": "equal", "transformers": "5.9.2"},
        {"type": "t5", "class": "refused", "transformers": "5.24.1"},
        {"type": "t5", "class": "equal", "transformers": "5.24.0"},
        {"type": "t5", "class": "crashed", "transformers": "5.9.2"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert {name: o["class"] for name, o in sweep.read(path).items()} == {
        "bert": "equal",
        "t5": "equal",
    }
    assert sweep.read(path, "5.24.3").keys() == {"t5"}
    assert sweep.read(path, "5.9.0")["t5"]["class"] == "crashed"
    releases = {
        release: {name: o | {"why": ""} for name, o in of.items()}
        for release, of in sweep.read_releases(path).items()
    }
    assert list(releases) == ["5.24", "5.9"]
    page = sweep.to_markdown(releases["5.9"] | releases["5.24"], 2, releases)
    assert "| | 5.24 | 5.9 |" in page
    assert "| equal | 1 | 1 |" in page
    assert "| crashed | 0 | 1 |" in page
    assert "| not compared | 1 |" in page
    assert "depends on the release: `t5` (5.24: equal, 5.9: crashed)." in page
    before = sweep.read_releases(path)
    sweep._rewrite(path, before)
    assert sweep.read_releases(path) == before
    assert len(path.read_text().splitlines()) == 3


def test_outcomes_outlive_edits_of_prose(sweep):
    code = '''"""Text."""
class A:
    """Text."""

    def f(self, x=None):
        """Text."""
        if not x:
            raise ValueError(f"x is {x}; expected a number")
        return [x, "text"]  # Why.
'''
    edited = '''class A:
    def f(
        self,
        x=None,
    ):
        """Other
        text.
        """
        if not x:
            raise ValueError("a number is needed")
        return [x, 'text']
'''
    known = sweep.hash_of_code([code])
    assert sweep.hash_of_code([edited]) == known
    changes = {'"text"]': "'texts']", "x=None": "x=0", '[x, "text"]': '(x, "text")', "A:": "B:"}
    for before, after in changes.items():
        assert sweep.hash_of_code([code.replace(before, after)]) != known, before
    assert sweep.hash_of_code([code, ""]) != known


def test_pages_name_the_figures_of_the_sweep():
    root = SWEEP.parents[1]
    page = (root / "docs" / "transformers.md").read_text()
    (found,) = re.findall(r"Of (\d+) types with the attention interface .* (\d+) are equal", page)
    for name, pattern in (
        ("README.md", r"Of (\d+) model types that use .*? interface, (\d+)"),
        ("docs/tutorials/huggingface.md", r"of (\d+) types with the attention interface, (\d+)"),
    ):
        text = " ".join((root / name).read_text().split())
        assert re.findall(pattern, text) == [found], name


def test_shares_count_only_types_with_attention(sweep):
    outcome = {"why": "", "interface": True, "code": sweep._code(), "transformers": "5.24.0"}
    classes = ["equal", "dense in part", "refused", "no attention"]
    outcomes = {name: outcome | {"type": name, "class": name} for name in classes}
    outcomes["without"] = outcome | {"type": "without", "class": "equal", "interface": False}
    page = sweep.to_markdown(outcomes, 5)
    assert (
        "Of 3 types with the attention interface and a softmax over keys, 1 are equal (33.3%)."
    ) in page
    assert "In 1 more, nothing differs and gnomon computes all" in page
    assert "With all of these, the share is 66.7%." in page
    outcomes["sampling"] = outcome | {
        "type": "sampling",
        "class": "dense in part",
        "why": "gnomon: layers of A with unsupported attention are left unchanged: "
        "ADeformableAttention, BMultiscaleDeformableAttention",
    }
    page = sweep.to_markdown(outcomes, 6)
    assert (
        "Of 4 types with the attention interface and a softmax over keys, 1 are equal (25.0%)."
    ) in page
    assert "In 1 more, nothing differs and gnomon computes every softmax over keys" in page
    assert "With these, the share is 50.0%." in page
    assert "With all of these, the share is 75.0%." in page
    outcomes["sampling"]["why"] = outcomes["sampling"]["why"].replace(": A", ": C, A")
    assert "With all of these, the share is 75.0%." in sweep.to_markdown(outcomes, 6)
    assert "every softmax over keys" not in sweep.to_markdown(outcomes, 6)


def test_a_type_that_crashes_or_hangs_affects_only_itself(sweep, tmp_path, monkeypatch):
    def in_child(model_type, descriptor):
        import os
        import time

        if model_type == "hangs":
            time.sleep(60)
        while model_type == "computes":
            pass
        if model_type == "crashes":
            os.abort()
        os.write(descriptor, json.dumps({"class": "equal", "why": ""}).encode())
        os._exit(0)

    monkeypatch.setattr(sweep, "_in_child", in_child)
    path = tmp_path / "outcomes.jsonl"
    sweep.sweep(["hangs", "computes", "crashes", "works"], path, jobs=2, limit_s=1)
    outcomes = sweep.read(path)
    assert outcomes["works"]["class"] == "equal"
    assert outcomes["hangs"]["class"] == outcomes["computes"]["class"] == "timed out"
    assert outcomes["crashes"]["class"] == "crashed"
    assert "still waiting after 10 s" in outcomes["hangs"]["why"]
    assert "more than 1 s of CPU time" in outcomes["computes"]["why"]
    assert "status -6" in outcomes["crashes"]["why"]
