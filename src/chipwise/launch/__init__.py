"""Job files for rented chips: `places.py` writes them from `templates/`, `launch_job.py` decides
their contents, and `carried.py` what travels with them.
"""
