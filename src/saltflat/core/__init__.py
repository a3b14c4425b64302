"""PyTorch utilities that several rooms share. A closed list; nothing here knows a method."""
