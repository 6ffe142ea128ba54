"""What a step cost and what it achieved, for people, for files and for the agent."""
