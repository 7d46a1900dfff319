"""Converts FlexAttention masks to arguments of gnomon.attention.

``flex_attention`` has the signature of torch.nn.attention.flex_attention.flex_attention.
``mask_arguments`` converts a BlockMask or a mask_mod to gnomon's arguments: causal, a window,
lengths, segments, or otherwise a Boolean array.
"""

from gnomon._names import publish
from gnomon.integrations.flex._flex import flex_attention, mask_arguments

__all__ = ["flex_attention", "mask_arguments"]

publish(__name__, __all__)
