"""The files of a run, a module for each kind.

`run_folder.py` decides whether this process may write, and owns the folder while it does.
`run_reader.py` reads one.
"""
