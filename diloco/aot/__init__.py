"""Dry run for TPUs and GPUs: compiles training programs without the devices."""
