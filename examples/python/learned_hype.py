"""A learned HyPE bias in your own model.

The model must output the previous token at each position. Only the bias of each head h, -tau_h
sinh(mu_h (p_i - p_j)), depends on positions; tau and mu are ordinary parameters.
"""

import torch
from torch import Tensor, nn

import gnomon

VOCABULARY, DIM, HEADS, LENGTH = 16, 32, 4, 48


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, VOCABULARY)
        self.tau = nn.Parameter(torch.ones(HEADS))
        self.mu = nn.Parameter(torch.full((HEADS,), 1 / LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, L, VOCABULARY) for tokens (B, L)."""
        qkv = self.qkv(self.embedding(tokens)).unflatten(2, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, HEADS, L, DIM / HEADS)
        hype = gnomon.position.HyPE(self.tau, self.mu)
        o = gnomon.attention(q, k, v, position=hype, causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    model = Recall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    print(f"step  0: tau {[round(tau, 2) for tau in model.tau.tolist()]}")
    for step in range(1, 61):
        tokens = torch.randint(VOCABULARY, (16, LENGTH))
        logits = model(tokens)[:, 1:]
        targets = tokens[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2}: loss {loss.item():.3f}")
    print(f"learned: tau {[round(tau, 2) for tau in model.tau.tolist()]}")


if __name__ == "__main__":
    main()
