"""What runs on an accelerator, tested without one."""
