"""A vision transformer of timm."""

import timm
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=128, depth=4, num_heads=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()
for step in range(3):
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(1000, (8,))
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
