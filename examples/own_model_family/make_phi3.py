"""Write a small Phi-3 with random weights as a Hugging Face directory: `python make_phi3.py DIRECTORY`."""

import sys

import torch
from transformers import Phi3Config, Phi3ForCausalLM


def main(directory: str) -> None:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        sliding_window=16,
        initializer_range=0.15,  # large, so that logits differ and an error shows
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Phi3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, whose weights are 1 otherwise
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1])
