"""gnomon as an attention implementation of Hugging Face's transformers.

    from gnomon.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="gnomon")

transformers' masks become gnomon's causal flag, window, starts and lengths of keys, segments and
offset, and no L x L array is made of them. It serves the models that attend through transformers'
AttentionInterface (Llama, Mistral, Qwen, GPT-2, BERT, ViT, Bart and others), with rotary positions,
attention sinks (GPT-OSS) and soft caps (Gemma 2) as these models have them. In T5 and MT5 (learned
buckets), BLOOM and MPT (ALiBi), DeBERTa v2 and v3 and SEW-D (disentangled attention) and Swin
(tables over shifted windows) the attention itself is replaced, and no L x L array of biases is
made. Modules that write softmax(q k^T ...) v by hand (GPT-J, GPT-Neo, CodeGen, Falcon, the first
DeBERTa and others) or call PyTorch's scaled_dot_product_attention or multi_head_attention_forward
(WavLM, torch.nn.MultiheadAttention) are watched while they run.
Keys that a layer chooses for each query (DeepSeek V3.2) become a mask. Dropout of weights is
honoured in training. A mask that is an array of all pairs is read: a band of keys beside the
queries, causal or a window, less those that no query sees, becomes that; any other is taken as the
array that it is, and so are biases that are arrays (BEiT, Swin v2, UMT5), with their gradients.
Layers that look whether their mask is an array, and append to it (DeepSeek V4), are given one. A
mask of booleans hides keys, as it does to SDPA; eager attention adds it to the scores (Grounding
DINO).

Refused, with NotImplementedError: output_attentions, paged caches, an argument of a layer's own
eager implementation that is not known here. Modules that are called attention and attend in no way
that is known stay as they are, and a warning says so. torch.compile traces models of the interface
as one graph (fullgraph=True): padding hides keys by segments there, and arrays stay arrays, since
neither is read. Its graph breaks at modules that are watched. A query that sees no key, padding on
the left, gives 0, where the eager implementation gives the mean of all values.
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
        f"gnomon.integrations.transformers: the package transformers, {OLDEST_NAME} or newer, is "
        f"needed: pip install 'transformers>={OLDEST_NAME}'"
    ) from error

# The attention of older models has other arguments.
if release_of(transformers.__version__) < OLDEST:
    raise ImportError(
        f"gnomon.integrations.transformers: transformers is {transformers.__version__}; "
        f"expected {OLDEST_NAME} or newer"
    )
if release_of(transformers.__version__) > NEWEST:
    warnings.warn(
        f"gnomon.integrations.transformers: transformers is {transformers.__version__}; tested "
        f"with {OLDEST_NAME} to {NEWEST_NAME}. Compare the outputs of your model before and after "
        "use_gnomon()",
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
