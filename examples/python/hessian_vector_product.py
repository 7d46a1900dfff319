"""The sharpness of a language model's loss, from Hessian-vector products.

The sharpness is the largest absolute value of the eigenvalues of the Hessian of the loss with
respect to all parameters. Power iteration finds it without computing the Hessian. Each training
text repeats a random word.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

import gnomon

VOCABULARY, DIM, HEADS, LENGTH, PERIOD = 12, 32, 4, 48, 6
Tensors = dict[str, Tensor]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.out = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, L, VOCABULARY) for tokens (B, L)."""
        x = self.embedding(tokens)
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, HEADS, L, DIM / HEADS)
        o = gnomon.attention(q, k, v, position="alibi", causal=True)
        x = x + o.transpose(1, 2).flatten(2)
        return self.out(x + self.mlp(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Callable[[Tensors], Tensor]:
    """Returns the mean next-token loss as a function of the model's parameters."""

    def loss(parameters: Tensors) -> Tensor:
        logits = functional_call(model, parameters, (tokens[:, :-1],))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def hessian_vector_product(
    loss: Callable[[Tensors], Tensor], parameters: Tensors, vector: Tensors
) -> Tensors:
    return jvp(grad(loss), (parameters,), (vector,))[1]


def sharpness(loss: Callable[[Tensors], Tensor], parameters: Tensors, steps: int = 20) -> float:
    """Returns the largest absolute value of the Hessian's eigenvalues."""
    vector = {name: torch.randn_like(x) for name, x in parameters.items()}
    size = 1.0
    for _ in range(steps):
        size = sum(float(x.square().sum()) for x in vector.values()) ** 0.5
        vector = {name: x / size for name, x in vector.items()}
        vector = hessian_vector_product(loss, parameters, vector)
    return size


def draw(count: int) -> Tensor:
    words = torch.randint(VOCABULARY, (count, PERIOD))
    return words.repeat(1, LENGTH // PERIOD)


def main() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    held_out = draw(16)
    for step in range(101):
        if step % 50 == 0:
            parameters = {name: x.detach() for name, x in model.named_parameters()}
            loss = loss_of(model, held_out)
            print(
                f"step {step:3}: loss {loss(parameters):.3f}, "
                f"sharpness {sharpness(loss, parameters):.3f}",
                flush=True,
            )
        optimizer.zero_grad()
        loss_of(model, draw(32))(dict(model.named_parameters())).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
