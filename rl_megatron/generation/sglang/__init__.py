"""The rollout engine on SGLang servers."""
