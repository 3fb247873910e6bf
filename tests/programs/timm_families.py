"""Families of timm under their own checkpointing,
under gradckpt.patched and with chosen modules, as JSON."""

import copy
import json
import re

import timm
import torch
import torch.nn.functional as F

import gradckpt

#: name -> (keywords, side of the images, the blocks that timm checkpoints)
FAMILIES = {
    "vit_tiny_patch16_224": (
        {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 128, "num_heads": 4},
        32,
        r"blocks\.\d+",
    ),
    "convnext_atto": ({"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64)}, 64, r"stages\.\d+\.blocks\.\d+"),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 32, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
        32,
        r"layers\.\d+\.blocks\.\d+",
    ),
    "test_resnet": ({}, 64, r"layer\d\.\d+"),
    "test_efficientnet": ({}, 64, r"blocks\.\d+\.\d+"),
    "gmixer_12_224": ({"img_size": 64}, 64, r"blocks\.\d+"),
}


def step(model, x, y):
    torch.manual_seed(5)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def error(found, exact):
    a, b = (torch.cat([g[name].flatten() for name in exact]) for g in (found, exact))
    return ((a - b).norm() / b.norm()).item()


def measure(name):
    keywords, side, blocks = FAMILIES[name]
    torch.manual_seed(0)
    plain = timm.create_model(name, pretrained=False, num_classes=10, **keywords).train()
    with torch.no_grad():
        for p in plain.parameters():  # some begin with zeros, behind which nothing has a gradient
            p.add_(torch.randn_like(p), alpha=0.02)
    stock, none, int8, applied = (copy.deepcopy(plain) for _ in range(4))
    x, y = torch.randn(8, 3, side, side), torch.arange(8)
    for model in (stock, none, int8):
        model.set_grad_checkpointing()
    plain_loss, plain_gradients, plain_buffers = step(plain, x, y)
    stock_loss, stock_gradients, stock_buffers = step(stock, x, y)
    with gradckpt.patched(None) as handle:
        none_loss, none_gradients, none_buffers = step(none, x, y)
        regions = handle.stats()["calls"]
    with gradckpt.patched("int8") as handle:
        int8_loss, int8_gradients, _ = step(int8, x, y)
        stats = handle.stats()
    with gradckpt.enable(applied, modules=re.compile(blocks)) as handle:
        applied_loss, applied_gradients, applied_buffers = step(applied, x, y)
        chosen = len(handle.modules)
    return {
        "stock is plain": equal(stock_gradients, plain_gradients),
        "None is stock": torch.equal(none_loss, stock_loss) and equal(none_gradients, stock_gradients),
        "buffers under None are those of stock": equal(none_buffers, stock_buffers),
        "buffers under apply are those of plain": equal(applied_buffers, plain_buffers),
        "losses are plain": plain_loss == int8_loss == applied_loss,
        "calls": regions,
        "modules under apply": chosen,
        "compressed": stats["compressed"],
        "ratio": stats["ratio"],
        "error": error(int8_gradients, stock_gradients),
        "apply as patched": error(applied_gradients, int8_gradients),
    }


def chosen():
    """The modules that gradckpt.enable chooses by itself."""
    model = timm.create_model("test_vit", pretrained=False)
    return list(gradckpt.enable(model).modules)


if __name__ == "__main__":
    print(json.dumps({**{name: measure(name) for name in FAMILIES}, "enable": chosen()}, default=bool))
