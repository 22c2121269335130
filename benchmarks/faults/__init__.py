"""The fault campaign: runs of four ranks are killed, stopped or damaged at random moments, and must recover."""
