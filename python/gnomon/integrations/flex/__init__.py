"""FlexAttention's masks as arguments of gnomon.attention.

``flex_attention`` takes the arguments of torch.nn.attention.flex_attention.flex_attention;
``mask_arguments`` finds what a BlockMask or a mask_mod is in gnomon: causal, a window, lengths,
segments, or an array of booleans for any other.
"""

from gnomon._names import publish
from gnomon.integrations.flex._flex import flex_attention, mask_arguments

__all__ = ["flex_attention", "mask_arguments"]

publish(__name__, __all__)
