"""Run it: strategies round the user's own model, optimizer and loop, on torch.distributed."""
