"""Trains runs that differ in numbers only: one launch does the step of all of them."""
