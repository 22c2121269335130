"""A stand-in for SGLang 0.5.23, which needs a GPU: the paths and answers of its server, over a Hugging Face model.

Paths, bodies, states and messages are those of SGLang's sources (srt/entrypoints/http_server.py,
srt/managers/io_struct.py, srt/managers/scheduler_components/weight_updater.py). What they compute is not: each token
is a forward pass over the whole sequence, on the CPU.
"""

__version__ = "0.5.23"
