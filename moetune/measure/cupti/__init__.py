"""CUPTI's range profiler, called through ctypes: hardware counters of single launches, read in the process that launches.

``structs`` are the parameter blocks of the C functions, ``library`` finds and calls them, ``host`` schedules and
evaluates metrics (without a GPU, for any chip), ``ranges`` counts launches on the current CUDA context.
"""
