"""Plan which sequences form which microbatch on which rank."""
