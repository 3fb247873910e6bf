"""Trains a small diffusion transformer as a script of diffusers' users does,
with diffusers' own checkpointing."""

import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, DiTTransformer2DModel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=4, num_layers=3, sample_size=16, norm_num_groups=1
    )
    model.train()
    model.enable_gradient_checkpointing()
    scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(args.steps):
        latents, noise = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16)
        times, labels = torch.randint(1000, (2,)), torch.randint(1000, (2,))
        found = model(scheduler.add_noise(latents, noise, times), timestep=times, class_labels=labels).sample
        loss = F.mse_loss(found, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save({"losses": losses, "weights": model.state_dict()}, args.save)


if __name__ == "__main__":
    main()
