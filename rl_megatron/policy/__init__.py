"""The interface between policies and algorithms, named as in NeMo RL."""
