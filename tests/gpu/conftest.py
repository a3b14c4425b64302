"""What only a GPU can show; on a machine without one there is nothing here to collect."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
