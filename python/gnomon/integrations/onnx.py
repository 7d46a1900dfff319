"""Export to ONNX: torch.onnx.export() writes gnomon's attention as standard ONNX operators. ::

    torch.onnx.export(model.eval(), (x,), "model.onnx")

Exporting requires the packages onnx and onnxscript. The exported file computes attention with
matrix products and a softmax over an L x L array, so its memory is quadratic in the length. The
docstring of plain() lists the supported terms.
"""

from __future__ import annotations

import torch

from gnomon._plain import plain_program

__all__ = ["plain"]


def plain(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replaces gnomon's operators in a torch.export.export() program with PyTorch operators.

    Use it before torch.onnx.export(), or for compilers that do not know gnomon's operators.
    Attention becomes matrix products, comparisons and a softmax over an L x L array. The supported
    similarities are dot, laplacian, gaussian, additive, hyperbolic and lorentz. The supported
    positions are rotations, and offset, key and pair biases. All masks are supported. ::

        program = torch.export.export(model.eval(), (x,))
        torch.onnx.export(gnomon.integrations.onnx.plain(program), f="model.onnx")

    Args:
        program: the exported program of a model in evaluation mode, without dropout.

    Raises:
        NotImplementedError: the program contains a similarity not listed above, relative keys or
            values, a grid bias, dropout, or a gnomon operator other than attention.

    Example:
        >>> module = gnomon.nn.MultiheadAttention(64, 4, position="alibi").eval()
        >>> x = torch.randn(2, 16, 64)
        >>> program = torch.export.export(module, (x,))  # doctest: +SKIP
        >>> program = gnomon.integrations.onnx.plain(program)  # doctest: +SKIP
    """
    return plain_program(program)
