"""A mean-flow loss (Geng et al. 2025) on a small diffusion transformer, and one-step sampling.

The model predicts the mean velocity u(z, r, t) of the path from time t to time r. Its target
contains du/dt along the path, which one call of torch.func.jvp computes together with u. In each
image, one of the four quadrants is bright.
"""

import torch
from torch import Tensor, nn
from torch.func import jvp

import gnomon

SIZE, PATCH, DIM, HEADS, CLASSES = 8, 2, 64, 4, 4


class Attention(nn.Module):
    """Self-attention with scores -gamma_h |q - k|^2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.gamma = nn.Parameter(torch.full((HEADS,), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, L, DIM) to the same shape."""
        qkv = self.qkv(x).unflatten(2, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, HEADS, L, DIM / HEADS)
        o = gnomon.attention(q, k, v, similarity=gnomon.similarity.Gaussian(self.gamma))
        return self.out(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block that scales and shifts normalised tokens by functions of time (adaLN)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM, elementwise_affine=False) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.modulation = nn.Linear(DIM, 4 * DIM)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Maps x (B, L, DIM), with embedded times (B, DIM), to the same shape."""
        scale, shift, mlp_scale, mlp_shift = self.modulation(times)[:, None].chunk(4, 2)
        x = x + self.attention(self.norms[0](x) * (1 + scale) + shift)
        return x + self.mlp(self.norms[1](x) * (1 + mlp_scale) + mlp_shift)


class DiffusionTransformer(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH**2, DIM)
        self.places = nn.Parameter(0.3 * torch.randn((SIZE // PATCH) ** 2, DIM))
        self.times = nn.Sequential(nn.Linear(2, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(DIM, PATCH**2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Returns the mean velocity (B, SIZE, SIZE) of images z between the times r and t (B,)."""
        patches = nn.functional.unfold(z[:, None], PATCH, stride=PATCH).transpose(1, 2)
        x = self.embed(patches) + self.places
        times = self.times(torch.stack([t, t - r], 1))
        for block in self.blocks:
            x = block(x, times)
        patches = self.out(x).transpose(1, 2)
        return nn.functional.fold(patches, SIZE, PATCH, stride=PATCH)[:, 0]


def mean_flow_loss(model: nn.Module, x: Tensor, noise: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """Returns the loss for images x and noise of the same shape, with times r <= t (B,).

    As in the paper, each image is weighted by the inverse of its error.
    """
    z = torch.lerp(x, noise, t[:, None, None])
    velocity = noise - x
    u, u_tangent = jvp(model, (z, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
    target = velocity - (t - r)[:, None, None] * u_tangent
    errors = (u - target.detach()).square().mean((1, 2))
    return (errors / (errors.detach() + 0.1)).mean()


def quadrants() -> Tensor:
    """Returns one image per class, (CLASSES, SIZE, SIZE)."""
    images = torch.full((CLASSES, 2, SIZE // 2, 2, SIZE // 2), -1.0)
    for n in range(CLASSES):
        images[n, n // 2, :, n % 2] = 1.0
    return images.reshape(CLASSES, SIZE, SIZE)


def draw(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns images, noise and times r <= t; half of the pairs have r = t, as in flow matching."""
    x = quadrants()[torch.randint(CLASSES, (count,))]
    times = torch.sigmoid(torch.randn(2, count) - 0.4)
    r, t = times.amin(0), times.amax(0)
    r = torch.where(torch.rand(count) < 0.5, t, r)
    return x, torch.randn_like(x), r, t


def main() -> None:
    torch.manual_seed(0)
    model = DiffusionTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(1, 201):
        loss = mean_flow_loss(model, *draw(64))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}", flush=True)
    noise = torch.randn(128, SIZE, SIZE)
    with torch.no_grad():
        samples = noise - model(noise, torch.zeros(128), torch.ones(128))  # one step
    distances = (samples[:, None] - quadrants()).square().mean((2, 3))
    share = distances.argmin(1).bincount(minlength=CLASSES).double() / len(samples)
    print(f"mean squared distance to the nearest image: {distances.amin(1).mean():.3f}")
    print(f"share of each image: {[round(n, 2) for n in share.tolist()]}")


if __name__ == "__main__":
    main()
