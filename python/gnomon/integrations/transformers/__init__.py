"""gnomon as an attention implementation of Hugging Face's transformers.

    from gnomon.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="gnomon")

Models are supported in one of three ways:

- Their layers call transformers' AttentionInterface: Llama, Mistral, Qwen, GPT-2, BERT, ViT, Bart
    and others. They keep their rotary positions, attention sinks (GPT-OSS) and soft caps (Gemma 2).
- gnomon replaces the forward of their layers, so that biases need no L x L array: T5 and MT5
    (learned buckets), BLOOM and MPT (ALiBi), DeBERTa v2 and v3 and SEW-D (disentangled attention),
    and Swin (tables over shifted windows).
- gnomon intercepts their modules while they run. These modules compute softmax(q k^T ...) v
    themselves (GPT-J, GPT-Neo, CodeGen, Falcon, the first DeBERTa and others), or call PyTorch's
    scaled_dot_product_attention or multi_head_attention_forward (WavLM,
    torch.nn.MultiheadAttention).

transformers' masks become the arguments causal, window, key_starts, key_lengths, segments and
query_offset, without an L x L array. If a mask is an L x L array, its values are inspected: causal
masks and windows, with or without padding, become these arguments, and any other mask is used as an
array. If a layer selects keys for each query (DeepSeek V3.2), the selection becomes a mask. Bias
arrays (BEiT, Swin v2, UMT5) remain arrays and receive gradients. Layers that test whether their
mask is an array and append to it (DeepSeek V4) receive an array. A Boolean mask hides keys, as in
SDPA, whereas eager attention adds it to the scores (Grounding DINO). Dropout is applied in
training.

output_attentions, paged caches, and unknown arguments of a layer's own eager implementation raise
NotImplementedError. Attention modules (by class name) that gnomon does not recognise are left
unchanged, with a warning. If all keys are masked for a query (left padding), the output is 0,
whereas the eager implementation returns the mean of all values.

torch.compile traces models that use the interface as one graph (fullgraph=True). Array values
cannot be inspected during tracing, so segments hide the padding, and array masks remain arrays.
Intercepted modules cause graph breaks.
"""

import warnings

from gnomon.integrations.transformers._versions import (
    NEWEST,
    NEWEST_NAME,
    OLDEST,
    OLDEST_NAME,
    release_of,
)

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"gnomon.integrations.transformers requires transformers {OLDEST_NAME} or newer; run: "
        f"pip install 'transformers>={OLDEST_NAME}'"
    ) from error

# In older releases, attention layers have a different signature.
if release_of(transformers.__version__) < OLDEST:
    raise ImportError(
        f"gnomon.integrations.transformers: transformers is {transformers.__version__}; "
        f"expected {OLDEST_NAME} or newer"
    )
if release_of(transformers.__version__) > NEWEST:
    warnings.warn(
        f"gnomon.integrations.transformers: transformers {transformers.__version__} is installed, "
        f"but gnomon was tested only with {OLDEST_NAME} to {NEWEST_NAME}. Compare your model's "
        "outputs before and after use_gnomon()",
        stacklevel=2,
    )

from gnomon.integrations.transformers._adapters import NAME
from gnomon.integrations.transformers._switch import (
    register,
    use_eager,
    use_gnomon,
    with_attention,
    with_cone_attention,
)

__all__ = ["NAME", "register", "use_eager", "use_gnomon", "with_attention", "with_cone_attention"]
