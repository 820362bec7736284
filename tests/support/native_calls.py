"""Native calls of many families: outputs with their content and arguments, and the calls of templates."""

DALLAS = {"city": "Dallas", "state": "TX"}
JSON_DALLAS = '{"name": "get_weather", "arguments": {"city": "Dallas", "state": "TX"}}'
JSON_NOW = '{"name": "now", "arguments": {}}'
OUTPUTS = {
    name: [
        (f"Two.{begin}[{JSON_DALLAS}, {JSON_NOW}]{end}", "Two.", [DALLAS, {}]),
        (f"{begin} [{JSON_DALLAS}\n]\n{end}\nSo.", "So.", [DALLAS]),
        (f"{begin}[{JSON_NOW.replace('now', 'put')}]{end}", f"{begin}[{JSON_NOW.replace('now', 'put')}]{end}", []),
    ]
    for name, (begin, end) in {
        "granite": ("<|tool_call|>", ""),
        "phi4_mini": ("<|tool_call|>", "<|/tool_call|>"),
        "tool_calls": ("<tool_calls>", "</tool_calls>"),
        "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    }.items()
}
MINIMAX_DALLAS = '<parameter name="city">Dallas</parameter>\n<parameter name="state">TX</parameter>\n'
DSML_DALLAS = (
    '<｜DSML｜parameter name="city" string="true">Dallas</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="state" string="true">TX</｜DSML｜parameter>\n'
)
KIMI_CALL = '<|tool_call_begin|>functions.%s<|tool_call_argument_begin|>{"city": "Dallas", "state": "TX"}'
OUTPUTS |= {
    "lfm2": [
        (
            "Two.<|tool_call_start|>[get_weather(city='Dallas', state=\"TX\"), now()]<|tool_call_end|>",
            "Two.",
            [DALLAS, {}],
        ),
        ("[get_weather(city='Dallas')]", "[get_weather(city='Dallas')]", []),
    ],
    "olmo3": [
        ("<function_calls>get_weather(city='Dallas', state='TX')\nnow()</function_calls>\nSo.", "So.", [DALLAS, {}]),
        ("<function_calls>put()</function_calls>", "<function_calls>put()</function_calls>", []),
    ],
    "kimi_k2": [
        (
            f"Two.<|tool_calls_section_begin|>{KIMI_CALL % 'get_weather:0'}<|tool_call_end|>"
            f"{KIMI_CALL % 'get_weather:1'}<|tool_call_end|><|tool_calls_section_end|>",
            "Two.",
            [DALLAS, DALLAS],
        ),
        (f"{KIMI_CALL % 'get_weather:0'}{KIMI_CALL % 'get_weather:1'}", "", [DALLAS, DALLAS]),  # marks forgotten
        (KIMI_CALL % "put:0", KIMI_CALL % "put:0", []),
    ],
    "seed_oss": [
        (
            "<seed:tool_call>\n<function=get-area_2>\n<parameter=shape>\n x = 1\n</parameter>\n<parameter=precision>2"
            "</parameter>\n</function>\n</seed:tool_call>\n",
            "",
            [{"shape": "\n x = 1\n", "precision": 2}],
        ),
    ],
    "minimax_m2": [
        (
            f'Two.\n<minimax:tool_call>\n<invoke name="get_weather">\n{MINIMAX_DALLAS}</invoke>\n<invoke name="now">\n'
            "</invoke>\n</minimax:tool_call>",
            "Two.",
            [DALLAS, {}],
        ),
    ],
    "deepseek_v32": [
        (
            f'Two.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{DSML_DALLAS}</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            "Two.",
            [DALLAS, {}],
        ),
    ],
    "deepseek_v4": [
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get-area_2">\n<｜DSML｜parameter name="unit" string="true">5'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="size" string="false">7</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="other" string="true">[1]</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "",
            [{"unit": "5", "size": 7, "other": "[1]"}],
        ),
    ],
    "minicpm5": [
        (
            '<function name="get-area_2"><param name="shape"><![CDATA[<b>]]</param>]]></param><param name="precision">2'
            '</param></function>\n<function name="now"></function>',
            "",
            [{"shape": "<b>]]</param>", "precision": 2}, {}],
        ),
    ],
    "cohere": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Dallas", '
            '"state": "TX"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
            "",
            [DALLAS, {}],
        ),
    ],
    "apertus": [
        (
            'Two.<|tools_prefix|>[{"get_weather": {"city": "Dallas", "state": "TX"}}, {"now": {}}]<|tools_suffix|>',
            "Two.",
            [DALLAS, {}],
        ),
    ],
    "minimax_m1": [(f"<tool_calls>\n{JSON_DALLAS}\n{JSON_NOW}\n</tool_calls>", "", [DALLAS, {}])],
    "gigachat3": [(f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON_DALLAS}", "So.", [DALLAS])],
    "gigachat31": [(f"So.<|function_call|>{JSON_DALLAS}", "So.", [DALLAS])],
    "functionary_v31": [
        (
            '<function=get_weather>{"city": "Dallas", "state": "TX"}</function>\n<function=now>{}</function>',
            "",
            [DALLAS, {}],
        ),
    ],
    "functionary_v32": [
        ('get_weather\n{"city": "Dallas", "state": "TX"}>>>now\n{}', "", [DALLAS, {}]),
        ('all\nTwo.>>>get_weather\n{"city": "Dallas", "state": "TX"}', "Two.", [DALLAS]),
    ],
    "glm4": [
        ('get_weather\n{"city": "Dallas", "state": "TX"}<|assistant|>now\n{}', "", [DALLAS, {}]),
        ("now\nis the time", "now\nis the time", []),
    ],
    "xlam": [
        (f"[{JSON_DALLAS}, {JSON_NOW}]", "", [DALLAS, {}]),
        ("[1] says so.", "[1] says so.", []),
    ],
}
PYTHON = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %})"
LIST = '[{"name": "{{ f.name }}", "arguments": {A}}]'
WRITTEN = {
    "lfm2": "<|tool_call_start|>" + f"[{PYTHON}]<|tool_call_end|>",
    "olmo3": f"<function_calls>{PYTHON}</function_calls>",
    "granite": "<|tool_call|>" + LIST,
    "phi4_mini": f"<|tool_call|>{LIST}<|/tool_call|>",
    "tool_calls": f"<tool_calls>{LIST}</tool_calls>",
    "nemotron": f"<TOOLCALL>{LIST}</TOOLCALL>",
    "xlam": LIST,
    "minimax_m1": f"<tool_calls>\n{LIST[1:-1]}\n</tool_calls>",
    "gigachat31": f"<|function_call|>{LIST[1:-1]}",
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": {A}}\n]<|END_ACTION|>'
    ),
    "apertus": '<|tools_prefix|>[{"{{ f.name }}": {A}}]<|tools_suffix|>',
    "functionary_v31": "<function={{ f.name }}>{A}</function>",
    "kimi_k2": (  # the id has the function's name
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{A}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments|items %}<parameter={{ k }}>{{ v }}"
        "</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments|items %}'
        '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>'
    ),
    "deepseek_v32": (
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n{% for k, v in f.arguments|items %}'
        '<｜DSML｜parameter name="{{ k }}" string="false">{{ v }}</｜DSML｜parameter>\n{% endfor %}'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "minicpm5": (
        '<function name="{{ f.name }}">{% for k, v in f.arguments|items %}'
        '<param name="{{ k }}">{{ v }}</param>{% endfor %}</function>'
    ),
}
