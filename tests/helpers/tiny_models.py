"""Models for the tests of chosen modules: small ones of transformers, from their configs,
and a plain one."""

import sys

import model_families
import torch
import transformers
from model_families import FAMILIES, LENGTH, VOCAB
from torch import nn

import gradckpt

WIDTH = 32
SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {**SIZES, **TEXT, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = {
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8},
}


def of_config(model, config, **fields):
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**fields))


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


#: Beside the families of model_families.py.
OTHERS = {
    "qwen2_moe": of_config(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=16, num_experts=4
    ),
    "deepseek_v3": of_config("DeepseekV3ForCausalLM", "DeepseekV3Config", **EXPERTS, **DEEPSEEK),
    "mamba": of_config("MambaForCausalLM", "MambaConfig", **TEXT, hidden_size=WIDTH, num_hidden_layers=2),
    "gpt_oss": of_config(
        *("GptOssForCausalLM", "GptOssConfig"), **SIZES, **TEXT, num_key_value_heads=2, head_dim=8, num_local_experts=4
    ),
    "torch": encoder,
}
MODELS = [*FAMILIES, *OTHERS]


def build(name):
    if name in FAMILIES:
        return model_families.build(name, "eager")
    torch.manual_seed(0)
    return OTHERS[name]().train()


def gradients(name, model):
    """The loss and the gradients of one batch, with the same random numbers each time."""
    if name in FAMILIES:
        return model_families.gradients(name, model)[:2]
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(2, LENGTH, WIDTH)).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ---- what a checkpointed module does ----


class Net(nn.Module):
    def __init__(self, n=4, size=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def names_of(model, rules, **options):
    with gradckpt.enable(model, modules=rules, **options) as handle:
        return list(handle.modules)


def regions_of(model, x=None):
    """The number of regions in one forward and backward."""
    gradckpt.stats.reset()
    out = model(torch.randn(2, 8) if x is None else x)
    if out.requires_grad:
        out.sum().backward()
    return gradckpt.stats()["regions"]


# ---- Ten blocks under ``compress_saved()`` and torch.compile: kept bytes, gradients' errors.
#
# ``python tests/helpers/tiny_models.py [backend,...] [block,...]`` prints the table.

BLOCK_WIDTH, INNER, HEADS, TOKENS, LAYERS = 128, 256, 2, 64, 2
BACKENDS = ("aot_eager", "inductor")


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids(rows=2):
    return torch.randint(3, 96, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(BLOCK_WIDTH), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(BLOCK_WIDTH, INNER, bias=False), nn.Linear(BLOCK_WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, BLOCK_WIDTH, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(BLOCK_WIDTH, 3 * BLOCK_WIDTH), nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Experts, of which each token gets the weighted sum of two."""

    def __init__(self, experts=3):
        super().__init__()
        self.router = nn.Linear(BLOCK_WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(BLOCK_WIDTH, INNER), nn.GELU(), nn.Linear(INNER, BLOCK_WIDTH))
            for _ in range(experts)
        )

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        top, chosen = weights.topk(2, -1)
        share = torch.zeros_like(weights).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        return sum(expert(x) * share[..., [i]] for i, expert in enumerate(self.experts))


class Convolutions(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x):
        return nn.functional.relu(x + self.inner(x))


def plain(*layers, inputs=None):
    return nn.Sequential(*layers), (drawn(2, TOKENS, BLOCK_WIDTH) if inputs is None else inputs,)


def resnet():
    stem = nn.Conv2d(3, 32, 3, padding=1)
    return plain(stem, *(Convolutions() for _ in range(LAYERS)), inputs=drawn(16, 3, 16, 16))


def of_transformers(name, inputs, **fields):
    config = getattr(transformers, f"{name}Config")(**fields)
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return getattr(transformers, f"{name}Model")(config), inputs


_TEXT = {
    **{"vocab_size": 96, "hidden_size": BLOCK_WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1},
    **{"num_attention_heads": HEADS, "max_position_embeddings": TOKENS, "use_cache": False},
}
_T5 = {
    **{"vocab_size": 96, "d_model": BLOCK_WIDTH, "d_kv": 64, "d_ff": INNER, "num_layers": 1, "num_heads": HEADS},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
}

BLOCKS = {
    "MLP": lambda: plain(
        *(
            Residual(nn.Sequential(nn.Linear(BLOCK_WIDTH, INNER), nn.GELU(), nn.Linear(INNER, BLOCK_WIDTH)))
            for _ in range(LAYERS)
        )
    ),
    "gated MLP": lambda: plain(*(Residual(Gated()) for _ in range(LAYERS))),
    "attention": lambda: plain(*(Residual(Attention()) for _ in range(LAYERS))),
    "mixture": lambda: plain(Residual(Mixture()), Residual(Mixture(2))),
    "ResNet": resnet,
    "Llama": lambda: of_transformers("Llama", {"input_ids": ids()}, **_TEXT),
    "GPT2": lambda: of_transformers(
        "GPT2",
        {"input_ids": ids()},
        vocab_size=96,
        n_embd=BLOCK_WIDTH,
        n_layer=1,
        n_head=HEADS,
        n_positions=TOKENS,
        use_cache=False,
    ),
    "Bert": lambda: of_transformers("Bert", {"input_ids": ids()}, **_TEXT),
    # Places between tokens, 8 bytes each, are saved once for all rows: of two they are 3 %.
    "T5": lambda: of_transformers("T5", {"input_ids": ids(4), "decoder_input_ids": ids(4)}, **_T5),
    "ViT": lambda: of_transformers(
        *("ViT", {"pixel_values": drawn(2, 3, 32, 32)}),
        **{
            "hidden_size": BLOCK_WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
        },
        **{"image_size": 32, "patch_size": 4},
    ),
}


def build_block(name, dtype=torch.float32):
    torch.manual_seed(0)
    model, inputs = BLOCKS[name]()
    with torch.no_grad():  # initial weights of 0.02 and biases of 0 hide errors
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    inputs = inputs if isinstance(inputs, dict) else {"input": inputs[0]}

    def cast(x):
        return x.to(dtype) if x.is_floating_point() else x

    return model.train().to(dtype), {key: cast(x) for key, x in inputs.items()}


class Kept:
    """Bytes of the storages that compiled graphs leave to their backward, without parameters
    and inputs."""

    def __init__(self, model, inputs):
        known = (*model.parameters(), *model.buffers(), *inputs.values())
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.sizes = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def nbytes(self):
        return sum(self.sizes.values())


def block_loss_of(model, inputs):
    out = model(**inputs)
    out = (out if isinstance(out, torch.Tensor) else out[0]).float()
    return (out * torch.linspace(-1, 2, out.shape[-1]).roll(out.shape[-1] // 3)).mean()


def step(model, inputs, function=block_loss_of):
    """Return the gradients of one step, the bytes that were kept for it, and the loss."""
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(2)
    with Kept(model, inputs) as kept:
        loss = function(model, inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, kept.nbytes, loss.detach()


def error(got, want):
    none = got.keys() ^ want.keys()
    assert not any(bool({**want, **got}[name].any()) for name in none)  # a graph has zeros for parameters without use
    want = {name: grad for name, grad in want.items() if name in got}
    difference = sum(float((got[name].double() - grad.double()).square().sum()) for name, grad in want.items())
    return (difference / sum(float(grad.double().square().sum()) for grad in want.values())) ** 0.5


def block_gradients(name, codec=None, backend=None, dtype=torch.float32):
    """Return the gradients of a block, the bytes that were kept for them, and the loss."""
    torch._dynamo.reset()
    model, inputs = build_block(name, dtype)
    handle = gradckpt.enable(model, codec, recompute=False) if codec is not None else None
    function = block_loss_of if backend is None else torch.compile(block_loss_of, backend=backend, fullgraph=True)
    gradckpt.stats.reset()
    found = step(model, inputs, function)
    if handle is not None:
        handle.remove()
    return found


def main(backends="", names="", dtype="float32", codec="int8"):
    dtype = getattr(torch, dtype)
    for name in names.split(",") if names else BLOCKS:
        want, _, _ = block_gradients(name, dtype=dtype)
        print(f"{name:10} uncompiled error {error(block_gradients(name, codec, dtype=dtype)[0], want):.2e}", flush=True)
        for backend in backends.split(",") if backends else BACKENDS:
            plain, whole, _ = block_gradients(name, backend=backend, dtype=dtype)
            got, kept, _ = block_gradients(name, codec, backend, dtype)
            s = gradckpt.stats()
            sizes = f"{kept / 2**10:7.0f} of {whole / 2**10:7.0f} KiB {kept / whole:.3f}"
            errors = f"error {error(got, want):.2e}, the compiler's {error(plain, want):.1e}"
            sizes_of = (s[f"compiled_bytes_{end}"] / 2**10 for end in ("in", "out"))
            payloads = f"{s['compiled_tensors']}: {' -> '.join(f'{n:.0f}' for n in sizes_of)}"
            print(
                f"  {backend:10} {sizes}  {errors}  payloads {payloads}  exact {s['compiled_uncompressed']}", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
