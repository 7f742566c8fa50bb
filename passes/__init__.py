"""Graph in, graph out. One pass, one file, one function, one test file; `pipeline` says which run, and in what order."""
