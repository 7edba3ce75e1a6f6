"""Dry run for TPUs: compiles training programs for machines that are not there."""
