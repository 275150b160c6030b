"""Programs that measure other libraries, each run by the interpreter of an environment that has the library.

They need nothing of ours: a program is given one JSON argument and answers in lines of JSON, first what it is, then for
each line on its standard input the seconds since the beginning at which each token was there.
"""
