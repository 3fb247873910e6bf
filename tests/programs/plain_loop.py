"""A small GPT on the bytes of a file: a loop as in many public training scripts,
with torch's checkpointing."""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=64, depth=4, heads=4, context=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids, reentrant):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--reentrant", choices=["yes", "no", "unsaid"], default="no")
    parser.add_argument("--save", required=True)
    args = parser.parse_args()
    reentrant = {"yes": True, "no": False, "unsaid": None}[args.reentrant]

    torch.manual_seed(0)
    model = GPT().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    losses, first = [], {}
    for step in range(args.steps):
        starts = torch.randint(len(data) - 65, (8,))
        batch = torch.stack([data[i : i + 65] for i in starts])
        loss = F.cross_entropy(model(batch[:, :-1], reentrant).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    torch.save({"losses": losses, "gradients": first, "weights": model.state_dict()}, args.save)


if __name__ == "__main__":
    main()
