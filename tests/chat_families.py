"""Chat templates that behave as those of the usual families do, each in a few lines, and what they write, by hand.

A family says what stands in front of a dialogue (`start`, with tools `tools`), what a question (`user`) and a tool's result (`tool`) look like, what
asks for an answer (`ask`) and what the answer is (`now`). An earlier answer may be written in another way (`past`, mark and end included). `thinks` and
`calls` are what asks for an answer and the answer itself where it has thoughts or calls a tool; None: the template leaves them out. `{t}` are the
thoughts, `{}` the words.
"""

from __future__ import annotations

from typing import Any

LOOP = "{%- for m in messages %}"
LAST_USER = "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
# thoughts apart (t), words apart (c)
SPLIT = (
    "{%- set t = m.reasoning_content if m.reasoning_content is string else '' %}{%- set c = m.content %}"
    "{%- if not t and '</think>' in c %}{%- set t = c.split('</think>')[0].split('<think>')[-1].strip() %}{%- set c = c.split('</think>')[-1].lstrip() %}{%- endif %}"
)
IM_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n<tools>' ~ (tools | tojson) ~ '</tools><|im_end|>\\n' }}{%- endif %}"
)
IM_OTHERS = (
    "{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' ~ m.content ~ '</tool_response><|im_end|>\\n' }}"
    "{%- elif m.role != 'assistant' %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}"
)
IM_CALLS = (
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}{%- endfor %}"
)
IM_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
CALL = '{"name": "tide", "arguments": {"day": 3}}'
IM: dict[str, Any] = {
    "eos": "<|im_end|>",
    "start": "",
    "tools": "<|im_start|>system\n<tools>TOOLS</tools><|im_end|>\n",
    "user": "<|im_start|>user\n{}<|im_end|>\n",
    "tool": "<|im_start|>user\n<tool_response>{}</tool_response><|im_end|>\n",
    "ask": "<|im_start|>assistant\n",
    "now": "{}<|im_end|>",
    "past": "<|im_start|>assistant\n{}<|im_end|>\n",
    "thinks": None,
    "calls": ("<|im_start|>assistant\n", f"<tool_call>{CALL}</tool_call><|im_end|>"),
    "called": f"<|im_start|>assistant\n<tool_call>{CALL}</tool_call><|im_end|>\n",
}
CHATML = (
    LOOP
    + IM_OTHERS
    + "{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    + IM_ASK
)


def plain(
    user: str, ask: str, end: str, start: str = "", eos: str = "", after: str = "", **more: Any
) -> dict[str, Any]:
    """A family without tools and thoughts: marks and ends."""
    template = (
        f"{{{{- {start!r} }}}}" + LOOP + "{%- if m.role == 'assistant' %}" + f"{{{{- {ask!r} ~ m.content ~ {end + after!r} }}}}"
        "{%- elif m.role == 'user' %}" + "{{{{- {!r} ~ m.content ~ {!r} }}}}".format(*user.split("{}")) + "{%- else %}{{- raise_exception('roles are user and assistant') }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}" + f"{{{{- {ask!r} }}}}" + "{%- endif %}"
    )  # fmt: skip
    end = end if end.endswith(eos or end) else end + (eos or "")
    return {
        "template": template, "eos": eos or end, "start": start, "user": user, "ask": ask, "now": "{}" + end, "mid": "{}" + end.removesuffix(after),
        "past": ask + "{}" + end + after, "thinks": None, "calls": None, **more,
    }  # fmt: skip


# an answer behind the last question has its thoughts, an empty pair of tags where there are none; earlier ones have none
QWEN3_SAID = (
    "{%- if m.role == 'assistant' %}"
    + SPLIT
    + "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or t) %}"
    "{{- '<think>\\n' ~ t ~ '\\n</think>\\n\\n' }}{%- endif %}{{- c }}"
    + IM_CALLS
    + "{{- '<|im_end|>\\n' }}{%- endif %}"
)
QWEN3 = IM_TOOLS + LAST_USER + LOOP + IM_OTHERS + QWEN3_SAID + "{%- endfor %}"
EMPTY = "<think>\n\n</think>\n\n"
DEEPSEEK_CALLS = "{%- for call in m.tool_calls or [] %}{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}{%- endfor %}"
DS_EOS = "<｜end▁of▁sentence｜>"
DS_CALL = '<｜tool▁call▁begin｜>tide<｜tool▁sep｜>{"day": 3}<｜tool▁call▁end｜>' + DS_EOS
DEEPSEEK: dict[str, Any] = {
    "eos": DS_EOS, "start": "", "tools": "TOOLS", "user": "<｜User｜>{}", "tool": "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>",
}  # fmt: skip
OSS = "<|start|>assistant"
OSS_CALL = '<|channel|>commentary to=functions.tide<|message|>{"day": 3}<|call|>'

FAMILIES: dict[str, dict[str, Any]] = {
    "smollm2": {**IM, "template": CHATML, "calls": None},
    "zephyr": plain("<|user|>\n{}</s>\n", "<|assistant|>\n", "</s>", after="\n"),
    "tulu3": {
        **plain("<|user|>\n{}\n", "<|assistant|>\n", "</s>", after="\n"),
        # the end of an answer is another one where a question follows, and both are known by then
    },
    "gemma2": plain("<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>", "<bos>", after="\n"),
    "llama3": plain(
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "<|begin_of_text|>",
    ),
    "mistral": plain("[INST]{}[/INST]", "", "</s>", "<s>"),
    "falcon3": plain("<|user|>\n{}\n", "<|assistant|>\n", "<|endoftext|>", after="\n"),
    "command-r": plain(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>",
    ),
    "phi4": plain("<|im_start|>user<|im_sep|>{}<|im_end|>", "<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
    "llama3.1": {
        **plain("<|user|>{}<|eot_id|>", "<|assistant|>\n\n", "<|eot_id|>"),
        "template": "{%- if tools %}{{- '<|system|>' ~ (tools | tojson) ~ '<|eot_id|>' }}{%- endif %}" + LOOP + "{%- if m.role == 'tool' %}{{- '<|ipython|>' ~ m.content ~ '<|eot_id|>' }}"
        "{%- elif m.role == 'user' %}{{- '<|user|>' ~ m.content ~ '<|eot_id|>' }}{%- elif m.tool_calls %}{{- '<|assistant|>\\n\\n' ~ (m.tool_calls[0].function | tojson) ~ '<|eot_id|>' }}"
        "{%- else %}{{- '<|assistant|>\\n\\n' ~ m.content ~ '<|eot_id|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n\\n' }}{%- endif %}",
        "tools": "<|system|>TOOLS<|eot_id|>", "tool": "<|ipython|>{}<|eot_id|>", "calls": ("<|assistant|>\n\n", CALL + "<|eot_id|>"), "called": f"<|assistant|>\n\n{CALL}<|eot_id|>",
    },
    "qwen2.5": {
        **IM,
        "template": IM_TOOLS + LOOP + IM_OTHERS + "{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' ~ m.content }}" + IM_CALLS + "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}" + IM_ASK,
    },
    "qwen3": {
        **IM,
        "template": QWEN3 + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
        "now": EMPTY + "{}<|im_end|>",
        "thinks": ("<|im_start|>assistant\n", "<think>\n{t}\n</think>\n\n{}<|im_end|>"),
        "calls": ("<|im_start|>assistant\n", f"{EMPTY}<tool_call>{CALL}</tool_call><|im_end|>"),
    },
    "qwen3.5": {
        **IM,
        "template": QWEN3.replace("(loop.last or t)", "true") + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}{%- endif %}",
        "ask": "<|im_start|>assistant\n<think>\n",
        "now": "\n</think>\n\n{}<|im_end|>",
        "thinks": ("<|im_start|>assistant\n<think>\n", "{t}\n</think>\n\n{}<|im_end|>"),
        "calls": ("<|im_start|>assistant\n<think>\n", f"\n</think>\n\n<tool_call>{CALL}</tool_call><|im_end|>"),
        "called": f"<|im_start|>assistant\n{EMPTY}<tool_call>{CALL}</tool_call><|im_end|>\n",
    },
    "nemotron3": {
        **IM,
        "template": IM_TOOLS + LAST_USER + LOOP + IM_OTHERS + "{%- if m.role == 'assistant' %}" + SPLIT + "{{- '<|im_start|>assistant\\n' }}"
        "{{- '<think>\\n' ~ t ~ '\\n</think>\\n' if t and loop.index0 > ns.last else '<think></think>' }}{{- c }}" + IM_CALLS + "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{{- '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}{%- endif %}",
        "ask": "<|im_start|>assistant\n<think></think>",
        "past": "<|im_start|>assistant\n<think></think>{}<|im_end|>\n",
        "thinks": ("<|im_start|>assistant\n<think>\n", "{t}\n</think>\n{}<|im_end|>"),
        "calls": ("<|im_start|>assistant\n<think></think>", f"<tool_call>{CALL}</tool_call><|im_end|>"),
        "called": f"<|im_start|>assistant\n<think></think><tool_call>{CALL}</tool_call><|im_end|>\n",
    },
    "smollm3": {
        **IM,
        "template": "{%- set think = enable_thinking if enable_thinking is defined else true %}{{- '<|im_start|>system\\nReasoning: ' ~ ('/think' if think else '/no_think') ~ '<|im_end|>\\n' }}" + LOOP + IM_OTHERS +
        "{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' ~ ('' if think else '<think>\\n\\n</think>\\n') ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' ~ ('' if think else '<think>\\n\\n</think>\\n') }}{%- endif %}",
        "start": "<|im_start|>system\nReasoning: /think<|im_end|>\n",
        "calls": None,
    },
    "phi3": {
        **plain("<|user|>\n{}<|end|>\n", "<|assistant|>\n", "<|end|>\n<|endoftext|>", eos="<|endoftext|>"),
        "template": LOOP + "{{- '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}{%- endfor %}{{- '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' }}",
        "past": "<|assistant|>\n{}<|end|>\n",
    },
    "olmo3": {
        **plain("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n", "<|endoftext|>"),
        "template": LOOP + "{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>assistant\\n' ~ m.content ~ ('<|endoftext|>' if loop.last else '<|im_end|>\\n') }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "past": "<|im_start|>assistant\n{}<|im_end|>\n",
    },
    "glm4.5": {
        "template": "{%- if tools %}{{- '<|system|>' ~ (tools | tojson) }}{%- endif %}" + LAST_USER + LOOP + "{%- if m.role == 'user' %}{{- '<|user|>\\n' ~ m.content }}{%- elif m.role == 'tool' %}{{- '<|observation|>\\n' ~ m.content }}"
        "{%- else %}" + SPLIT + "{{- '<|assistant|>\\n<think>' ~ (t if loop.index0 > ns.last else '') ~ '</think>' }}{{- '\\n' ~ c if c else '' }}" + IM_CALLS + "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
        "eos": "<|endoftext|>", "start": "", "tools": "<|system|>TOOLS", "user": "<|user|>\n{}", "tool": "<|observation|>\n{}", "ask": "<|assistant|>",
        "now": "\n<think></think>\n{}<|endoftext|>", "mid": "\n<think></think>\n{}", "past": "<|assistant|>\n<think></think>\n{}",
        "thinks": ("<|assistant|>", "\n<think>{t}</think>\n{}<|endoftext|>"), "calls": ("<|assistant|>", f"\n<think></think><tool_call>{CALL}</tool_call>"),
        "called": f"<|assistant|>\n<think></think><tool_call>{CALL}</tool_call>",
    },
    "deepseek-v3": {  # as R1: thoughts are asked for, and left out of what it writes
        **DEEPSEEK,
        "template": "{{- (tools | tojson) if tools else '' }}" + LOOP + "{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
        "{%- else %}{%- if loop.previtem.role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}{{- m.content.split('</think>')[-1] }}" + DEEPSEEK_CALLS + "{{- '" + DS_EOS + "' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}",
        "ask": "<｜Assistant｜>", "now": "{}" + DS_EOS, "past": "<｜Assistant｜>{}" + DS_EOS, "after_tool": "",
        "thinks": ("<｜Assistant｜><think>\n", "{t}\n</think>\n\n{}" + DS_EOS), "calls": ("<｜Assistant｜>", DS_CALL), "called": "<｜Assistant｜>" + DS_CALL,
    },
    "deepseek-v3.1": {
        **DEEPSEEK,
        "template": "{{- (tools | tojson) if tools else '' }}" + LOOP + "{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
        "{%- else %}{%- if loop.previtem.role != 'tool' %}{{- '<｜Assistant｜></think>' }}{%- endif %}{{- m.content.split('</think>')[-1] }}" + DEEPSEEK_CALLS + "{{- '" + DS_EOS + "' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜>' ~ ('<think>' if thinking is defined and thinking else '</think>') }}{%- endif %}",
        "ask": "<｜Assistant｜></think>", "now": "{}" + DS_EOS, "past": "<｜Assistant｜></think>{}" + DS_EOS, "after_tool": "",
        "thinks": ("<｜Assistant｜><think>", "{t}\n</think>\n\n{}" + DS_EOS), "calls": ("<｜Assistant｜></think>", DS_CALL), "called": "<｜Assistant｜></think>" + DS_CALL,
    },
    "gpt-oss": {
        "template": "{{- '<|start|>developer<|message|>' ~ (tools | tojson) ~ '<|end|>' if tools else '' }}" + LOOP + "{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' ~ m.content ~ '<|end|>' }}"
        "{%- elif m.role == 'tool' %}{{- '<|start|>functions.tide to=assistant<|message|>' ~ m.content ~ '<|end|>' }}{%- elif m.tool_calls %}"
        "{{- '<|start|>assistant<|channel|>commentary to=functions.' ~ m.tool_calls[0].function.name ~ '<|message|>' ~ (m.tool_calls[0].function.arguments | tojson) ~ '<|call|>' }}"
        "{%- elif loop.last and not add_generation_prompt %}{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' if m.thinking else '' }}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}{%- endif %}"
        "{%- endfor %}{{- '<|start|>assistant' if add_generation_prompt else '' }}",
        "eos": "<|return|>", "start": "", "tools": "<|start|>developer<|message|>TOOLS<|end|>", "user": "<|start|>user<|message|>{}<|end|>",
        "tool": "<|start|>functions.tide to=assistant<|message|>{}<|end|>", "ask": OSS, "now": "<|channel|>final<|message|>{}<|return|>", "past": OSS + "<|channel|>final<|message|>{}<|end|>",
        "thinks": (OSS, "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"), "calls": (OSS, OSS_CALL), "called": OSS + OSS_CALL,
    },
}  # fmt: skip
