"""What operators cost on a device: pure functions, with fitted curves as data.

Three shapes of formula cover every operator (see docs/cost-model.md):

    matrix     tiles in waves over the multiprocessors, against memory and cache traffic
    stream     launch + bytes / bandwidth + cycles per element and per row
    attention  both: matrix work, score arithmetic and traffic
"""
