"""Configurations: their parser, the names of classes in them, and sentences for what is wrong."""
