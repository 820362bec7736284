"""EAGLE heads from their folders, against a plain reference; and the refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.library.models import eagle3_head, spec_of
from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.kernels.attention.attention_torch import AttentionShape, plan_attention
from runtime.kernels.attention.tiled_rows import TiledRows, attention_tiles
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.folder import is_head_folder
from runtime.models.decoder_build import draw_decoder
from runtime.models.forward_batch import ForwardBatch, GroupRows
from runtime.models.heads.build import DrawnHead
from runtime.models.heads.eagle_files import EagleFiles, folder_head
from runtime.worker.kv_cache import KVCache
from runtime.worker.runner import choose_numerics
from tests.heads.eagle_reference import CONFIG, DRAFT, HIDDEN, VOCAB, Reference, Tensors, drawn, layer_tensors
from tests.support.models.specs import dense_spec
from tests.support.ranks.rank_threads import on_ranks

TARGET = dense_spec(
    num_layers=8, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=VOCAB,
    max_positions=128, norm_eps=1e-5,
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "classic": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norms of taps": {"fc_norm": True},
    "norm output": {"norm_output": True},
    "qk norms, biases": {"by_head": True, "biases": True},
    "own embedding": {"own_embedding": True},
    "the target's head": {"own_head": False},
    "whole head": {"d2t": False, "logit_scale": 0.5},
    "two layers": {"num_hidden_layers": 2, "prefix": "model.layers.0."},
    "one named layer": {"prefix": "layers.0."},
    "eagle 1": {"kind": "eagle"},
    "eagle 1 with a bias": {"kind": "eagle", "fc_bias": True, "own_embedding": True},
}


def head_folder(folder: Path, **options: Any) -> tuple[Tensors, dict[str, Any], str]:
    """Write a head. Returns its tensors, its config and the prefix of its first layer."""
    is_eagle3 = options.get("kind") != "eagle"
    prefix = options.get("prefix", "midlayer." if is_eagle3 else "layers.0.")
    config = CONFIG | {name: value for name, value in options.items() if "norm" in name or name in CONFIG}
    config |= {"logit_scale": options["logit_scale"]} if "logit_scale" in options else {}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, (3 if is_eagle3 else 2) * HIDDEN)}
    for layer in range(config["num_hidden_layers"]):
        own, inputs = prefix.replace("0", str(layer)), HIDDEN * (2 if is_eagle3 and not layer else 1)
        shapes |= layer_tensors(own, inputs, **options)
        if is_eagle3 or layer:
            shapes[f"{own}input_layernorm.weight"] = (HIDDEN,)
    if is_eagle3:
        shapes |= {f"{prefix}hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
        if options.get("own_head", True):
            shapes["lm_head.weight"] = (DRAFT if options.get("d2t", True) else VOCAB, HIDDEN)
    else:
        config = {k: v for k, v in config.items() if k != "draft_vocab_size"} | {"architectures": ["LlamaForCausalLM"]}
    shapes |= {"fc.bias": (HIDDEN,)} if options.get("fc_bias") else {}
    shapes |= {"input_norm.weight": (3 * HIDDEN,)} if options.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)} if options.get("fc_norm") else {}
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN)} if options.get("own_embedding") else {}
    tensors = drawn(shapes)
    if shapes.get("lm_head.weight", (0,))[0] == DRAFT:
        tensors["d2t"] = torch.arange(DRAFT) * 2 + torch.arange(DRAFT) % 3  # ids 3 i + i % 3 as offsets
    save(folder, tensors, config)
    return tensors, config, prefix


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write a head's files."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path, **options: Any) -> EagleFiles:
    """The head in a folder, for the target."""
    checkpoint = open_checkpoint(folder)
    return folder_head(checkpoint.config, checkpoint, checkpoint.fingerprint, TARGET, **options)


class Drafting:
    """A head over one sequence: its rows are at positions from 1 on."""

    def __init__(self, found: EagleFiles | DrawnHead, backend: str, communicator: Communicator | None = None) -> None:
        ranks = communicator or OneRank()
        numerics = choose_numerics(EngineConfig(device="cpu", kernel_backend=backend, dtype="float32"))
        shard = Shard(ranks.rank, ranks.size)
        self.target = draw_decoder(TARGET.of_rank(shard), numerics, 64, communicator=ranks)
        spec = found.spec.for_rank(shard)
        self.head = found.load(self.target, spec, 64)
        cache_spec = spec.decoder.kv_cache("float32")
        self.cache = KVCache(cache_spec, 5, 16, numerics.device)
        form = numerics.dtype, numerics.device, numerics.deterministic
        mixer = spec.layers[0].mixer
        self.shape = AttentionShape(mixer.num_heads, mixer.num_kv_heads, 5, 16, *form)
        self.tables = np.array([[1, 3, 0, 0]], np.int32)

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, start: int, only_stores: bool = False
    ) -> torch.Tensor:
        count = len(tokens)
        positions = torch.arange(start, start + count)
        starts, counts, rows = (np.array([n], np.int32) for n in (start, count, 0))
        plan: Any
        if self.target.kernels.launcher is not None:
            tiles = torch.from_numpy(attention_tiles(starts, counts, rows))
            plan = TiledRows(count, tiles, torch.from_numpy(self.tables))
        else:
            plan = plan_attention(self.tables, starts, counts, self.shape)
        places = torch.from_numpy(self.tables[0])[positions // 16].long() * 16 + positions % 16
        batch = ForwardBatch(tokens, positions, [GroupRows(places, plan)], only_stores=only_stores)
        return self.head.forward(batch, hidden, self.cache.layers).clone()


def three_drafts(drafting: Drafting, taps: list[torch.Tensor], tokens: torch.Tensor, drafts: torch.Tensor) -> Any:
    """[3, own ids] logits of the drafts after a prompt, where `drafts` follow it."""
    head, found = drafting.head, []
    is_eagle3 = head.spec.kind == "eagle3"
    features = head.combined(torch.cat(taps, 1) if is_eagle3 else taps[0])
    drafting.forward(tokens[:9], features[:9], 1, only_stores=True)
    x = drafting.forward(tokens[9:], features[9:], 10)[-1:]
    for i, token in enumerate(drafts):
        out = torch.empty(1, len(head.spec.decoder.token_ids))
        found.append(head.logits(x, out).clone())
        assert torch.equal(found[-1], head.logits(x))
        x = drafting.forward(token[None], head.recycled(x), len(tokens) + 1 + i)
    return torch.cat(found)


@pytest.fixture
def prompt() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Features of 20 tokens, the tokens after them, and three drafts."""
    generator = torch.Generator().manual_seed(0)
    taps = [torch.randn(20, HIDDEN, generator=generator) for _ in range(3)]
    return taps, torch.randint(VOCAB, (20,), generator=generator), torch.tensor([5, 99, 7])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_three_drafts_equal_the_reference(variant, backend, tmp_path, prompt):
    taps, tokens, drafts = prompt
    tensors, config, prefix = head_folder(tmp_path, **VARIANTS[variant])
    drafting = Drafting(read(tmp_path), backend)
    with torch.inference_mode():
        ours = three_drafts(drafting, taps, tokens, drafts)
        target = draw_decoder(TARGET, choose_numerics(EngineConfig(device="cpu", kernel_backend="torch")), 64)
        embed = tensors.get("embed_tokens.weight", target.embed.float())
        reference = Reference(tensors, config, prefix, embed)
        hidden = reference.combined(taps) if reference.is_eagle3 else taps[0]
        head_weight = target.head.product(torch.eye(HIDDEN)).T
        for i in range(3):
            x = reference.forward(tokens, hidden)[-1:]
            torch.testing.assert_close(ours[i : i + 1], reference.logits(x, head_weight), atol=2e-4, rtol=2e-4)
            tokens, hidden = torch.cat((tokens, drafts[i : i + 1])), torch.cat((hidden, reference.recycled(x)))


def test_two_ranks_draft_as_one(tmp_path, prompt):
    head_folder(tmp_path)

    def logits(ranks: Communicator) -> torch.Tensor:
        with torch.inference_mode():
            return three_drafts(Drafting(read(tmp_path), "torch", ranks), *prompt)

    torch.testing.assert_close(torch.cat(on_ranks(2, logits), 1), logits(OneRank()), atol=1e-4, rtol=1e-4)


def test_ids_are_layers_outputs_or_inputs(tmp_path):
    tensors, config, _ = head_folder(tmp_path)
    assert read(tmp_path).spec.taps == (2, 4, 5)
    for ids, taps in (([1, 3, 6], (2, 4, 7)), ([2, 4, 8], (2, 4, 8)), ([2, 4, 6], (2, 4, 6))):
        save(tmp_path, tensors, config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}})
        assert read(tmp_path).spec.taps == taps
    assert read(tmp_path, boundaries=(1, 2, 3)).spec.taps == (1, 2, 3)
    own = ("architectures", "draft_vocab_size")
    speculators = {
        "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT, "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "transformer_layer_config": {name: value for name, value in config.items() if name not in own},
        "architectures": ["Eagle3Speculator"], "norm_before_residual": True,
    }  # fmt: skip
    save(tmp_path, tensors, speculators)
    spec = read(tmp_path).spec
    assert (spec.taps, spec.flags, spec.num_ids) == ((1, 3, 5), {"norm_before_residual"}, DRAFT)


def test_an_equal_embedding_is_the_targets(tmp_path):
    head_folder(tmp_path, own_embedding=True)
    own = open_checkpoint(tmp_path)
    assert not read(tmp_path, embedding=(own, "embed_tokens.weight")).spec.own_embedding
    assert read(tmp_path).spec.own_embedding


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 132}, "vocabulary of 132 tokens; the target's has 131"),
        ({"target_hidden_size": 128}, "hidden size of 128; the target's is 64"),
        ({"norm_everything": True}, "norm_everything"),
        ({"mask_token_id": 3}, "P-EAGLE"),
        ({"dflash_config": {}}, "DFlash"),
        ({"medusa_num_heads": 4}, "Medusa"),
        ({"speculators_model_type": "mlp"}, "speculators_model_type"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architecture"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "8 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "3 of the target's"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields, words, tmp_path):
    tensors, config, _ = head_folder(tmp_path)
    save(tmp_path, tensors, config | fields)
    with pytest.raises(CallboardError, match=words):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("fc.weight", None, "lacks fc.weight"),
        ("fc.weight", torch.zeros(HIDDEN, 100), "fc.weight has shape"),
        ("d2t", torch.full((DRAFT,), 120), "d2t"),
        ("d2t", -torch.arange(DRAFT), "d2t"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name, tensor, words, tmp_path):
    tensors, config, _ = head_folder(tmp_path)
    changed = {**tensors, name: tensor} if tensor is not None else {n: t for n, t in tensors.items() if n != name}
    save(tmp_path, changed, config)
    with pytest.raises(CallboardError, match=words):
        read(tmp_path)


def test_a_missing_parameter_is_refused(tmp_path):
    tensors, config, prefix = head_folder(tmp_path)
    del tensors[f"{prefix}mlp.up_proj.weight"]
    save(tmp_path, tensors, config)
    with pytest.raises(CallboardError, match=r"mlp\.up_proj\.weight"):
        Drafting(read(tmp_path), "torch")


def test_folders_of_heads_are_told_from_models(tmp_path):
    tensors, config, _ = head_folder(tmp_path, kind="eagle")
    assert is_head_folder(tmp_path)
    save(tmp_path, {"norm.weight": tensors["fc.weight"]}, config)
    assert not is_head_folder(tmp_path)
    save(tmp_path, tensors, CONFIG)
    assert is_head_folder(tmp_path)
    assert not is_head_folder(tmp_path / "elsewhere")


def test_a_drawn_head_has_the_published_size():
    """Llama-3.1-8B's EAGLE-3 head has 424.7 million parameters."""
    shapes = eagle3_head(spec_of("llama-3.1-8b")).decoder.shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(424.7e6, rel=1e-3)


def test_a_drawn_head_computes(prompt):
    taps, tokens, drafts = prompt
    source = DrawnHead(eagle3_head(TARGET, DRAFT))
    with torch.inference_mode():
        logits = three_drafts(Drafting(source, "torch"), taps, tokens, drafts)
    assert (logits.isfinite().sum(1) == DRAFT).all()
