"""Models of other libraries: replace_attention for torch.nn and timm, and a module for each other.

gnomon.integrations.transformers needs the package that it is named after; gnomon needs none.
"""

from gnomon.integrations._replace import replace_attention

__all__ = ["replace_attention"]
