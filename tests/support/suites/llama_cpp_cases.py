"""The parser cases of llama.cpp's test-chat.cpp, read from its source.

Its cases are calls of a fluent builder. `cases_of` compiles the file's constants and these calls with a builder that
prints each case.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STUB = r"""
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>
#define LOG_DBG(...)
#define GGML_ASSERT(...)
#undef assert
#define assert(...)
#define throw (void)
enum common_reasoning_format { COMMON_REASONING_FORMAT_NONE, COMMON_REASONING_FORMAT_AUTO,
    COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY, COMMON_REASONING_FORMAT_DEEPSEEK };
enum common_chat_tool_choice { COMMON_CHAT_TOOL_CHOICE_AUTO, COMMON_CHAT_TOOL_CHOICE_REQUIRED,
    COMMON_CHAT_TOOL_CHOICE_NONE };
enum common_chat_continuation { COMMON_CHAT_CONTINUATION_NONE, COMMON_CHAT_CONTINUATION_AUTO,
    COMMON_CHAT_CONTINUATION_REASONING, COMMON_CHAT_CONTINUATION_CONTENT };
struct common_chat_tool_call { std::string name, arguments, id; };
struct common_chat_msg_content_part { std::string type, text; };
struct common_chat_msg { std::string role, content; std::vector<common_chat_msg_content_part> content_parts;
    std::vector<common_chat_tool_call> tool_calls; std::string reasoning_content, tool_name, tool_call_id; };
struct common_chat_tool { std::string name, description, parameters; };
struct common_chat_templates_inputs { std::vector<common_chat_msg> messages; std::string json_schema;
    std::vector<common_chat_tool> tools;
    bool use_jinja = true, add_generation_prompt = true, parallel_tool_calls = false, enable_thinking = true;
    common_chat_tool_choice tool_choice = COMMON_CHAT_TOOL_CHOICE_AUTO;
    common_chat_continuation continue_final_message = COMMON_CHAT_CONTINUATION_NONE;
    common_reasoning_format reasoning_format = COMMON_REASONING_FORMAT_NONE; };
struct common_chat_params { std::string prompt, generation_prompt, parser; };
struct common_chat_parser_params : common_chat_params { common_chat_parser_params(common_chat_params) {} bool debug; };
struct common_peg_arena { void load(const std::string &) {} };
struct common_chat_templates {};
using common_chat_templates_ptr = std::unique_ptr<common_chat_templates>;
static common_chat_templates_ptr read_templates(const std::string &) { return {}; }
static std::string read_file(const std::string &) { return ""; }
static common_chat_templates * common_chat_templates_init(void *, const std::string &) { return nullptr; }
static common_chat_params common_chat_templates_apply(void *, const common_chat_templates_inputs &) { return {}; }
static common_chat_msg common_chat_peg_parse(common_peg_arena &, const std::string &, bool,
    const common_chat_parser_params &) { return {}; }
static bool string_ends_with(const std::string &, const std::string &) { return true; }
static std::string g_template_filter;

static void put(const std::string & text) {
    putchar('"');
    for (unsigned char c : text) {
        if (c < 32 || c == '"' || c == '\\') printf("\\u%04x", c); else putchar(c);
    }
    putchar('"');
}
static void field(const char * name, const std::string & text) { printf("\"%s\":", name); put(text); printf(","); }
static void put(const common_chat_msg & m) {
    printf("{"); field("role", m.role); field("tool_name", m.tool_name); field("tool_call_id", m.tool_call_id);
    field("reasoning_content", m.reasoning_content); printf("\"tool_calls\":[");
    for (size_t i = 0; i < m.tool_calls.size(); i++) {
        printf(i ? ",{" : "{"); field("name", m.tool_calls[i].name); field("id", m.tool_calls[i].id);
        printf("\"arguments\":"); put(m.tool_calls[i].arguments); printf("}");
    }
    printf("],\"parts\":[");
    for (size_t i = 0; i < m.content_parts.size(); i++) { printf(i ? "," : ""); put(m.content_parts[i].text); }
    printf("],\"content\":"); put(m.content); printf("}");
}
"""
_RUN = r"""
    void run() {
        printf("{"); field("template", tester_.template_path()); field("input", tc_.input);
        field("json_schema", tc_.params.json_schema); printf("\"messages\":[");
        for (size_t i = 0; i < tc_.params.messages.size(); i++) { printf(i ? "," : ""); put(tc_.params.messages[i]); }
        printf("],\"tools\":[");
        for (size_t i = 0; i < tc_.params.tools.size(); i++) {
            printf(i ? ",{" : "{"); field("name", tc_.params.tools[i].name);
            field("description", tc_.params.tools[i].description);
            printf("\"parameters\":"); put(tc_.params.tools[i].parameters); printf("}");
        }
        printf("],\"expect\":"); put(tc_.expect);
        printf(",\"reasoning_format\":%d,\"tool_choice\":%d,\"continues\":%d,\"thinking\":%s,\"parallel\":%s,"
               "\"begins_turn\":%s,\"is_partial\":%s}\n",
               tc_.params.reasoning_format, tc_.params.tool_choice, tc_.params.continue_final_message,
               tc_.params.enable_thinking ? "true" : "false", tc_.params.parallel_tool_calls ? "true" : "false",
               tc_.params.add_generation_prompt ? "true" : "false", tc_.is_partial ? "true" : "false");
    }
};
"""
_MAIN = "\nint main() { test_template_output_peg_parsers(false); }\n"


@dataclass(frozen=True)
class LlamaCase:
    """One output of a model with llama.cpp's expectation."""

    number: int
    template: Path
    fields: dict[str, Any]


def cases_of(root: Path) -> list[LlamaCase]:
    """Return the cases of a llama.cpp source folder. Needs g++."""
    source = (root / "tests" / "test-chat.cpp").read_text("utf-8")
    constants = _between(source, "static common_chat_tool special_function_tool{", "struct make_peg_parser")
    builder = _between(source, "class peg_test_builder;", "    // Execute the test")
    builder += _RUN + _between(source, "peg_test_builder peg_tester::test", "static void test_msgs_")
    tests = _between(source, "static void test_lfm2_parser(", "static void test_template_generation_prompt()")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "cases.cpp")
        program.write_text(_STUB + constants + builder + tests + _MAIN, "utf-8")
        binary = program.with_suffix("")
        command = ["g++", "-std=c++17", "-O0", "-w", "-o", str(binary), str(program)]
        subprocess.run(command, check=True)
        lines = subprocess.run([str(binary)], check=True, capture_output=True).stdout.decode().splitlines()
    cases = [json.loads(line) for line in lines]
    return [LlamaCase(i, root / case["template"], case) for i, case in enumerate(cases)]


def _between(source: str, begin: str, end: str) -> str:
    found = re.search(rf"^{re.escape(begin)}.*?(?=^{re.escape(end)})", source, re.DOTALL | re.MULTILINE)
    assert found is not None, f"test-chat.cpp has no part from {begin!r} to {end!r}"
    return found[0]
