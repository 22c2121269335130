"""Small tokenizers with the special tokens and the chat template of some families, and conversations to render."""

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEMPLATES = Path(__file__).parent / "chat_templates"
CORPUS = [
    "system user assistant tool\n\nBe brief. What is the weather in Rome? It is sunny there.\n",
    '{"name": "weather", "arguments": {"city": "Rome"}} function parameters description string object\n',
    "Add two numbers, and say what 2 + 3 is. The sum is 5. Thank you, and 4 + 4? That is 8.\n",
] * 3
# Family → (eos, other special tokens, tokens that are added to the vocabulary but not special)
FAMILIES = {
    "qwen3": (
        "<|im_end|>",
        ["<|endoftext|>", "<|im_start|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    ),
    "llama3": (
        "<|eot_id|>",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        [],
    ),
    "mistral": (
        "</s>",
        ["<s>", "<unk>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
    ),
    "deepseek": (
        "<｜end▁of▁sentence｜>",
        ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
         "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"],
        [],
    ),
}  # fmt: skip
# Families whose template is written here in short: only messages with text, but the same special tokens around them.
SHORT_FAMILIES = {
    "qwen2_5": ("<|im_end|>", ["<|endoftext|>", "<|im_start|>"], []),
    "qwen2_5 base": ("<|endoftext|>", ["<|im_end|>", "<|im_start|>"], []),
    "gemma3": ("<eos>", ["<bos>", "<pad>", "<start_of_turn>", "<end_of_turn>"], []),
    "gpt_oss": (
        "<|return|>",
        ["<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
        [],
    ),
    "glm4": ("<|endoftext|>", ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"], []),
    "text after the turn": ("<|im_end|>", ["<|endoftext|>", "<|im_start|>"], []),
    "eos after the turn": ("<|endoftext|>", ["<|im_end|>", "<|im_start|>"], []),
}
_BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "deepseek": "<｜begin▁of▁sentence｜>", "gemma3": "<bos>"}


def _turns(markers, before, user_end, prompt, answer_end, answer="", prefix="", last=""):
    """Return a template that writes "{prompt}{answer}text{answer_end}" for an answer, and "{last}" in the end.

    `markers` says what lies between generation markers: "none" of it, the "turn" after the prompt, or the "text".
    """
    begin, end = ("", "") if markers == "none" else ("{% generation %}", "{% endgeneration %}")
    text = f"{begin}{answer}{{{{ m.content }}}}"
    turn = text + (answer_end + end if markers == "turn" else end + answer_end)
    asked = f"{before}{{{{ m.content }}}}{user_end}"
    messages = f"{{% if m.role == 'assistant' %}}{prompt}{turn}{{% else %}}{asked}{{% endif %}}"
    ending = f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{last}{{% endif %}}"
    return f"{prefix}{{% for m in messages %}}{messages}{{% endfor %}}{ending}"


_CHATML = dict(
    before="<|im_start|>{{ m.role }}\n", user_end="<|im_end|>\n", answer_end="<|im_end|>\n",
    prompt="<|im_start|>assistant\n",
)  # fmt: skip
_PARTS = {
    "qwen2_5": dict(**_CHATML, prefix="<|im_start|>system\nYou are helpful.<|im_end|>\n"),
    "qwen2_5 base": dict(**_CHATML),
    "gemma3": dict(
        before="<start_of_turn>{{ m.role }}\n", user_end="<end_of_turn>\n", answer_end="<end_of_turn>\n",
        prompt="<start_of_turn>model\n", prefix="{{ bos_token }}",
    ),
    "gpt_oss": dict(
        before="<|start|>{{ m.role }}<|message|>", user_end="<|end|>", prompt="<|start|>assistant",
        answer="<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>",
        answer_end="{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}",
    ),
    "glm4": dict(
        before="<|{{ m.role }}|>\n", user_end="", answer_end="", prompt="<|assistant|>\n",
        prefix="[gMASK]<sop>",
    ),
    "text after the turn": dict(**_CHATML, last="That was all.\n"),
    "eos after the turn": dict(**_CHATML, last="<|endoftext|>\n"),
}  # fmt: skip


def template_of(family, markers="none"):
    if family in SHORT_FAMILIES:
        return _turns(markers, **_PARTS[family])
    assert markers == "none", "the files have no markers"
    return (TEMPLATES / f"{family}.jinja").read_text("utf-8")


def write_tokenizer(family, directory, chat_template=None):
    """Write a family's tokenizer as a Hugging Face directory; the template is in the config or in a file of its own."""
    eos, special, added = (FAMILIES | SHORT_FAMILIES)[family]
    backend = Backend(models.BPE(unk_token="<unk>" if family == "mistral" else None))
    if family == "mistral":  # like SentencePiece
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in range(0x21, 0x7F)]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[eos, *special], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(added)
    bos = _BOS.get(family)
    if bos is not None:  # a text that is encoded with special tokens begins with BOS; the template writes its own
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    if bos is not None:
        config["bos_token"] = bos
    template = chat_template or template_of(family)
    if family in ("qwen3", "mistral"):
        config["chat_template"] = template
    else:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(city, content=None):
    function = {"name": "weather", "arguments": {"city": city}}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "id": "123456789", "function": function}]}
    return message if content is None else message | {"content": content}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "123456789", "name": "weather"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say the weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ONE_TURN = [user("What is 2 + 3?"), assistant("The sum is 5.")]
WITH_SYSTEM = [system("Be brief."), *ONE_TURN]
TWO_TURNS = [*ONE_TURN, user("Thank you,\nand 4 + 4?"), assistant("  That is 8 €.\n")]
WITH_TOOLS = [user("What is the weather in Rome?"), call("Rome", ""), result("sunny"), assistant("It is sunny.")]
LONG = [
    system("Be brief."),
    *TWO_TURNS,
    user("And in Rome?"),
    call("Rome", "I look."),
    result("sunny"),
    assistant("<think>\nsunny\n</think>\n\nIt is sunny there."),
]
