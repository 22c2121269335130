"""The interface between policies and algorithms, under NeMo RL's name."""
