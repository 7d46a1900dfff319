"""transformers models with random weights: gnomon compared with their eager implementation."""

import copy
import functools
import importlib
import inspect
import pickle
import pkgutil
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from formulas import generator_of, mostly_long, pairwise
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers import masking_utils as masks  # noqa: E402
from transformers.models.bloom.modeling_bloom import BloomAttention  # noqa: E402
from transformers.models.deberta_v2.modeling_deberta_v2 import (  # noqa: E402
    DebertaV2Attention,
    DebertaV2Encoder,
)
from transformers.models.mpt.modeling_mpt import MptAttention  # noqa: E402
from transformers.models.mt5.modeling_mt5 import MT5Attention  # noqa: E402
from transformers.models.sew_d.modeling_sew_d import (  # noqa: E402
    SEWDAttention,
    SEWDTransformerEncoder,
)
from transformers.models.swin.modeling_swin import SwinAttention, SwinLayer  # noqa: E402
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

import gnomon  # noqa: E402
from gnomon.integrations import _terms  # noqa: E402
from gnomon.integrations import transformers as integration  # noqa: E402
from gnomon.integrations._terms import (  # noqa: E402
    POSITION,
    SIMILARITY,
    LearnedSimilarity,
)
from gnomon.integrations.transformers import (  # noqa: E402
    _adapters,
    _cones,
    _interface,
    _products,
    _switch,
    _versions,
)
from gnomon.integrations.transformers._masks import read_array  # noqa: E402

# The tests copy models with their buffers, and load models, which requires a real device.
# test_devices.py tests models that are created on a device.
pytestmark = pytest.mark.real_device

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **TOKENS, intermediate_size=48, num_key_value_heads=2)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(
            **SIZES, **TOKENS, intermediate_size=48, num_key_value_heads=2, sliding_window=5
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **SIZES, **TOKENS, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**SIZES, **TOKENS)),
    # The model has six heads, because MPT orders slopes differently if their number is not a power
    # of two.
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(
            d_model=36,
            n_heads=6,
            n_layers=2,
            vocab_size=61,
            max_seq_len=1300,
            attn_config={"softmax_scale": 0.7, "clip_qkv": 0.8},
            **TOKENS,
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SIZES, **NO_HIDDEN_DROPOUT, intermediate_size=48, max_position_embeddings=1300
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5_SIZES, **TOKENS)
    ),
    "mt5": lambda: transformers.MT5ForConditionalGeneration(
        transformers.MT5Config(**T5_SIZES, **TOKENS)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=61,
            dropout=0.0,
            decoder_start_token_id=3,
            forced_eos_token_id=None,
            **TOKENS,
        )
    ),
    "swin": lambda: transformers.SwinModel(transformers.SwinConfig(**SWIN_SIZES)),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=40,
            patch_size=8,
        )
    ),
}
# These models add arrays with one value per pair to their scores.
ARRAYS = {
    "umt5": lambda: transformers.UMT5ForConditionalGeneration(
        transformers.UMT5Config(**T5_SIZES, **TOKENS)
    ),
    "beit": lambda: transformers.BeitModel(
        transformers.BeitConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=40,
            patch_size=8,
            use_relative_position_bias=True,
            drop_path_rate=0.0,
        )
    ),
    "swinv2": lambda: transformers.Swinv2Model(transformers.Swinv2Config(**SWIN_SIZES)),
}
SWIN_SIZES = {
    # Windows of 4 x 4 divide the 20 x 20 patches, but not the 10 x 10 of the second stage.
    "image_size": 40,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
T5_SIZES = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 61,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 3,
}
IMAGES = ("swin", "vit", "beit", "swinv2")
ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart")
GENERATORS = ("llama", "mistral", "gpt2", "bloom", "mpt", "t5", "mt5", "bart")


def eager(family):
    torch.manual_seed(0)
    model = (FAMILIES | ARRAYS)[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Bias tables start at zero, where they would have no effect.
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation("eager")
    return model


def both(family):
    model = eager(family)
    return model, integration.use_gnomon(copy.deepcopy(model))


def padded(padding, batch=3, length=13):
    """1 for tokens, 0 for padding."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    if padding == "left":
        mask[0, :4] = mask[1, :1] = 0
    elif padding == "right":
        mask[0, -4:] = mask[1, -1:] = 0
    elif padding == "both":
        mask[0, :3] = mask[0, -2:] = mask[1, :1] = mask[2, -1:] = 0
    elif padding == "holes":
        mask[0, 2:4] = mask[1, 7] = mask[2, -1] = 0
    return mask


def inputs_of(family, padding="none", length=13):
    """The arguments of a model, and the rows of its output that can be compared."""
    torch.manual_seed(1)
    if family in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 40, 40)}, ...
    mask = padded(padding, length=length)
    inputs = {"input_ids": torch.randint(1, 61, mask.shape), "attention_mask": mask}
    if family in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = torch.randint(1, 61, (3, 7))
        return inputs, ...
    return inputs, mask.bool()


def output_of(model, inputs, rows):
    out = model(**inputs)
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return out[rows]


def check_outputs_and_gradients(theirs, ours, inputs, rows):
    expected, found = (output_of(model, inputs, rows) for model in (theirs, ours))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    direction = torch.randn_like(expected)
    expected.mul(direction).sum().backward()
    found.mul(direction).sum().backward()
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert (gradients[name].grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                gradients[name].grad, parameter.grad, atol=1e-6 + 2e-5 * scale, rtol=1e-4, msg=name
            )


CASES = [
    pytest.param(family, padding, id=f"{family}-{padding}")
    for family in FAMILIES
    for padding in (("none",) if family in IMAGES else ("none", "left", "right", "both", "holes"))
]


@pytest.mark.parametrize(("family", "padding"), CASES)
def test_outputs_and_gradients(family, padding):
    check_outputs_and_gradients(*both(family), *inputs_of(family, padding))


@pytest.mark.parametrize(
    ("family", "padding"),
    [("umt5", "none"), ("umt5", "left"), ("beit", "none"), ("swinv2", "none")],
)
def test_biases_as_arrays(family, padding):
    check_outputs_and_gradients(*both(family), *inputs_of(family, padding))


@pytest.mark.parametrize("family", ["llama", "t5", "bloom", "mpt"])
def test_the_implementation_is_a_word_of_configurations(family):
    model = eager(family)
    integration.register()
    integration.register()
    named = type(model)._from_config(
        copy.deepcopy(model.config), attn_implementation=integration.NAME
    )
    named.load_state_dict(model.state_dict())
    inputs, rows = inputs_of(family, "left")
    torch.testing.assert_close(
        output_of(named.eval(), inputs, rows),
        output_of(model, inputs, rows),
        atol=2e-5,
        rtol=2e-5,
    )


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradient_checkpointing(family):
    theirs, ours = both(family)
    ours.activation_checkpointing_enable()
    ours.train()
    check_outputs_and_gradients(theirs, ours, *inputs_of(family, "left"))


def test_packed_sequences():
    theirs, ours = both("llama")
    inputs, _ = inputs_of("llama")
    places = torch.cat([torch.arange(6), torch.arange(3), torch.arange(4)]).expand(3, -1)
    inputs = {"input_ids": inputs["input_ids"], "position_ids": places, "use_cache": False}
    check_outputs_and_gradients(theirs, ours, inputs, ...)


LENGTHS = (5, 1, 7)
PACKED = ["llama", "mistral", "gpt2", "bert"]


def packed_as_arrays(causal, window=None):
    """The mask for sequences of the lengths LENGTHS that are packed into one row."""
    document = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    seen = document[:, None] == document
    behind = torch.arange(13)[:, None] - torch.arange(13)
    seen &= (behind >= 0) | torch.tensor(not causal)
    return seen if window is None else seen & (behind < window)


@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("family", PACKED)
def test_packed_sequences_by_their_ends(family, with_positions):
    """Only cu_seq_lens_q and cu_seq_lens_k are given, which eager attention ignores."""
    theirs, ours = both(family)
    ids = torch.randint(1, 61, (1, 13), generator=generator_of(0))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    kwargs = {"input_ids": ids} if family == "bert" else {"input_ids": ids, "use_cache": False}
    if with_positions:
        kwargs["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    seen = packed_as_arrays(family != "bert", 5 if family == "mistral" else None)
    expected = theirs(**kwargs, attention_mask=as_added(seen[None, None])).logits
    torch.testing.assert_close(ours(**kwargs, **packed).logits, expected, atol=2e-5, rtol=2e-5)


def test_unread_packed_sequences_are_rejected():
    _, ours = both("llama")
    ids = torch.randint(1, 61, (2, 6), generator=generator_of(0))

    def call(model, of_queries, of_keys=None):
        of_keys = of_queries if of_keys is None else of_keys
        ends = {"cu_seq_lens_q": of_queries, "cu_seq_lens_k": of_keys}
        return model(
            ids, **{name: None if x == [] else torch.tensor(x) for name, x in ends.items()}
        )

    call(ours, [0, 4, 6, 12])
    for wrong in ([0, 4, 6, 11], [0, 4, 12], [4, 6, 12]):
        with pytest.raises(ValueError, match=r"cu_seq_lens_q is .*; expected offsets from 0 to 12"):
            call(ours, wrong)
    with pytest.raises(ValueError, match="one of cu_seq_lens_q and cu_seq_lens_k is given"):
        call(ours, [0, 6, 12], [])
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q and cu_seq_lens_k differ, so the"):
        call(ours, [0, 4, 6, 12], [0, 5, 6, 12])
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    ends = torch.tensor([0, 4, 6, 12])
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
    torch.testing.assert_close(compiled(ids, **packed).logits, ours(ids, **packed).logits)
    # These models do not pass cu_seq_lens to their layers.
    for deaf in (both("bloom")[1], small(HANDWRITTEN["falcon"]())[1]):
        with pytest.raises(NotImplementedError, match="CausalLM does not pass cu_seq"):
            call(deaf, [0, 6, 12])
        integration.use_eager(deaf)
        call(deaf, [0, 6, 12])


def generate(model, family, **options):
    mask = padded("left")
    torch.manual_seed(2)
    out = model.generate(
        torch.randint(1, 61, mask.shape),
        attention_mask=mask,
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False} | options,
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("family", GENERATORS)
def test_generation(family):
    theirs, ours = both(family)
    sequences, logits = generate(theirs, family)
    for options in ({}, {"use_cache": False}):
        found, its_logits = generate(ours, family, **options)
        assert torch.equal(found, sequences)
        torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("way", ["beams", "samples"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "t5"])
def test_generation_of_several_sequences(family, way):
    theirs, ours = both(family)
    options = {"num_beams": 3} if way == "beams" else {"do_sample": True}
    options["num_return_sequences"] = 2
    sequences, logits = generate(theirs, family, **options)
    assert len(sequences) == 6
    found, its_logits = generate(ours, family, **options)
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "t5", "bart"])
def test_generation_with_a_static_cache(family):
    theirs, ours = both(family)
    sequences, logits = generate(theirs, family)
    found, its_logits = generate(ours, family, cache_implementation="static")
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_of_weights(family):
    theirs, ours = both(family)
    inputs, rows = inputs_of(family)

    def drop(model, chance):
        model.train()
        for layer in model.modules():
            if not _switch.attends(layer):
                continue
            for name in ("attention_dropout", "attn_dropout_p", "attn_dropout", "dropout"):
                dropout = getattr(layer, name, None)
                if isinstance(dropout, torch.nn.Dropout):
                    dropout.p = chance
                elif dropout is not None:
                    setattr(layer, name, chance)

    with torch.no_grad():
        whole = output_of(ours, inputs, rows)
        for model in (theirs, ours):
            drop(model, 1.0)
        # If all weights are dropped, outputs are equal up to the last digits.
        expected = output_of(theirs, inputs, rows)
        torch.testing.assert_close(output_of(ours, inputs, rows), expected, atol=2e-5, rtol=2e-5)
        assert not torch.allclose(whole, expected, atol=1e-3)
        drop(ours, 0.5)
        first, second = (output_of(ours, inputs, rows) for _ in range(2))
        assert not torch.allclose(first, second, atol=1e-4)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is allocated."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.size = max([self.size, *(tensor.untyped_storage().nbytes() for tensor in made)])
        return out


@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "mpt", "bert", "t5"])
def test_no_array_of_all_pairs(family):
    length = 1201
    theirs, ours = both(family)
    ids = torch.randint(1, 61, (1, length))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family == "t5":
        inputs["decoder_input_ids"] = ids
    with Largest() as largest:
        ours(**inputs).logits.sum().backward()
    # The smallest array of pairs has one byte per pair and is shared by heads; activations have up
    # to 4 * 36 columns of 4 bytes.
    assert 0 < largest.size < length * length
    with Largest() as largest, torch.no_grad():
        theirs(**inputs)
    assert largest.size >= length * length


@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
def test_bfloat16(family):
    theirs, ours = (model.bfloat16() for model in both(family))
    inputs, rows = inputs_of(family, "left")
    expected, found = (output_of(model, inputs, rows) for model in (theirs, ours))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
    integration.with_cone_attention(ours)
    output_of(ours, inputs, rows).float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


FUNCTIONS = {
    "causal": lambda: masks.causal_mask_function,
    "bidirectional": lambda: masks.bidirectional_mask_function,
    "sliding": lambda: masks.sliding_window_causal_mask_function(4),
    "sliding_both": lambda: masks.sliding_window_bidirectional_mask_function(3),
    "chunked": lambda: masks.chunked_causal_mask_function(4, torch.tensor([4, 1, 0])),
    "chunked_sliding": lambda: masks.and_masks(
        FUNCTIONS["sliding"](), FUNCTIONS["sliding_both"](), FUNCTIONS["chunked"]()
    ),
}
# Lengths and offsets of queries and keys; the last two occur with caches.
PLACES = [(13, 13, 0, 0), (3, 13, 10, 0), (2, 6, 11, 7)]


@pairwise(function=FUNCTIONS, places=PLACES, padding=["none", "left", "right", "holes"])
def test_masks(function, places, padding):
    queries, keys, first_query, first_key = places
    torch.manual_seed(0)
    arguments = {
        "batch_size": 3,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": first_query,
        "kv_offset": first_key,
        "mask_function": FUNCTIONS[function](),
        "attention_mask": None if padding == "none" else padded(padding).bool(),
        "device": torch.get_default_device(),
    }
    dense = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    dense = dense.expand(3, 1, queries, keys)
    integration.register()
    mask = transformers.AttentionMaskInterface()[integration.NAME](**arguments)
    attend = transformers.AttentionInterface()[integration.NAME]
    q, k, v = (torch.randn(3, 2, n, 8) for n in (queries, keys, keys))
    found, weights = attend(torch.nn.Module(), q, k, v, mask)
    assert weights is None
    scores = (q @ k.mT / 8**0.5).masked_fill(~dense, -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_a_mask_the_flag_of_the_call_counts():
    integration.register()
    attend = transformers.AttentionInterface()[integration.NAME]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    module = torch.nn.Module()
    for causal in (True, False):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        # Eager attention ignores the module's own flag.
        module.is_causal = not causal
        found = [attend(module, q, k, v, None, is_causal=causal)[0]]
        if not causal:
            found.append(attend(module, q, k, v, None)[0])
        for o in found:
            torch.testing.assert_close(o.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    # A single causal query is the last token.
    last = attend(module, q[:, :, -1:], k, v, None, is_causal=True)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v)
    torch.testing.assert_close(last.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="3 causal queries over 5 keys"):
        attend(module, q[:, :, :3], k, v, None, is_causal=True)
    mask = transformers.AttentionMaskInterface()[integration.NAME](1, 5, 6)
    with pytest.raises(
        NotImplementedError, match=r"5 queries and 6 keys, but attention has 5 and 5"
    ):
        attend(module, q, k, v, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_refused(family):
    _, ours = both(family)
    inputs, _ = inputs_of(family)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        ours(**inputs, output_attentions=True)


def small(config, kind=transformers.AutoModelForCausalLM):
    """A model built from its configuration, with weights that make attention uneven, and our
    copy."""
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval(), integration.use_gnomon(copy.deepcopy(model.eval()))


def test_sinks():
    config = transformers.GptOssConfig(
        **SIZES,
        **TOKENS,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
    )
    theirs, ours = small(config)
    assert all(layer.self_attn.sinks.abs().max() > 0.01 for layer in ours.model.layers)
    check_outputs_and_gradients(theirs, ours, *inputs_of("llama", "left"))


def test_soft_caps():
    config = transformers.Gemma2Config(
        **SIZES,
        **TOKENS,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        attn_logit_softcapping=0.5,
    )
    check_outputs_and_gradients(*small(config), *inputs_of("llama", "left"))


def test_eager_attention_reads_nothing_else_of_a_module():
    """The integration must read all module attributes that the replaced transformers function
    reads."""
    known = {"num_key_value_groups", "training", "head_dim", "scaling", "sinks"}
    read = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = package.module_finder.path
        path = f"{folder}/{package.name}/modeling_{package.name}.py"
        try:
            with open(path) as file:
                source = file.read()
        except OSError:
            continue
        body = re.search(r"\ndef eager_attention_forward\(.*?\n(?=\S)(?!\))", source, re.DOTALL)
        if body is not None:
            read[package.name] = set(re.findall(r"\bmodule\.(\w+)", body[0]))
    assert len(read) > 300
    assert set().union(*read.values()) <= known


HANDWRITTEN = {
    "gptj": lambda: transformers.GPTJConfig(
        **SIZES, **TOKENS, rotary_dim=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "codegen": lambda: transformers.CodeGenConfig(
        **SIZES, **TOKENS, rotary_dim=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        vocab_size=61,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        max_position_embeddings=64,
        attention_dropout=0.0,
        embed_dropout=0.0,
        resid_dropout=0.0,
        **TOKENS,
    ),
    "falcon": lambda: transformers.FalconConfig(**SIZES, **TOKENS),
}


@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "holes"])
@pytest.mark.parametrize("family", HANDWRITTEN)
def test_attention_that_a_model_writes_itself(family, padding):
    theirs, ours = small(HANDWRITTEN[family]())
    check_outputs_and_gradients(theirs, ours, *inputs_of(family, padding))
    with torch.no_grad(), torch.profiler.profile() as profile:
        ours(**inputs_of(family, padding)[0])
    names = [event.key for event in profile.key_averages()]
    assert "gnomon::attention_forward" in names
    assert not any("softmax" in name for name in names)


@pytest.mark.parametrize("family", mostly_long(HANDWRITTEN))
def test_graphs_break_around_attention_that_a_model_writes_itself(family):
    _, ours = small(HANDWRITTEN[family]())
    inputs, rows = inputs_of(family, "left")
    inputs["use_cache"] = False
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        expected, found = (output_of(model, inputs, rows) for model in (ours, compiled))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    again = pickle.loads(pickle.dumps(ours))
    with torch.no_grad(), torch.profiler.profile() as profile:
        torch.testing.assert_close(output_of(again, inputs, rows), expected)
    assert "gnomon::attention_forward" in [event.key for event in profile.key_averages()]


DEBERTA = {
    "buckets": {"position_buckets": 4, "max_relative_positions": 10, "share_att_key": True},
    "one row per distance": {"max_relative_positions": 6},
    "only content to position": {"max_relative_positions": 6, "pos_att_type": ["c2p"]},
}


@pytest.mark.parametrize("padding", ["none", "right", "holes"])
@pytest.mark.parametrize("options", DEBERTA)
def test_disentangled_attention_is_a_term(options, padding, device):
    config = transformers.DebertaV2Config(
        **SIZES,
        **NO_HIDDEN_DROPOUT,
        intermediate_size=48,
        relative_attention=True,
        norm_rel_ebd="layer_norm",
        **{"pos_att_type": ["c2p", "p2c"]} | DEBERTA[options],
    )
    theirs, ours = small(config, transformers.AutoModelForMaskedLM)
    inputs, rows = inputs_of("deberta", padding)
    check_outputs_and_gradients(theirs, ours, inputs, rows)
    with torch.no_grad(), torch.profiler.profile() as profile:
        ours(**inputs)
    names = [event.key for event in profile.key_averages()]
    assert "gnomon::attention_forward" in names
    assert not any("softmax" in name for name in names)
    # On a GPU, the scores of positions are passed as an array.
    is_array = options == "only content to position" or device.type == "cuda"
    assert any("gather" in name for name in names) == is_array
    with pytest.raises(NotImplementedError, match="output_attentions"):
        ours(**inputs, output_attentions=True)


@pytest.mark.parametrize("similarity", [None, "laplacian"])
@pytest.mark.parametrize("options", ["buckets", "one row per distance"])
def test_disentangled_attention_as_an_array_is_the_same(options, similarity, monkeypatch):
    """Position scores are passed as an array, as on a GPU."""
    config = transformers.DebertaV2Config(
        **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], **DEBERTA[options]
    )
    _, model = small(config, transformers.AutoModelForMaskedLM)
    if similarity is not None:
        integration.with_cone_attention(model, similarity)
    inputs, rows = inputs_of("deberta", "right")
    found = []
    for is_array in (False, True):
        monkeypatch.setattr(_adapters, "_has_disentangled_kernels", lambda _q, no=is_array: not no)
        out = output_of(model, inputs, rows)
        leaves = [p for p in model.parameters() if p.requires_grad]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
    for term, array in zip(*found, strict=True):
        assert (term is None) == (array is None)
        if term is not None:
            torch.testing.assert_close(array, term, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("named", [True, False])
def test_distances_of_the_caller_are_not_lost(named):
    """The names of DeBERTa's inputs must be recognised, or these inputs would be dropped."""
    config = transformers.DebertaV2Config(
        **SIZES, **NO_HIDDEN_DROPOUT, relative_attention=True, pos_att_type=["c2p", "p2c"]
    )
    theirs, ours = small(config, transformers.AutoModel)
    tokens = torch.randn(2, 5, config.hidden_size)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.int64)
    distances = torch.randint(-3, 4, (1, 5, 5))
    calls = []
    for model in (theirs, ours):
        attention, rows = model.encoder.layer[0].attention, model.encoder.get_rel_embedding()
        if named:
            calls.append(attention(tokens, mask, relative_pos=distances, rel_embeddings=rows)[0])
        else:
            calls.append(functools.partial(attention, tokens, mask, False, None, distances, rows))
    if named:
        torch.testing.assert_close(calls[1], calls[0])
    else:
        with pytest.raises(TypeError, match="expected query_states and relative_pos as keyword"):
            calls[1]()


@pytest.mark.parametrize("family", HANDWRITTEN)
def test_generation_where_a_model_writes_its_attention(family):
    theirs, ours = small(HANDWRITTEN[family]())
    sequences, logits = generate(theirs, family)
    found, its_logits = generate(ours, family)
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        ours(**inputs_of(family)[0], output_attentions=True)
    # The switch can be undone.
    for part in ours.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.config._attn_implementation = "eager"
    inputs, rows = inputs_of(family)
    assert torch.equal(output_of(ours, inputs, rows), output_of(theirs, inputs, rows))


def as_added(mask):
    """Creates a mask in the form that eager attention expects."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def test_masks_as_arrays():
    theirs, ours = both("llama")
    inputs, _ = inputs_of("llama")
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    for seen in (causal, causal.triu(-3), causal & (torch.arange(13) < 9)):
        seen = seen.expand(3, 1, 13, 13)
        rows = seen.any(-1)[:, 0]
        array = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        expected = output_of(theirs, inputs | {"attention_mask": array}, rows)
        for mask in (array, seen):
            found = output_of(ours, inputs | {"attention_mask": mask}, rows)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    holes = causal.clone()
    holes[5, 2] = False
    # A mask that is not a band is passed as an array, and additive biases are added.
    for mask in (holes.expand(3, 1, 13, 13), torch.randn(3, 1, 13, 13)):
        expected = output_of(theirs, inputs | {"attention_mask": as_added(mask)}, ...)
        found = output_of(ours, inputs | {"attention_mask": mask}, ...)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_masks_of_a_row_for_each_query(family, dtype):
    """A mask (B, Lq, Lk), which transformers accepts only with four axes. Causal models stay
    causal."""
    theirs, ours = both(family)
    inputs, _ = inputs_of(family)
    mask = torch.rand(3, 13, 13, generator=generator_of(0)) < 0.7
    mask |= torch.eye(13, dtype=torch.bool)
    mask[1] = padded("right")[0].bool()
    seen = mask.tril() if family == "llama" else mask
    expected = output_of(theirs, inputs | {"attention_mask": as_added(seen[:, None])}, ...)
    found = output_of(ours, inputs | {"attention_mask": mask.to(dtype)}, ...)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    # All queries, or the whole batch, may share a mask.
    for part in (mask[:, :1], mask[:1]):
        found = output_of(ours, inputs | {"attention_mask": part.to(dtype)}, ...)
        whole = part.expand(3, 13, 13).to(dtype)
        expected = output_of(ours, inputs | {"attention_mask": whole}, ...)
        torch.testing.assert_close(found, expected)


def test_masks_of_other_shapes_are_refused():
    _, ours = both("bert")
    ids = inputs_of("bert")[0]["input_ids"]
    for shape, match in (
        ((13,), r"attention_mask has shape \[13\]; expected \(B, Lk\)"),
        ((3, 5, 13), r"attention_mask has shape \[3, 5, 13\]; .* = \(3, 13, 13\)"),
        ((3, 1, 13, 12), r"of BertSelfAttention has shape \[3, 1, 13, 12\]; .*\[3, 4, 13, 13\]"),
        ((3, 1, 1, 13, 13), r"attention_mask has shape \[3, 1, 1, 13, 13\]"),
    ):
        mask = torch.ones(shape, dtype=torch.int64)
        mask.view(-1)[-1] = 0
        with pytest.raises(ValueError, match=match):
            ours(input_ids=ids, attention_mask=mask)
    with pytest.raises(TypeError, match=r"dtype torch\.float32; expected booleans or int"):
        ours(input_ids=ids, attention_mask=torch.zeros(3, 13, 13))
    # A mask that hides nothing may have any length, as in transformers.
    torch.testing.assert_close(
        ours(input_ids=ids, attention_mask=torch.ones(3, 20)).logits, ours(input_ids=ids).logits
    )


@pytest.mark.parametrize("queries", [1, 4, 9])
def test_bands_are_read_from_arrays(queries):
    keys = 9
    generator = generator_of(queries)
    query = torch.arange(queries)[:, None] + keys - queries
    offset = torch.arange(keys) - query
    for left in (0, 2, keys):
        for right in (0, 1, keys):
            there = torch.rand(2, 1, 1, keys, generator=generator) < 0.7
            seen = there & (offset >= -left) & (offset <= right)
            mask = read_array(seen, (2, 1, queries, keys))
            assert mask is not None
            assert torch.equal(mask.is_seen(), seen)
    seen[0, 0, queries // 2, keys // 2] ^= True
    assert queries == 1 or read_array(seen, (2, 1, queries, keys)) is None


def test_masks_that_models_compute_with():
    integration.register()
    to_mask = transformers.AttentionMaskInterface()[integration.NAME]
    arguments = {"attention_mask": padded("left").bool(), "device": torch.get_default_device()}
    mask = to_mask(3, 13, 13, **arguments)
    array = masks.eager_mask(3, 13, 13, **arguments)
    assert mask.size() == array.shape
    assert mask.size(2) == mask.shape[2] == 13
    assert (mask.dim(), mask.dtype) == (4, torch.float32)
    assert mask[:, :, :, :13] is mask
    assert mask.contiguous() is mask
    assert mask.to(torch.bfloat16).dtype == torch.bfloat16
    for use in (
        lambda m: m[:, :, -3:],
        lambda m: torch.zeros(()) + m,
        lambda m: m + 1.0,
        lambda m: 1.0 - m,
        lambda m: m == 0,
        lambda m: m.repeat(1, 2, 1, 1),
        lambda m: m.to(torch.bool),
        lambda m: torch.where(m < 0, 1.0, 0.0),
    ):
        assert torch.equal(use(mask), use(array))


def test_masks_that_are_no_bands():
    integration.register()
    to_mask = transformers.AttentionMaskInterface()[integration.NAME]
    attend = transformers.AttentionInterface()[integration.NAME]
    q = torch.randn(2, 4, 5, 8)
    anything = masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k < 2)
    chunks = masks.and_masks(
        masks.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1]])),
        masks.remap_positions_for_packed_sequence(
            FUNCTIONS["chunked"](), torch.tensor([[0, 1, 2, 0, 1]])
        ),
    )
    for function in (anything, chunks, masks.blockwise_overlay(torch.tensor([[0, 0, 1, 1, 0]]))):
        arguments = {"mask_function": function, "device": torch.get_default_device()}
        mask = to_mask(1, 5, 5, **arguments)
        seen = masks.sdpa_mask(1, 5, 5, **arguments, allow_is_causal_skip=False)
        assert torch.equal(mask.is_seen(), seen)
        o, _ = attend(torch.nn.Module(), q[:1], q[:1], q[:1], mask)
        expected = torch.nn.functional.scaled_dot_product_attention(q[:1], q[:1], q[:1], seen)
        torch.testing.assert_close(o.transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("family", "padding"),
    mostly_long(
        [
            ("llama", "left"),
            ("bloom", "none"),
            ("t5", "left"),
            ("llama", "none"),
            ("mistral", "left"),
            ("bert", "left"),
            ("vit", "none"),
        ],
        ordinary=3,
    ),
)
def test_a_graph_is_not_broken(family, padding):
    """Each model compiles to a single graph, except BLOOM, whose graph transformers breaks."""
    _, ours = both(family)
    inputs, rows = inputs_of(family, padding)
    if family in ("llama", "mistral", "bloom"):
        inputs["use_cache"] = False
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=family != "bloom")
    with torch.no_grad():
        expected, found = (output_of(model, inputs, rows) for model in (ours, compiled))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def attend_with(module=None, length=5, **arguments):
    """Calls the interface's function with random tokens; returns them and the output (B, H, L,
    D)."""
    integration.register()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 8) for _ in range(3))
    attend = transformers.AttentionInterface()[integration.NAME]
    mask = arguments.pop("attention_mask", None)
    o, _ = attend(module or torch.nn.Module(), q, k, v, mask, is_causal=False, **arguments)
    return q, k, v, o.transpose(1, 2)


def test_sinks_of_each_row():
    """Inkling 2 computes its sinks from the tokens."""
    sinks = torch.randn(2, 4, 5, 1)
    q, k, v, o = attend_with(sinks=sinks)
    scores = torch.cat([q @ k.mT / 8**0.5, sinks], -1)
    torch.testing.assert_close(o, scores.softmax(-1)[..., :-1] @ v)


def test_arguments_that_are_not_known_are_refused(monkeypatch):
    class Layer(torch.nn.Module):
        pass

    def eager_attention_forward(module, query, key, value, attention_mask, temperature=1.5):
        pass

    monkeypatch.setattr(
        sys.modules[__name__], "eager_attention_forward", eager_attention_forward, raising=False
    )
    _interface._extra_arguments.cache_clear()
    for harmless in (None, False, (None, None)):
        attend_with(Layer(), temperature=harmless, another=3)
    attend_with(Layer(), temperature=1.5)  # the default
    with pytest.raises(NotImplementedError, match="Layer passes temperature to its attention"):
        attend_with(Layer(), temperature=torch.ones(5))
    _interface._extra_arguments.cache_clear()


REPLACED = [
    (layer, method, ours)
    for layer, method, ours in (
        *((layer, "forward", _adapters._t5_forward) for layer in (T5Attention, MT5Attention)),
        (BloomAttention, "forward", _adapters._bloom_forward),
        (MptAttention, "forward", _adapters._mpt_forward),
        (DebertaV2Attention, "forward", _adapters._deberta_forward),
        (DebertaV2Encoder, "get_rel_pos", _adapters._no_distances),
        (SEWDAttention, "forward", _adapters._deberta_forward),
        (SEWDTransformerEncoder, "get_rel_pos", _adapters._no_distances),
        (SwinAttention, "forward", _adapters._swin_forward),
        (SwinLayer, "get_attn_mask", _adapters._swin_segments),
    )
]


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced[0].__name__)
def test_signatures_of_replaced_functions_are_known(replaced):
    """Detects arguments that a transformers release adds before a model uses them."""
    layer, method, ours = replaced
    integration.register()
    theirs = getattr(layer, method)
    assert inspect.unwrap(theirs) is not theirs
    assert _interface.extra_arguments(theirs, ours, _adapters._KNOWN) == {}


def test_new_arguments_of_replaced_functions_are_rejected_unless_harmless():
    class Layer(torch.nn.Module):
        def forward(self, x, gain=1.0, bias=None, use_cache=False):
            return "theirs"

    def ours(layer, x, **kwargs):
        return "ours"

    _adapters._replace(Layer, "forward", ours, lambda _layer, kwargs: "theirs" not in kwargs)
    for harmless in ({}, {"gain": 1.0}, {"bias": None, "use_cache": True}, {"bias": [None, None]}):
        assert Layer()(0, **harmless) == "ours"
    for name, value in (("gain", 2.0), ("gain", torch.ones(2)), ("bias", torch.zeros(2))):
        with pytest.raises(NotImplementedError, match=f"Layer passes {name} to its attention"):
            Layer()(0, **{name: value})


def test_layer_caches_are_distinguished_from_paged_ones():
    class PagedAttentionCache:
        pass

    for cache in (None, transformers.DynamicCache(), transformers.EncoderDecoderCache):
        _interface.refuse({"cache": cache})
    with pytest.raises(NotImplementedError, match="paged caches"):
        _interface.refuse({"cache": PagedAttentionCache()})


def test_keys_that_are_chosen():
    """DeepSeek V3.2 passes indices of keys; MiniMax M3 passes indices of key blocks per head
    group."""
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    indices = torch.rand(2, 7, 7).argsort(-1)[..., :3].int()
    indices[..., 0] = 0
    seen = torch.zeros(2, 1, 7, 7, dtype=torch.bool).scatter(-1, indices[:, None].long(), True)
    for mask in (causal.expand(2, 1, 7, 7), as_added(causal.expand(2, 1, 7, 7))):
        q, k, v, o = attend_with(length=7, attention_mask=mask, indices=indices)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen & causal)
        torch.testing.assert_close(o, expected)
    q, k, v, o = attend_with(length=7, indices=indices)
    torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, seen))
    blocks = torch.tensor([[0, 2], [1, -1]]).view(1, 2, 1, 2).repeat(2, 1, 7, 1)
    layer = torch.nn.Module()
    with pytest.raises(NotImplementedError, match="block_indices"):
        attend_with(layer, length=7, block_indices=blocks)
    layer.indexer = types.SimpleNamespace(block_size=3)
    seen = torch.tensor([[1, 1, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 0]]).bool()
    seen = seen.repeat_interleave(2, 0)[None, :, None].expand(2, 4, 7, 7)
    q, k, v, o = attend_with(layer, length=7, block_indices=blocks)
    torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, seen))


def test_rows_of_an_array_that_hide_all_keys():
    """In eager mode, such rows attend to all keys uniformly; some models use them (TimesFM)."""
    array = torch.zeros(2, 1, 5, 5)
    array[0, :, 1] = torch.finfo(torch.float32).min
    array[1, :, :, 3] = torch.finfo(torch.float32).min
    q, k, v, o = attend_with(attention_mask=array)
    torch.testing.assert_close(o, (q @ k.mT / 8**0.5 + array).softmax(-1) @ v)
    torch.testing.assert_close(o[0, :, 1], v[0].mean(1))


class HandwrittenAttention(torch.nn.Module):
    """Handwritten attention in several forms."""

    def forward(self, q, k, v, way):
        if way == "function":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if way == "function with a mask":
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril(), scale=0.5
            )
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        o = torch.matmul(weights, v)
        if way == "added in place":
            o += torch.matmul(weights.flip(-1), v)
        if way == "two":
            scores = torch.cat([q @ k.transpose(-1, -2), q @ v.transpose(-1, -2)], -1)
            o = o + torch.softmax(scores, -1) @ torch.cat([k, v], -2)
        return o


@pytest.mark.parametrize("way", ["function", "function with a mask", "added in place", "two"])
def test_other_handwritten_operations(way):
    torch.manual_seed(0)
    layer = HandwrittenAttention()
    tokens = [torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3)]
    expected = layer(*tokens, way)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * direction).sum(), tokens)
    config = types.SimpleNamespace(_attn_implementation=integration.NAME)
    _products.see_products(layer, config, integration.NAME)
    with warnings.catch_warnings(record=True) as said, torch.profiler.profile() as profile:
        warnings.simplefilter("always")
        found = layer(*tokens, way)
    assert "gnomon::attention_forward" in [event.key for event in profile.key_averages()]
    said = [str(w.message) for w in said if "gnomon" in str(w.message)]
    assert (way == "two") == any("some of its attention stays dense" in text for text in said)
    torch.testing.assert_close(found, expected)
    for mine, other in zip(
        torch.autograd.grad((found * direction).sum(), tokens), gradients, strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "added"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multi_head_attention_of_pytorch(mask, batch_first):
    """Calls the function as WavLM, SigLIP and others do."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first)
    assert _switch.attends(layer)
    x, y = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    options = {
        "none": {},
        "padding": {"key_padding_mask": padded("left", length=5) == 0},
        "causal": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        "added": {"attn_mask": torch.randn(12, 5, 5)},
    }[mask]
    if mask == "padding":
        options["key_padding_mask"][0, 4] = False
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    expected, _ = layer(x, y, y, **options)
    config = types.SimpleNamespace(_attn_implementation=integration.NAME)
    _products.see_products(layer, config, integration.NAME)
    with torch.profiler.profile() as profile:
        found, weights = layer(x, y, y, **options)
    assert "gnomon::attention_forward" in [event.key for event in profile.key_averages()]
    assert weights is None
    torch.testing.assert_close(found, expected)


def test_models_that_are_refused():
    model = transformers.MambaModel(transformers.MambaConfig(hidden_size=16, num_hidden_layers=1))
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match="MambaModel has no supported attention"):
        integration.use_gnomon(model)
    assert model.config._attn_implementation == before
    with pytest.raises(TypeError, match="model is a Linear"):
        integration.use_gnomon(torch.nn.Linear(2, 2))


def test_a_model_whose_similarity_is_refused_stays_as_it_was():
    model = eager("llama")
    state = copy.deepcopy(model.state_dict())
    for spec in ("nonsense", "additive"):
        with pytest.raises((ValueError, NotImplementedError)):
            integration.with_cone_attention(model, spec)
    assert model.config._attn_implementation == "eager"
    assert model.state_dict().keys() == state.keys()
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_layers_that_stay_dense_say_so():
    class OddAttention(torch.nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    model = eager("llama")
    model.model.odd = OddAttention()
    with pytest.warns(
        UserWarning, match="LlamaForCausalLM with unsupported attention .*: OddAttention"
    ):
        integration.use_gnomon(model)
    with pytest.raises(NotImplementedError, match="OddAttention"):
        integration.with_cone_attention(eager_with(OddAttention()))


def eager_with(part):
    model = eager("llama")
    model.model.odd = part
    return model


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bloom", "bert", "t5", "vit", "swin", "deepseek_v3", "gptj"]
)
def test_autocast(family):
    """Float32 cosines and sines make q and k float32, while v keeps autocast's dtype."""
    configs = ROTATING | HANDWRITTEN
    theirs, ours = small(configs[family]()) if family in configs else both(family)
    inputs, rows = inputs_of("llama" if family in configs else family, "left")
    if "input_ids" in inputs and family != "bert":
        inputs["use_cache"] = False
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (output_of(m, inputs, rows) for m in (theirs, ours))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0)
    # The two models round at different points, but their errors must be similar.
    exact = copy.deepcopy(theirs)
    for model, out in ((theirs, expected), (ours, found), (exact, output_of(exact, inputs, rows))):
        model.zero_grad()
        out.float().square().mean().backward()
    parts = zip(ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True)
    errors = []
    for (name, mine), other, true in parts:
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            assert mine.grad.dtype == mine.dtype
            off, their_off = ((part.grad - true.grad).norm() for part in (mine, other))
            # The errors of a single parameter are random; over all parameters, they must be
            # similar.
            assert off <= 4 * their_off + 1e-2 * true.grad.norm() + 1e-6, name
            if true.grad.any():
                errors.append(torch.stack((off, their_off)) / true.grad.norm())
    off, their_off = torch.stack(errors).median(0).values
    assert off <= 1.5 * their_off + 1e-3


GPTJ = transformers.GPTJConfig(
    vocab_size=61, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_comes_back(family):
    theirs, ours = both(family)
    inputs, rows = inputs_of(family)
    output_of(ours, inputs, rows)
    assert integration.use_eager(ours) is ours
    torch.testing.assert_close(
        output_of(ours, inputs, rows), output_of(theirs, inputs, rows), atol=0, rtol=0
    )


@pytest.mark.parametrize(
    "config",
    [
        transformers.DebertaV2Config(
            **SIZES, intermediate_size=48, relative_attention=True, pos_att_type=["c2p", "p2c"]
        ),
        GPTJ,
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_eager_attention_comes_back_to_models_without_the_interface(config):
    theirs, ours = small(config, transformers.AutoModel)
    inputs, rows = inputs_of("deberta")
    with pytest.raises(NotImplementedError, match=r"or use_eager\(model\)"):
        ours(**inputs, output_attentions=True)
    integration.use_eager(ours)
    torch.testing.assert_close(
        output_of(ours, inputs, rows), output_of(theirs, inputs, rows), atol=0, rtol=0
    )
    assert ours(**inputs, output_attentions=True).attentions[0].shape == (3, 4, 13, 13)
    integration.with_cone_attention(ours, "laplacian")
    with pytest.raises(ValueError, match="has terms that with_attention added"):
        integration.use_eager(ours)
    with pytest.raises(TypeError, match="model is an int"):
        integration.use_eager(3)


def test_models_without_attention_are_named():
    """A layer of a model may have no attention (a convolution); this causes no warning."""
    integration.register()
    for config in (
        transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, vocab_size=9),
        transformers.FNetConfig(hidden_size=32, num_hidden_layers=1, vocab_size=9),
    ):
        with pytest.warns(UserWarning, match="has no supported attention and is left unchanged"):
            transformers.AutoModel.from_config(config, attn_implementation="gnomon")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.AutoModel.from_config(
            transformers.LlamaConfig(**SIZES, **TOKENS), attn_implementation="gnomon"
        )


def test_unused_modules_named_attention_are_not_reported():
    """Funnel's FunnelAttentionStructure creates the tensors that its layers attend with."""
    torch.manual_seed(0)
    config = transformers.FunnelConfig(
        vocab_size=61, block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8,
        d_inner=32,
    )  # fmt: skip
    model = transformers.FunnelBaseModel(config).eval()
    ids = torch.randint(61, (2, 12))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            integration.use_gnomon(model)
        torch.testing.assert_close(model(ids).last_hidden_state, expected)
        integration.with_cone_attention(model, "laplacian")
        assert not torch.allclose(model(ids).last_hidden_state, expected, atol=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        transformers.FalconConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=61
        ),
        transformers.GPTNeoConfig(
            hidden_size=32, num_layers=1, num_heads=4, vocab_size=61,
            attention_types=[[["global"], 1]], max_position_embeddings=32,
            bos_token_id=None, eos_token_id=None,
        ),
        GPTJ,
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_look_their_layers_up_by_the_implementation(config):
    integration.register()
    torch.manual_seed(0)
    ours = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="gnomon")
    theirs = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager")
    theirs.load_state_dict(ours.state_dict())
    # Build a model from the configuration of a switched model.
    again = type(ours)(integration.use_gnomon(copy.deepcopy(theirs)).config)
    again.load_state_dict(ours.state_dict())
    inputs, rows = inputs_of("llama", "right")
    expected = output_of(theirs.eval(), inputs, rows)
    for model in (ours, again):
        with torch.no_grad(), torch.profiler.profile() as profile:
            found = output_of(model.eval(), inputs, rows)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        names = {event.key for event in profile.key_averages()}
        assert "gnomon::attention_forward" in names


def test_other_models_stay_as_they_are():
    theirs, _ = both("t5")
    inputs, rows = inputs_of("t5")
    theirs.set_attn_implementation("sdpa")
    before = output_of(theirs, inputs, rows)
    theirs.set_attn_implementation("eager")
    torch.testing.assert_close(output_of(theirs, inputs, rows), before, atol=2e-5, rtol=2e-5)
    assert theirs(**inputs, output_attentions=True).encoder_attentions[0].shape == (3, 4, 13, 13)


# Cones.


@pytest.mark.parametrize("family", FAMILIES)
def test_cones_train_and_are_saved(family, tmp_path):
    theirs, _ = both(family)
    model = integration.with_cone_attention(copy.deepcopy(theirs))
    inputs, rows = inputs_of(family)
    out = output_of(model, inputs, rows)
    assert not torch.allclose(out, output_of(theirs, inputs, rows), atol=1e-2)
    new = {name for name, _ in model.named_parameters()}
    new -= {name for name, _ in theirs.named_parameters()}
    assert new
    assert all(name.endswith("gnomon_similarity.gamma_theta") for name in new)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loss = out.square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in new:
            assert parameter.grad.abs().min() > 0, name
    optimizer.step()
    trained = output_of(model, inputs, rows)
    assert trained.square().mean() < loss
    again = integration.with_cone_attention(eager(family))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(output_of(again, inputs, rows), trained, atol=0, rtol=0)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output_of(loaded, inputs, rows), trained, atol=0, rtol=0)


@pytest.mark.parametrize(
    "similarity",
    ["lorentz:c=learned", "lorentz:c=2", "hyperbolic:model=ball", "umbral", "dot:softcap=5"],
)
def test_similarities_are_saved(similarity, tmp_path):
    """A model may be built on the meta device before its checkpoint is loaded."""
    model = integration.with_cone_attention(eager("llama"), similarity)
    for name, parameter in model.named_parameters():
        if name.endswith("_theta"):
            torch.nn.init.normal_(parameter, std=0.1)
    inputs, rows = inputs_of("llama")
    expected = output_of(model, inputs, rows)
    model.save_pretrained(tmp_path)
    for copied in (
        type(model).from_pretrained(tmp_path).eval(),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        torch.testing.assert_close(output_of(copied, inputs, rows), expected, atol=0, rtol=0)


@pytest.mark.parametrize("similarity", ["penumbral", "laplacian:gamma=fixed", "lorentz:c=learned"])
def test_parameters_missing_from_a_checkpoint_are_initialised(similarity, tmp_path):
    theirs = eager("llama")
    theirs.save_pretrained(tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    config.gnomon_similarity = similarity
    expected = integration.with_cone_attention(theirs, similarity).state_dict()
    # Use memory that previously held other numbers.
    for _ in range(3):
        junk = [torch.full((4,), 3e30) for _ in range(1000)]
        del junk
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config).state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=0, rtol=0, msg=name)


def test_cones_of_a_part_are_saved(tmp_path):
    """The configuration of a saved model names the terms; a second model may share it."""
    theirs = eager("llama")
    config = theirs.config
    ours = transformers.LlamaForCausalLM(config).eval()
    ours.load_state_dict(theirs.state_dict())
    integration.with_cone_attention(ours.model)
    inputs, rows = inputs_of("llama")
    expected = output_of(ours, inputs, rows)
    ours.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output_of(again, inputs, rows), expected, atol=0, rtol=0)
    theirs.save_pretrained(tmp_path)
    assert not hasattr(transformers.LlamaConfig.from_pretrained(tmp_path), "gnomon_similarity")
    assert not hasattr(config, "gnomon_similarity")


def test_cones_of_only_an_encoder_are_saved(tmp_path):
    sizes = SIZES | {"intermediate_size": 48} | NO_HIDDEN_DROPOUT
    model = transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.BertConfig(**sizes), transformers.BertConfig(**sizes)
        )
    ).eval()
    integration.with_cone_attention(model.encoder, "lorentz:c=learned")
    ids = inputs_of("llama")[0]["input_ids"]
    expected = model(input_ids=ids, decoder_input_ids=ids).logits
    model.save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    found = again(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert again.config.encoder.gnomon_similarity == "lorentz:c=learned"
    assert not hasattr(again.config.decoder, "gnomon_similarity")


def test_other_implementations_are_rejected_with_terms(tmp_path):
    model = integration.with_cone_attention(eager("llama"))
    for name in ("eager", "sdpa", {"": "eager"}):
        with pytest.raises(ValueError, match="ignores the terms that with_attention added"):
            model.set_attn_implementation(name)
    model.set_attn_implementation("gnomon")
    inputs, rows = inputs_of("llama")
    expected = output_of(model, inputs, rows)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="attn_implementation is 'eager', which ignores"):
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(output_of(again.eval(), inputs, rows), expected, atol=0, rtol=0)


@pytest.mark.parametrize("similarity", ["laplacian", "penumbral", "dot"])
@pytest.mark.parametrize("kind", ["falcon", "gpt_neox_japanese"])
def test_cones_of_watched_models_that_rotate(kind, similarity):
    own = {"gpt_neox_japanese": lambda: transformers.GPTNeoXJapaneseConfig(**SIZES)}
    config = (HANDWRITTEN | own)[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = inputs_of("llama")[0]["input_ids"]
    expected = model.eval()(input_ids=ids).logits
    integration.with_cone_attention(model, similarity)
    found = model(input_ids=ids).logits
    assert found.isfinite().all()
    if similarity == "dot":
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    else:
        assert not torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["gptj", "gpt_neo", "codegen"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.02), (torch.float64, 1e-5)])
def test_cones_of_other_types_where_a_layer_multiplies_in_float32(kind, dtype, close):
    config = HANDWRITTEN[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    integration.with_cone_attention(model, "laplacian")
    ids = inputs_of("llama")[0]["input_ids"]
    expected = model(input_ids=ids, use_cache=False).logits
    found = model.to(dtype)(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found.float(), expected, atol=close, rtol=close)


def test_models_of_one_configuration_are_apart(tmp_path):
    config = eager("llama").config
    one, other = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    integration.with_cone_attention(one)
    assert one.config is one.model.config is one.model.layers[0].self_attn.config
    inputs, rows = inputs_of("llama")
    expected = output_of(other, inputs, rows)
    other.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output_of(loaded, inputs, rows), expected)
    assert not any("gnomon" in name for name, _ in loaded.named_parameters())


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kinds", [["c2p", "p2c"], ["c2p"]], ids="+".join)
def test_another_similarity_beside_disentangled_positions(kinds, shares):
    """The similarity's per-head scores replace q . k; the position scores remain."""
    torch.manual_seed(0)
    model = transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            vocab_size=61, relative_attention=True, position_buckets=8, max_relative_positions=16,
            pos_att_type=kinds, share_att_key=shares,
        )
    )  # fmt: skip
    integration.with_cone_attention(model.eval(), "laplacian")
    layer = model.encoder.layer[0].attention
    part = layer.self
    learned = part.gnomon_similarity
    torch.nn.init.normal_(learned.gamma_theta, std=0.1)
    leaves = [learned.gamma_theta, part.query_proj.weight, part.key_proj.weight]
    x = torch.randn(2, 13, 32)
    seen = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    seen[1, ..., 9:] = False
    embeddings = model.encoder.get_rel_embedding()
    ours, _ = layer(x, seen, rel_embeddings=embeddings)

    q, k, v = (
        part.transpose_for_scores(project(x), 4)
        for project in (part.query_proj, part.key_proj, part.value_proj)
    )
    scale_factor = 1 + len(kinds)
    bias = part.disentangled_attention_bias(q, k, None, embeddings, scale_factor)
    if len(kinds) < 2:
        # A layer without position-to-content scores scales its keys first.
        k = k / (8 * scale_factor) ** 0.5
    gamma = learned.gamma_start * (5 * learned.gamma_theta).exp()
    scores = (bias - torch.cdist(q, k) * gamma.repeat(2)[:, None, None]).view(2, 4, 13, 13)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    o = (weights.view(8, 13, 13) @ v).view(2, 4, 13, 8).transpose(1, 2).flatten(2)
    theirs = layer.output(o, x)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for mine, expected in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", GENERATORS)
def test_cones_generate(family):
    model = integration.with_cone_attention(eager(family))
    sequences, logits = generate(model, family)
    found, its_logits = generate(model, family, use_cache=False)
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("similarity", ["penumbral", "umbral", "hyperbolic", "laplacian", "dot"])
def test_rotations_leave_heights(similarity):
    model = integration.with_cone_attention(eager("llama"), similarity)
    ids = inputs_of("llama")[0]["input_ids"]
    places = torch.arange(13).expand(3, -1)
    here, there = (model(ids, position_ids=places + shift).logits for shift in (0, 9))
    torch.testing.assert_close(here, there, atol=5e-5, rtol=5e-5)
    if similarity == "dot":
        expected = eager("llama")(ids).logits
        torch.testing.assert_close(here, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("similarity", "has_height"),
    [
        ("hyperbolic", True),
        ("hyperbolic:map=exp", False),
        ("hyperbolic:model=half_space", True),
        ("hyperbolic:model=ball", False),
        ("hyperbolic:model=klein", False),
        ("entailment", False),
        ("umbral:map=exp", True),
    ],
)
def test_similarities_with_a_height(similarity, has_height):
    """As in gnomon.nn: without a height, every pair of coordinates is rotated."""
    layer = integration.with_cone_attention(eager("llama"), similarity).model.layers[0].self_attn
    assert layer.gnomon_similarity.height == (-1 if has_height else None)
    cos, sin = torch.rand(2, 1, 5, 4).repeat(1, 1, 1, 2)
    _, kwargs = _cones._keep_heights((), layer, (), {"position_embeddings": (cos, sin)})
    kept = kwargs["position_embeddings"][0]
    assert torch.equal(kept, cos) != has_height


def test_the_height_moves_if_it_is_rotated():
    model = integration.with_cone_attention(eager("llama"))
    ids = inputs_of("llama")[0]["input_ids"]
    places = torch.arange(13).expand(3, -1)
    for layer in model.modules():
        layer._forward_pre_hooks.clear()
    here, there = (model(ids, position_ids=places + shift).logits for shift in (0, 900))
    assert not torch.allclose(here, there, atol=1e-4)


def test_heads_that_are_rotated_in_part_or_otherwise():
    ids = inputs_of("llama")[0]["input_ids"]
    places = torch.arange(13).expand(3, -1)
    config = transformers.GPTNeoXConfig(**SIZES, intermediate_size=48, rotary_pct=0.5)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    integration.with_cone_attention(model)
    here, there = (model(ids, position_ids=places + shift).logits for shift in (0, 9))
    torch.testing.assert_close(here, there, atol=5e-5, rtol=5e-5)


def rotates_no_height(model, ids, height=-1):
    """Whether coordinate -1 or 0 of the queries is the same for equal tokens at all positions."""
    found = []
    attend = _cones_attend = _terms.attention

    def watch(q, k, v, **options):
        found.append((q, k))
        return attend(q, k, v, **options)

    _terms.attention = watch
    try:
        with torch.no_grad():
            model(torch.full_like(ids, 7))
    finally:
        _terms.attention = _cones_attend
    # This checks the first layer, because its tokens have no other position information.
    return all(
        torch.allclose(x[..., height], x[..., :1, height].expand_as(x[..., height]), atol=1e-5)
        for x in found[0]
    )


ROTATING = {
    # The columns of a pair are adjacent.
    "cohere": lambda: transformers.CohereConfig(**SIZES, pad_token_id=0),
    "glm": lambda: transformers.GlmConfig(
        **SIZES,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
    # The pairs are complex numbers.
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        pad_token_id=0,
        use_qk_norm=False,
    ),
    # A submodule of the layer rotates the tokens.
    "kyutai": lambda: transformers.KyutaiSpeechToTextConfig(
        **SIZES,
        ffn_dim=48,
        num_key_value_heads=4,
        head_dim=8,
        codebook_vocab_size=61,
        num_codebooks=2,
        audio_bos_token_id=3,
        audio_pad_token_id=4,
        pad_token_id=0,
    ),
    # Entire heads are rotated, in adjacent pairs (before transformers 5.24, by a rotation layer of
    # the model).
    "gptj": lambda: transformers.GPTJConfig(**SIZES, **TOKENS, rotary_dim=8),
    "codegen": lambda: transformers.CodeGenConfig(**SIZES, **TOKENS, rotary_dim=8),
    # The tables of cosines and sines have one number per pair.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # Only the end of each head is rotated.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        pad_token_id=0,
    ),
}


@pytest.mark.parametrize("kind", ROTATING)
def test_other_rotations_leave_heights(kind):
    if kind in ("gptj", "codegen") and _versions.release_of(transformers.__version__) < (5, 24):
        pytest.skip("its layers apply the rotation themselves")
    torch.manual_seed(0)
    config = ROTATING[kind]()
    ids = inputs_of("llama")[0]["input_ids"]
    if kind == "kyutai":
        model = transformers.KyutaiSpeechToTextModel(config).eval()
        ids = ids[..., None].repeat(1, 1, 3)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    integration.use_gnomon(model)
    assert not rotates_no_height(model, ids)
    integration.with_cone_attention(model)
    assert rotates_no_height(model, ids)
    # A similarity with the height first.
    layers = [layer for layer in model.modules() if hasattr(layer, SIMILARITY)]
    assert layers
    for layer in layers:
        getattr(layer, SIMILARITY).height = 0
    assert rotates_no_height(model, ids, height=0)
    # Without a height, everything is rotated.
    integration.with_cone_attention(model, "laplacian")
    assert not rotates_no_height(model, ids)


def half_rotated(kind):
    """Models that rotate half of each head, with cosines repeated for both columns of a pair."""
    if kind == "gpt_neox_japanese":
        return transformers.GPTNeoXJapaneseConfig(**SIZES, rotary_pct=0.5)
    config = ROTATING["deepseek_v3"]()
    config.qk_nope_head_dim = config.qk_rope_head_dim
    config.qk_head_dim = 2 * config.qk_rope_head_dim
    return config


@pytest.mark.parametrize("kind", ["gpt_neox_japanese", "deepseek_v3"])
def test_rotations_of_half_a_head_stay_rotations(kind, monkeypatch):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(half_rotated(kind)).eval()
    integration.with_cone_attention(model)
    module = sys.modules[type(model).__module__]
    seen = []

    def watch(rotate, q, k, *arguments, **options):
        rotated = rotate(q, k, *arguments, **options)
        seen.extend(zip((q, k), rotated, strict=True))
        return rotated

    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, functools.partial(watch, getattr(module, name)))
    model(input_ids=inputs_of("llama")[0]["input_ids"], use_cache=False)
    assert seen
    for before, after in seen:
        torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1))
        assert not torch.allclose(after, before, atol=1e-3)
        # If the first half of a head is rotated, the height is in the other half.
        if kind == "deepseek_v3":
            assert torch.equal(after[..., -1], before[..., -1])


def test_rotations_of_all_heads_together_leave_each_height():
    """EfficientLoFTR rotates adjacent pairs before splitting the heads."""
    layer = torch.nn.Module()
    layer.num_heads, layer.head_dim = 3, 4
    cos, sin = (torch.rand(2, 5, 6).repeat_interleave(2, -1) for _ in range(2))
    for height, pair, other in ((-1, slice(2, 4), slice(2)), (0, slice(2), slice(2, 4))):
        kept, _ = _cones._without_height(layer, (cos, sin), height)
        per_head = kept.unflatten(-1, (3, 4))
        assert (per_head[..., pair] == 1).all()
        assert torch.equal(per_head[..., other], cos.unflatten(-1, (3, 4))[..., other])
    cos, sin = (torch.rand(2, 5, 6).repeat(1, 1, 2) for _ in range(2))
    with pytest.raises(NotImplementedError, match="uses an unknown rotation layout"):
        _cones._without_height(layer, (cos, sin), -1)


@pytest.mark.parametrize("family", mostly_long(["glm", "llama", "cohere"]))
def test_a_graph_leaves_heights(family):
    config = FAMILIES["llama"]().config if family == "llama" else ROTATING[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    integration.with_cone_attention(model)
    ids = inputs_of("llama")[0]["input_ids"]
    expected = model(input_ids=ids, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("family", "similarity"),
    mostly_long([("t5", "penumbral"), ("bloom", "penumbral"), ("mpt", "laplacian")]),
)
def test_a_graph_of_cones_where_positions_are_terms(family, similarity):
    model = integration.with_cone_attention(eager(family), similarity)
    inputs, rows = inputs_of(family)
    inputs["use_cache"] = False
    expected = output_of(model, inputs, rows)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(output_of(compiled, inputs, rows), expected, atol=1e-5, rtol=1e-5)


class TurningAttention(torch.nn.Module):
    """Rotates tokens itself, like GPT-J before transformers 5.24."""

    def forward(self, q, k):
        return apply_rotary_pos_emb(q), apply_rotary_pos_emb(k)  # noqa: F821


def test_rotations_by_the_layer_itself_are_refused():
    with pytest.raises(
        NotImplementedError, match=("TurningAttention rotates queries and keys itself")
    ):
        _cones.check_rotation(TurningAttention())


def test_cones_of_one_layer():
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8
    )
    model = transformers.LlamaModel(config)
    integration.with_cone_attention(model, "penumbral:score=height2")
    learned = model.layers[0].self_attn.gnomon_similarity
    module = gnomon.nn.MultiheadAttention(32, 4, similarity="penumbral:score=height2")
    torch.testing.assert_close(learned.gamma_start, module.gamma_start)
    assert learned.gamma_theta.shape == (4,)
    assert "height2" in repr(learned)
    # An equivalent specification, and a fixed number.
    integration.with_cone_attention(model, "penumbral:gamma=learned")
    ids = torch.ones(1, 5, dtype=torch.int64)
    before = model(ids).last_hidden_state
    start = float(model.layers[0].self_attn.gnomon_similarity.gamma_start)
    integration.with_cone_attention(model, f"penumbral:gamma={start}")
    assert not list(model.layers[0].self_attn.gnomon_similarity.parameters())
    torch.testing.assert_close(model(ids).last_hidden_state, before)
    integration.with_cone_attention(model, "penumbral:gamma=fixed")
    assert not list(model.layers[0].self_attn.gnomon_similarity.parameters())
    torch.testing.assert_close(model(ids).last_hidden_state, before)
    # Replacing the similarity again must not add a second hook.
    integration.with_cone_attention(model, "hyperbolic")
    assert model.layers[0].self_attn.gnomon_similarity.beta_theta.shape == (4,)
    assert len(model.layers[0].self_attn._forward_pre_hooks) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_similarity_has_the_values_of_a_module(dtype):
    """Parameters are learned, even if a layer's queries have a wider dtype than its parameters."""
    spec = "lorentz:c=learned:bias=0.5"
    its = LearnedSimilarity(spec, 4, 8).to(torch.get_default_device(), dtype)
    module = gnomon.nn.MultiheadAttention(32, 4, similarity=spec)
    assert its.state_dict().keys() == {"scale_start", "scale_theta", "c_theta"}
    for part in (its.scale_theta, its.c_theta):
        torch.nn.init.normal_(part, std=0.1)
    module.load_state_dict(its.state_dict(), strict=False)
    for wide in (torch.float32, dtype, torch.float64):
        term = its(torch.zeros(2, 4, 3, 8, dtype=wide))
        assert term.spec == "lorentz:c=tensor:bias=0.5:scale=tensor"
        learned = module.learned_values()
        for value, name in zip(term.tensors, ("scale", "c"), strict=True):
            assert value.dtype == (torch.float64 if wide == torch.float64 else torch.float32)
            torch.testing.assert_close(value.float(), learned[name].value)
    sum(value.sum() for value in term.tensors).backward()
    assert its.scale_theta.grad.abs().min() > 0
    assert its.c_theta.grad.abs().min() > 0
    fixed = LearnedSimilarity("umbral:gamma=fixed", 4, 8)
    (gamma,) = fixed(torch.zeros(1, 4, 1, 8)).tensors
    torch.testing.assert_close(gamma, fixed.gamma_start.expand(4))


def test_similarities_that_are_refused():
    with pytest.raises(ValueError, match="nonsense"):
        integration.with_cone_attention(eager("llama"), "nonsense")
    with pytest.raises(TypeError, match="similarity is an int"):
        integration.with_cone_attention(eager("llama"), 3)


@pytest.mark.parametrize(
    "similarity", ["lorentz:map=none", "hyperbolic:model=ball:map=none", "umbral:map=none"]
)
def test_tokens_are_no_points(similarity):
    model = eager("llama")
    with pytest.raises(
        ValueError, match=("map=none expects queries and keys that are already points")
    ):
        integration.with_cone_attention(model, similarity)
    assert model.config._attn_implementation == "eager"
    name = similarity.split(":")[0]
    integration.with_cone_attention(model, name)
    assert model.config.gnomon_similarity == name


# Positions and sinks combined with the similarity.


def alibi_array(heads, length):
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    return -gnomon.alibi_slopes(heads)[:, None, None] * distance


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "t5"])
def test_a_position_is_added_to_those_of_a_model(family):
    """Compares with eager attention whose mask is an array of biases."""
    theirs, ours = both(family)
    integration.with_attention(ours, position="alibi")
    inputs, _ = inputs_of(family)
    bias = alibi_array(4, 13)[None]
    if family in ("llama", "gpt2"):
        bias = bias + as_added(torch.ones(13, 13, dtype=torch.bool).tril())
    if family == "t5":
        # This compares only the encoder, because the decoder's cross-attention has no position.
        theirs, ours = theirs.encoder, ours.encoder
        inputs.pop("decoder_input_ids")
    expected = output_of(theirs, inputs | {"attention_mask": bias}, ...)
    torch.testing.assert_close(output_of(ours, inputs, ...), expected, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(expected, output_of(theirs, inputs, ...), atol=1e-3)


@pytest.mark.parametrize("position", ["alibi+sink", "t5", "hype:tau=learned", "relative", "rope"])
@pytest.mark.parametrize("similarity", [None, "penumbral"])
def test_positions_train_generate_and_are_saved(position, similarity, tmp_path):
    model = integration.with_attention(eager("llama"), similarity, position)
    learned = [p for n, p in model.named_parameters() if "gnomon_position" in n]
    assert bool(learned) == (position not in ("alibi", "rope"))
    for parameter in learned:
        torch.nn.init.normal_(parameter, std=0.2)
    sequences, logits = generate(model, "llama")
    found, its_logits = generate(model, "llama", use_cache=False)
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)
    inputs, rows = inputs_of("llama", "left")
    out = output_of(model, inputs, rows)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learned)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.gnomon_position == position
    assert getattr(again.config, "gnomon_similarity", None) == similarity
    torch.testing.assert_close(output_of(again, inputs, rows), out, atol=0, rtol=0)
    with pytest.raises(ValueError, match="has terms that with_attention added"):
        integration.use_eager(again)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_positions_with_a_static_cache(family):
    """The masks are longer than the current tokens, and determine the positions of the queries."""
    model = integration.with_attention(eager(family), position="t5+sink")
    for name, parameter in model.named_parameters():
        if "gnomon_position" in name or "relative_attention_bias" in name:
            # With a sink, the weights matter even if all tokens are equal.
            torch.nn.init.normal_(parameter)
    sequences, logits = generate(model, family)
    found, its_logits = generate(model, family, cache_implementation="static")
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)


def test_sinks_of_positions():
    model = integration.with_attention(eager("llama"), position=["sink"])
    layer = model.model.layers[0].self_attn
    score = layer.gnomon_position.sink_score
    torch.nn.init.normal_(score)
    q, k, v, o = attend_with(layer)
    scores = torch.cat([q @ k.mT / 8**0.5, score.view(4, 1, 1).expand(2, 4, 5, 1)], -1)
    torch.testing.assert_close(o, scores.softmax(-1)[..., :-1] @ v)


def test_layers_that_attend_to_an_encoder_get_no_position():
    model = integration.with_attention(eager("bart"), "laplacian", "alibi")
    with_positions, without = set(), set()
    for name, layer in model.named_modules():
        if hasattr(layer, SIMILARITY):
            (with_positions if hasattr(layer, POSITION) else without).add(name.split(".")[-1])
    assert with_positions == {"self_attn"}
    assert without == {"encoder_attn"}
    sequences, logits = generate(model, "bart")
    found, its_logits = generate(model, "bart", use_cache=False)
    assert torch.equal(found, sequences)
    torch.testing.assert_close(its_logits, logits, atol=5e-5, rtol=5e-5)


def test_a_similarity_and_a_position_by_and_by():
    model = eager("llama")
    inputs, rows = inputs_of("llama")
    whole = integration.with_attention(copy.deepcopy(model), "laplacian", "alibi")
    integration.with_attention(model, position="alibi")
    integration.with_attention(model, "laplacian")
    torch.testing.assert_close(output_of(model, inputs, rows), output_of(whole, inputs, rows))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs["use_cache"] = False
    torch.testing.assert_close(output_of(compiled, inputs, rows), output_of(whole, inputs, rows))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "neither a similarity nor a position is given"),
        ({"position": 3}, TypeError, "position is an int"),
        ({"position": ["alibi", 3]}, TypeError, "position is a list"),
        ({"position": "sinusoidal"}, NotImplementedError, "'sinusoidal' is added to the embedd"),
        ({"position": "forget"}, NotImplementedError, "'forget' projects the tokens of a layer"),
        ({"position": "nonsense"}, ValueError, "nonsense"),
        ({"similarity": 3}, TypeError, "similarity is an int"),
    ],
)
def test_positions_that_are_refused(arguments, error, match):
    model = eager("llama")
    with pytest.raises(error, match=match):
        integration.with_attention(model, **arguments)
    assert model.config._attn_implementation == "eager"
    assert not any("gnomon" in name for name, _ in model.named_modules())


# The package itself.


def test_the_tested_range_matches_pages_and_requirements():
    oldest, newest = _versions.OLDEST_NAME, _versions.NEWEST_NAME
    root = Path(__file__).resolve().parents[2]
    (page,) = root.glob("docs/**/huggingface.md")
    assert f"transformers {oldest} to {newest}" in page.read_text()
    assert f'transformers = ["transformers>={oldest}"]' in (root / "pyproject.toml").read_text()
    assert f"\ntransformers=={newest}." in (root / "requirements-test.txt").read_text()
    assert _versions.OLDEST <= _versions.release_of(transformers.__version__) <= _versions.NEWEST


def test_a_newer_release_is_warned_of(monkeypatch):
    name = "gnomon.integrations.transformers"
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0.dev0")
    monkeypatch.delitem(sys.modules, name)
    with pytest.warns(
        UserWarning,
        match=r"transformers 5.99.0.dev0 is installed, but .* tested only with 5.\d+ to 5.\d+",
    ):
        importlib.import_module(name)


@pytest.mark.parametrize("version", [None, "4.57.1"])
def test_the_package_is_named(version, monkeypatch):
    name = "gnomon.integrations.transformers"
    monkeypatch.delitem(sys.modules, name)
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        # transformers replaces itself in sys.modules.
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers.*{version or 'pip install'}"):
        importlib.import_module(name)
