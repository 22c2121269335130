"""An advantage estimator of a user's own, which compares samples with the whole batch."""


def over_the_batch(inputs):
    """Return how far the reward of each sample is from the mean of all, in standard deviations."""
    rewards = inputs.token_rewards.sum(1)
    moments = inputs.ranks.moments(rewards, correction=1)
    return ((rewards - moments.mean) / moments.deviation)[:, None] * inputs.token_mask
