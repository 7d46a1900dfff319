"""transformers models with PEFT adapters: gnomon compared with their eager attention."""

import copy
import warnings

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5.23")

from gnomon.integrations import _terms  # noqa: E402
from gnomon.integrations.transformers import use_eager, use_gnomon, with_attention  # noqa: E402

# The tests load models, which requires a real device.
pytestmark = pytest.mark.real_device

FIELDS = ["gnomon_position", "gnomon_similarity"]
TERMS = ("penumbral", "t5")


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=61, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def with_lora(model, **options):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, **options)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                # Adapters start at zero, where they have no effect.
                parameter.normal_(std=0.3)
    return model


IDS = torch.arange(26).view(2, 13) % 60 + 1


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


def train(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model.train()).backward()
        optimizer.step()
    return model.eval()


def test_lora_is_the_same_as_without():
    """Compares with SDPA, because Llama's eager attention computes its weights in float32."""
    theirs = with_lora(llama()).double()
    theirs.set_attn_implementation("sdpa")
    ours = copy.deepcopy(theirs)
    assert use_gnomon(ours) is ours
    losses = [loss_of(model) for model in (theirs, ours)]
    torch.testing.assert_close(losses[1], losses[0], atol=1e-12, rtol=1e-12)
    for loss in losses:
        loss.backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None) == ("lora" not in name)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=1e-9)
    assert use_eager(ours) is ours
    torch.testing.assert_close(loss_of(ours), losses[0], atol=1e-6, rtol=0)


def test_terms_after_lora_train_and_are_saved(tmp_path):
    model = with_lora(llama())
    assert with_attention(model, *TERMS) is model
    assert model.peft_config["default"].modules_to_save == FIELDS
    trains = {name.split(".")[-1] for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {"weight", "gamma_theta", "t5_table"}
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = loss_of(model)
    train(model)
    after = loss_of(model)
    assert after < before
    assert all(torch.equal(model.get_parameter(name), p) for name, p in base.items())
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(with_attention(llama(), *TERMS), tmp_path).eval()
    torch.testing.assert_close(loss_of(again), after, atol=0, rtol=0)
    # If the adapter is disabled, terms have their initial values.
    with model.disable_adapter():
        torch.testing.assert_close(loss_of(model), loss_of(with_attention(llama(), *TERMS)))
    merged = model.merge_and_unload()
    torch.testing.assert_close(loss_of(merged), after, atol=1e-5, rtol=1e-5)
    assert merged.model.layers[0].self_attn.gnomon_similarity.gamma_theta.abs().max() > 0


@pytest.mark.parametrize("method", ["IA3", "LoHa"])
def test_terms_are_merged_with_other_methods(method):
    options = {"feedforward_modules": []} if method == "IA3" else {"r": 2}
    config = getattr(peft, f"{method}Config")(
        target_modules=["q_proj", "v_proj"], modules_to_save=FIELDS, **options
    )
    model = peft.get_peft_model(with_attention(llama(), *TERMS), config)
    after = loss_of(train(model))
    merged = model.merge_and_unload()
    torch.testing.assert_close(loss_of(merged), after, atol=1e-5, rtol=1e-5)
    assert merged.model.layers[0].self_attn.gnomon_similarity.gamma_theta.abs().max() > 0


def test_terms_before_lora_train_where_the_configuration_names_them(tmp_path):
    model = with_lora(with_attention(llama(), *TERMS), modules_to_save=FIELDS)
    start = copy.deepcopy(model.state_dict())
    after = loss_of(train(model))
    changed = {n for n, x in model.state_dict().items() if not torch.equal(x, start[n])}
    for name in ("gamma_theta", "t5_table"):
        assert any(name in key for key in changed)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(with_attention(llama(), *TERMS), tmp_path).eval()
    torch.testing.assert_close(loss_of(again), after, atol=0, rtol=0)


def test_terms_that_lora_freezes_are_warned_of(monkeypatch):
    monkeypatch.setattr(_terms._Terms, "_warned", False)
    model = with_lora(with_attention(llama(), "penumbral"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model)  # in evaluation
    with pytest.warns(UserWarning, match=r"modules_to_save=\['gnomon_similarity'"):
        loss_of(model.train())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model)  # once


def trained_by_the_trainer(model, folder):
    """The losses that Hugging Face's Trainer logs at each step, and the trained parameters."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, learning_rate=0.02,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    rows = torch.arange(8 * 13).view(8, 13) % 60 + 1
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    # Pad one row.
    data[2]["attention_mask"] = (torch.arange(13) < 9).long()
    for row in data:
        row.setdefault("attention_mask", torch.ones(13, dtype=torch.long))
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return losses, trained


def test_the_trainer_with_lora_is_the_same_as_without(tmp_path):
    theirs = with_lora(llama()).double()
    theirs.set_attn_implementation("sdpa")
    ours = use_gnomon(copy.deepcopy(theirs))
    expected, their_parameters = trained_by_the_trainer(theirs, tmp_path / "theirs")
    found, our_parameters = trained_by_the_trainer(ours, tmp_path / "ours")
    assert len(found) == 4
    assert found[-1] < found[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    for name, parameter in their_parameters.items():
        torch.testing.assert_close(our_parameters[name], parameter, atol=1e-9, rtol=1e-9, msg=name)


def test_two_adapters_have_terms_of_their_own():
    model = with_lora(llama())
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], r=2))
    with_attention(model, "penumbral")
    first = loss_of(train(model))
    model.set_adapter("other")
    part = model.get_base_model().model.layers[0].self_attn.gnomon_similarity
    assert part.modules_to_save["default"].gamma_theta.abs().max() > 0
    assert part.modules_to_save["other"].gamma_theta.abs().max() == 0
    assert not torch.allclose(loss_of(model), first, atol=1e-5)
    model.set_adapter("default")
    torch.testing.assert_close(loss_of(model), first)


def test_adapters_that_save_no_modules_are_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(llama(), config)
    if hasattr(config, "modules_to_save"):
        pytest.skip("this PEFT saves modules beside prompts")
    with pytest.raises(NotImplementedError, match="PromptTuningConfig, which has no modules_to_s"):
        with_attention(model, "penumbral")
    expected = loss_of(model)
    torch.testing.assert_close(loss_of(use_gnomon(model)), expected)
    with pytest.raises(TypeError, match="or a PEFT model of one"):
        use_gnomon(torch.nn.Linear(2, 2))
