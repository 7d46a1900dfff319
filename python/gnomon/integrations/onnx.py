"""ONNX: torch.onnx.export() writes attention of gnomon as plain operators of ONNX. ::

    torch.onnx.export(model.eval(), (x,), "model.onnx")

It needs the packages onnx and onnxscript. The file computes attention by products of matrices and
a softmax over an array of all pairs, with memory in the square of the length, and so does what
reads it. plain() says what has this form, and makes it of a program of torch.export.export().
"""

from __future__ import annotations

import torch

from gnomon._plain import plain_program

__all__ = ["plain"]


def plain(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program of torch.export.export() with attention in operators of PyTorch alone.

    For torch.onnx.export() of a program, and for other compilers. These operators are products of
    matrices, comparisons and a softmax over an array of all pairs. The similarities dot, laplacian,
    gaussian, additive, hyperbolic and lorentz have such a form, with every mask, with rotations and
    with biases by offset, key or pair. ::

        program = torch.export.export(model.eval(), (x,))
        torch.onnx.export(gnomon.integrations.onnx.plain(program), f="model.onnx")

    Args:
        program: of a model in evaluation, without dropout.

    Raises:
        NotImplementedError: another similarity, relative keys or values, a bias on a grid, dropout,
            or another operator of gnomon.
    """
    return plain_program(program)
