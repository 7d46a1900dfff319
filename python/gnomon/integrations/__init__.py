"""Integrations with PyTorch, timm, transformers, FlexAttention and ONNX.

gnomon.integrations.transformers requires the transformers package. gnomon itself does not.
"""

from gnomon.integrations._replace import replace_attention

__all__ = ["replace_attention"]
