"""Dry run for TPUs: compiles training programs without the TPUs."""
