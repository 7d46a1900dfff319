"""A critic with a gradient penalty (Gulrajani et al. 2017) estimates a Wasserstein distance.

A sample is a set of points. The second distribution is the first with every coordinate shifted by a
constant, so the exact distance is the norm of that shift over all coordinates of a sample.
"""

import torch
from torch import Tensor, nn

import gnomon

POINTS, DIM, HEADS, SHIFT, WEIGHT = 8, 32, 4, 0.5, 50


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.score = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1))

    def forward(self, points: Tensor) -> Tensor:
        """Returns scores (B,) for sets of points (B, POINTS, 2)."""
        x = self.embed(points)
        qkv = self.qkv(x).unflatten(2, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, HEADS, POINTS, DIM / HEADS)
        x = x + gnomon.attention(q, k, v).transpose(1, 2).flatten(2)
        return self.score(x).sum((1, 2))


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Returns the negative distance estimate plus the penalty at lerp(real, fake, mix)."""
    between = torch.lerp(real, fake, mix[:, None, None]).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    return critic(real).mean() - critic(fake).mean() + WEIGHT * penalty


def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
    real, fake = torch.randn(2, count, POINTS, 2).unbind()
    return real, fake + SHIFT, torch.rand(count)


def main() -> None:
    torch.manual_seed(0)
    critic = Critic()
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    for step in range(1, 201):
        loss = critic_loss(critic, *draw(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}", flush=True)
    real, fake, _ = draw(1024)
    with torch.no_grad():
        estimate = (critic(fake).mean() - critic(real).mean()).item()
    print(f"distance {estimate:.3f}, exactly {SHIFT * (2 * POINTS) ** 0.5:.3f}")


if __name__ == "__main__":
    main()
