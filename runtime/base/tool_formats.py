"""Names of the tool-call formats; `runtime/text/tool_calls` has their parsers."""

TOOL_FORMATS = (
    "hermes", "llama3_json", "mistral", "mistral_v11", "pythonic", "qwen3_coder", "glm45", "glm47", "deepseek_v3",
    "deepseek_v31", "harmony", "gemma4", "lfm2", "olmo3", "granite", "phi4_mini", "kimi_k2", "seed_oss",
    "deepseek_v32", "deepseek_v4", "minimax_m1", "minimax_m2", "minicpm5", "cohere", "apertus", "tool_calls",
    "nemotron", "gigachat3", "gigachat31", "functionary_v31", "functionary_v32", "glm4", "xlam", "generic",
)  # fmt: skip
