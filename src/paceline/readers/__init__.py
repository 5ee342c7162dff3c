"""Files that other programs wrote, one reader each: traces, logs, configurations.

A reader gives a small frozen result. What it does not understand it names; what a file does not say it leaves
out, and guesses nothing. Any file that cannot be read is a DataError of one line.
"""
