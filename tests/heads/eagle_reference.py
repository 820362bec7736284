"""A plain EAGLE head over a whole sequence, in torch, and random tensors for one."""

from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
HIDDEN, HEADS, KV, DIM, FFN, VOCAB, DRAFT = 64, 4, 2, 16, 96, 131, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "intermediate_size": FFN, "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 1000.0,
}  # fmt: skip


def layer_tensors(before: str, inputs: int, **options: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's tensors. Options are biases and by_head."""
    rows = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
    shapes = {f"self_attn.{part}_proj.weight": (size, inputs) for part, size in rows.items()}
    shapes |= {"self_attn.o_proj.weight": (HIDDEN, HEADS * DIM), "post_attention_layernorm.weight": (HIDDEN,)}
    shapes |= {f"mlp.{part}_proj.weight": (FFN, HIDDEN) for part in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = HIDDEN, FFN
    if options.get("biases"):
        shapes |= {f"self_attn.{part}_proj.bias": (size,) for part, size in {**rows, "o": HIDDEN}.items()}
    if options.get("by_head"):
        shapes |= {f"self_attn.{part}_norm.weight": (DIM,) for part in "qk"}
    return {before + name: shape for name, shape in shapes.items()}


def drawn(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Random tensors. Norms are near 1."""
    generator, found = torch.Generator().manual_seed(1), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.3 * noise if "norm" in name else noise * shape[-1] ** -0.5
    return found


class Reference:
    """The head's pass, from its formulas."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], prefix: str, embed: torch.Tensor) -> None:
        self.t, self.config, self.prefix, self.embed = tensors, config, prefix, embed
        self.is_eagle3 = prefix + "hidden_norm.weight" in tensors

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.t[name], 1e-5)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def combined(self, taps: list[torch.Tensor]) -> torch.Tensor:
        if self.config.get("fc_norm"):
            taps = [self.norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(taps)]
        features = torch.cat(taps, 1)
        if self.config.get("norm_before_fc"):
            features = self.norm(features, "input_norm.weight")
        return self.linear(features, "fc")

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        """Row i is at position i + 1; position 0 lacks an entry."""
        q, k, v = (self.linear(x, f"{prefix}self_attn.{part}_proj").unflatten(1, (-1, DIM)) for part in "qkv")
        if f"{prefix}self_attn.q_norm.weight" in self.t:
            q, k = (self.norm(y, f"{prefix}self_attn.{part}_norm.weight") for y, part in ((q, "q"), (k, "k")))
        angles = torch.arange(1, len(x) + 1)[:, None] * 1000.0 ** -(torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        q, k = (y * cos + torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), is_causal=True)
        return self.linear(mixed.transpose(0, 1).flatten(1), f"{prefix}self_attn.o_proj")

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of tokens at positions 1 to n, with the hidden states before them."""
        embedded, prefix = self.embed[tokens], self.prefix
        if self.is_eagle3:
            normed = self.norm(hidden, f"{prefix}hidden_norm.weight")
            x = normed if self.config.get("norm_before_residual") else hidden
            own = torch.cat((self.norm(embedded, f"{prefix}input_layernorm.weight"), normed), 1)
        else:
            x = own = self.linear(torch.cat((embedded, hidden), 1), "fc")
        for layer in range(self.config["num_hidden_layers"]):
            prefix = self.prefix.replace("0", str(layer))
            if layer:
                own = self.norm(x, f"{prefix}input_layernorm.weight")
            x = x + self.attention(own, prefix)
            y = self.norm(x, f"{prefix}post_attention_layernorm.weight")
            gate, up = (self.linear(y, f"{prefix}mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{prefix}mlp.down_proj")
        return x

    def recycled(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, "norm.weight") if self.config.get("norm_output") else x

    def logits(self, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """[n, vocab]. `head` is the target's, for heads without their own."""
        y = self.norm(x, "norm.weight") if self.is_eagle3 else x
        own = F.linear(y, self.t.get("lm_head.weight", head)) * self.config.get("logit_scale", 1.0)
        if "d2t" not in self.t:
            return own
        logits = torch.full((len(x), VOCAB), -torch.inf)
        logits[:, torch.arange(len(self.t["d2t"])) + self.t["d2t"]] = own
        return logits
