"""The rollout engine on vLLM servers."""
