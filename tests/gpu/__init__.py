"""What only a real accelerator can show; skipped without one."""
