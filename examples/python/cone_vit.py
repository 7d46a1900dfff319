"""Cone attention in a timm-style vision transformer block.

The images are noise with a bright square. The class is the quadrant that contains the square.
"""

import torch
from torch import Tensor, nn

import gnomon

SIZE, PATCH, DIM, HEADS, CLASSES = 16, 4, 64, 4, 4


class Attention(nn.Module):
    """The attention of timm.models.vision_transformer, with penumbral cones.

    The last coordinate of each head's queries and keys is a height.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.gamma = nn.Parameter(torch.full((num_heads,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, L, dim) to the same shape."""
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, num_heads, L, dim / num_heads)
        # timm calls F.scaled_dot_product_attention(q, k, v)
        o = gnomon.attention(q, k, v, similarity=gnomon.similarity.Penumbral(self.gamma))
        return self.proj(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, DIM, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(0.3 * torch.randn(1, 1 + (SIZE // PATCH) ** 2, DIM))
        self.blocks = nn.Sequential(*[Block(DIM, HEADS) for _ in range(depth)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, CLASSES) for images (B, 1, SIZE, SIZE)."""
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Returns images (count, 1, SIZE, SIZE) and their classes (count,)."""
    images = 0.3 * torch.randn(count, 1, SIZE, SIZE)
    labels = torch.randint(CLASSES, (count,))
    half, side = SIZE // 2, SIZE // 4
    corners = torch.randint(half - side, (count, 2))
    for image, label, (row, column) in zip(images, labels.tolist(), corners.tolist(), strict=True):
        top, left = row + half * (label // 2), column + half * (label % 2)
        image[0, top : top + side, left : left + side] += 1
    return images, labels


def main() -> None:
    torch.manual_seed(0)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(1, 51):
        images, labels = draw(32)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}: loss {loss.item():.3f}")
    images, labels = draw(256)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"accuracy on new images: {100 * right:.0f}%")


if __name__ == "__main__":
    main()
