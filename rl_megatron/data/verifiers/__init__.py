"""Environments of the library `verifiers`: their examples, and one rollout of them with an OpenAI client.

These modules run in the interpreter that has the library, which may have nothing else of what this package needs. They
import only the standard library, and the library itself when an environment is loaded.
"""
