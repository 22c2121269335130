"""Answer a question with an exported model, by transformers alone: `python generate.py DIRECTORY QUESTION`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(directory: str, question: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
