"""Small tokenizers with the special tokens and the chat template of four families, and conversations to render."""

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
_BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "deepseek": "<｜begin▁of▁sentence｜>"}


def template_of(family):
    return (TEMPLATES / f"{family}.jinja").read_text("utf-8")


def write_tokenizer(family, directory, chat_template=None):
    """Write a family's tokenizer as a Hugging Face directory; the template is in the config or in a file of its own."""
    eos, special, added = FAMILIES[family]
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
