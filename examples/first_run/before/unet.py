"""A diffusion model: a UNet of diffusers with a condition."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel


def train(unet, scheduler, steps=3):
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    for step in range(steps):
        latents, noise, text = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16), torch.randn(2, 20, 32)
        times = torch.randint(1000, (2,))
        found = unet(scheduler.add_noise(latents, noise, times), times, encoder_hidden_states=text).sample
        loss = F.mse_loss(found, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=16,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=8,
    norm_num_groups=8,
)
unet.train()
unet.enable_gradient_checkpointing()
train(unet, DDPMScheduler())
