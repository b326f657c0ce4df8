"""Readers: files of other projects that hold measured times, as Measurements of the lab."""
