"""From plain records of what was measured to pictures."""
