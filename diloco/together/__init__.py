"""Trains runs that differ in numbers only: one launch runs a step of all runs."""
