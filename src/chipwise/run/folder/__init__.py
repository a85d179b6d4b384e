"""The files of a run, a module for each kind.

`run_folder.py` owns the folder while it is written. `run_reader.py` reads one.
"""
