"""`callboard models`: a line for each family, details of some, and the truth of both."""

import math
from pathlib import Path

import pytest

from runtime import family_report
from runtime.models import FAMILIES, load_spec
from runtime.models.published import PUBLISHED
from runtime.text.chat import ChatTemplate
from runtime.text.tool_calls import FORMATS
from serve_app import cli
from tests.support.http.own_templates import OWN_TEMPLATES, SHORT_TEMPLATES

TEMPLATES = {path.stem: path for path in Path(__file__).parents[1].glob("data/chat_templates/*.jinja")}


@pytest.fixture(autouse=True)
def empty_hub_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)


def rows() -> dict[str, list[str]]:
    """The cells of each line of the table, by the family's name and sizes."""
    lines = family_report.family_table().split("\n\n")[0].splitlines()
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    return {f"{row[0]} {row[1].strip()}": [cell.strip() for cell in row[2:]] for row in cells}


def test_each_family_has_one_line():
    assert len(rows()) == 1 + len(FAMILIES)


def test_a_line_shows_the_features_of_a_family():
    found = rows()
    assert found["Qwen3 0.6B, 4B, 8B"] == ["no", "hermes", "yes", "safetensors, GGUF", "logits"]
    assert found["Mixtral 8x7B, 8x22B"] == ["no", "mistral, generic", "no", "safetensors", "logits, texts"]
    assert found["Gemma 4 E2B, E4B, 26B-A4B, 31B"] == ["yes", "gemma4", "yes", "safetensors", "logits"]
    assert found["LFM2-MoE 8B-A1B, 24B-A2B"] == ["no", "lfm2", "no", "safetensors, GGUF", "logits"]
    assert found["GPT-2, DistilGPT2 ?"] == ["no", "no chats", "no", "safetensors, GGUF", "logits"]
    assert len({(name, *cells[2:]) for name, cells in found.items()}) == len(found)
    assert found["Gemma 3 4B, 12B, 27B"] == ["yes", "generic", "no", "safetensors", "logits"]
    assert "Llama 2, 3, 3.1, 3.2; SmolLM2 135M, 1B, 3B, 8B, 70B" in found
    assert "GPT-2, DistilGPT2 ?" in found


def test_lines_of_the_table_fit_a_wide_terminal():
    assert max(map(len, family_report.family_table().splitlines())) <= 136


@pytest.mark.one_in(4)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_details_name_every_fact_of_a_family(architecture: str, capsys):
    assert cli.main(["models", architecture]) == 0
    text, family = capsys.readouterr().out, FAMILIES[architecture]
    assert all(part in text for part in (architecture, family.models, family.example, family.verified))
    assert all(chat.template in text for chat in family.chats)
    for name, config in PUBLISHED.items():
        assert (f" {name} " in text) == (config["architectures"] == [architecture])


def test_every_name_of_a_family_finds_its_details(capsys):
    for name, architecture in (
        ("Llama-3.1-8B-Instruct", "LlamaForCausalLM"),
        ("SMOLLM2", "LlamaForCausalLM"),
        ("Qwen/Qwen3-0.6B", "Qwen3ForCausalLM"),
        ("mixtral", "MixtralForCausalLM"),
    ):
        assert cli.main(["models", name]) == 0
        assert architecture in capsys.readouterr().out
    assert cli.main(["models", "lamma"]) == 1
    assert "No family is called 'lamma'; did you mean Llama?" in capsys.readouterr().err
    assert cli.main(["models", "%"]) == 1
    assert "No family is called '%'; see `callboard models` for all." in capsys.readouterr().err


def test_details_list_short_names():
    for name in ("qwen3", "Qwen3-8B"):
        lines = family_report.family_details(name).splitlines()
        assert lines.index("short names:") < lines.index("  qwen3          8b, 0.6b, 1.7b, 4b, 14b, 32b, 30b, 30b-a3b")
    assert "short names" not in family_report.family_details("gpt2")


def test_chat_formats_follow_the_published_templates():
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    forms = {form for family in FAMILIES.values() for form in family.chats}
    templates = {name: path.read_text("utf-8") for name, path in TEMPLATES.items()} | OWN_TEMPLATES | SHORT_TEMPLATES
    # The table lists other models.
    of_others = {"cohere", "deepseek-v3.2", "kimi-k2", "minimax-m2", "xlam"}
    assert {form.template for form in forms} == set(templates) - of_others
    for form in forms:
        template = ChatTemplate(templates[form.template], special)
        assert template.tool_format is FORMATS[form.tools]
        assert (template.thinks or template.has_channels) is form.reasons


def test_memory_is_weights_cache_and_activations():
    spec = load_spec(PUBLISHED["llama-3.1-8b"])[0]
    weights = 2 * sum(math.prod(shape) for shape in spec.shapes().values())
    cache = 2 * 2 * 32 * 8 * 128 * 8192
    found = [family_report._gpu_bytes(spec, form, 8192) for form in ("bfloat16", "int8", "int4")]
    assert 1 << 30 < found[0] - weights - cache < 4 << 30
    assert found == sorted(found, reverse=True)
    assert found[0] - found[2] > weights / 2


def test_memory_comes_from_a_config_that_was_fetched(tmp_path: Path, monkeypatch):
    import json

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-4b"]))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert "Qwen/Qwen3-0.6B        4,022,468,096  8192     11." in family_report.family_details("Qwen3ForCausalLM")
