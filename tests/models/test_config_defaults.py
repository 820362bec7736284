"""A key that a config.json lacks has the value of transformers' config class, in every family.

Most tests read one config twice: as it is, and as transformers completes it."""

import ast
import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.base.types import CallboardError
from runtime.loading.folder import folder_eos_token_ids
from runtime.models import FAMILIES, families, load_spec
from runtime.models.families.defaults import DEFAULTS
from tests.support.models.family_cases import CASES, config_of, random_model
from tests.support.models.runner_driver import Driver, open_runner

# Keys without an effect on a spec, and parts of a config
_OTHERS = {f.name for f in fields(PreTrainedConfig)} | {"text_config", "vision_config", "audio_config", "model_type"}
_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "per_layer_config")  # an entry for each layer
_SIZES = {  # of a tiny model
    "vocab_size", "vocab_size_per_layer_input", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "shared_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "n_group", "topk_group", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "hidden_size_per_layer_input", "block_multiple_of", "n_embd", "n_layer", "n_head", "n_positions", "layer_types",
    "per_layer_config", "first_k_dense_replace", "mlp_layer_types", "num_dense_layers", "n_shared_experts",
    "mamba_n_heads", "mamba_expand", "pad_token_id",
}  # fmt: skip
_OUTER = {"architectures", "model_type", "text_config", "vision_config", "mm_tokens_per_image"}


def _class(architecture: str) -> type[PreTrainedConfig]:
    found: type[PreTrainedConfig] = getattr(transformers, architecture).config_class
    return found


@cache
def _text_of_complete(architecture: str) -> str:
    """A tiny config of the architecture with all keys, as JSON."""
    case = next(case for case, (kind, _) in CASES.items() if kind == _class(architecture).__name__)
    return json.dumps(_json(config_of(case), architecture))


def _json(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    found.pop("time_step_limit", None)  # transformers writes it as it cannot read it
    return found


def _read(config: dict[str, Any]) -> PreTrainedConfig:
    return _class(config["architectures"][0]).from_dict(json.loads(json.dumps(config)))  # changes its argument


def _spec(config: dict[str, Any]) -> Any:
    """The spec, or the refusal's text."""
    try:
        return load_spec(config)[0]
    except CallboardError as e:
        return str(e)


def _variants(architecture: str, change: Callable[[dict[str, Any], str], None]) -> dict[str, dict[str, Any]]:
    """The config after a change of each key, in the text part or outside."""
    found = {}
    for place in ("", "text_config."):
        complete = json.loads(_text_of_complete(architecture))
        for key in sorted(complete.get("text_config", {}) if place else complete.keys() - _OTHERS):
            config = json.loads(_text_of_complete(architecture))
            change(config["text_config"] if place else config, key)
            if key == "tie_word_embeddings" and "text_config" in config:  # see the test of its places
                change(config["text_config"], key)
            found[place + key] = config
    return found


def _remove(part: dict[str, Any], key: str) -> None:
    together = {"num_hidden_layers": _LISTS, "layer_types": ("per_layer_config",)}
    for name in (key, *together.get(key, ())):
        part.pop(name, None)


def _set_to_null(part: dict[str, Any], key: str) -> None:
    _remove(part, key)
    part[key] = None


def _runs(config: PreTrainedConfig) -> bool:
    """True if a model of this config computes anything."""
    try:
        with torch.no_grad():
            _model(config)(torch.tensor([[3, 4, 5]]))
    except Exception:
        return False
    return True


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    assert config.architectures
    return random_model(getattr(transformers, config.architectures[0]), config)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_absent_key_has_the_class_default(architecture):
    for key, config in _variants(architecture, _remove).items():
        try:
            theirs = _spec(_json(_read(config), architecture))
        except Exception:  # the sizes of the tiny config and the default make no model
            default = {f.name: f.default for f in fields(_class(architecture))}
            name = key.removeprefix("text_config.")
            text = _class(architecture)().get_text_config()
            if name in DEFAULTS[architecture]:
                assert DEFAULTS[architecture][name] == default.get(name, getattr(text, name, None)), key
            continue
        ours = _spec(config)
        if isinstance(ours, str) and "lacks" in ours:  # nor has transformers a default
            assert not _runs(_read(config)), (key, ours)
            continue
        assert ours == theirs, key


@pytest.mark.parametrize("architecture", FAMILIES)
def test_null_is_absence_or_what_transformers_makes_of_it(architecture):
    absent = _variants(architecture, _remove)
    for key, config in _variants(architecture, _set_to_null).items():
        ours = _spec(config)
        try:
            read = _read(config)
        except Exception:
            assert ours == _spec(absent[key]), key
            continue
        if ours != _spec(_json(read, architecture)):
            assert ours == _spec(absent[key]), key
            assert not _runs(read), key


@torch.no_grad()
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_config_of_sizes_alone_gives_the_same_logits(architecture, tmp_path):
    config = json.loads(_text_of_complete(architecture))
    sizes = {name: value for name, value in config.items() if name in _SIZES | _OUTER}
    if "text_config" in sizes:
        sizes["text_config"] = {n: v for n, v in config["text_config"].items() if n in _SIZES | _OUTER}
    model = _model(_read(sizes))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(3, 101, (30,))
    want = model(tokens[None]).logits[0, -1]
    driver = Driver(open_runner(tmp_path, max_model_len=64))
    driver.open(0, tokens.tolist())
    got = driver.prefill(0, tokens.tolist())
    assert (got - want).abs().max() <= 5e-5 * want.abs().max()


def test_families_read_other_keys_without_defaults():
    """A key that some config class has is read from the table, so that no second default exists."""
    known = {f.name for architecture in FAMILIES for f in fields(_class(architecture)().get_text_config())}
    read = set()
    folder = Path(families.__file__).parent
    for path in {*folder.glob("*.py"), folder.parent / "rope.py"} - {folder / "defaults.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            is_get = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
            if is_get and ast.unparse(node.func.value) in ("config", "text"):
                read.add(node.args[0].value)
    alternatives = {"rope_interleave", "topk_method"}  # one of DeepSeek's classes lacks it
    gemma4 = {"num_experts", "top_k_experts", "moe_intermediate_size"}
    assert read & known - {"use_bidirectional_attention"} <= alternatives | gemma4


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_end_tokens_are_the_class_default(architecture, tmp_path):
    config = json.loads(_text_of_complete(architecture))
    for part in (config, config.get("text_config", {})):
        part.pop("eos_token_id", None)
        part.pop("vocab_size", None)  # the default one has the default token
    theirs = _class(architecture).from_dict(json.loads(json.dumps(config))).get_text_config()
    theirs = getattr(theirs, "eos_token_id", None)
    want = tuple(theirs) if isinstance(theirs, list) else () if theirs is None else (theirs,)
    assert folder_eos_token_ids(tmp_path, config) == want
    inner = {"text_config": config["text_config"] | {"vocab_size": 1}} if "text_config" in config else {}
    small = config | {"vocab_size": 1} | inner
    assert folder_eos_token_ids(tmp_path, small) == ()
    assert folder_eos_token_ids(tmp_path, config | {"eos_token_id": None}) == ()


@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling", "both"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_keys_of_older_configs_are_read_as_transformers_does(architecture, key):
    config = json.loads(_text_of_complete(architecture))
    text = config.get("text_config", config)
    if text.pop("rope_parameters", None) is None or architecture.startswith(("Gemma4", "GPT2")):
        return  # without old configs, or without RoPE
    theta = (
        500000.0 if architecture.startswith("Olmo3") else 777.0
    )  # transformers reads it for one kind of layers alone
    text |= {"rope_theta": theta} if key != "rope_scaling" else {}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}} if key != "rope_theta" else {}
    if architecture.startswith("Phi3") and key != "rope_theta":
        text["rope_scaling"] = {"type": "longrope", "short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    assert _spec(config) == _spec(_json(_read(config), architecture))


def test_whole_numbers_may_be_written_as_floats():
    config = json.loads(_text_of_complete("Qwen3MoeForCausalLM"))
    floats = {name: float(value) for name, value in config.items() if type(value) is int and not name.endswith("_id")}
    assert load_spec(config | floats) == load_spec(config)


@pytest.mark.parametrize(
    ("architecture", "outer", "inner", "tied"),
    [
        ("Gemma3ForConditionalGeneration", None, None, True),
        ("Gemma3ForConditionalGeneration", None, False, True),
        ("Gemma3ForConditionalGeneration", False, True, False),
        ("Mistral3ForConditionalGeneration", None, None, True),
        ("Mistral3ForConditionalGeneration", False, None, False),
        ("Qwen3_5ForConditionalGeneration", None, None, False),
        ("Qwen3_5ForConditionalGeneration", True, False, True),
        ("Qwen3_5ForConditionalGeneration", None, True, True),  # transformers makes a random head
    ],
)
def test_tied_heads_are_stated_outside_of_the_text_part(architecture, outer, inner, tied):
    config = json.loads(_text_of_complete(architecture))
    config |= {"tie_word_embeddings": outer}
    config["text_config"]["tie_word_embeddings"] = inner
    assert load_spec(config)[0].tied_head is tied
